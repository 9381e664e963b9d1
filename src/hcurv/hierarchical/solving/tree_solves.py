"""Solves with the rows that a tree holds: up the tree, where rows are eliminated, and down again.

With the eliminations of all levels, (A₀ + D)⁻¹ = G J Gᵀ for what the tree stores, A₀. Going up the
tree applies Gᵀ, and going down applies G. J is a diagonal of signs, which are all positive where
A₀ + D is positive definite. Rows that are zero in A₀ are not in the tree: there the inverse is that
of D alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.hierarchical.solving.elimination import LevelFactor
from hcurv.hierarchical.solving.inverse_blocks import inverse_diagonal
from hcurv.hierarchical.solving.vector_solve import VectorSolve, make_vector_solve
from hcurv.hierarchical.tree.cluster_tree import ClusterTree

__all__ = ["TreeSolves"]

# Vectors are taken some columns at a time, so that a vector of the lowest level holds at most this
# many floats. It bounds the memory of a solve with many right-hand sides.
_COLUMN_FLOATS = 2**23


@dataclass(frozen=True)
class TreeSolves:
    """(A₀ + D)⁻¹ of what the tree stores, without a global part.

    Attributes:
        tree: order and clusters of the rows.
        levels: what was eliminated on each level, from the leaves to the root.
        damping: D.
    """

    tree: ClusterTree
    levels: tuple[LevelFactor, ...]
    damping: Damping

    def solve(self, rhs: Tensor) -> Tensor:
        """(A₀ + D)⁻¹ times (N, k)."""
        if (one := self._one_vector(rhs)) is not None:
            return one.solve(rhs[:, 0])[:, None]
        return self._by_columns(rhs, self._both, -1.0)

    def half(self, rhs: Tensor) -> Tensor:
        """G times (N, k)."""
        if (one := self._one_vector(rhs)) is not None:
            return one.half(rhs[:, 0])[:, None]
        return self._by_columns(rhs, self._half, -0.5)

    def half_transposed(self, rhs: Tensor) -> Tensor:
        """Gᵀ times (N, k)."""
        if (one := self._one_vector(rhs)) is not None:
            return one.half_transposed(rhs[:, 0])[:, None]
        return self._by_columns(rhs, self._up, -0.5)

    def _one_vector(self, rhs: Tensor) -> VectorSolve | None:
        """How to solve for one vector; None if there are more, or if batches do this as fast."""
        return self._vector_solve if rhs.shape[1] == 1 else None

    @cached_property
    def _vector_solve(self) -> VectorSolve | None:
        return make_vector_solve(self)

    def diagonal(self) -> Tensor:
        """The diagonal of (A₀ + D)⁻¹, (N,), in double precision."""
        device = self.tree.permutation.device
        result = torch.empty(self.tree.size, dtype=torch.float64, device=device)
        zero_rows = self.tree.zero_rows
        result[zero_rows] = 1 / self.damping.rows(zero_rows)
        result[self.tree.permutation] = inverse_diagonal(self.levels)
        return result

    def _by_columns(self, rhs: Tensor, run: Callable[[Tensor], Tensor], power: float) -> Tensor:
        """Apply ``run`` in tree order, some columns at a time; zero rows are multiplied by D^power.

        Args:
            rhs: (N, k).
            run: maps vectors in tree order (rows + 1, columns) to such vectors; it may change its
                argument.
            power: of D, for the rows that are not in the tree.
        """
        kept = self.tree.permutation
        if kept.numel() < self.tree.size:
            damping = self.damping.value
            if isinstance(damping, Tensor):
                result = rhs * damping.pow(power).to(rhs)[:, None]
            else:
                result = rhs * damping**power
        else:
            result = torch.empty_like(rhs)
        step = max(1, _COLUMN_FLOATS // (kept.numel() + 1))
        for start in range(0, rhs.shape[1] if kept.numel() else 0, step):
            columns = slice(start, start + step)
            inputs = rhs.new_zeros(kept.numel() + 1, rhs[:, columns].shape[1])
            torch.index_select(rhs[:, columns], 0, kept, out=inputs[:-1])
            result[:, columns].index_copy_(0, kept, run(inputs)[:-1])
        return result

    def _both(self, values: Tensor) -> Tensor:
        """The whole solve: up and down the tree."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.up(vectors[-1]))
        return self._down(vectors)

    def _up(self, values: Tensor) -> Tensor:
        """Only up the tree. What each level eliminated stays in its place."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.up(vectors[-1]))
        for number in reversed(range(len(self.levels))):
            self.levels[number].put_back(vectors[number + 1], vectors[number])
        return vectors[0]

    def _half(self, values: Tensor) -> Tensor:
        """Only down the tree."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.skip(vectors[-1]))
        return self._down(vectors)

    def _down(self, vectors: list[Tensor]) -> Tensor:
        for number in reversed(range(len(self.levels))):
            self.levels[number].down(vectors[number + 1], vectors[number])
        return vectors[0]
