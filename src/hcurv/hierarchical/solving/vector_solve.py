"""Solves for one right-hand side, in few calls (see `parts.vector_steps`).

With the names of `elimination`, T = E J Z and b̃ = b_R − W b_S, a node passes b_S − Tᵀ b̃ on to its
parent and keeps s = Eᵀ b̃. Down the tree, x_R = E J s − T x_S and then x_S − Wᵀ x_R. So E is needed
neither to go up nor to go down, and the E of all levels are one sparse matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.hierarchical.parts.sparse_blocks import SparseEntries, SparseMatrix
from hcurv.hierarchical.parts.vector_steps import (
    MAX_ENTRIES,
    DenseBlocks,
    places_of,
    top_number,
)
from hcurv.hierarchical.solving.elimination import Elimination

if TYPE_CHECKING:
    from hcurv.hierarchical.solving.tree_solves import TreeSolves

__all__ = ["VectorSolve", "make_vector_solve"]

# A node is multiplied by six calls of its own if otherwise it had so many sparse entries.
_LARGE = 2**14


@dataclass(frozen=True)
class LargeNodes:
    """Large nodes of a level, as they are stored.

    Attributes:
        weights: W, with positions of R and S on the level below.
        root: E, with positions of R.
        cross: Z, with positions of R, and of S on this level.
        signs: J for all R, one after the other; None where it is the identity.
    """

    weights: DenseBlocks
    root: DenseBlocks
    cross: DenseBlocks
    signs: Tensor | None

    def signed(self, values: Tensor) -> Tensor:
        """Return J times values."""
        return values if self.signs is None else values * self.signs


@dataclass(frozen=True)
class SolveStep:
    """The nodes of one level. Matrices are without the blocks of large nodes.

    Attributes:
        weights: W, a square matrix over the rows of the level below.
        basis: the identity for S and −T for R, (rows of the level below, rows of this level).
        large: large nodes, or None.
    """

    weights: SparseMatrix
    basis: SparseMatrix
    large: LargeNodes | None


@dataclass(frozen=True)
class VectorSolve:
    """A factorized tree that solves for one right-hand side.

    Vectors of all levels lie in one flat vector: first all rows of the matrix in their own order,
    then the skeleton rows of each level, up to the level from which on all is dense.

    Attributes:
        bounds: where the vectors of the levels begin in the flat vector, and where the last ends.
        steps: the levels below the top.
        root: E of all these levels and of the rows that the tree does not hold, of the flat vector.
        signs: J of the flat vector, None where it is the identity.
        top_up: Gᵀ of everything above the last step.
        top_down: G J of the same.
        homes: where each row of the matrix lies in the flat vector once it is eliminated, (N,).
    """

    bounds: tuple[int, ...]
    steps: tuple[SolveStep, ...]
    root: SparseMatrix
    signs: Tensor | None
    top_up: Tensor
    top_down: Tensor
    homes: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """(A₀ + D)⁻¹ times (N,)."""
        return self._down(self._up(rhs))

    def half(self, rhs: Tensor) -> Tensor:
        """G times (N,)."""
        if not self.steps:
            return self.top_down @ rhs
        return self._down(rhs.new_zeros(self.bounds[-1]).index_copy_(0, self.homes, rhs))

    def half_transposed(self, rhs: Tensor) -> Tensor:
        """Gᵀ times (N,)."""
        if not self.steps:
            return self.top_up @ rhs
        return self._up(rhs).index_select(0, self.homes)

    def _up(self, rhs: Tensor) -> Tensor:
        """From a right-hand side to s, both of the flat vector."""
        if not self.steps:
            return self.top_up @ rhs
        bounds = self.bounds
        flat = rhs.new_empty(bounds[-1])
        flat[: bounds[1]] = rhs
        kept: list[Tensor] = []
        for number, step in enumerate(self.steps):
            low, high, end = bounds[number : number + 3]
            below = flat[low:high]
            below -= step.weights.times(below)
            flat[high:end] = step.basis.transposed_times(below)
            if (large := step.large) is not None:
                own = below.index_select(0, large.weights.cols)
                rest = below.index_select(0, large.weights.rows).sub_(large.weights.times(own))
                kept.append(large.root.transposed_times(rest))
                passed = large.cross.transposed_times(large.signed(kept[-1]))
                flat[high:end].index_add_(0, large.cross.cols, passed, alpha=-1)
        result = self.root.transposed_times(flat)
        for number, step in enumerate(self.steps):
            if step.large is not None:
                part = result[bounds[number] : bounds[number + 1]]
                part.index_copy_(0, step.large.root.rows, kept.pop(0))
        result[bounds[-2] :] = self.top_up @ flat[bounds[-2] :]
        return result

    def _down(self, scaled: Tensor) -> Tensor:
        """From s to the solution."""
        if not self.steps:
            return self.top_down @ scaled
        bounds = self.bounds
        outputs = self.root.times(scaled if self.signs is None else scaled * self.signs)
        outputs[bounds[-2] :] = self.top_down @ scaled[bounds[-2] :]
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            low, high, end = bounds[number : number + 3]
            below = outputs[low:high]
            below += step.basis.times(outputs[high:end])
            below -= step.weights.transposed_times(below)
            if (large := step.large) is not None:
                here = outputs[high:end].index_select(0, large.cross.cols)
                rest = scaled[low:high].index_select(0, large.root.rows)
                rest.sub_(large.cross.times(here))
                solved = large.root.times(large.signed(rest))
                below.index_copy_(0, large.root.rows, solved)
                passed = large.weights.transposed_times(solved)
                below.index_add_(0, large.weights.cols, passed, alpha=-1)
        return outputs[: bounds[1]]


def make_vector_solve(solves: TreeSolves) -> VectorSolve | None:
    """Return how to solve for one right-hand side; None if batches do this as fast."""
    tree, levels = solves.tree, solves.levels
    if tree.num_kept == 0 or tree.permutation.device.type != "cpu":
        return None
    dtype = levels[0].eliminations[0].root.dtype
    sizes = [tree.size, *(level.size for level in levels)]
    top = top_number(sizes)
    if _num_entries(solves, top) > MAX_ENTRIES:
        return None
    sizes = sizes[: top + 1]
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    zero_rows = tree.zero_rows
    damping = solves.damping.rows(zero_rows)
    outside = damping.abs().rsqrt().to(dtype)
    signs = torch.ones(bounds[-1], dtype=dtype)
    signs[zero_rows] = damping.sign().to(dtype)
    if top == 0:
        up, down = (
            _with_zero_rows(solves, part[:-1], values)
            for part, values in zip(
                _dense_halves(solves, 0, tree.num_kept, dtype),
                (outside, outside * signs[zero_rows]),
                strict=True,
            )
        )
        empty = SparseEntries((0, 0)).matrix(dtype)
        return VectorSolve((0, tree.size), (), empty, None, up, down, torch.arange(tree.size))
    root = SparseEntries((bounds[-1], bounds[-1]))
    root.add(zero_rows[:, None], zero_rows[:, None], outside[:, None, None])
    homes, origins = torch.arange(tree.size), torch.arange(tree.size)
    steps = []
    for number in range(top):
        level = levels[number]
        maker = _StepMaker(sizes[number], level.size, level.size_below, dtype)
        places = tree.permutation if number == 0 else None
        above = torch.empty(level.size, dtype=torch.long)
        for node in level.eliminations:
            skeleton, rest = (
                places_of(index, level.size_below, places) for index in (node.skeleton, node.rest)
            )
            target = places_of(node.target, level.size)
            maker.add(node, skeleton, rest, target)
            above[target[target >= 0]] = origins[skeleton[skeleton >= 0]]
            is_row = rest >= 0
            flat = (rest + bounds[number]).masked_fill_(~is_row, -1)
            homes[origins[rest[is_row]]] = flat[is_row]
            if node.signs is not None:
                signs[flat[is_row]] = node.signs[is_row]
            if not _is_large(node):
                root.add(flat, flat, node.root)
        origins = above
        steps.append(maker.step())
    homes[origins] = torch.arange(bounds[-2], bounds[-1])
    signs[bounds[-2] :] = 1.0  # those of the top are in its matrices
    up, down = (part[:-1] for part in _dense_halves(solves, top, sizes[-1], dtype))
    return VectorSolve(
        tuple(bounds),
        tuple(steps),
        root.matrix(dtype),
        signs if bool((signs < 0).any()) else None,
        up,
        down,
        homes,
    )


class _StepMaker:
    """Collects the nodes of one level."""

    def __init__(self, size_here: int, size_above: int, padding: int, dtype: torch.dtype) -> None:
        self._weights = SparseEntries((size_here, size_here))
        self._basis = SparseEntries((size_here, size_above))
        self._padding, self._dtype = padding, dtype
        self._large: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], [], []]
        self._signs: list[Tensor] = []

    def add(self, node: Elimination, skeleton: Tensor, rest: Tensor, target: Tensor) -> None:
        """Add nodes of like shape, given where their rows lie."""
        self._basis.add_identity(skeleton, target, self._dtype)
        if _is_large(node):
            for kept, cols, values in zip(
                self._large,
                (skeleton, rest, target),
                (node.weights, node.root, node.cross),
                strict=True,
            ):
                kept += list(zip(rest, cols, values, strict=True))
            if node.signs is not None:
                self._signs.append(node.signs[rest >= 0])
            return
        self._weights.add(rest, skeleton, node.weights)
        root, cross = node.root.double(), node.cross.double()
        signed = cross if node.signs is None else cross * node.signs[:, :, None]
        self._basis.add(rest, target, (root @ signed).neg_().to(self._dtype))

    def step(self) -> SolveStep:
        """Return the step."""
        weights, root, cross = (DenseBlocks.of(kept) for kept in self._large)
        large = None
        if weights is not None and root is not None and cross is not None:
            large = LargeNodes(
                weights, root, cross, torch.cat(self._signs) if self._signs else None
            )
        return SolveStep(self._weights.matrix(self._dtype), self._basis.matrix(self._dtype), large)


def _is_large(node: Elimination) -> bool:
    size, rank = node.weights.shape[1:]
    return size * (size + 4 * rank) >= _LARGE


def _num_entries(solves: TreeSolves, top: int) -> int:
    """The number of entries that would be copied into sparse matrices, with padding."""
    nodes = [node for level in solves.levels[:top] for node in level.eliminations]
    return sum(
        node.weights.numel() + node.cross.numel() + node.root.numel()
        for node in nodes
        if not _is_large(node)
    )


def _dense_halves(
    solves: TreeSolves, first: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gᵀ and G J of the levels from ``first`` on, each with a last row of zeros."""
    upper = type(solves)(solves.tree, solves.levels[first:], solves.damping)
    identity = torch.eye(size + 1, size, dtype=dtype)
    return upper._up(identity.clone()), upper._half(identity)


def _with_zero_rows(solves: TreeSolves, inside: Tensor, outside: Tensor) -> Tensor:
    """A matrix over all rows, in their own order, from that of the tree's rows and a diagonal."""
    tree = solves.tree
    result = inside.new_zeros(tree.size, tree.size)
    result[tree.permutation[:, None], tree.permutation] = inside
    result[tree.zero_rows, tree.zero_rows] = outside
    return result
