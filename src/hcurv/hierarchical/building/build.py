"""Bottom-up construction: interpolate every node from samples of its off-diagonal rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import (
    NodeInterpolations,
    leaf_blocks,
    make_bases,
    make_couplings,
    skeleton_places,
    skeleton_scales,
)
from hcurv.hierarchical.building.error_budget import ErrorBudget
from hcurv.hierarchical.building.level_step import choose_skeletons
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import (
    EXTRA_COLUMNS,
    FIRST_RANK,
    LevelRows,
    Sampler,
    num_columns_for,
)
from hcurv.hierarchical.building.skeleton_columns import AdaptiveSampler
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level, row_table
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from hcurv.hierarchical.tree.block_pattern import BlockPattern
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.operators import EntrySource

__all__ = ["Builder", "BuiltBlocks"]

# Nodes are taken together as long as their samples, or their Gram matrices, have fewer floats than
# this: enough for efficient batches, and 128 MB in double precision.
_GROUP_FLOATS = 2**24
# Another group of nodes takes about as long as so many floating-point operations.
_GROUP_FLOPS = 2**27
# Where a rank cap cuts a skeleton off, more columns keep its weights from fitting the samples by
# chance. That many columns are taken only if the sketch has no more floats than this.
_CAPPED_OVERSAMPLING = 4
_CAPPED_FLOATS = 2**28
# So many nodes, those with most rows, show first whether there are enough columns.
_PROBED_NODES = 4
# A rank below this share of the columns is what the tolerance asks for; a larger one may have been
# cut off by the number of columns.
_FOUND_SHARE = 0.9


class BuiltBlocks(NamedTuple):
    """The blocks of a hierarchical matrix.

    Attributes:
        leaves: diagonal blocks of the leaves.
        dense: dense blocks of pairs of different leaves.
        levels: bases and couplings, from the leaves up.
    """

    leaves: LeafBlocks
    dense: tuple[Coupling, ...]
    levels: tuple[Level, ...]


@dataclass
class _Attempt:
    """Interpolations of the nodes of a level, from a given number of columns.

    Attributes:
        nodes: what was found.
        num_capped: number of nodes that the cap kept from their tolerance.
        columns_needed: columns of samples that skeletons of these ranks should be chosen from.
        squared_error: sum over the nodes.
    """

    nodes: list[NodeInterpolations] = field(default_factory=list)
    num_capped: int = 0
    columns_needed: int = 0
    squared_error: float = 0.0


class Builder:
    """Builds the blocks of a hierarchical matrix.

    Args:
        source: the matrix.
        tree: clusters of its rows.
        pattern: which blocks are dense, and which ones are coupled through bases.
        budget: how much error every node may make.
        max_rank: rank cap.
        phases: where to count the time and show progress.

    Attributes:
        num_capped: number of nodes that the cap kept from their tolerance.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        pattern: BlockPattern,
        budget: ErrorBudget,
        max_rank: int,
        phases: Phases,
    ) -> None:
        self._source, self._tree, self._pattern = source, tree, pattern
        self._budget, self._max_rank, self._phases = budget, max_rank, phases
        self.num_capped = 0

    def build(self, first: Sampler) -> BuiltBlocks:
        """Build all blocks from the leaves up, from samples that ``first`` takes."""
        tree, order, phases = self._tree, self._tree.permutation, self._phases
        sampler = AdaptiveSampler(first, tree.num_kept, self._pattern)
        bounds = tree.bounds(tree.depth)
        phases.expect(tree.depth + 1)
        phases.describe(f"building: blocks of {2**tree.depth} leaves")
        with phases.timed("leaf blocks"):
            leaves = leaf_blocks(self._source, order, bounds)
            pairs = self._pattern.dense_pairs()
            dense = make_couplings(self._source, order, bounds.diff(), pairs)
        rows = LevelRows(
            torch.arange(order.numel(), device=order.device),
            bounds[:-1],
            bounds.diff(),
            torch.ones(order.numel() + 1, dtype=self._source.dtype, device=order.device),
        )
        sampler.begin((leaves, *dense), rows)
        levels: list[Level] = []
        for depth in range(tree.depth, 0, -1):
            phases.advance()
            phases.describe(f"building: level {depth}, {2**depth} nodes")
            level, places, above = self._build_level(sampler, rows, depth)
            levels.append(level)
            if depth > 1:
                with phases.timed("samples"):
                    sampler.ascend(level, places, above)
            rows = above
        phases.advance()
        return BuiltBlocks(leaves, dense, tuple(levels))

    def _build_level(
        self, sampler: AdaptiveSampler, rows: LevelRows, depth: int
    ) -> tuple[Level, Tensor, LevelRows]:
        """A level, the places of its skeleton rows, and these as the rows of the level above."""
        nodes = self._interpolate(sampler, rows, depth)
        ranks = torch.zeros_like(rows.counts)
        for some in nodes:
            ranks[some.nodes] = some.ranks
        with self._phases.timed("assembly"):
            bases = make_bases(nodes, rows.starts, rows.counts, ranks, rows.size)
            places = skeleton_places(bases, ranks)
            counts = ranks.view(-1, 2).sum(1)
            above = LevelRows(
                rows.positions[places],
                counts.cumsum(0) - counts,
                counts,
                skeleton_scales(nodes, ranks),
            )
        with self._phases.timed("couplings"):
            pairs = self._pattern.coupled_pairs(depth)
            couplings = make_couplings(*sampler.entries(places), ranks, pairs)
        return Level(ranks, rows.size, bases, couplings), places, above

    def _interpolate(
        self, sampler: AdaptiveSampler, rows: LevelRows, depth: int
    ) -> list[NodeInterpolations]:
        """Skeletons and weights of the nodes of one level.

        The sample grows until it has columns enough for the ranks that the tolerance asks for. It
        is tried on the nodes with most rows first.
        """
        counts = rows.counts
        rank = min(self._max_rank, rows.largest, FIRST_RANK)
        with self._phases.timed("samples"):
            sampler.grow(max(sampler.num_columns, num_columns_for(rank)))
        # Padding takes time, and so does every group.
        padding = _GROUP_FLOPS // max(1, rows.largest * sampler.num_columns)
        groups = group_by_shape(counts, torch.ones_like(counts), least_saving=padding)
        groups.sort(key=lambda group: -int(counts[group].max()))
        probed = groups[0][:_PROBED_NODES]
        while True:
            needed = 0
            if sampler.is_random and groups[0].numel() > _PROBED_NODES:
                needed = self._try(sampler, [probed], rows, depth).columns_needed
            if needed <= sampler.num_columns:
                attempt = self._try(sampler, groups, rows, depth)
                needed = attempt.columns_needed
            if needed <= sampler.num_columns:
                self.num_capped += attempt.num_capped
                if sampler.norm > 0:
                    self._budget.spend(attempt.squared_error / sampler.norm**2)
                return attempt.nodes
            self._phases.describe(
                f"building: level {depth}, {2**depth} nodes, {needed} columns of samples"
            )
            with self._phases.timed("samples"):
                sampler.widen(needed)

    def _try(
        self, sampler: AdaptiveSampler, groups: list[Tensor], rows: LevelRows, depth: int
    ) -> _Attempt:
        """Interpolate groups of nodes; stop as soon as there are too few columns."""
        num_columns = sampler.num_columns
        num_random = num_columns if sampler.is_random else None
        allowed = self._budget.node_error(depth) * sampler.norm * sampler.gain
        attempt = _Attempt()
        for group in groups:
            width = int(rows.counts[group].max())
            step = max(1, _GROUP_FLOATS // max(1, width * max(width, num_columns)))
            for nodes in group.split(step):
                table = row_table(rows.starts[nodes], rows.counts[nodes], width, rows.size)
                with self._phases.timed("samples"):
                    samples = sampler.samples(nodes, table)
                with self._phases.timed("interpolation"):
                    found = choose_skeletons(
                        samples, rows.scales[table], allowed, self._max_rank, num_random
                    )
                    kept = NodeInterpolations.trim(nodes, rows.counts[nodes], found)
                attempt.nodes.append(kept)
                attempt.num_capped += int(found.is_capped.sum())
                attempt.squared_error += float((found.errors / sampler.gain).square().sum())
                if sampler.is_random:
                    capped = bool(found.is_capped.any())
                    needed = self._columns_needed(found.ranks, capped, num_columns, width)
                    attempt.columns_needed = max(attempt.columns_needed, needed)
                if attempt.columns_needed > num_columns:
                    return attempt
        return attempt

    def _columns_needed(self, ranks: Tensor, capped: bool, num_columns: int, width: int) -> int:
        """How many columns interpolations of some ranks should be made of.

        A rank well below the number of columns is the one that the tolerance asks for, with some
        uncertainty. Otherwise it may be any larger number, and the columns are doubled.
        """
        if capped:
            generous = _CAPPED_OVERSAMPLING * self._max_rank + EXTRA_COLUMNS
            if 2 * self._tree.num_kept * generous <= _CAPPED_FLOATS:
                return generous
            return num_columns_for(self._max_rank)
        rank = int(ranks.max())
        needed = num_columns_for(rank)
        if needed <= num_columns:
            return needed
        is_known = rank < _FOUND_SHARE * num_columns
        likely = num_columns_for(math.ceil(1.1 * rank)) if is_known else 2 * num_columns
        return min(likely, num_columns_for(min(self._max_rank, width)))
