"""Factorizations and solves of a matrix whose subtrees lie on different ranks.

Each rank eliminates the rows of its own subtrees up to the cut level. What is left of the diagonal
blocks there goes to all ranks, which eliminate the top of the tree, all in the same way. A solve
exchanges what is left of the right-hand sides on the cut level, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.hierarchical.parts.levels import LeafBlocks
from hcurv.hierarchical.parts.row_share import RowShare, largest_of
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.solving.elimination import IndefiniteError, LevelFactor
from hcurv.hierarchical.solving.factorize import (
    eliminate_levels,
    factorize_levels,
    require_memory,
    scales_of,
    smallest_pivot,
)
from hcurv.hierarchical.solving.inverse_blocks import inverse_diagonal, skeleton_blocks
from hcurv.hierarchical.solving.tree_solves import TreeSolves
from hcurv.linalg.nystrom import double_gram, outer_eigenpairs

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix

__all__ = [
    "SharedFactors",
    "SharedSolves",
    "SharedUpdate",
    "factorize_shared",
    "make_shared_update",
]

# As in `tree_solves`: vectors are taken some columns at a time.
_COLUMN_FLOATS = 2**23


class SharedFactors(NamedTuple):
    """What was eliminated.

    Attributes:
        own: on the levels of this rank, from the leaves to the cut level.
        top: on the levels that all ranks have, up to the root.
        log_determinant: log |det| over the rows that the tree holds.
        num_negative: number of negative eigenvalues.
    """

    own: tuple[LevelFactor, ...]
    top: tuple[LevelFactor, ...]
    log_determinant: float
    num_negative: int


def factorize_shared(
    matrix: DistributedHMatrix, damping: float | Tensor, definite: bool = True, keep: bool = True
) -> SharedFactors:
    """Factorize A + D over the rows that the tree holds, as `factorize_levels` does.

    Raises:
        IndefiniteError: A + D is not positive definite, or not regular; on all ranks.
    """
    nodes, top, ranks = matrix.nodes, matrix.top, matrix.share.ranks
    if nodes.cut is None:
        found = factorize_levels(top, damping, definite, keep)
        return SharedFactors((), found.levels, found.log_determinant, found.num_negative)
    own = matrix.own_matrix
    if keep:
        with ranks.agreed():
            require_memory(own, has_root=False)
    scales = torch.zeros(ranks.size, 3, dtype=torch.float64)
    scales[ranks.rank] = torch.tensor(scales_of(own, damping), dtype=torch.float64)
    scales = ranks.sum(scales)
    low, high, largest = float(scales[:, 0].min()), *scales[:, 1:].amax(0).tolist()
    floor = smallest_pivot(matrix.dtype, low, high, largest)
    failed = 0
    try:
        factors, left = eliminate_levels(own, damping, definite, keep, floor, has_root=False)
    except IndefiniteError:
        failed = 1
    if largest_of(ranks, failed):
        raise IndefiniteError
    cut_ranks = matrix.node_ranks[-1]
    width = int(cut_ranks.max())
    schur = torch.zeros(nodes.num_nodes(nodes.cut), width, width, dtype=torch.float64)
    schur = schur.to(matrix.device)
    for members, values in left.schur:
        rank = min(width, values.shape[1])
        schur[members, :rank, :rank] = values[:, :rank, :rank]
    bounds = top.tree.bounds(top.tree.depth)
    blocks = LeafBlocks.of(bounds, nodes.of_all(schur, nodes.cut))
    above, _ = eliminate_levels(top.with_leaves(blocks), 0.0, definite, keep, floor)
    logarithm, negative = nodes.totals(factors.log_determinant, factors.num_negative)
    return SharedFactors(
        factors.levels,
        above.levels,
        logarithm + above.log_determinant,
        int(negative) + above.num_negative,
    )


@dataclass(frozen=True)
class SharedSolves:
    """(A₀ + D)⁻¹ = G J Gᵀ of what the tree stores, for the rows that are not zero in A.

    Vectors are own rows, (m, k). The names of the methods are those of `TreeSolves`.

    Attributes:
        share: these rows.
        own: what was eliminated on the levels of this rank.
        top: the same on the levels that all ranks have; None without a tree, where A₀ = 0.
        exchange: gives the own vectors of the cut level to all ranks, as those of the matrix.
        first: the first own node of the cut level.
        num_nodes: how many own nodes there are.
        damping: D.
    """

    share: RowShare
    own: tuple[LevelFactor, ...]
    top: TreeSolves | None
    exchange: Callable[[Tensor], tuple[Tensor, slice]]
    first: int
    num_nodes: int
    damping: Damping

    def solve(self, rhs: Tensor) -> Tensor:
        """(A₀ + D)⁻¹ times own rows."""
        return self._by_columns(rhs, self._solve, -1.0)

    def half(self, rhs: Tensor) -> Tensor:
        """G times own rows."""
        return self._by_columns(rhs, self._half, -0.5)

    def half_transposed(self, rhs: Tensor) -> Tensor:
        """Gᵀ times own rows."""
        return self._by_columns(rhs, self._half_transposed, -0.5)

    def diagonal(self) -> Tensor:
        """The own part of the diagonal of (A₀ + D)⁻¹, (m,), in double precision."""
        if self.top is None:
            return 1 / self.damping.rows(self.share.own_rows)
        if not self.own:
            return self.share.own(inverse_diagonal(self.top.levels))
        known = []
        for nodes, values in skeleton_blocks(self.top.levels):
            mine = (nodes >= self.first) & (nodes < self.first + self.num_nodes)
            if bool(mine.any()):
                known.append((nodes[mine] - self.first, values[mine]))
        return inverse_diagonal(self.own, known)

    def _by_columns(self, rhs: Tensor, run: Callable[[Tensor], Tensor], power: float) -> Tensor:
        if self.top is None:
            scales = self.damping.rows(self.share.own_rows).pow(power)
            return rhs * scales.to(rhs.dtype)[:, None]
        result = torch.empty_like(rhs)
        step = max(1, _COLUMN_FLOATS // (self.share.num_rows + 1))
        for start in range(0, rhs.shape[1], step):
            columns = slice(start, start + step)
            result[:, columns] = run(_padded(rhs[:, columns]))[:-1]
        return result

    def _solve(self, values: Tensor) -> Tensor:
        assert self.top is not None
        vectors = [values]
        for level in self.own:
            vectors.append(level.up(vectors[-1]))
        vectors[-1] = self._through_top(vectors[-1], self.top._both)
        return self._down(vectors)

    def _half_transposed(self, values: Tensor) -> Tensor:
        assert self.top is not None
        vectors = [values]
        for level in self.own:
            vectors.append(level.up(vectors[-1]))
        vectors[-1] = self._through_top(vectors[-1], self.top._up)
        for number in reversed(range(len(self.own))):
            self.own[number].put_back(vectors[number + 1], vectors[number])
        return vectors[0]

    def _half(self, values: Tensor) -> Tensor:
        assert self.top is not None
        vectors = [values]
        for level in self.own:
            vectors.append(level.skip(vectors[-1]))
        vectors[-1] = self._through_top(vectors[-1], self.top._half)
        return self._down(vectors)

    def _through_top(self, own: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        whole, mine = self.exchange(own)
        return _padded(run(whole)[mine])

    def _down(self, vectors: list[Tensor]) -> Tensor:
        for number in reversed(range(len(self.own))):
            self.own[number].down(vectors[number + 1], vectors[number])
        return vectors[0]


def _padded(values: Tensor) -> Tensor:
    return torch.cat([values, values.new_zeros(1, values.shape[1])])


@dataclass(frozen=True)
class SharedUpdate:
    """What a shared global part changes in solves: `GlobalUpdate` with own rows of the basis.

    Attributes:
        share: the rows of the basis.
        basis: own rows, (m, g).
        values: as in `GlobalUpdate`, (g,), double precision.
        between: whether it belongs between the halves of a solve.
        log_determinant: what it adds to log |det|.
        num_negative: what it adds to the number of negative eigenvalues.
    """

    share: RowShare
    basis: Tensor
    values: Tensor
    between: bool
    log_determinant: float
    num_negative: int

    def invert(self, vectors: Tensor) -> Tensor:
        """The middle factor's inverse times own rows."""
        return self._changed(vectors, vectors, -self.values / (1 + self.values))

    def invert_root(self, vectors: Tensor) -> Tensor:
        """Its symmetric inverse root times own rows."""
        return self._changed(vectors, vectors, (1 + self.values).rsqrt() - 1)

    def correct(self, rhs: Tensor, solved: Tensor) -> Tensor:
        """From F b to (F − W C⁻¹ Wᵀ) b."""
        return self._changed(solved, rhs, -self.values)

    def _changed(self, values: Tensor, seen: Tensor, scales: Tensor) -> Tensor:
        mixed = self.share.total(self.basis.T @ seen)
        return torch.addmm(values, self.basis, mixed * scales.to(mixed.dtype)[:, None])


def make_shared_update(
    part: SharedPart, apply: Callable[[Tensor], Tensor], between: bool
) -> SharedUpdate:
    """What a shared global part changes in solves; see `make_update`."""
    share = part.share
    columns = apply(part.factor.contiguous())
    if between:
        basis, values = outer_eigenpairs(columns, share.ranks)
        return SharedUpdate(share, basis, values, True, float(values.log1p().sum()), 0)
    core = double_gram(part.factor, columns, share.ranks)
    core = (core + core.T) / 2 + torch.eye(part.rank, dtype=core.dtype, device=core.device)
    values, mixing = torch.linalg.eigh(core)
    basis = columns @ (mixing * values.abs().rsqrt()).to(columns.dtype)
    logarithm, negative = float(values.abs().log().sum()), -int((values < 0).sum())
    return SharedUpdate(share, basis, values.sign(), False, logarithm, negative)
