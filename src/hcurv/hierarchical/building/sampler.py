"""What a build asks of samples, and how many columns of samples it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.operators import EntrySource

__all__ = ["EXTRA_COLUMNS", "FIRST_RANK", "LevelRows", "Sampler", "num_columns_for"]

# A skeleton of r rows is chosen from 1.5 r + 16 columns. Fewer columns make weights fit by chance,
# more of them cost more products; 1.5 to 2 times the rank was a good compromise on Gauss-Newton
# Hessians.
_OVERSAMPLING = 1.5
EXTRA_COLUMNS = 16
# The first sample suffices for skeletons of this many rows. Most leaves need fewer.
FIRST_RANK = 48


def num_columns_for(rank: int) -> int:
    """How many columns of samples a skeleton of ``rank`` rows is chosen from."""
    return math.ceil(_OVERSAMPLING * rank) + EXTRA_COLUMNS


@dataclass(frozen=True)
class LevelRows:
    """The rows that are left on a level, node by node.

    Attributes:
        positions: places of the rows in tree order, (rows,).
        starts: first row of each node, (nodes,).
        counts: number of its rows, (nodes,).
        scales: how much an error in a row weighs in the whole matrix, (rows + 1,), the last one
            for padding: norms of the columns of the product of all bases below.
    """

    positions: Tensor
    starts: Tensor
    counts: Tensor
    scales: Tensor

    @property
    def size(self) -> int:
        """Number of rows of all nodes."""
        return self.positions.numel()

    def of_all(self, nodes: NodeShare, counts: Tensor, depth: int) -> LevelRows:
        """All rows of a level, if these are the own ones of this rank.

        Args:
            nodes: which nodes are own ones.
            counts: numbers of rows of all nodes.
            depth: the level.

        Returns:
            All rows, with positions among all rows of the tree.
        """
        if not nodes.is_shared:
            return self
        ranks, number = nodes.share.ranks, nodes.row_counts(counts, depth)
        positions = ranks.collect(self.positions + nodes.share.start, number)
        scales = ranks.collect(self.scales[:-1], number)
        scales = torch.cat([scales, scales.new_ones(1)])
        return LevelRows(positions, counts.cumsum(0) - counts, counts, scales)


class Sampler(Protocol):
    """Samples of the rows of nodes, in columns outside of the nodes, level by level from below."""

    @property
    def num_columns(self) -> int:
        """Number s of columns of a sample."""

    @property
    def is_random(self) -> bool:
        """Whether the columns are a random selection or combination of all columns."""

    def num_random(self, num_rows: int) -> int | None:
        """How many columns of a sketch tell as much as a sample of so many rows.

        None if the sample has all columns, and leaves nothing to chance.
        """

    @property
    def gain(self) -> float:
        """Norm of a sample over the norm of what it is a sample of."""

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F; known once `grow` was called."""

    def begin(self, dense: tuple[LeafBlocks | Coupling, ...], rows: LevelRows) -> None:
        """Start with the leaves.

        Args:
            dense: all dense blocks, which samples do not show.
            rows: the rows of the leaves.
        """

    def grow(self, num_columns: int) -> None:
        """Have at least so many columns, from the current level on."""

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes (B,), by their places on the current level: (B, m, s)."""

    def entries(self, places: Tensor) -> tuple[EntrySource, Tensor]:
        """Where to read entries between rows at some places of the current level.

        Returns:
            A source, and the numbers of the rows in it.
        """

    def ascend(self, level: Level, places: Tensor, rows: LevelRows) -> None:
        """Go on to the next level.

        Args:
            level: bases and couplings of the current level.
            places: where the skeleton rows lie on the current level.
            rows: the skeleton rows, as rows of the next level.
        """

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Vectors (N, k) that no sample was made of, and their products with H."""
