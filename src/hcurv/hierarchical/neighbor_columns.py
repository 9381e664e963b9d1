"""Samples of off-diagonal rows by entries alone: columns of near neighbours and uniform ones.

This is the paper's way (§4, Algorithm 4.1), and what works for sources without a product, such as
sampled entries. Half of the columns of a node are those that most of its rows have among their
nearest neighbours; the others are drawn evenly from all columns outside of the node, weighted so
that the norm of the sample estimates that of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, Distance
from hcurv.hierarchical.levels import LeafBlocks, Level
from hcurv.neighbors import nearest_neighbors
from hcurv.operators import EntrySource
from hcurv.sources import blocks

__all__ = ["NeighborSampler"]

_NEIGHBORS = 16  # of every row
_FACTOR = 2  # columns that stand for one column of a sketch ...
_EXTRA = 64  # ... and beyond: entries tell less than random combinations of them
_HELD_OUT = 32  # columns to estimate norm and error with


class NeighborSampler:
    """Samples from entries.

    Args:
        source: entries.
        tree: clusters.
        diagonal: of the source.
        distance: of the neighbours.
        seed: of all random choices.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        diagonal: Tensor,
        distance: Distance,
        seed: int,
    ) -> None:
        self._source = source
        self._tree = tree
        self._depth = tree.depth
        self._generator = torch.Generator(source.device).manual_seed(seed)
        rows = tree.permutation
        self._positions = torch.arange(rows.numel(), device=rows.device)
        inverse = torch.full((tree.size + 1,), -1, dtype=torch.long, device=rows.device)
        inverse[rows] = self._positions
        neighbors = nearest_neighbors(
            source, _NEIGHBORS, distance=distance, rows=rows, diagonal=diagonal, seed=seed
        )
        # In tree order, with a last row for padding.
        self._neighbors = torch.cat([inverse[neighbors], inverse.new_full((1, _NEIGHBORS), -1)])
        self._num_columns = 0
        self._columns, self._weights = _draw_columns(diagonal[rows], rows, self._generator)
        self._products = source.block(slice(None), self._columns) * self._weights

    @property
    def num_columns(self) -> int:
        """Columns of a sketch that tells as much."""
        return self._num_columns

    @property
    def gain(self) -> float:
        """Samples are weighted to have the norm of what they stand for."""
        return 1.0

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F from a few columns."""
        return float(torch.linalg.vector_norm(self._products, dtype=torch.float64))

    def begin(self, leaves: LeafBlocks) -> None:
        """Nothing is needed of the leaf blocks."""

    def grow(self, num_columns: int) -> None:
        """Use more columns from now on."""
        self._num_columns = max(self._num_columns, num_columns)

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, given by their places on the current level, (B, m, s)."""
        bounds = self._tree.bounds(self._depth)
        begin, end = bounds[nodes], bounds[nodes + 1]
        positions = torch.cat([self._positions, self._positions.new_full((1,), -1)])[table]
        columns, weights = self._choose(begin, end, positions)
        rows = self._tree.permutation
        index = torch.cat([rows, rows.new_full((1,), -1)])
        return blocks(self._source, index[positions], index[columns]).mul_(weights[:, None])

    def ascend(self, level: Level, positions: Tensor) -> None:
        """Go on with the skeletons of a level."""
        self._positions = positions
        self._depth -= 1

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Scaled unit vectors, drawn by the diagonal, and their products."""
        inputs = torch.zeros_like(self._products)
        places = torch.arange(self._columns.numel(), device=inputs.device)
        inputs[self._columns, places] = self._weights
        return inputs, self._products

    def _choose(self, begin: Tensor, end: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of each node in tree order, -1 for none, and their weights, (B, s)."""
        dtype, device = self._source.dtype, positions.device
        num_outside = self._tree.permutation.numel() - (end - begin)
        most, count = int(num_outside.max()), _FACTOR * self._num_columns + _EXTRA
        if most <= count:
            offsets = torch.arange(most, device=positions.device).expand(begin.numel(), -1)
            columns = _skip(offsets, begin, end)
            columns = columns.masked_fill(offsets >= num_outside[:, None], -1)
            return columns, torch.ones(columns.shape, dtype=dtype, device=device)
        near = self._vote(begin, end, positions, count // 2)
        num_even = count - near.shape[1]
        strata = torch.rand(
            begin.numel(), num_even, dtype=dtype, device=device, generator=self._generator
        )
        strata = (strata + torch.arange(num_even, device=strata.device)) / num_even
        even = (strata * num_outside[:, None]).long()
        even = _skip(torch.minimum(even, num_outside[:, None] - 1), begin, end)
        share = (num_outside / num_even).sqrt().to(strata.dtype)
        ones = torch.ones(near.shape, dtype=dtype, device=device)
        weights = torch.cat([ones, share[:, None].expand_as(even)], 1)
        return torch.cat([near, even], 1), weights

    def _vote(self, begin: Tensor, end: Tensor, positions: Tensor, count: int) -> Tensor:
        """The columns outside of a node that most of its rows have as neighbours, (B, count)."""
        none = self._tree.permutation.numel()
        found = self._neighbors[positions].flatten(1)
        inside = (found >= begin[:, None]) & (found < end[:, None])
        found = found.masked_fill(inside | (found < 0), none).sort(1).values
        new = torch.ones_like(found, dtype=torch.bool)
        new[:, 1:] = found[:, 1:] != found[:, :-1]
        run = new.cumsum(1) - 1
        votes = torch.zeros_like(found).scatter_add_(1, run, torch.ones_like(found))
        candidates = torch.full_like(found, none).scatter_(1, run, found)
        votes.masked_fill_(candidates == none, 0)
        best = votes.sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen = candidates.gather(1, best)
        return chosen.masked_fill(chosen == none, -1)


def _skip(offsets: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Count positions outside of [begin, end)."""
    beyond = offsets >= begin[:, None]
    return offsets + torch.where(beyond, (end - begin)[:, None], 0)


def _draw_columns(
    diagonal: Tensor, rows: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Columns, drawn half by the diagonal and half evenly, and 1/√(probability · number)."""
    if rows.numel() == 0:
        return rows, diagonal
    shares = diagonal.double() / diagonal.double().sum()
    shares = (shares + 1 / rows.numel()) / 2
    count = min(_HELD_OUT, rows.numel())
    uniforms = torch.rand(count, dtype=torch.float64, device=rows.device, generator=generator)
    uniforms = (uniforms + torch.arange(count, device=rows.device)) / count
    chosen = torch.searchsorted(shares.cumsum(0), uniforms).clamp_(max=rows.numel() - 1)
    return rows[chosen], (shares[chosen] * count).rsqrt().to(diagonal.dtype)
