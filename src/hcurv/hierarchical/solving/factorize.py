"""From a hierarchical matrix to its factorization, level by level (see `elimination`).

All of it is computed in double precision, whatever the matrix is stored in; factors are then
rounded to the precision of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Basis, Coupling, row_table
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from hcurv.hierarchical.solving.elimination import (
    BlockInverse,
    Elimination,
    LevelFactor,
    Split,
    cholesky_inverse,
    eliminate,
    permute,
    spectral_inverse,
)
from hcurv.memory import require_bytes

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = [
    "Factors",
    "NodeBlocks",
    "eliminate_levels",
    "factorize_levels",
    "node_groups",
    "peak_bytes",
    "require_memory",
    "scales_of",
    "smallest_pivot",
    "splits",
]

# Diagonal blocks are eliminated in batches of at most this many floats, which bounds the memory.
_BLOCK_FLOATS = 2**24
# A pivot that is smaller than this, relative to the largest diagonal entry, is rounding.
_FLOORS = {torch.float32: 2.0**-30, torch.float64: 2.0**-46}
# The same relative to the largest damping, which is known exactly: all is computed in float64.
_DAMPING_FLOOR = 2.0**-48


@dataclass(frozen=True)
class Factors:
    """What was eliminated on all levels of a tree.

    Attributes:
        levels: the eliminations, from the leaves to the root.
        log_determinant: log |det| over the rows that the tree holds.
        num_negative: number of negative eigenvalues.
    """

    levels: tuple[LevelFactor, ...]
    log_determinant: float
    num_negative: int


def splits(matrix: HMatrix, has_root: bool = True) -> list[Split]:
    """Return how the rows of the nodes of all levels lie, from the leaves to the root.

    Without a root, the last are the nodes of the uppermost level itself.
    """
    bounds = matrix.tree.bounds(matrix.tree.depth)
    counts = bounds.diff()
    found = [Split(bounds[:-1], counts, counts)]
    for level in matrix.levels if has_root else matrix.levels[:-1]:
        counts = level.ranks.view(-1, 2).sum(1)
        found.append(Split(counts.cumsum(0) - counts, counts, level.ranks[::2]))
    return found


def node_groups(matrix: HMatrix, split: Split, number: int) -> Iterator[Basis]:
    """Yield the bases of all nodes of a level, also of nodes without skeleton rows."""
    size_below = int(split.counts.sum())
    if number < len(matrix.levels):
        yield from matrix.levels[number].bases
        ranks = matrix.levels[number].ranks
    else:
        ranks = torch.zeros_like(split.counts)
    without_skeleton = (ranks == 0).nonzero().squeeze(1)
    counts = split.counts[without_skeleton]
    for group in group_by_shape(counts, counts.clamp(max=1)):
        nodes, width = without_skeleton[group], int(counts[group].max())
        rest = row_table(split.starts[nodes], split.counts[nodes], width, size_below)
        weights = torch.zeros(nodes.numel(), width, 0, dtype=matrix.dtype, device=matrix.device)
        none = rest[:, :0]
        yield Basis(nodes, none, rest, none, weights)


def peak_bytes(matrix: HMatrix, has_root: bool = True, keep: bool = True) -> int:
    """Return the most bytes that a factorization of a matrix takes at one time.

    A group of m + r rows a node stores the roots (m, m) and crosses (m, r) of its nodes in the
    matrix's precision, and passes Schur complements (r, r) on in double precision. Some of its
    nodes are eliminated at a time, in double precision. What exists then are either three copies of
    their diagonal blocks, where rows are brought into order, or one of them, X, its Cholesky factor
    and its inverse, each (m, m), and two of (m, r). In double precision, the inverse and one of the
    latter are what is stored.
    """
    held = peak = 0
    for number, split in enumerate(splits(matrix, has_root)):
        for group in node_groups(matrix, split, number):
            count, size, rank = group.weights.shape
            stored = size * (size + rank) * matrix.dtype.itemsize if keep else 0
            held += count * (stored + rank**2 * 8)
            step = min(count, _batch(size + rank))
            ordering = 3 * (size + rank) ** 2 * 8 - stored
            eliminating = ((size + rank) ** 2 + 3 * size**2 + 2 * size * rank) * 8
            if matrix.dtype == torch.float64:
                eliminating -= stored
            peak = max(peak, held + step * max(ordering, eliminating))
    return peak


def _batch(width: int) -> int:
    """The number of nodes that are eliminated together, with so many rows each."""
    return max(1, _BLOCK_FLOATS // max(1, width**2))


@dataclass
class NodeBlocks:
    """Diagonal blocks of the nodes of a level, made of what the level below left.

    Attributes:
        schur: Schur complements of the level below, by groups of its nodes.
        couplings: between the skeletons of the level below.
    """

    schur: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    couplings: tuple[Coupling, ...] = ()

    def of(self, nodes: Tensor, split: Split) -> Tensor:
        """Return blocks (B, w, w) in double precision, with a last row and column of zeros."""
        left_width, right_width = split.widths(nodes)
        width = left_width + right_width + 1
        result = torch.zeros(nodes.numel(), width, width, dtype=torch.float64, device=nodes.device)
        slots = torch.full_like(split.counts, -1)
        slots[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        left, right = slice(0, left_width), slice(left_width, left_width + right_width)
        for children, values in self.schur:
            for side, place in ((0, left), (1, right)):
                own = (children % 2 == side) & (slots[children // 2] >= 0)
                if not bool(own.any()):
                    continue
                size = min(values.shape[1], place.stop - place.start)
                part = slice(place.start, place.start + size)
                result[slots[children[own] // 2], part, part] = values[own, :size, :size]
        for coupling in self.couplings:
            parents = coupling.pairs[:, 0] // 2
            own = slots[parents] >= 0
            if not bool(own.any()):
                continue
            rows, cols = (
                min(a, b)
                for a, b in zip(coupling.values.shape[1:], (left_width, right_width), strict=True)
            )
            values = coupling.values[own, :rows, :cols].double()
            slot = slots[parents[own]]
            result[slot, :rows, left_width : left_width + cols] = values
            result[slot, left_width : left_width + cols, :rows] = values.transpose(1, 2)
        return result


def factorize_levels(
    matrix: HMatrix, damping: float | Tensor, definite: bool = True, keep: bool = True
) -> Factors:
    """Factorize A + D over the rows that the tree holds, without the global part of A.

    Args:
        matrix: A.
        damping: D, a number λ for D = λI, or the diagonal of D, (N,), in double precision.
        definite: whether A + D must be positive definite. Otherwise it must be regular.
        keep: whether to keep the factors. With False the only question is whether there are any.

    Raises:
        IndefiniteError: A + D is not positive definite, or not regular.
    """
    require_memory(matrix, keep=keep)
    low, high, largest = scales_of(matrix, damping)
    floor = smallest_pivot(matrix.dtype, low, high, largest)
    return eliminate_levels(matrix, damping, definite, keep, floor)[0]


def require_memory(matrix: HMatrix, has_root: bool = True, keep: bool = True) -> None:
    """Raise unless there is memory for factorizing a matrix."""
    require_bytes(
        peak_bytes(matrix, has_root, keep),
        matrix.device,
        f"the factorization of a matrix of N = {matrix.shape[0]}",
        (
            "compress with a larger tolerance",
            "convert the matrix with .to(dtype=torch.float32)",
        ),
    )


def scales_of(matrix: HMatrix, damping: float | Tensor) -> tuple[float, float, float]:
    """Return the smallest and the largest damping, and the largest diagonal entry."""
    diagonal = matrix.leaves.values.diagonal(dim1=1, dim2=2)
    largest = float(diagonal.max()) if diagonal.numel() else 0.0
    sizes = _leaf_damping(matrix, damping).abs()
    if sizes.numel() == 0:
        return 0.0, 0.0, largest
    return float(sizes.min()), float(sizes.max()), largest


def smallest_pivot(dtype: torch.dtype, low: float, high: float, largest: float) -> float:
    """Return the size below which a pivot is rounding, from what `scales_of` gives."""
    return max(_FLOORS[dtype] * max(largest, low), _DAMPING_FLOOR * high)


def eliminate_levels(
    matrix: HMatrix,
    damping: float | Tensor,
    definite: bool,
    keep: bool,
    floor: float,
    has_root: bool = True,
) -> tuple[Factors, NodeBlocks]:
    """Eliminate all levels, and the root if the matrix has one.

    Args:
        matrix: A.
        damping: as for `factorize_levels`.
        definite: likewise.
        keep: likewise.
        floor: a pivot that is smaller than this is rounding.
        has_root: whether the nodes of the uppermost level are two children of a root.

    Returns:
        The factors, and what is left of the diagonal blocks of the uppermost level.
    """
    invert = cholesky_inverse if definite else spectral_inverse
    run = _Run(matrix, _leaf_damping(matrix, damping), invert, floor, keep)
    levels = []
    for number, split in enumerate(splits(matrix, has_root)):
        levels.append(run.level(number, split))
    return Factors(tuple(levels), run.log_determinant, run.num_negative), run.left


def _leaf_damping(matrix: HMatrix, damping: float | Tensor) -> Tensor:
    """The damping of each row of each leaf, (leaves, m)."""
    rows = matrix.leaves.rows
    if not isinstance(damping, Tensor):
        return torch.full(rows.shape, damping, dtype=torch.float64, device=rows.device)
    ordered = damping.to(rows.device)[matrix.tree.permutation]
    if ordered.numel() == 0:
        return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    # Padded places of a leaf are never read, so that any value will do there.
    return ordered[rows.clamp(max=ordered.numel() - 1)]


class _Run:
    """One factorization under way."""

    def __init__(
        self,
        matrix: HMatrix,
        damping: Tensor,
        invert: Callable[[Tensor, Tensor, float], BlockInverse],
        floor: float,
        keep: bool,
    ) -> None:
        self._matrix, self._damping, self._keep = matrix, damping, keep
        self._invert, self._floor = invert, floor
        self.left = NodeBlocks()
        self.log_determinant = 0.0
        self.num_negative = 0

    def level(self, number: int, split: Split) -> LevelFactor:
        """Eliminate all nodes of a level."""
        matrix = self._matrix
        size_below = int(split.counts.sum())
        above = NodeBlocks()
        if number < len(matrix.levels):
            above.couplings = matrix.levels[number].couplings
        eliminations = []
        for group in node_groups(matrix, split, number):
            if group.rest.numel() or group.skeleton.numel():
                elimination, schur = self._group(group, split, number == 0, size_below)
                eliminations.append(elimination)
                above.schur.append((group.nodes, schur))
        self.left = above
        size = matrix.levels[number].size if number < len(matrix.levels) else 0
        return LevelFactor(split, size, size_below, tuple(eliminations))

    def _group(
        self, group: Basis, split: Split, are_leaves: bool, size_below: int
    ) -> tuple[Elimination, Tensor]:
        number, num_rest, rank = group.weights.shape
        dtype = self._matrix.dtype
        shape = (number, num_rest) if self._keep else (0, num_rest)
        root, cross = (
            torch.empty(*shape, columns, dtype=dtype, device=group.nodes.device)
            for columns in (num_rest, rank)
        )
        signs: list[Tensor] = []
        schur = torch.empty(number, rank, rank, dtype=torch.float64, device=group.nodes.device)
        step = _batch(num_rest + rank)
        for start in range(0, number, step):
            part = slice(start, start + step)
            blocks = self._diagonal_blocks(group, part, split, are_leaves)
            inverse, crossed, schur[part] = eliminate(
                blocks,
                group.weights[part].double(),
                group.rest[part] == size_below,
                lambda values, padding: self._invert(values, padding, self._floor),
            )
            self.log_determinant += inverse.log_determinant
            if inverse.signs is not None:
                self.num_negative += int((inverse.signs < 0).sum())
                signs.append(inverse.signs.to(dtype))
            if self._keep:
                root[part], cross[part] = inverse.root, crossed
        elimination = Elimination(
            group.nodes,
            group.skeleton,
            group.rest,
            group.target,
            group.weights,
            root,
            cross,
            torch.cat(signs) if signs else None,
        )
        return elimination, schur

    def _diagonal_blocks(self, group: Basis, part: slice, split: Split, are_leaves: bool) -> Tensor:
        """Return the diagonal blocks of nodes, with skeleton rows first."""
        nodes = group.nodes[part]
        if are_leaves:
            values = self._matrix.leaves.values
            width = split.widths(nodes)[0]
            blocks = torch.zeros(
                nodes.numel(), width + 1, width + 1, dtype=torch.float64, device=nodes.device
            )
            blocks[:, :-1, :-1] = values[nodes, :width, :width]
            blocks.diagonal(dim1=1, dim2=2)[:, :-1].add_(self._damping[nodes, :width])
        else:
            blocks = self.left.of(nodes, split)
        order = torch.cat([group.skeleton[part], group.rest[part]], 1)
        return permute(blocks, split.places(nodes, order))
