"""Bottom-up construction: interpolate every node from samples of its off-diagonal rows."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import (
    Batch,
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
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import LevelRows, Sampler
from hcurv.hierarchical.building.shared_rest import OwnEntries, SharedRest
from hcurv.hierarchical.building.size_forecast import (
    WantedFloats,
    floats_of_ranks,
    likely_ranks,
)
from hcurv.hierarchical.building.skeleton_choice import SkeletonChooser
from hcurv.hierarchical.building.skeleton_columns import AdaptiveSampler
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level, identity_bases
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.tree.block_pattern import BlockPattern
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.operators import EntrySource

__all__ = ["Builder", "BuiltBlocks"]

# How large a tree will be is foreseen once the ranks of so many levels are known, where a matrix
# has at least so many rows. Otherwise a complete build takes hardly longer.
_KNOWN_LEVELS, _LEAST_ROWS = 3, 2**13
# Blocks of like shape are padded to one shape, which takes about so many times the floats.
_PADDING = 1.03


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
        wanted: how many floats the tree shall take. A build that is likely to take others is given
            up; None for no limits.
        max_entries: entries that may be read at a time to take samples from.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        pattern: BlockPattern,
        budget: ErrorBudget,
        max_rank: int,
        phases: Phases,
        nodes: NodeShare | None,
        wanted: WantedFloats | None,
        max_entries: int,
    ) -> None:
        self._source, self._tree, self._pattern = source, tree, pattern
        self._budget, self._phases, self._max_entries = budget, phases, max_entries
        self._alone = NodeShare(RowShare(tree.permutation))
        self._nodes = self._alone if nodes is None else nodes
        self._chooser = SkeletonChooser(
            source, tree.num_kept, budget, max_rank, phases, self._nodes.share.ranks
        )
        self._wanted = None if self._nodes.is_shared else wanted
        self._is_foreseen = tree.num_kept < _LEAST_ROWS

    @property
    def num_capped(self) -> int:
        """Number of nodes that the cap kept from their tolerance."""
        return self._chooser.num_capped

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
                sizes = tree.bounds(tree.depth).diff()
                relief = self._wanted.relief(sizes, tree.depth, ranks)
                if relief > 1:
                    self._budget.loosen(depth - 1, relief)
            if checkpoint is not None:
                state.whole, state.spent = self._budget.whole, self._budget.spent
                state.num_capped, state.is_foreseen = self.num_capped, self._is_foreseen
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
        self._budget.whole, self._budget.spent = state.whole, state.spent
        self._chooser.num_capped, self._is_foreseen = state.num_capped, state.is_foreseen
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
        found = self._chooser.choose(
            sampler, rows, counts, depth, nodes, partial(self._foresee, sampler, state)
        )
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

    def _foresee(self, sampler: AdaptiveSampler, state: BuildState) -> None:
        """Raise `MisfitError` if a tree is likely to be larger or smaller than is wanted.

        More columns of samples take nearly all of the time of a build. So before they are made for
        the first time, the tree is tried out to its root with the columns that there are. They
        find ranks up to their number, which are few where ranks stop growing. Other ranks are
        estimated.
        """
        if self._is_foreseen or self._wanted is None or len(state.levels) < _KNOWN_LEVELS:
            return
        self._is_foreseen = True
        ahead_sampler = sampler.forked()
        if ahead_sampler is None:
            return
        trial, ahead = copy(self), replace(state, levels=list(state.levels))
        trial._chooser, trial._phases = self._chooser.trial(sampler.num_columns), Phases()
        self._phases.describe("building: how large will it be?")
        with self._phases.timed("planning"):
            while ahead.depth:
                trial._advance(ahead_sampler, ahead)
            sizes = self._tree.bounds(self._tree.depth).diff()
            found = [level.ranks for level in ahead.levels]
            cap, most = trial._chooser.max_rank, self._chooser.max_rank
            floats = _PADDING * floats_of_ranks(sizes, likely_ranks(sizes, found, cap, most))
        self._wanted.require(floats)


def _finish(source: EntrySource) -> None:
    """Answer the questions of other ranks until nobody has any."""
    if isinstance(source, OwnEntries):
        source.finish()
