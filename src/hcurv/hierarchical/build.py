"""Bottom-up construction: interpolate every node from samples of its off-diagonal rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from hcurv.cluster_tree import ClusterTree
from hcurv.hierarchical.assembly import (
    NodeInterpolations,
    leaf_blocks,
    make_bases,
    make_couplings,
)
from hcurv.hierarchical.buckets import group_by_shape
from hcurv.hierarchical.error_budget import ErrorBudget, out_of_sample
from hcurv.hierarchical.interactions import Interactions
from hcurv.hierarchical.levels import Basis, Coupling, LeafBlocks, Level, row_table
from hcurv.hierarchical.skeleton_columns import SkeletonSampler
from hcurv.interpolative import Interpolation, interpolate_rows
from hcurv.operators import EntrySource
from hcurv.sources import DenseMatrix

__all__ = ["FIRST_RANK", "Builder", "Sampler", "num_columns_for"]

_GROUP_FLOATS = 2**24  # of samples or Gram matrices of a group of nodes
_OVERSAMPLING = 1.5  # columns per row of a skeleton ...
_EXTRA = 16  # ... and beyond
_CAPPED = 4  # columns per row of a skeleton that a cap cuts off: weights must not fit by chance
_SKETCH_FLOATS = 2**28  # of a sketch with that many columns; a larger one makes do with fewer
_SKELETON_ENTRIES = 2**27  # between all skeletons of a level, or as many as a sketch has
_PROBE = 4  # nodes that tell whether a sample has columns enough
FIRST_RANK = 48  # that the first sample is made for


def num_columns_for(rank: int) -> int:
    """Columns of samples with which a skeleton of ``rank`` rows is chosen safely."""
    return math.ceil(_OVERSAMPLING * rank) + _EXTRA


class Sampler(Protocol):
    """Gives samples of the rows of nodes outside of the nodes themselves, level by level."""

    @property
    def num_columns(self) -> int:
        """Number s of columns of a sample."""

    @property
    def gain(self) -> float:
        """Norm of a sample over the norm of what it is a sample of."""

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F; known once `grow` was called."""

    def begin(self, leaves: LeafBlocks, near: tuple[Coupling, ...]) -> None:
        """Give the blocks of leaves and of near pairs of them, before anything else."""

    def grow(self, num_columns: int) -> None:
        """Have at least so many columns, from the current level on."""

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, by their places on the current level, (B, m, s)."""

    def ascend(self, level: Level, positions: Tensor) -> None:
        """Go on with a level whose parts are known and whose skeletons lie at ``positions``."""

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Vectors (N, k) that no sample was made of, and their products."""


@dataclass(frozen=True)
class _Rows:
    """The rows that are left on a level, node by node.

    Attributes:
        positions: in tree order, (rows,).
        starts: first row of each node, (nodes,).
        counts: number of its rows, (nodes,).
        scales: how much an error in a row weighs in the whole matrix, (rows + 1,), the last for
            padding: norms of the columns of the product of all bases below.
    """

    positions: Tensor
    starts: Tensor
    counts: Tensor
    scales: Tensor

    @property
    def size(self) -> int:
        return self.positions.numel()

    @property
    def largest(self) -> int:
        return int(self.counts.max())


class Builder:
    """Builds the parts of a hierarchical matrix.

    Args:
        source: entries.
        tree: clusters.
        interactions: which leaves are near.
        tolerance: relative error asked for.
        max_rank: rank cap.
        progress: show a bar.

    Attributes:
        num_capped: nodes that the cap kept from their tolerance.
        seconds: time spent in each phase.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        interactions: Interactions,
        tolerance: float,
        max_rank: int,
        progress: bool = False,
    ) -> None:
        self._source, self._tree, self._interactions = source, tree, interactions
        self._max_rank, self._progress = max_rank, progress
        self._skeletons: SkeletonSampler | None = None
        self._budget = ErrorBudget(tolerance, tree.depth)
        self.num_capped = 0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def build(self, sampler: Sampler) -> tuple[LeafBlocks, tuple[Coupling, ...], tuple[Level, ...]]:
        """Leaf blocks, blocks of near leaves, and all levels, from the leaves up."""
        tree, order = self._tree, self._tree.permutation
        bounds = tree.bounds(tree.depth)
        with self.timed("leaf blocks"):
            leaves = leaf_blocks(self._source, order, bounds)
            near = make_couplings(self._source, order, bounds.diff(), self._interactions.near)
        sampler.begin(leaves, near)
        levels: list[Level] = []
        rows = _Rows(
            torch.arange(order.numel(), device=order.device),
            bounds[:-1],
            bounds.diff(),
            torch.ones(order.numel() + 1, dtype=self._source.dtype, device=order.device),
        )
        bar = tqdm(range(tree.depth, 0, -1), unit="level", disable=not self._progress)
        for depth in bar:
            bar.set_description(f"level {depth}, {2**depth} nodes")
            parts = self._interpolate(sampler, rows, depth)
            ranks = torch.zeros_like(rows.counts)
            for part in parts:
                ranks[part.nodes] = part.ranks
            with self.timed("assembly"):
                bases = make_bases(parts, rows.starts, rows.counts, ranks, rows.size)
                places = _skeleton_places(bases, int(ranks.sum()), order.device)
                counts = ranks.view(-1, 2).sum(1)
                above = _Rows(
                    rows.positions[places],
                    counts.cumsum(0) - counts,
                    counts,
                    _column_norms(bases, rows.scales, places.numel()),
                )
            with self.timed("couplings"):
                source, index = self._source, order[above.positions]
                if self._skeletons is not None:  # the entries are there already
                    self._skeletons.ascend(places, above.scales, above.starts, above.counts)
                    source = DenseMatrix(self._skeletons.entries)
                    index = torch.arange(places.numel(), device=places.device)
                couplings = self._couplings(source, index, ranks, depth)
            levels.append(Level(ranks, rows.size, bases, *couplings))
            with self.timed("samples"):
                if self._skeletons is None and depth > 1:
                    sampler.ascend(levels[-1], above.positions)
            rows = above
        return leaves, near, tuple(levels)

    def _couplings(
        self, source: EntrySource, index: Tensor, ranks: Tensor, depth: int
    ) -> Iterator[tuple[Coupling, ...]]:
        """Of siblings, and of other far pairs."""
        parents, others = self._interactions.far(depth)
        for pairs in (torch.stack([2 * parents, 2 * parents + 1], 1), others):
            yield make_couplings(source, index, ranks, pairs)

    def _interpolate(self, sampler: Sampler, rows: _Rows, depth: int) -> list[NodeInterpolations]:
        """Skeletons and weights of the nodes of one level.

        The sample grows until it has columns enough for the ranks that the tolerance asks for;
        it is tried on the nodes with the largest samples first.
        """
        counts = rows.counts
        if self._skeletons is None:
            rank = min(self._max_rank, rows.largest, FIRST_RANK)
            with self.timed("samples"):
                sampler.grow(max(sampler.num_columns, num_columns_for(rank)))
        groups = group_by_shape(counts, torch.ones_like(counts))
        groups.sort(key=lambda group: -int(counts[group].max()))
        probe = groups[0][:_PROBE]
        probing = groups[0].numel() > _PROBE
        while True:
            needed = 0
            if self._skeletons is None and probing:
                needed = self._try(sampler, [probe], rows).columns_needed
            if needed <= sampler.num_columns:
                tried = self._try(sampler, groups, rows)
                needed = tried.columns_needed
            if needed <= sampler.num_columns:
                self.num_capped += tried.num_capped
                if sampler.norm > 0:
                    self._budget.spend(tried.squared_error / sampler.norm**2)
                return tried.parts
            with self.timed("samples"):
                self._widen(sampler, rows, needed, depth)

    def _widen(self, sampler: Sampler, rows: _Rows, needed: int, depth: int) -> None:
        """More columns, or on the upper levels all entries between skeletons."""
        most = min(2 * self._tree.num_kept * needed, _SKELETON_ENTRIES)
        most = max(most, 2 * rows.size * needed)  # what the sketch would take on this level
        if depth < self._tree.depth and rows.size**2 <= most:
            index = self._tree.permutation[rows.positions]
            self._skeletons = SkeletonSampler(
                self._source, index, rows.scales, rows.starts, rows.counts, self._interactions
            )
        else:
            sampler.grow(needed)

    def _columns_needed(self, ranks: Tensor, capped: Tensor, num_columns: int, width: int) -> int:
        """Columns that interpolations of some ranks should have been made of.

        A rank well below the number of columns has been found, with some uncertainty; else it is
        at least as large, and the columns are doubled.
        """
        if bool(capped.any()):
            generous = _CAPPED * self._max_rank + _EXTRA
            if 2 * self._tree.num_kept * generous <= _SKETCH_FLOATS:
                return generous
            return num_columns_for(self._max_rank)
        rank = int(ranks.max())
        needed = num_columns_for(rank)
        if needed <= num_columns:
            return needed
        known = rank < 0.9 * num_columns
        likely = num_columns_for(math.ceil(1.1 * rank)) if known else 2 * num_columns
        return min(likely, num_columns_for(min(self._max_rank, width)))

    def _try(self, sampler: Sampler, groups: list[Tensor], rows: _Rows) -> _Tried:
        """Interpolate nodes; stops where columns lack."""
        chosen = sampler if self._skeletons is None else self._skeletons
        random, num_columns = self._skeletons is None, chosen.num_columns
        depth = rows.counts.numel().bit_length() - 1
        tolerance = self._budget.node_error(depth) * sampler.norm * chosen.gain
        tried = _Tried()
        for group in groups:
            width = int(rows.counts[group].max())
            step = max(1, _GROUP_FLOATS // max(1, width * max(width, num_columns)))
            for nodes in group.split(step):
                table = row_table(rows.starts[nodes], rows.counts[nodes], width, rows.size)
                with self.timed("samples"):
                    samples = chosen.samples(nodes, table)
                with self.timed("interpolation"):
                    found, capped = _scaled_interpolation(
                        samples, rows.scales[table], self._max_rank, tolerance, random
                    )
                    part = NodeInterpolations.trim(nodes, rows.counts[nodes], found)
                tried.parts.append(part)
                tried.num_capped += int(capped.sum())
                errors = found.errors.double()
                if random:
                    errors = out_of_sample(errors, found.ranks, num_columns)
                    wanted = self._columns_needed(found.ranks, capped, num_columns, width)
                    tried.columns_needed = max(tried.columns_needed, wanted)
                tried.squared_error += float((errors / chosen.gain).square().sum())
                if tried.columns_needed > num_columns:
                    return tried
        return tried


@dataclass
class _Tried:
    """Interpolations of nodes.

    Attributes:
        parts: what was found.
        num_capped: nodes that the cap kept from their tolerance.
        columns_needed: of samples, to choose so many rows safely.
        squared_error: sum over the nodes.
    """

    parts: list[NodeInterpolations] = field(default_factory=list)
    num_capped: int = 0
    columns_needed: int = 0
    squared_error: float = 0.0


def _scaled_interpolation(
    samples: Tensor, scales: Tensor, max_rank: int, tolerance: float, random: bool
) -> tuple[Interpolation, Tensor]:
    """Interpolate rows whose errors weigh ``scales``; also which nodes the cap cuts off."""
    samples.mul_(scales[:, :, None])
    found = interpolate_rows(samples, max_rank, tolerance, random_columns=random)
    allowed = torch.full_like(found.errors, 1.001 * tolerance)
    if random:
        allowed *= (1 - found.ranks / max(1, samples.shape[2])).sqrt()
    reached = found.errors <= allowed
    capped = ~reached & (found.ranks >= max_rank)
    rank = found.skeleton.shape[1]
    within = torch.arange(rank, device=scales.device) < found.ranks[:, None]
    chosen = scales.gather(1, torch.where(within, found.skeleton, 0))
    weights = found.weights.mul_(chosen[:, None]).div_(scales[:, :, None])
    return Interpolation(found.skeleton, weights, found.ranks, found.errors), capped


def _column_norms(bases: tuple[Basis, ...], scales: Tensor, size: int) -> Tensor:
    """Norms of the columns of the product of all bases so far, cross terms left out."""
    squares = scales.square()
    result = scales.new_ones(size + 1)
    for basis in bases:
        step = max(1, _GROUP_FLOATS // max(1, basis.weights[0].numel()))
        for start in range(0, basis.weights.shape[0], step):
            part = slice(start, start + step)
            below = squares[basis.rest[part]][:, None]
            total = (below @ basis.weights[part].square()).squeeze(1)
            total += squares[basis.skeleton[part]]
            result[basis.target[part]] = total.sqrt()
    result[-1] = 1.0
    return result


def _skeleton_places(bases: tuple[Basis, ...], size: int, device: torch.device) -> Tensor:
    """Where the skeleton rows of a level lie on the level below."""
    result = torch.zeros(size + 1, dtype=torch.long, device=device)
    for basis in bases:
        result[basis.target] = basis.skeleton
    return result[:-1]
