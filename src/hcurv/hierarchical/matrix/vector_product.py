"""The product of what a tree stores with one vector, in few calls (see `parts.vector_steps`).

The vectors of all levels lie one after the other in one flat vector: first all rows of the matrix,
in their own order, then the skeleton rows of each level. So one sparse matrix holds the leaves, the
near field and the couplings of all levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks
from hcurv.hierarchical.parts.sparse_blocks import SparseEntries, SparseMatrix
from hcurv.hierarchical.parts.vector_steps import (
    MAX_ENTRIES,
    DenseBlocks,
    places_of,
    top_number,
)

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = ["VectorProduct", "make_vector_product"]

# Blocks of so many floats are multiplied by a call of their own.
_LARGE = 2**12
# Leaves of so many floats are multiplied in one batch, as they are stored.
_LARGE_LEAF = 2**10


@dataclass(frozen=True)
class BasisStep:
    """The bases of one level.

    Attributes:
        small: P without the weights of large nodes, (rows on the level below, rows on this level).
        large: the weights of large nodes, or None.
    """

    small: SparseMatrix
    large: DenseBlocks | None


@dataclass(frozen=True)
class VectorProduct:
    """A tree that multiplies one vector.

    Attributes:
        bounds: where the vectors of the levels begin in the flat vector, and where the last ends.
        steps: the bases, from the leaves up to the level below `top`.
        small: small couplings, blocks of the near field and leaves, of the flat vector.
        large: large couplings and blocks of the near field above the diagonal, or None.
        leaves: all leaves, if they are large, with rows of the flat vector; or None.
        top: everything above the last step as a dense matrix, or None.
    """

    bounds: tuple[int, ...]
    steps: tuple[BasisStep, ...]
    small: SparseMatrix
    large: DenseBlocks | None
    leaves: LeafBlocks | None
    top: Tensor | None

    def apply(self, vector: Tensor) -> Tensor:
        """Return the product with a vector (N,)."""
        bounds = self.bounds
        if self.top is not None and not self.steps:
            return self.top @ vector
        flat = vector.new_empty(bounds[-1] + 1)
        flat[: bounds[1]] = vector
        flat[-1] = 0.0
        for number, step in enumerate(self.steps):
            low, high, end = bounds[number : number + 3]
            flat[high:end] = step.small.transposed_times(flat[low:high])
            if (large := step.large) is not None:
                own = flat[low:high].index_select(0, large.rows)
                flat[high:end].index_add_(0, large.cols, large.transposed_times(own))
        outputs = self._across(flat)
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            low, high, end = bounds[number : number + 3]
            outputs[low:high] += step.small.times(outputs[high:end])
            if (large := step.large) is not None:
                own = outputs[high:end].index_select(0, large.cols)
                outputs[low:high].index_add_(0, large.rows, large.times(own))
        return outputs[: bounds[1]]

    def _across(self, flat: Tensor) -> Tensor:
        """Multiply the vectors of all levels by leaves, near field and couplings."""
        outputs = self.small.times(flat)
        if self.large is not None:
            rows, cols = self.large.rows, self.large.cols
            found_rows, found_cols = self.large.both_times(
                flat.index_select(0, rows), flat.index_select(0, cols)
            )
            outputs.index_add_(0, rows, found_rows)
            outputs.index_add_(0, cols, found_cols)
        if self.leaves is not None:
            # A row times a symmetric block is several times as fast as a block times a column.
            rows = self.leaves.rows.reshape(-1)
            own = flat.index_select(0, rows).view(-1, 1, self.leaves.values.shape[1])
            outputs.index_add_(0, rows, torch.bmm(own, self.leaves.values).view(-1))
        if self.top is not None:
            last = slice(self.bounds[-2], self.bounds[-1])
            outputs[last] = self.top @ flat[last]
        return outputs


def make_vector_product(matrix: HMatrix) -> VectorProduct | None:
    """Return how to multiply one vector by a tree; None if batches do this as fast.

    Args:
        matrix: its tree, leaves, levels and near field are used, its global part is not.
    """
    tree, size = matrix.tree, matrix.shape[0]
    if tree.num_kept == 0 or matrix.device.type != "cpu":
        return None
    sizes = [size, *(level.size for level in matrix.levels)]
    top = top_number(sizes)
    if top == 0:
        dense = torch.zeros(size, size, dtype=matrix.dtype)
        identity = torch.eye(tree.num_kept + 1, tree.num_kept, dtype=matrix.dtype)
        kept = tree.permutation
        dense[kept[:, None], kept] = matrix._apply(identity)[:-1]
        empty = SparseEntries((0, 0)).matrix(matrix.dtype)
        return VectorProduct((0, size), (), empty, None, None, dense)
    if _num_entries(matrix, top) > MAX_ENTRIES:
        return None
    sizes = sizes[: top + 1]
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    total = bounds[-1] + 1
    steps = tuple(_basis_step(matrix, number, sizes) for number in range(len(sizes) - 1))
    small, large = SparseEntries((total, total)), []
    for coupling, number in _couplings(matrix, top):
        count, places = (sizes[number], None) if number else (tree.num_kept, tree.permutation)
        left, right = (
            places_of(index, count, places, bounds[number])
            for index in (coupling.left, coupling.right)
        )
        if coupling.values[0].numel() >= _LARGE:
            large += list(zip(left, right, coupling.values, strict=True))
        else:
            small.add(left, right, coupling.values)
            small.add(right, left, coupling.values.transpose(1, 2))
    leaves = None
    rows = places_of(matrix.leaves.rows, tree.num_kept, tree.permutation)
    if matrix.leaves.values.shape[1] ** 2 >= _LARGE_LEAF:
        leaves = LeafBlocks(rows.masked_fill(rows < 0, total - 1), matrix.leaves.values)
    else:
        small.add(rows, rows, matrix.leaves.values)
    return VectorProduct(
        tuple(bounds),
        steps,
        small.matrix(matrix.dtype),
        DenseBlocks.of(large),
        leaves,
        _top(matrix, top) if top <= len(matrix.levels) else None,
    )


def _num_entries(matrix: HMatrix, top: int) -> int:
    """The number of entries that would be copied into sparse matrices, with padding."""
    couplings = [*matrix.near, *(c for level in matrix.levels[:top] for c in level.couplings)]
    blocks = [basis.weights for level in matrix.levels[:top] for basis in level.bases]
    blocks += 2 * [coupling.values for coupling in couplings]
    total = sum(values.numel() for values in blocks if values[0].numel() < _LARGE)
    leaves = matrix.leaves.values
    return total + (leaves.numel() if leaves.shape[1] ** 2 < _LARGE_LEAF else 0)


def _couplings(matrix: HMatrix, top: int) -> Iterator[tuple[Coupling, int]]:
    """All couplings below the top, each with the number of the level whose vectors it takes."""
    for coupling in matrix.near:
        yield coupling, 0
    for number, level in enumerate(matrix.levels[: top - 1], 1):
        for coupling in level.couplings:
            yield coupling, number


def _basis_step(matrix: HMatrix, number: int, sizes: list[int]) -> BasisStep:
    level = matrix.levels[number]
    places = matrix.tree.permutation if number == 0 else None
    small, large = SparseEntries((sizes[number], sizes[number + 1])), []
    for basis in level.bases:
        skeleton, rest = (
            places_of(index, level.size_below, places) for index in (basis.skeleton, basis.rest)
        )
        target = places_of(basis.target, level.size)
        small.add_identity(skeleton, target, matrix.dtype)
        if basis.weights[0].numel() >= _LARGE:
            large += list(zip(rest, target, basis.weights, strict=True))
        else:
            small.add(rest, target, basis.weights)
    return BasisStep(small.matrix(matrix.dtype), DenseBlocks.of(large))


def _top(matrix: HMatrix, top: int) -> Tensor:
    """The couplings of a level, and all levels above it, as a dense matrix."""
    couplings, levels = matrix.levels[top - 1], matrix.levels[top:]
    identity = torch.eye(couplings.size + 1, couplings.size, dtype=matrix.dtype)
    gathered = [identity]
    for level in levels:
        gathered.append(level.gather(gathered[-1]))
    outputs = torch.zeros_like(gathered[-1])
    for level, values in zip(reversed(levels), reversed(gathered), strict=False):
        level.add_couplings(values, outputs)
        outputs = level.spread(outputs)
    couplings.add_couplings(identity, outputs)
    return outputs[:-1]
