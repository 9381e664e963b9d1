"""Nearest neighbours of the rows of a matrix, from its entries, by randomized trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.hierarchical.tree.cluster_tree import (
    MAX_ENTRIES,
    Distance,
    depth_for,
    distances,
    node_rows,
    row_batches,
    split_rows,
)
from hcurv.indexing import Indices, check_count, check_seed, resolve_indices
from hcurv.operators import EntrySource
from hcurv.precision import full_precision
from hcurv.sources import as_source

__all__ = ["nearest_neighbors", "neighbor_lists"]

# A leaf has at least this many rows, however few neighbours are wanted: larger leaves find more
# neighbours per tree, but take more entries.
_LEAF = 64
# Another tree is built only if the last one improved at least this share of all neighbours.
_SETTLED = 0.01


@full_precision
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
    """Find approximately nearest neighbours of each row, (M, k), the nearest first.

    A tree splits every node at the median of d(i, p) − d(i, q), where p and q are two of its rows
    at random, and the rows of a leaf are compared with each other. The lists of several trees are
    merged, until a tree improves less than a percent of them. If there are no more than
    ``leaf_size`` rows, all of them are compared.

    Args:
        source: the matrix.
        num_neighbors: number k of neighbours of each row.
        distance: "angle" for 1 − H_ij²/(H_ii H_jj) or "gram" for H_ii + H_jj − 2H_ij.
        num_trees: largest number of trees to build.
        leaf_size: largest number of rows of a leaf, at least 2(k + 1), so that a leaf offers k
            others to each of its rows; None for 2 max(2k, 64), that is, leaves of about
            1.5 max(2k, 64) rows.
        rows: matrix rows to look for and among, all different; None for those with a nonzero
            diagonal, in ascending order.
        diagonal: diagonal of the matrix; None to ask the source for it.
        seed: seed of the trees.

    Returns:
        Matrix rows; -1 fills the lists if there are fewer than k others. Equally distant rows come
        in ascending order.

    Examples:
        >>> hcurv.nearest_neighbors(H, 3).shape[1]
        3
    """
    matrix = as_source(source)
    if diagonal is not None:
        size = matrix.shape[0]
        if not isinstance(diagonal, Tensor) or diagonal.shape != (size,):
            raise TypeError(f"diagonal must be a tensor ({size},), or None to ask the source")
        check_dense(diagonal, "diagonal")
    return neighbor_lists(
        matrix,
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
    max_entries: int = MAX_ENTRIES,
) -> tuple[Tensor, Tensor]:
    """What `nearest_neighbors` returns, and the distances, infinite where there is none.

    ``max_entries`` is the number of entries that the source is asked for at a time.
    """
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
    generator = torch.Generator().manual_seed(check_seed(seed))

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
        order = split_rows(source, diagonal, order, depth, distance, random_pairs, max_entries)
        leaves = node_rows(order, depth)
        improved = _compare(source, diagonal, leaves, distance, lists, max_entries)
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
    source: EntrySource,
    diagonal: Tensor,
    leaves: Tensor,
    distance: Distance,
    lists: _Lists,
    max_entries: int,
) -> int:
    """Offer the rows of each leaf to each other; return how many neighbours are new."""
    improved = 0
    for rows, owners in row_batches(leaves, leaves.shape[1], max_entries):
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
