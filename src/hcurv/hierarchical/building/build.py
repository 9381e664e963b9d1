"""Bottom-up construction: interpolate every node from samples of its off-diagonal rows."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import (
    Batch,
    NodeInterpolations,
    basis_batches,
    coupling_batches,
    leaf_blocks,
    make_bases,
    make_couplings,
    skeleton_places,
    skeleton_scales,
)
from hcurv.hierarchical.building.checkpoint import BuildCheckpoint, BuildState
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
from hcurv.hierarchical.building.shared_rest import OwnEntries, SharedRest
from hcurv.hierarchical.building.size_forecast import (
    WantedFloats,
    floats_of_ranks,
    likely_ranks,
)
from hcurv.hierarchical.building.skeleton_columns import AdaptiveSampler
from hcurv.hierarchical.parts.levels import (
    Coupling,
    LeafBlocks,
    Level,
    identity_bases,
    row_table,
)
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from hcurv.hierarchical.tree.block_pattern import BlockPattern
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.linalg.interpolative import interpolation_bytes
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource

__all__ = ["Builder", "BuiltBlocks"]

# Nodes are taken together as long as their samples, or their Gram matrices, have fewer floats than
# this: enough for efficient batches, and 128 MB in double precision.
_GROUP_FLOATS = 2**24
# Another group of nodes takes about as long as so many floating-point operations.
_GROUP_FLOPS = 2**27
# How large a tree will be is foreseen where a matrix has at least so many rows. Otherwise a
# complete build takes hardly longer.
_LEAST_ROWS = 2**13
# Blocks of like shape are padded to one shape, which takes about so many times the floats.
_PADDING = 1.03
# Where a rank cap cuts a skeleton off, more columns keep its weights from fitting the samples by
# chance. That many columns are taken only if the sketch has no more floats than this.
_CAPPED_OVERSAMPLING = 4
_CAPPED_FLOATS = 2**28
# So many nodes, those with most rows, show first whether there are enough columns.
_PROBED_NODES = 4
# A rank below this share of the columns is what the tolerance asks for; a larger one may have been
# cut off by the number of columns.
_FOUND_SHARE = 0.9


def _group_step(width: int, num_columns: int) -> int:
    """The number of nodes with so many rows that are interpolated together."""
    return max(1, _GROUP_FLOATS // max(1, width * max(width, num_columns)))


class BuiltBlocks(NamedTuple):
    """The blocks of a hierarchical matrix.

    Attributes:
        leaves: diagonal blocks of the leaves.
        dense: dense blocks of pairs of different leaves.
        levels: bases and couplings, from the leaves up; of this rank if ranks share them.
        ranks: then the ranks of all nodes of these levels,
        top: and the levels from the cut level up, which are on every rank. On the lowest of them
            the skeletons of the cut level are all rows.
    """

    leaves: LeafBlocks
    dense: tuple[Coupling, ...]
    levels: tuple[Level, ...]
    ranks: tuple[Tensor, ...] = ()
    top: tuple[Level, ...] = ()


@dataclass
class _Attempt:
    """Interpolations of the nodes of a level, from a given number of columns.

    Attributes:
        nodes: what was found.
        num_capped: number of nodes that the cap kept from their tolerance.
        columns_needed: columns of samples that skeletons of these ranks should be chosen from.
        squared_error: sum over the nodes.
        capped_error: sum over those that the cap kept from their tolerance.
    """

    nodes: list[NodeInterpolations] = field(default_factory=list)
    num_capped: int = 0
    columns_needed: int = 0
    squared_error: float = 0.0
    capped_error: float = 0.0


class _BuiltLevel(NamedTuple):
    """One level.

    Attributes:
        level: bases and couplings of the own nodes.
        places: where their skeleton rows lie among the rows of the level.
        above: these rows as those of the level above.
        ranks: ranks of all nodes.
    """

    level: Level
    places: Tensor
    above: LevelRows
    ranks: Tensor


class Builder:
    """Builds the blocks of a hierarchical matrix.

    Args:
        source: the matrix.
        tree: clusters of its rows.
        pattern: which blocks are dense, and which ones are coupled through bases.
        budget: how much error every node may make.
        max_rank: rank cap.
        phases: where to count the time and show progress.
        nodes: the nodes of this rank; None for one process. If ranks share them, the source is a
            `SharedRest`.
        wanted: a build that is likely to take other numbers of floats is given up; None for no
            limits.
        max_entries: entries that may be read at a time to take samples from.

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
        nodes: NodeShare | None = None,
        wanted: WantedFloats | None = None,
        max_entries: int = 2**28,
    ) -> None:
        self._source, self._tree, self._pattern = source, tree, pattern
        self._budget, self._max_rank, self._phases = budget, max_rank, phases
        self._max_entries = max_entries
        self._alone = NodeShare(RowShare(tree.permutation))
        self._nodes = self._alone if nodes is None else nodes
        self._wanted = None if self._nodes.is_shared else wanted
        self._is_foreseen = tree.num_kept < _LEAST_ROWS
        self.num_capped = 0

    def build(self, first: Sampler, checkpoint: BuildCheckpoint | None = None) -> BuiltBlocks:
        """Build all blocks from the leaves up.

        Args:
            first: takes samples on the lower levels.
            checkpoint: where to go on, and where to save what was built after each level.

        Raises:
            MisfitError: the blocks are likely to take more or fewer floats than are wanted.
        """
        tree, phases = self._tree, self._phases
        sampler = AdaptiveSampler(
            first, tree.num_kept, self._pattern, self._nodes, self._max_entries
        )
        phases.expect(tree.depth + 1)
        state = None if checkpoint is None else self._resume(sampler, checkpoint)
        if state is None:
            state = self._begin(sampler)
        for depth in range(state.depth, 0, -1):
            phases.advance()
            phases.describe(f"building: level {depth}, {2**depth} nodes")
            self._advance(sampler, state)
            if self._wanted is not None and depth > 1:
                ranks = [level.ranks for level in state.levels]
                self._wanted.require_few(tree.num_kept, tree.depth, ranks)
            if checkpoint is not None:
                state.spent, state.num_capped = self._budget.spent, self.num_capped
                with phases.timed("checkpoint"):
                    checkpoint.save(state, sampler)
        phases.advance()
        return BuiltBlocks(
            state.leaves, state.dense, tuple(state.levels), tuple(state.ranks), tuple(state.top)
        )

    def _begin(self, sampler: AdaptiveSampler) -> BuildState:
        """The leaves."""
        tree, nodes = self._tree, self._nodes
        order, bounds = nodes.share.own_rows, nodes.leaf_bounds(tree)
        self._phases.describe(f"building: blocks of {2**tree.depth} leaves")
        with self._phases.timed("leaf blocks"):
            source = self._entries()
            width = int(tree.bounds(tree.depth).diff().max())
            leaves = leaf_blocks(source, order, bounds, nodes.share.ranks, width)
            _finish(source)
            pairs = self._pattern.dense_pairs()
            dense = make_couplings(self._source, order, bounds.diff(), pairs)
        rows = LevelRows(
            torch.arange(order.numel(), device=order.device),
            bounds[:-1],
            bounds.diff(),
            torch.ones(order.numel() + 1, dtype=self._source.dtype, device=order.device),
        )
        sampler.begin((leaves, *dense), rows)
        return BuildState(tree.depth, rows, leaves, dense)

    def _resume(self, sampler: AdaptiveSampler, checkpoint: BuildCheckpoint) -> BuildState | None:
        """What an interrupted build left, with the samples brought to its level."""
        state = checkpoint.load(self._nodes.leaf_bounds(self._tree))
        if state is None:
            return None
        sampler.begin((state.leaves,), state.rows)
        for level in state.levels:
            sampler.skip(level)
        if state.top:
            cut = self._nodes.cut
            assert cut is not None
            counts = self._nodes.row_counts(state.ranks[-1], cut)
            sampler.join(self._source, state.rows, counts)
            for level in state.top:
                sampler.skip(level)
        sampler.restore(state.samples, state.rows, state.depth)
        self._budget.spend(state.spent)
        self.num_capped = state.num_capped
        return state

    def _advance(self, sampler: AdaptiveSampler, state: BuildState) -> None:
        """Build one level, and bring the samples to the next one."""
        depth, cut = state.depth, self._nodes.cut
        nodes = self._alone if cut is None or depth < cut else self._nodes
        built = self._build_level(sampler, state, nodes)
        state.rows, state.depth = built.above, depth - 1
        if nodes.is_shared:
            state.ranks.append(built.ranks)
        (state.top if self._nodes.is_shared and not nodes.is_shared else state.levels).append(
            built.level
        )
        if depth > 1 or nodes.is_shared:
            with self._phases.timed("samples"):
                sampler.ascend(built.level, built.places, state.rows)
        if depth == cut:
            level, state.rows = self._join(sampler, state.rows, built.ranks, depth)
            state.top.append(level)

    def _entries(self) -> EntrySource:
        """Where to read the entries of own leaves."""
        if not self._nodes.is_shared:
            return self._source
        assert isinstance(self._source, SharedRest)
        return OwnEntries(self._source)

    def _build_level(
        self, sampler: AdaptiveSampler, state: BuildState, nodes: NodeShare
    ) -> _BuiltLevel:
        """One level of own nodes. On the cut level, couplings are left to `_join`."""
        rows, depth = state.rows, state.depth
        counts = nodes.of_all(rows.counts, depth)
        found = self._interpolate(sampler, state, counts, nodes)
        own_ranks = torch.zeros_like(rows.counts)
        for some in found:
            own_ranks[some.nodes] = some.ranks
        ranks = nodes.of_all(own_ranks, depth)

        def own(batches: list[Batch], level: int) -> list[Batch]:
            return [batch._replace(members=nodes.own_of(batch.members, level)) for batch in batches]

        with self._phases.timed("assembly"):
            batches = own(basis_batches(counts, ranks), depth)
            bases = make_bases(found, rows.starts, rows.counts, own_ranks, rows.size, batches)
            places = skeleton_places(bases, own_ranks)
            sizes = own_ranks if depth == nodes.cut else own_ranks.view(-1, 2).sum(1)
            above = LevelRows(
                rows.positions[places],
                sizes.cumsum(0) - sizes,
                sizes,
                skeleton_scales(found, own_ranks),
            )
        couplings: tuple[Coupling, ...] = ()
        with self._phases.timed("couplings"):
            pairs = self._pattern.coupled_pairs(depth)
            source, index = sampler.entries(places)
            if not nodes.is_shared:
                couplings = make_couplings(source, index, ranks, pairs)
            elif depth != nodes.cut:
                batches = own(coupling_batches(ranks, pairs), depth - 1)
                own_pairs = nodes.own_pairs(depth)
                couplings = make_couplings(source, index, own_ranks, own_pairs, batches)
                _finish(source)
        level = Level(own_ranks, rows.size, bases, couplings)
        return _BuiltLevel(level, places, above, ranks)

    def _join(
        self, sampler: AdaptiveSampler, rows: LevelRows, ranks: Tensor, depth: int
    ) -> tuple[Level, LevelRows]:
        """Give the skeletons of the cut level to all ranks.

        Args:
            sampler: the samples, on the skeleton rows of the cut level.
            rows: the own ones of these rows, by the nodes of the cut level.
            ranks: ranks of all nodes.
            depth: the cut level.

        Returns:
            The lowest of the levels that all ranks have, and its rows, by the nodes above it.
        """
        nodes = self._nodes
        every = rows.of_all(nodes, ranks, depth)
        sampler.join(self._source, every, nodes.row_counts(ranks, depth))
        places = torch.arange(every.size, device=ranks.device)
        with self._phases.timed("couplings"):
            pairs = self._pattern.coupled_pairs(depth)
            couplings = make_couplings(*sampler.entries(places), ranks, pairs)
        level = Level(ranks, every.size, identity_bases(ranks, self._source.dtype), couplings)
        sizes = ranks.view(-1, 2).sum(1)
        above = LevelRows(every.positions, sizes.cumsum(0) - sizes, sizes, every.scales)
        if depth > 1:
            sampler.ascend(level, places, above)
        return level, above

    def _interpolate(
        self, sampler: AdaptiveSampler, state: BuildState, counts: Tensor, nodes: NodeShare
    ) -> list[NodeInterpolations]:
        """Skeletons and weights of the own nodes of one level.

        The sample grows until it has columns enough for the ranks that the tolerance asks for. It
        is tried on the nodes with most rows first, whichever rank has them.
        """
        rows, depth, largest = state.rows, state.depth, int(counts.max())
        rank = min(self._max_rank, largest, FIRST_RANK)
        with self._phases.timed("samples"):
            sampler.grow(max(sampler.num_columns, num_columns_for(rank)))
        # Padding takes time, and so does every group.
        padding = _GROUP_FLOPS // max(1, largest * sampler.num_columns)
        groups = group_by_shape(counts, torch.ones_like(counts), least_saving=padding)
        groups.sort(key=lambda group: -int(counts[group].max()))
        own = [(nodes.own_of(group, depth), int(counts[group].max())) for group in groups]
        probed = [(nodes.own_of(groups[0][:_PROBED_NODES], depth), own[0][1])]
        while True:
            needed = 0
            if sampler.is_random and groups[0].numel() > _PROBED_NODES:
                needed = self._try(sampler, probed, rows, depth).columns_needed
                needed = nodes.largest(needed)
            if needed <= sampler.num_columns:
                attempt = self._try(sampler, own, rows, depth)
                needed = nodes.largest(attempt.columns_needed)
            if needed <= sampler.num_columns:
                square, capped = nodes.totals(attempt.squared_error, attempt.num_capped)
                self.num_capped += int(capped)
                if sampler.norm > 0:
                    self._budget.spend(square / sampler.norm**2)
                return attempt.nodes
            self._foresee(sampler, state)
            self._phases.describe(
                f"building: level {depth}, {2**depth} nodes, {needed} columns of samples"
            )
            with self._phases.timed("samples"):
                sampler.widen(needed, counts, depth)

    def _foresee(self, sampler: AdaptiveSampler, state: BuildState) -> None:
        """Raise `MisfitError` if a tree is likely to be larger or smaller than is wanted.

        More columns of samples take nearly all of the time of a build. So before they are made for
        the first time, the tree is tried out to its root with the columns that there are. They
        find ranks up to their number, which are few where ranks stop growing. Other ranks are
        estimated.
        """
        if self._is_foreseen or self._wanted is None or not state.levels:
            return
        self._is_foreseen = True
        trial_sampler = sampler.forked()
        if trial_sampler is None:
            return
        cap = min(self._max_rank, int(_FOUND_SHARE * sampler.num_columns))
        trial = _Trial(self._source, self._tree, self._pattern, copy(self._budget), cap, Phases())
        ahead = replace(state, levels=list(state.levels))
        self._phases.describe("building: how large will it be?")
        with self._phases.timed("planning"):
            while ahead.depth:
                trial._advance(trial_sampler, ahead)
            sizes = self._tree.bounds(self._tree.depth).diff()
            found = [level.ranks for level in ahead.levels]
            ranks = likely_ranks(sizes, found, cap, self._max_rank)
            floats = _PADDING * floats_of_ranks(sizes, ranks)
        self._wanted.require(floats)

    def _require_samples(self, sampler: Sampler, groups: list[tuple[Tensor, int]]) -> None:
        """Raise unless there is memory for samples of nodes, and for choosing their skeletons."""
        dtype, needed = self._source.dtype, 0
        for group, width in groups:
            num_random = sampler.num_random(width)
            columns = num_random or sampler.num_columns
            count = min(group.numel(), _group_step(width, columns))
            # The samples, and those of one panel before they are put into place.
            samples = count * width * columns * dtype.itemsize
            choosing = interpolation_bytes(count, width, columns, self._max_rank, dtype)
            gathered = samples
            if num_random is not None and not sampler.is_random:
                # All entries of a node's rows, weighted and transposed, before they are summed.
                gathered = 3 * width * sampler.num_columns * dtype.itemsize
            needed = max(needed, samples + max(gathered, choosing))
        with self._nodes.share.ranks.agreed():
            require_bytes(
                needed,
                self._source.device,
                f"choosing skeletons from {sampler.num_columns} columns of samples",
                ("choose a smaller leaf_size or max_rank", "choose a larger tolerance"),
            )

    def _try(
        self,
        sampler: AdaptiveSampler,
        groups: list[tuple[Tensor, int]],
        rows: LevelRows,
        depth: int,
    ) -> _Attempt:
        """Interpolate groups of nodes, each with the largest number of rows of its nodes.

        All groups are tried, also if the first has too few columns: how many columns are needed
        must not depend on which nodes lie on this rank.
        """
        num_columns = sampler.num_columns
        allowed = self._budget.node_error(depth) * sampler.norm * sampler.gain
        self._require_samples(sampler, groups)
        attempt = _Attempt()
        for group, width in groups:
            if group.numel() == 0:
                continue
            num_random = sampler.num_random(width)
            for nodes in group.split(_group_step(width, num_random or num_columns)):
                table = row_table(rows.starts[nodes], rows.counts[nodes], width, rows.size)
                with self._phases.timed("samples"):
                    samples = sampler.samples(nodes, table)
                with self._phases.timed("interpolation"):
                    found = choose_skeletons(
                        samples, rows.scales[table], allowed, self._max_rank, num_random
                    )
                    kept = NodeInterpolations.trim(nodes, rows.counts[nodes], found)
                attempt.nodes.append(kept)
                squares = (found.errors / sampler.gain).square()
                attempt.num_capped += int(found.is_capped.sum())
                attempt.squared_error += float(squares.sum())
                attempt.capped_error += float(squares[found.is_capped].sum())
                if sampler.is_random:
                    capped = bool(found.is_capped.any())
                    needed = self._columns_needed(found.ranks, capped, num_columns, width)
                    attempt.columns_needed = max(attempt.columns_needed, needed)
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


class _Trial(Builder):
    """A builder that makes do with the columns that there are, whatever ranks these cut off."""

    def _interpolate(
        self, sampler: AdaptiveSampler, state: BuildState, counts: Tensor, nodes: NodeShare
    ) -> list[NodeInterpolations]:
        groups = group_by_shape(counts, torch.ones_like(counts))
        own = [(group, int(counts[group].max())) for group in groups]
        attempt = self._try(sampler, own, state.rows, state.depth)
        if sampler.norm > 0:
            # With more columns, nodes that were cut off will make the error that they may make.
            each = self._budget.node_error(state.depth) ** 2
            square = (attempt.squared_error - attempt.capped_error) / sampler.norm**2
            self._budget.spend(square + attempt.num_capped * each)
        return attempt.nodes


def _finish(source: EntrySource) -> None:
    """Answer the questions of other ranks until nobody has any."""
    if isinstance(source, OwnEntries):
        source.finish()
