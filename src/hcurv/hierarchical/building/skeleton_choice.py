"""Skeletons of all nodes of one level, from as many columns of samples as they need."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import NodeInterpolations
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
from hcurv.hierarchical.parts.levels import row_table
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from hcurv.linalg.interpolative import interpolation_bytes
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.ranks import OneRank

__all__ = ["SkeletonChooser"]

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


def _group_step(width: int, num_columns: int) -> int:
    """The number of nodes with so many rows that are interpolated together."""
    return max(1, _GROUP_FLOATS // max(1, width * max(width, num_columns)))


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


class SkeletonChooser:
    """Chooses skeletons.

    Args:
        source: the matrix.
        num_kept: number of rows of its tree.
        budget: how much error every node may make.
        max_rank: rank cap.
        phases: where to count the time and show progress.
        ranks: the ranks that share the matrix.

    Attributes:
        max_rank: as given.
        num_capped: number of nodes that the cap kept from their tolerance.
    """

    def __init__(
        self,
        source: EntrySource,
        num_kept: int,
        budget: ErrorBudget,
        max_rank: int,
        phases: Phases,
        ranks: OneRank,
    ) -> None:
        self._source, self._num_kept, self._budget = source, num_kept, budget
        self._phases, self._ranks = phases, ranks
        self.max_rank, self.num_capped = max_rank, 0

    def trial(self, num_columns: int) -> SkeletonChooser:
        """A chooser that never asks for more columns than there are."""
        cap = min(self.max_rank, int(_FOUND_SHARE * num_columns))
        budget = copy(self._budget)
        return _Trial(self._source, self._num_kept, budget, cap, Phases(), self._ranks)

    def choose(
        self,
        sampler: AdaptiveSampler,
        rows: LevelRows,
        counts: Tensor,
        depth: int,
        nodes: NodeShare,
        before_widening: Callable[[], None],
    ) -> list[NodeInterpolations]:
        """Skeletons and weights of the own nodes of one level.

        The sample grows until it has columns enough for the ranks that the tolerance asks for. It
        is tried on the nodes with most rows first, whichever rank has them.

        Args:
            sampler: gives samples of the rows of nodes.
            rows: the own rows of the level.
            counts: numbers of rows of all nodes.
            depth: the level.
            nodes: the nodes of this rank.
            before_widening: called before the sample is made wider.
        """
        largest = int(counts.max())
        rank = min(self.max_rank, largest, FIRST_RANK)
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
            before_widening()
            self._phases.describe(
                f"building: level {depth}, {2**depth} nodes, {needed} columns of samples"
            )
            with self._phases.timed("samples"):
                sampler.widen(needed, counts, depth)

    def _require_samples(self, sampler: Sampler, groups: list[tuple[Tensor, int]]) -> None:
        """Raise unless there is memory for samples of nodes, and for choosing their skeletons."""
        dtype, needed = self._source.dtype, 0
        for group, width in groups:
            num_random = sampler.num_random(width)
            columns = num_random or sampler.num_columns
            count = min(group.numel(), _group_step(width, columns))
            # The samples, and those of one panel before they are put into place.
            samples = count * width * columns * dtype.itemsize
            choosing = interpolation_bytes(count, width, columns, self.max_rank, dtype)
            gathered = samples
            if num_random is not None and not sampler.is_random:
                # All entries of a node's rows, weighted and transposed, before they are summed.
                gathered = 3 * width * sampler.num_columns * dtype.itemsize
            needed = max(needed, samples + max(gathered, choosing))
        with self._ranks.agreed():
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
                        samples, rows.scales[table], allowed, self.max_rank, num_random
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
            generous = _CAPPED_OVERSAMPLING * self.max_rank + EXTRA_COLUMNS
            if 2 * self._num_kept * generous <= _CAPPED_FLOATS:
                return generous
            return num_columns_for(self.max_rank)
        rank = int(ranks.max())
        needed = num_columns_for(rank)
        if needed <= num_columns:
            return needed
        is_known = rank < _FOUND_SHARE * num_columns
        likely = num_columns_for(math.ceil(1.1 * rank)) if is_known else 2 * num_columns
        return min(likely, num_columns_for(min(self.max_rank, width)))


class _Trial(SkeletonChooser):
    """Makes do with the columns that there are, whatever ranks these cut off."""

    def choose(
        self,
        sampler: AdaptiveSampler,
        rows: LevelRows,
        counts: Tensor,
        depth: int,
        nodes: NodeShare,
        before_widening: Callable[[], None],
    ) -> list[NodeInterpolations]:
        """Skeletons and weights of the nodes of one level."""
        groups = group_by_shape(counts, torch.ones_like(counts))
        own = [(group, int(counts[group].max())) for group in groups]
        attempt = self._try(sampler, own, rows, depth)
        if sampler.norm > 0:
            # With more columns, nodes that were cut off will make the error that they may make.
            each = self._budget.node_error(depth) ** 2
            square = (attempt.squared_error - attempt.capped_error) / sampler.norm**2
            self._budget.spend(square + attempt.num_capped * each)
        return attempt.nodes
