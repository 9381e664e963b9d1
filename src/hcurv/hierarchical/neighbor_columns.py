"""Samples of off-diagonal rows by entries alone: columns of near neighbours and uniform ones.

This is the paper's way (§4, Algorithm 4.1), and what works for sources without a product, such as
sampled entries. Two thirds of the columns of a node are neighbours of its rows, with the largest
sums of squared entries; the others are drawn at random from all columns outside of the node, half
evenly and half by the diagonal, H_jj ≥ H_ij²/H_ii, and weighted so that the norm of the sample
estimates that of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, Distance
from hcurv.hierarchical.interactions import Interactions
from hcurv.hierarchical.levels import Coupling, LeafBlocks, Level
from hcurv.neighbors import neighbor_lists
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
        interactions: columns close to a node are left out of its samples.
        seed: of all random choices.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        diagonal: Tensor,
        distance: Distance,
        interactions: Interactions,
        seed: int,
    ) -> None:
        self._source, self._interactions = source, interactions
        self._tree = tree
        self._depth = tree.depth
        self._generator = torch.Generator(source.device).manual_seed(seed)
        rows = tree.permutation
        self._positions = torch.arange(rows.numel(), device=rows.device)
        inverse = torch.full((tree.size + 1,), -1, dtype=torch.long, device=rows.device)
        inverse[rows] = self._positions
        neighbors, distances = neighbor_lists(
            source, _NEIGHBORS, distance=distance, rows=rows, diagonal=diagonal, seed=seed
        )
        squares = _squared_entries(diagonal, rows, neighbors, distances, distance)
        # In tree order, with a last row for padding.
        self._neighbors = torch.cat([inverse[neighbors], inverse.new_full((1, _NEIGHBORS), -1)])
        self._squares = torch.cat([squares, squares.new_zeros(1, _NEIGHBORS)])
        self._shares = _shares(diagonal[rows])
        before = self._shares.cumsum(0)
        self._before = torch.cat([before.new_zeros(1), before])
        self._num_columns = 0
        self._columns, self._weights = self._draw_columns()
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

    def begin(self, leaves: LeafBlocks, near: tuple[Coupling, ...]) -> None:
        """Nothing is needed of the blocks."""

    def grow(self, num_columns: int) -> None:
        """Use more columns from now on."""
        self._num_columns = max(self._num_columns, num_columns)

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, given by their places on the current level, (B, m, s)."""
        bounds = self._tree.bounds(self._depth)
        begin, end = bounds[nodes], bounds[nodes + 1]
        positions = torch.cat([self._positions, self._positions.new_full((1,), -1)])[table]
        close = None
        if self._interactions.near.numel():
            close = self._interactions.is_close(self._depth, nodes)
        columns, weights = self._choose(begin, end, positions, close)
        if close is not None:
            weights = weights.masked_fill(self._among(columns, close), 0.0)
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

    def _among(self, columns: Tensor, close: Tensor) -> Tensor:
        """Which columns, (B, s) in tree order, lie in nodes that each node is close to."""
        bounds = self._tree.bounds(self._depth)
        owners = torch.searchsorted(bounds[1:].contiguous(), columns.clamp(min=0), right=True)
        return close.gather(1, owners.clamp_(max=close.shape[1] - 1))

    def _choose(
        self, begin: Tensor, end: Tensor, positions: Tensor, close: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Columns of each node in tree order, -1 for none, and their weights, (B, s)."""
        dtype, device = self._source.dtype, positions.device
        num_outside = self._tree.permutation.numel() - (end - begin)
        most, count = int(num_outside.max()), _FACTOR * self._num_columns + _EXTRA
        if most <= count:
            offsets = torch.arange(most, device=positions.device).expand(begin.numel(), -1)
            columns = _skip(offsets, begin, end)
            columns = columns.masked_fill(offsets >= num_outside[:, None], -1)
            return columns, torch.ones(columns.shape, dtype=dtype, device=device)
        near = self._vote(begin, end, positions, count, close)
        even, weights = self._draw(begin, end, count // 2)
        ones = torch.ones(near.shape, dtype=dtype, device=device)
        return torch.cat([near, even], 1), torch.cat([ones, weights.to(dtype)], 1)

    def _draw(self, begin: Tensor, end: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Random columns outside of nodes, stratified, and 1/√(probability · number), (B, c)."""
        before, inside = (
            self._before[begin, None],
            (self._before[end] - self._before[begin])[:, None],
        )
        places = torch.rand(
            begin.numel(), count, dtype=before.dtype, device=begin.device, generator=self._generator
        )
        places = (
            (places + torch.arange(count, device=begin.device))
            / count
            * (self._before[-1] - inside)
        )
        places += torch.where(places >= before, inside, 0.0)
        drawn = torch.searchsorted(self._before, places, right=True) - 1
        # Rounding must not lead into a node or beyond the end.
        drawn = drawn.clamp_(0, self._shares.numel() - 1)
        is_left = places < before
        drawn = torch.where(is_left, torch.minimum(drawn, begin[:, None] - 1), drawn)
        drawn = torch.where(is_left, drawn, torch.maximum(drawn, end[:, None]))
        return drawn, (self._shares[drawn] / (self._before[-1] - inside) * count).rsqrt()

    def _draw_columns(self) -> tuple[Tensor, Tensor]:
        """Held-out columns, and 1/√(probability · number)."""
        rows = self._tree.permutation
        none = rows.new_zeros(1)
        drawn, weights = self._draw(none, none, min(_HELD_OUT, rows.numel()))
        return rows[drawn[0]], weights[0].to(self._source.dtype)

    def _vote(
        self, begin: Tensor, end: Tensor, positions: Tensor, count: int, close: Tensor | None
    ) -> Tensor:
        """The neighbours outside of a node with the largest sums of squared entries, (B, count)."""
        none = self._tree.permutation.numel()
        found = self._neighbors[positions].flatten(1)
        inside = (found >= begin[:, None]) & (found < end[:, None])
        if close is not None:
            inside |= self._among(found, close)
        found, order = found.masked_fill(inside | (found < 0), none).sort(dim=1, stable=True)
        squares = self._squares[positions].flatten(1).gather(1, order)
        new = torch.ones_like(found, dtype=torch.bool)
        new[:, 1:] = found[:, 1:] != found[:, :-1]
        run = new.cumsum(1) - 1
        sums = torch.zeros_like(squares).scatter_add_(1, run, squares)
        candidates = torch.full_like(found, none).scatter_(1, run, found)
        sums.masked_fill_(candidates == none, -1.0)
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, :count]
        chosen = candidates.gather(1, best)
        return chosen.masked_fill(chosen == none, -1)


def _squared_entries(
    diagonal: Tensor, rows: Tensor, neighbors: Tensor, distances: Tensor, distance: Distance
) -> Tensor:
    """Squares of the entries of rows in the columns of their neighbours, from the distances."""
    own, other = diagonal[rows, None], diagonal[neighbors.clamp(min=0)]
    if distance == "angle":
        squares = (1 - distances) * own * other
    else:
        squares = ((own + other - distances) / 2).square()
    return squares.clamp_(min=0.0).masked_fill_(neighbors < 0, 0.0)


def _shares(diagonal: Tensor) -> Tensor:
    """Probabilities of columns, half even and half by the diagonal."""
    shares = diagonal.double() / diagonal.double().sum()
    return (shares + 1 / max(1, diagonal.numel())) / 2


def _skip(offsets: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Count positions outside of [begin, end)."""
    beyond = offsets >= begin[:, None]
    return offsets + torch.where(beyond, (end - begin)[:, None], 0)
