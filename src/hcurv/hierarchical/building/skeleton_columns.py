"""Samples on the upper levels: all entries between the skeleton rows that are left.

Once few rows are left on a level, there are fewer entries between them than numbers in the products
that a wider sketch would take, and they leave nothing to chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from hcurv.hierarchical.building.sampler import LevelRows, Sampler, num_columns_for
from hcurv.hierarchical.building.shared_rest import OwnEntries
from hcurv.hierarchical.building.sketch import SketchSampler
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.tree.block_pattern import BlockPattern
from hcurv.operators import EntrySource
from hcurv.sources import DenseMatrix

__all__ = ["AdaptiveSampler", "SkeletonSampler"]

# For each point, a column of a product takes four flops a row, and an entry of a symmetric block
# takes one, in larger products. After a wider sketch, the entries of the next level are often read
# all the same, which are half as many.
_COLUMN_ENTRIES = 12
# Random sums of columns take their place, if they are so many times as many. Choosing a skeleton
# costs a product of the samples with themselves, in double precision.
_WORTH_MIXING = 1.5
# Every column goes into so many of these sums.
_NUM_SUMS = 4


class AdaptiveSampler:
    """Takes samples from a first sampler as long as that is cheaper than reading all entries.

    Args:
        first: sampler of the lower levels.
        num_kept: number of rows of the leaves.
        pattern: says which columns a node leaves out of its samples.
        nodes: the nodes of this rank; None for one process.
        max_entries: all entries of a level are read if they are no more than this, or than a
            sketch would hold on this level.
    """

    def __init__(
        self,
        first: Sampler,
        num_kept: int,
        pattern: BlockPattern,
        nodes: NodeShare | None,
        max_entries: int,
    ) -> None:
        self._first, self._pattern, self._max_entries = first, pattern, max_entries
        self._nodes = nodes
        self._current = first
        self._rows: LevelRows | None = None
        self._num_kept, self._is_above_leaves = num_kept, False

    @property
    def num_columns(self) -> int:
        """Number of columns of a sample."""
        return self._current.num_columns

    @property
    def is_random(self) -> bool:
        """Whether the columns are a random selection or combination of all columns."""
        return self._current.is_random

    def num_random(self, num_rows: int) -> int | None:
        """How many columns of a sketch tell as much; None if there are all columns."""
        return self._current.num_random(num_rows)

    @property
    def gain(self) -> float:
        """Norm of a sample over the norm of what it is a sample of."""
        return self._current.gain

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F."""
        return self._first.norm

    def begin(self, dense: tuple[LeafBlocks | Coupling, ...], rows: LevelRows) -> None:
        """Start with the leaves."""
        self._rows = rows
        self._first.begin(dense, rows)

    def grow(self, num_columns: int) -> None:
        """Have at least so many columns."""
        self._current.grow(num_columns)

    def widen(self, num_columns: int, counts: Tensor, depth: int) -> None:
        """Have at least so many columns, or on the upper levels all entries if they are fewer.

        Args:
            num_columns: number of columns.
            counts: number of rows of all nodes of the current level.
            depth: that level.
        """
        rows, size = self._rows, int(counts.sum())
        assert rows is not None
        more = num_columns - self.num_columns
        most = self._num_kept * max(2 * num_columns, _COLUMN_ENTRIES * more)
        most = min(most, self._max_entries)
        most = max(most, 2 * size * num_columns)  # numbers of a sketch on this level
        if self._is_above_leaves and size**2 <= most:
            places = torch.arange(rows.size, device=rows.positions.device)
            source, index = self._current.entries(places)
            every, columns = rows, index
            if self._nodes is not None and self._nodes.is_shared:
                every = rows.of_all(self._nodes, counts, depth)
                columns = self._nodes.share.rows[every.positions]
            values = source.block(index, columns)
            if isinstance(source, OwnEntries):
                source.finish()
            self._current = SkeletonSampler(values, rows, every, self._pattern, self._nodes, depth)
        else:
            self._current.grow(num_columns)

    def forked(self) -> AdaptiveSampler | None:
        """A sampler that goes on by itself, while this one stays; None if it is no sketch."""
        if not isinstance(self._first, SketchSampler) or self._current is not self._first:
            return None
        other = copy(self)
        other._first = other._current = self._first.forked()
        return other

    def join(self, source: EntrySource, rows: LevelRows, counts: Sequence[int]) -> None:
        """Give all rows of the current level to every rank, as `SketchSampler.join` does."""
        assert isinstance(self._first, SketchSampler)
        self._rows, self._nodes = rows, None
        if isinstance(self._current, SkeletonSampler):
            self._current.join(rows, counts)
        else:
            self._first.join(source, rows, counts)

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, by their places on the current level, (B, m, s)."""
        return self._current.samples(nodes, table)

    def entries(self, places: Tensor) -> tuple[EntrySource, Tensor]:
        """Where to read entries between rows at some places of the current level."""
        return self._current.entries(places)

    def ascend(self, level: Level, places: Tensor, rows: LevelRows) -> None:
        """Go on to the next level."""
        self._rows, self._is_above_leaves = rows, True
        self._current.ascend(level, places, rows)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Vectors (N, k) that no sample was made of, and their products with H."""
        return self._first.held_out()

    def skip(self, level: Level) -> None:
        """Go on to the next level of a build that is resumed."""
        assert isinstance(self._first, SketchSampler)
        self._first.skip(level)

    def state(self) -> dict[str, Tensor]:
        """What is needed to go on from the current level."""
        assert isinstance(self._first, SketchSampler)
        is_sketch = self._current is self._first
        found = self._first.state(is_sketch)
        if isinstance(self._current, SkeletonSampler):
            found["skeleton"] = self._current.values
        return found

    def restore(self, state: Mapping[str, Tensor], rows: LevelRows, depth: int) -> None:
        """Go on from what `state` has given.

        Args:
            state: what it has given.
            rows: rows of the current level.
            depth: that level.
        """
        assert isinstance(self._first, SketchSampler)
        self._first.restore(state, rows)
        self._rows, self._is_above_leaves = rows, True
        if "skeleton" in state:
            every, nodes = rows, self._nodes
            if nodes is not None and nodes.is_shared:
                every = rows.of_all(nodes, nodes.of_all(rows.counts, depth), depth)
            self._current = SkeletonSampler(
                state["skeleton"], rows, every, self._pattern, nodes, depth
            )


class SkeletonSampler:
    """Entries of the rows of a node in the columns of all other rows of its level.

    Args:
        values: entries between the own rows of the current level and all of its rows.
        rows: its own rows.
        every: all its rows.
        pattern: says which columns a node leaves out of its samples.
        nodes: the nodes of this rank; None for one process, whose own rows are all.
        depth: the current level.

    Attributes:
        values: as given, on the current level.
    """

    is_random = False
    gain = 1.0  # columns are weighted, so that samples have the norm of what they stand for

    def __init__(
        self,
        values: Tensor,
        rows: LevelRows,
        every: LevelRows,
        pattern: BlockPattern,
        nodes: NodeShare | None,
        depth: int,
    ) -> None:
        self.values, self._rows, self._pattern = values, rows, pattern
        self._every, self._depth = every, depth
        self._nodes = nodes if nodes is not None and nodes.is_shared else None

    @property
    def _first_node(self) -> int:
        return 0 if self._nodes is None else self._nodes.first(self._depth)

    @property
    def _first_row(self) -> int:
        """Where the own rows begin among all rows."""
        return int(self._every.counts[: self._first_node].sum())

    @property
    def num_columns(self) -> int:
        """Number of rows of the level."""
        return self.values.shape[1]

    def num_random(self, num_rows: int) -> int | None:
        """Where there are many columns, fewer random sums of them; None for all of them."""
        count = num_columns_for(num_rows)
        return count if count * _WORTH_MIXING <= self.num_columns else None

    @property
    def norm(self) -> float:
        """Norm of the entries between the rows of the current level."""
        return float(torch.linalg.vector_norm(self.values, dtype=torch.float64))

    def begin(self, dense: tuple[LeafBlocks | Coupling, ...], rows: LevelRows) -> None:
        """Do nothing: the pattern says which columns lie in dense blocks."""

    def grow(self, num_columns: int) -> None:
        """Do nothing: there are no more columns."""

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, by their places on the current level, (B, m, s)."""
        count = self.num_random(table.shape[1])
        if count is not None:
            return self._mixed(nodes, table, count)
        starts, sizes = self._every.starts, self._every.counts
        first, counts = (part[nodes + self._first_node, None] for part in (starts, sizes))
        # All columns but the node's own; the last are padding where nodes differ in size.
        columns = torch.arange(self.num_columns - int(counts.min()), device=table.device)
        columns = columns + torch.where(columns >= first, counts, 0)
        beyond = columns >= self.num_columns
        columns = columns.clamp(max=self.num_columns - 1)
        weights = self._weights(nodes, columns).masked_fill_(beyond, 0.0)
        padding = table >= self._rows.size
        rows = table.masked_fill(padding, 0)
        values = self.values[rows[:, :, None], columns[:, None]].mul_(weights[:, None])
        return values.masked_fill_(padding[:, :, None], 0.0) if bool(padding.any()) else values

    def _weights(self, nodes: Tensor, columns: Tensor) -> Tensor:
        """Weights of columns (B, s) in the samples of nodes (B,): 0 for those that do not count."""
        counts = self._every.counts
        level = counts.numel().bit_length() - 1
        owners = torch.arange(counts.numel(), device=columns.device).repeat_interleave(counts)
        excluded = self._pattern.is_excluded(level, nodes + self._first_node, owners[columns])
        return self._every.scales[columns].masked_fill_(excluded, 0.0)

    def _mixed(self, nodes: Tensor, table: Tensor, count: int) -> Tensor:
        """Samples in random sums of columns: a sparse sketch, which costs next to nothing.

        Every column goes, with random signs, into a few of ``count`` sums, so that squared norms
        are as before on average.
        """
        device, num_sums = table.device, min(_NUM_SUMS, count)
        generator = torch.Generator(device).manual_seed(self._depth)
        shape = (num_sums, self.num_columns)
        # The sums of a column lie in different parts of all sums.
        sums = torch.rand(shape, generator=generator, device=device)
        sums += torch.arange(num_sums, device=device)[:, None]
        sums = (sums * (count / num_sums)).long().clamp_(max=count - 1)
        # What goes into a sum with a negative sign is added up by itself.
        sums += count * torch.randint(0, 2, shape, generator=generator, device=device)
        result = self.values.new_zeros(*table.shape, count)
        columns = torch.arange(self.num_columns, device=device)[None]
        for place, (node, places) in enumerate(zip(nodes, table, strict=True)):
            rows = places[places < self._rows.size]
            values = (self.values[rows] * self._weights(node[None], columns)).T.contiguous()
            added = values.new_zeros(2 * count, rows.numel())
            for own in sums:
                added.index_add_(0, own, values)
            mixed = (added[:count] - added[count:]).div_(math.sqrt(num_sums))
            result[place, : rows.numel()] = mixed.T
        return result

    def entries(self, places: Tensor) -> tuple[EntrySource, Tensor]:
        """The entries are here already."""
        start = self._first_row
        return DenseMatrix(self.values[:, start : start + self._rows.size]), places

    def ascend(self, level: Level, places: Tensor, rows: LevelRows) -> None:
        """Keep the entries between some of the rows."""
        columns, every = places, rows
        # On the cut level the rows stay with their nodes.
        is_cut = rows.counts.numel() == self._rows.counts.numel()
        depth = self._depth if is_cut else self._depth - 1
        if self._nodes is not None:
            counts = self._nodes.of_all(rows.counts, depth)
            every = rows.of_all(self._nodes, counts, depth)
            number = self._nodes.row_counts(counts, depth)
            columns = self._nodes.share.ranks.collect(places + self._first_row, number)
        self.values = self.values.index_select(0, places).index_select(1, columns)
        self._rows, self._every, self._depth = rows, every, depth

    def join(self, rows: LevelRows, counts: Sequence[int]) -> None:
        """Give the entries between all rows of the current level to every rank."""
        assert self._nodes is not None
        self.values = self._nodes.share.ranks.collect(self.values, counts)
        self._rows = self._every = rows
        self._nodes = None

    def held_out(self) -> tuple[Tensor, Tensor]:
        """No vectors: every entry is part of a sample."""
        none = self.values[:, :0]
        return none, none
