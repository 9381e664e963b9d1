"""Nearest neighbours of the rows of a matrix, from its entries, by randomized trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.cluster_tree import (
    Distance,
    depth_for,
    distances,
    node_rows,
    row_pieces,
    split_rows,
)
from hcurv.indexing import Indices, check_count, resolve_indices
from hcurv.operators import EntrySource

__all__ = ["nearest_neighbors", "neighbor_lists"]

_LEAF = 64  # fewest rows of a leaf, however few neighbours are wanted
_SETTLED = 0.01  # share of neighbours that a tree must improve for another one to be worth it


def nearest_neighbors(
    source: EntrySource,
    num_neighbors: int,
    *,
    distance: Distance = "angle",
    num_trees: int = 8,
    leaf_size: int | None = None,
    rows: Indices | None = None,
    diagonal: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Approximately nearest others of each row, (M, k), the nearest first.

    A tree splits every node at the median of d(i, p) − d(i, q), p and q two of its rows at random;
    the rows of a leaf are compared with each other. The lists of several trees are merged, until
    one improves less than a percent of them. Up to ``leaf_size`` rows are all compared.

    Args:
        source: the matrix.
        num_neighbors: k.
        distance: "angle" or "gram", as in `pair_distances`.
        num_trees: most trees to build.
        leaf_size: most rows of a leaf, at least 2(k + 1), so that a leaf offers k others to each
            of its rows; None for 2 max(2k, 64), that is, leaves of about 1.5 max(2k, 64) rows.
        rows: matrix rows to look for and among, all different; None for those with a nonzero
            diagonal, in ascending order.
        diagonal: of the matrix, if it is known already.
        seed: of the trees.

    Returns:
        Matrix rows; -1 fills the lists if there are fewer than k others. Equally distant rows come
        in ascending order.
    """
    return neighbor_lists(
        source,
        num_neighbors,
        distance=distance,
        num_trees=num_trees,
        leaf_size=leaf_size,
        rows=rows,
        diagonal=diagonal,
        seed=seed,
    )[0]


def neighbor_lists(
    source: EntrySource,
    num_neighbors: int,
    *,
    distance: Distance = "angle",
    num_trees: int = 8,
    leaf_size: int | None = None,
    rows: Indices | None = None,
    diagonal: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """What `nearest_neighbors` returns, and the distances, infinite where there is none."""
    num_neighbors = check_count(num_neighbors, "num_neighbors")
    num_trees = check_count(num_trees, "num_trees")
    least = 2 * (num_neighbors + 1)
    if leaf_size is None:
        leaf_size = 2 * max(2 * num_neighbors, _LEAF)
    leaf_size = check_count(leaf_size, "leaf_size", least)
    diagonal = (source.diagonal() if diagonal is None else diagonal).to(source.device)
    if rows is None:
        rows = diagonal.nonzero().squeeze(1)
    rows = resolve_indices(rows, source.shape[0], source.device, "rows")
    if rows.unique().numel() < rows.numel():
        raise ValueError("rows must be different from each other")
    generator = torch.Generator().manual_seed(seed)

    def random_pairs(nodes: Tensor) -> Tensor:
        sizes = (nodes >= 0).sum(1)
        draws = torch.rand(2, len(nodes), dtype=torch.float64, generator=generator)
        draws = draws.to(nodes.device)
        first = (draws[0] * sizes).long()
        second = (first + 1 + (draws[1] * (sizes - 1)).long()) % sizes
        return nodes.gather(1, torch.stack([first, second], dim=1))

    lists = _Lists.empty(rows, source.shape[0], num_neighbors, source.dtype)
    depth = depth_for(rows.numel(), leaf_size)
    order = rows
    for _ in range(num_trees):
        order = split_rows(source, diagonal, order, depth, distance, random_pairs)
        improved = _compare(source, diagonal, node_rows(order, depth), distance, lists)
        if depth == 0 or improved < _SETTLED * rows.numel() * num_neighbors:
            break
        # Ties keep the order that a tree starts from: that of the rows first, then a random one.
        order = rows[torch.randperm(rows.numel(), generator=generator).to(rows.device)]
    return lists.neighbors, lists.distances


@dataclass(frozen=True)
class _Lists:
    """The nearest others found so far, updated in place.

    Attributes:
        positions: of the matrix rows in the lists, (N,).
        neighbors: matrix rows, (M, k), sorted by distance and row; -1 where there is none.
        distances: of the neighbours, (M, k), infinite where there is none.
    """

    positions: Tensor
    neighbors: Tensor
    distances: Tensor

    @classmethod
    def empty(cls, rows: Tensor, size: int, num_neighbors: int, dtype: torch.dtype) -> _Lists:
        positions = torch.full((size,), -1, device=rows.device)
        positions[rows] = torch.arange(rows.numel(), device=rows.device)
        neighbors = torch.full((rows.numel(), num_neighbors), -1, device=rows.device)
        return cls(positions, neighbors, torch.full_like(neighbors, torch.inf, dtype=dtype))

    def merge(self, rows: Tensor, candidates: Tensor, distances: Tensor) -> int:
        """Merge candidates (n, c) into the lists of rows (n,); return how many got in."""
        index = self.positions[rows]
        num_neighbors = self.neighbors.shape[1]
        worst = self.distances[index, -1:]
        merged = torch.cat([self.neighbors[index], candidates], dim=1)
        merged, order = merged.sort(dim=1, stable=True)
        values = torch.cat([self.distances[index], distances], dim=1).gather(1, order)
        values[:, 1:].masked_fill_(merged[:, 1:] == merged[:, :-1], torch.inf)
        values, best = values.sort(dim=1, stable=True)
        values, best = values[:, :num_neighbors], best[:, :num_neighbors]
        self.neighbors[index] = merged.gather(1, best).masked_fill_(values == torch.inf, -1)
        self.distances[index] = values
        is_new = order.gather(1, best) >= num_neighbors
        return int((is_new & (values < worst)).sum())


def _compare(
    source: EntrySource, diagonal: Tensor, leaves: Tensor, distance: Distance, lists: _Lists
) -> int:
    """Offer the rows of each leaf to each other; return how many neighbours are new."""
    improved = 0
    for rows, owners in row_pieces(leaves, leaves.shape[1]):
        cols = leaves[owners]
        found = distances(source, diagonal, rows, cols, distance)
        excluded = (rows[:, :, None] == cols[:, None, :]) | (cols < 0)[:, None, :]
        found.masked_fill_(excluded, torch.inf)
        num_candidates = min(lists.neighbors.shape[1], cols.shape[1])
        nearest, best = found.topk(num_candidates, dim=2, largest=False)
        candidates = cols[:, None, :].expand(-1, rows.shape[1], -1).gather(2, best)
        candidates.masked_fill_(nearest == torch.inf, -1)
        present = rows >= 0
        improved += lists.merge(rows[present], candidates[present], nearest[present])
    return improved
