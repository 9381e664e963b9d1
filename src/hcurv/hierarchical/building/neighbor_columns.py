"""Samples of off-diagonal rows from entries alone: columns of near neighbours and random ones.

This is the paper's way (§4, Algorithm 4.1). It works for sources without a product, such as sampled
entries. Two thirds of the columns of a node are neighbours of its rows, those with the largest sums
of squared entries. The others are drawn at random from all columns outside of the node: half of the
probability is uniform, half follows the diagonal, because H_jj ≥ H_ij²/H_ii. They are weighted, so
that the norm of the sample estimates that of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.hierarchical.building.sampler import LevelRows
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.tree.block_pattern import BlockPattern
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, Distance
from hcurv.hierarchical.tree.neighbors import neighbor_lists
from hcurv.operators import EntrySource
from hcurv.sources import blocks

__all__ = ["NeighborSampler"]

# Every row proposes so many nearest neighbours as columns of the sample.
_NEIGHBORS = 16
# A sketch of s columns is replaced by 2 s + 64 neighbours and half as many random columns, because
# single columns tell less than random combinations of all columns.
_FACTOR = 2
_EXTRA = 64
# So many columns are held out to estimate the norm and the error with.
_HELD_OUT = 32


class NeighborSampler:
    """Samples from entries.

    Args:
        source: the matrix.
        tree: clusters of its rows.
        diagonal: its diagonal.
        distance: distance of nearest neighbours.
        pattern: says which columns a node leaves out of its samples.
        seed: seed of all random choices.
    """

    def __init__(
        self,
        source: EntrySource,
        tree: ClusterTree,
        diagonal: Tensor,
        distance: Distance,
        pattern: BlockPattern,
        seed: int,
    ) -> None:
        self._source, self._pattern = source, pattern
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
        """Number of columns of a sketch that would tell as much."""
        return self._num_columns

    is_random = True

    def num_random(self, num_rows: int) -> int:
        """As many as there are columns."""
        return self._num_columns

    @property
    def gain(self) -> float:
        """1, because samples are weighted to have the norm of what they stand for."""
        return 1.0

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F from the held-out columns."""
        return float(torch.linalg.vector_norm(self._products, dtype=torch.float64))

    def begin(self, dense: tuple[LeafBlocks | Coupling, ...], rows: LevelRows) -> None:
        """Do nothing: samples from entries leave out the columns of dense blocks."""

    def grow(self, num_columns: int) -> None:
        """Use at least so many columns from now on."""
        self._num_columns = max(self._num_columns, num_columns)

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, by their places on the current level, (B, m, s)."""
        bounds = self._tree.bounds(self._depth)
        begin, end = bounds[nodes], bounds[nodes + 1]
        positions = torch.cat([self._positions, self._positions.new_full((1,), -1)])[table]
        columns, weights = self._choose(nodes, begin, end, positions)
        weights = weights.masked_fill(self._is_excluded(nodes, columns), 0.0)
        rows = self._tree.permutation
        index = torch.cat([rows, rows.new_full((1,), -1)])
        return blocks(self._source, index[positions], index[columns]).mul_(weights[:, None])

    def entries(self, places: Tensor) -> tuple[EntrySource, Tensor]:
        """The source, and the matrix rows at some places of the current level."""
        return self._source, self._tree.permutation[self._positions[places]]

    def ascend(self, level: Level, places: Tensor, rows: LevelRows) -> None:
        """Go on to the next level."""
        self._positions = rows.positions
        self._depth -= 1

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Scaled unit vectors, at random with more weight on large diagonals, and products."""
        inputs = torch.zeros_like(self._products)
        places = torch.arange(self._columns.numel(), device=inputs.device)
        inputs[self._columns, places] = self._weights
        return inputs, self._products

    def _is_excluded(self, nodes: Tensor, columns: Tensor) -> Tensor:
        """Which columns, (B, s) in tree order, a node leaves out; -1 is treated as column 0."""
        bounds = self._tree.bounds(self._depth)
        owners = torch.searchsorted(bounds[1:].contiguous(), columns.clamp(min=0), right=True)
        owners.clamp_(max=bounds.numel() - 2)
        return self._pattern.is_excluded(self._depth, nodes, owners)

    def _choose(
        self, nodes: Tensor, begin: Tensor, end: Tensor, positions: Tensor
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
        near = self._vote(nodes, positions, count)
        even, weights = self._draw(begin, end, count // 2)
        ones = torch.ones(near.shape, dtype=dtype, device=device)
        return torch.cat([near, even], 1), torch.cat([ones, weights.to(dtype)], 1)

    def _draw(self, begin: Tensor, end: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draw columns outside of nodes by stratified sampling.

        Returns:
            The columns, (B, c), and their weights 1/√(probability · number).
        """
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
        # Rounding must lead neither into a node nor beyond the end.
        drawn = drawn.clamp_(0, self._shares.numel() - 1)
        is_before = places < before
        drawn = torch.where(is_before, torch.minimum(drawn, begin[:, None] - 1), drawn)
        drawn = torch.where(is_before, drawn, torch.maximum(drawn, end[:, None]))
        return drawn, (self._shares[drawn] / (self._before[-1] - inside) * count).rsqrt()

    def _draw_columns(self) -> tuple[Tensor, Tensor]:
        """Draw the held-out columns; also their weights 1/√(probability · number)."""
        rows = self._tree.permutation
        none = rows.new_zeros(1)
        drawn, weights = self._draw(none, none, min(_HELD_OUT, rows.numel()))
        return rows[drawn[0]], weights[0].to(self._source.dtype)

    def _vote(self, nodes: Tensor, positions: Tensor, count: int) -> Tensor:
        """The neighbours outside of a node with the largest sums of squared entries, (B, count)."""
        none = self._tree.permutation.numel()
        found = self._neighbors[positions].flatten(1)
        excluded = self._is_excluded(nodes, found) | (found < 0)
        found, order = found.masked_fill(excluded, none).sort(dim=1, stable=True)
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
    """Squares of the entries of rows in the columns of their neighbours, from their distances."""
    row_diagonal, col_diagonal = diagonal[rows, None], diagonal[neighbors.clamp(min=0)]
    if distance == "angle":
        squares = (1 - distances) * row_diagonal * col_diagonal
    else:
        squares = ((row_diagonal + col_diagonal - distances) / 2).square()
    return squares.clamp_(min=0.0).masked_fill_(neighbors < 0, 0.0)


def _shares(diagonal: Tensor) -> Tensor:
    """Probabilities of columns, half of them uniform and half following the diagonal."""
    shares = diagonal.double() / diagonal.double().sum()
    return (shares + 1 / max(1, diagonal.numel())) / 2


def _skip(offsets: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The positions with given numbers, (B, s), if those from begin to end do not count."""
    beyond = offsets >= begin[:, None]
    return offsets + torch.where(beyond, (end - begin)[:, None], 0)
