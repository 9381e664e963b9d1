"""Samples on the upper levels by all entries between the skeletons that are left.

Once there are few rows left on a level, their entries are fewer than those of the products that a
wider sketch would take, and leave nothing to chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.hierarchical.interactions import Interactions
from hcurv.operators import EntrySource

__all__ = ["SkeletonSampler"]


class SkeletonSampler:
    """Entries of the rows of a node in the columns of all other rows of its level.

    Args:
        source: entries.
        rows: matrix rows of the current level.
        scales: how much each of them weighs in the whole matrix, one more for padding.
        starts: first row of each node.
        counts: number of its rows.
        interactions: nodes that are close to one another have no columns in common.
    """

    gain = 1.0  # columns are weighted: samples have the norm of what they stand for

    def __init__(
        self,
        source: EntrySource,
        rows: Tensor,
        scales: Tensor,
        starts: Tensor,
        counts: Tensor,
        interactions: Interactions,
    ) -> None:
        self.entries = source.block(rows, rows)
        self._interactions = interactions
        self._scales, self._starts, self._counts = scales, starts, counts

    @property
    def num_columns(self) -> int:
        """Rows of the level."""
        return self.entries.shape[1]

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, given by their places on the current level, (B, m, s)."""
        first, counts = self._starts[nodes, None], self._counts[nodes, None]
        # All columns but the node's own; the last are padding where nodes differ in size.
        columns = torch.arange(self.num_columns - int(counts.min()), device=table.device)
        columns = columns + torch.where(columns >= first, counts, 0)
        beyond = columns >= self.num_columns
        columns = columns.clamp(max=self.num_columns - 1)
        weights = self._scales[columns].masked_fill_(beyond, 0.0)
        if self._interactions.near.numel():
            level = self._counts.numel().bit_length() - 1
            numbers = torch.arange(self._counts.numel(), device=table.device)
            owners = numbers.repeat_interleave(self._counts)[columns]
            close = self._interactions.is_close(level, nodes)
            weights = weights.masked_fill(close.gather(1, owners), 0.0)
        padding = table >= self.num_columns
        rows = table.masked_fill(padding, 0)
        values = self.entries[rows[:, :, None], columns[:, None]].mul_(weights[:, None])
        return values.masked_fill_(padding[:, :, None], 0.0) if bool(padding.any()) else values

    def ascend(self, places: Tensor, scales: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Go on with some of the rows."""
        self.entries = self.entries.index_select(0, places).index_select(1, places)
        self._scales, self._starts, self._counts = scales, starts, counts
