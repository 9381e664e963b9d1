"""Samples on the upper levels by all entries between the skeletons that are left.

Once there are few rows left on a level, their entries are fewer than those of the products that a
wider sketch would take, and leave nothing to chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """

    gain = 1.0  # columns are weighted: samples have the norm of what they stand for

    def __init__(
        self, source: EntrySource, rows: Tensor, scales: Tensor, starts: Tensor, counts: Tensor
    ) -> None:
        self._entries = torch.zeros(
            rows.numel() + 1, rows.numel(), dtype=source.dtype, device=source.device
        )
        self._entries[:-1] = source.block(rows, rows)
        self._scales, self._starts, self._counts = scales[:-1], starts, counts

    @property
    def num_columns(self) -> int:
        """Rows of the level."""
        return self._entries.shape[1]

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, given by their places on the current level, (B, m, s)."""
        values = self._entries.index_select(0, table.reshape(-1)).view(
            *table.shape, self.num_columns
        )
        columns = torch.arange(self.num_columns, device=table.device)
        first = self._starts[nodes, None]
        own = (columns >= first) & (columns < first + self._counts[nodes, None])
        weights = self._scales.expand(nodes.numel(), -1).masked_fill(own, 0.0)
        return values.mul_(weights[:, None])

    def ascend(self, places: Tensor, scales: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Go on with some of the rows."""
        padded = torch.cat([places, places.new_full((1,), self.num_columns)])
        self._entries = self._entries[padded[:, None], places]
        self._scales, self._starts, self._counts = scales[:-1], starts, counts
