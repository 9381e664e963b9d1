"""Orderings of the rows of a matrix, and the balanced binary tree over an ordering.

A positive semi-definite matrix H is the Gram matrix of vectors φ_i, so that its entries alone tell
how far two rows are apart: by the angle, sin²∠(φ_i, φ_j) = 1 − H_ij²/(H_ii H_jj) (Eq. 4.1), or by
the difference, ‖φ_i − φ_j‖² = H_ii + H_jj − 2H_ij. Both distances are squared, which keeps the
order of neighbours and needs no root of a rounded zero. With the second one, a mean over a sample
measures the distance to its centroid, and a split is one by a hyperplane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from hcurv.indexing import check_count
from hcurv.operators import EntrySource
from hcurv.sources import blocks, structural_orders

__all__ = [
    "MAX_ENTRIES",
    "ClusterTree",
    "Distance",
    "SubtreeForest",
    "cluster",
    "depth_for",
    "distance_order",
    "pair_distances",
]

Distance: TypeAlias = Literal["angle", "gram"]

_ORDERINGS = ("angle", "gram", "natural")
# The mean distance to this many rows of a node stands for the distance to its centroid.
_CENTROID = 16
# A source is asked for at most this many entries at a time: 32 MB in double precision.
MAX_ENTRIES = 2**22


@dataclass(frozen=True)
class ClusterTree:
    """Balanced binary tree over the rows of a matrix that are not zero.

    Node j of level l holds the rows ``permutation[b[j]:b[j + 1]]``, b = ``bounds(l)``; its
    children are the nodes 2j and 2j + 1 of level l + 1. The nodes of a level differ in size by
    at most one.

    Attributes:
        size: number N of rows of the matrix.
        permutation: matrix rows in tree order, (M,), M ≤ N; rows of zeros are left out.
        depth: level of the 2**depth leaves; level 0 is the root.
        ordering: name of the ordering; "given" for the user's own.
        scores: scores of all candidates, if the ordering was chosen among several.

    Examples:
        >>> dense = torch.eye(6) + 1
        >>> tree = hcurv.compress(dense, leaf_size=2, ordering="natural", global_rank=0).tree
        >>> tree.depth, tree.permutation.tolist()
        (2, [0, 1, 2, 3, 4, 5])
    """

    size: int
    permutation: Tensor
    depth: int
    ordering: str
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """M, the number of rows in the tree."""
        return self.permutation.numel()

    @property
    def has_clusters(self) -> bool:
        """Whether blocks between rows are stored.

        Not so beside a global part that stands alone, or together with a diagonal: its ordering is
        then "none".
        """
        return self.num_kept > 0 and self.ordering != "none"

    @property
    def zero_rows(self) -> Tensor:
        """Rows of zeros, which are not in the tree, (N - M,), ascending."""
        absent = torch.ones(self.size, dtype=torch.bool, device=self.permutation.device)
        absent[self.permutation] = False
        return absent.nonzero().squeeze(1)

    def bounds(self, level: int) -> Tensor:
        """Where the nodes of a level begin and end in the permutation, (2**level + 1,).

        Examples:
            >>> tree = hcurv.ClusterTree(5, torch.arange(5), depth=1, ordering="natural")
            >>> tree.bounds(1).tolist()
            [0, 2, 5]
        """
        level = check_count(level, "level", 0, self.depth)
        return _bounds(self.num_kept, level, self.permutation.device)

    def leaves(self) -> Tensor:
        """Matrix rows of the leaves, (2**depth, m), padded with -1 to the largest leaf.

        Examples:
            >>> tree = hcurv.ClusterTree(5, torch.arange(5), depth=1, ordering="natural")
            >>> tree.leaves().tolist()
            [[0, 1, -1], [2, 3, 4]]
        """
        return node_rows(self.permutation, self.depth)


@dataclass(frozen=True)
class SubtreeForest(ClusterTree):
    """Some neighbouring subtrees of a tree, all of the same depth; or one with leaves of any size.

    Attributes:
        leaf_bounds: where the leaves begin and end in the permutation.
    """

    leaf_bounds: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))

    def bounds(self, level: int) -> Tensor:
        """Where the leaves begin and end in the permutation."""
        if level != self.depth:
            raise ValueError("nothing but the leaves of a forest have bounds")
        return self.leaf_bounds


def depth_for(num_rows: int, leaf_size: int) -> int:
    """Smallest depth at which no leaf has more than ``leaf_size`` rows."""
    num_rows = check_count(num_rows, "num_rows", 0)
    leaf_size = check_count(leaf_size, "leaf_size")
    return (max(num_rows - 1, 0) // leaf_size).bit_length()


def cluster(
    source: EntrySource,
    *,
    leaf_size: int,
    ordering: str | Tensor,
    seed: int,
    diagonal: Tensor | None = None,
    orders: Mapping[str, Tensor] | None = None,
    max_entries: int = MAX_ENTRIES,
) -> ClusterTree:
    """Order the rows of a matrix and build the tree over them.

    Args:
        source: the matrix, positive semi-definite: a row with zero diagonal is zero, and is kept
            out of the tree.
        leaf_size: largest number of rows of a leaf, where zero rows count, too.
        ordering: "angle" or "gram" to split by distances between rows, "natural" to leave the
            rows as they are, a name among ``orders``, or a permutation of all N rows.
        seed: seed of the samples that splits by distance take.
        diagonal: diagonal of the matrix; None to ask the source for it.
        orders: orders of the rows by name; None to ask the source for them.
        max_entries: number of entries that the source is asked for at a time.

    Raises:
        TypeError: ``ordering`` is neither a name nor an integer tensor.
        ValueError: there is no ordering of that name, or the tensor is not a permutation.
    """
    diagonal = (source.diagonal() if diagonal is None else diagonal).to(source.device)
    order, name = _start(source, ordering, orders)
    rows = order[diagonal[order] != 0]
    # The tree is as deep as all N rows would need, so that its shape does not depend on the data.
    depth = min(depth_for(source.shape[0], leaf_size), max(rows.numel() - 1, 0).bit_length())
    if name in ("angle", "gram"):
        generator = torch.Generator().manual_seed(seed)
        distance = cast("Distance", name)
        rows = distance_order(source, diagonal, rows, depth, distance, generator, max_entries)
    return ClusterTree(source.shape[0], rows, depth, name)


def distance_order(
    source: EntrySource,
    diagonal: Tensor,  # (N,)
    rows: Tensor,  # (M,)
    depth: int,
    distance: Distance,
    generator: torch.Generator,
    max_entries: int = MAX_ENTRIES,
) -> Tensor:
    """Order rows by recursive splits between far rows, as GOFMM does: (M,) → (M,).

    In each node p is the row farthest from the centroid of a sample, q the row farthest from p,
    and the median of d(i, p) − d(i, q) splits the node.
    """

    def farthest(nodes: Tensor, cols: Tensor, weights: Tensor) -> Tensor:
        sums = _combine(source, diagonal, nodes, cols, weights, distance, max_entries)
        return _farthest(nodes, sums)

    def far_pairs(nodes: Tensor) -> Tensor:
        sample = _sample_rows(nodes, generator)
        present = (sample >= 0).to(source.dtype)
        mean = present / present.sum(1, keepdim=True).clamp(min=1)
        first = farthest(nodes, sample, mean)
        second = farthest(nodes, first, torch.ones_like(mean[:, :1]))
        return torch.cat([first, second], dim=1)

    return split_rows(source, diagonal, rows, depth, distance, far_pairs, max_entries)


def split_rows(
    source: EntrySource,
    diagonal: Tensor,  # (N,)
    rows: Tensor,  # (M,)
    depth: int,
    distance: Distance,
    choose_pairs: Callable[[Tensor], Tensor],
    max_entries: int = MAX_ENTRIES,
) -> Tensor:
    """Order rows by splits at the median of d(i, p) − d(i, q), level by level: (M,) → (M,).

    ``choose_pairs`` takes the rows of the nodes of a level, (B, m), padded with -1 at the end,
    and returns the rows p, q of each node, (B, 2). Ties keep the order of ``rows``.
    """
    signs = torch.tensor([[1.0, -1.0]], dtype=source.dtype, device=source.device)
    for level in range(depth if rows.numel() > 1 else 0):
        nodes = node_rows(rows, level)
        weights = signs.expand(nodes.shape[0], -1)
        pairs = choose_pairs(nodes)
        keys = _combine(source, diagonal, nodes, pairs, weights, distance, max_entries)
        keys = keys.masked_fill(nodes < 0, torch.inf)
        nodes = nodes.gather(1, keys.sort(dim=1, stable=True).indices)
        rows = nodes[nodes >= 0]
    return rows


def distances(
    source: EntrySource,
    diagonal: Tensor,  # (N,)
    rows: Tensor,  # (B, m)
    cols: Tensor,  # (B, k)
    distance: Distance,
) -> Tensor:
    """Distances of rows[b] from cols[b], (B, m, k). A row has distance 0 from itself.

    The index -1 stands for a row of zeros.
    """
    with torch.no_grad():
        row_diagonal = torch.where(rows < 0, 0, diagonal[rows])
        col_diagonal = torch.where(cols < 0, 0, diagonal[cols])
        entries = blocks(source, rows, cols)
        result = pair_distances(entries, row_diagonal, col_diagonal, distance)
        return result.masked_fill_(rows[:, :, None] == cols[:, None, :], 0.0)


def pair_distances(
    entries: Tensor,  # (..., m, k)
    row_diagonal: Tensor,  # (..., m)
    col_diagonal: Tensor,  # (..., k)
    distance: Distance,
) -> Tensor:
    """Squared distances between rows, (..., m, k), from entries and the diagonal.

    "angle" is 1 − H_ij²/(H_ii H_jj), in [0, 1], and 1 if a diagonal entry is zero. "gram" is
    H_ii + H_jj − 2H_ij, at least 0. The entries may be noisy: values out of range are clamped.
    """
    if distance not in ("angle", "gram"):
        raise ValueError(f"distance must be 'angle' or 'gram'; got {distance!r}")
    rows, cols = row_diagonal[..., :, None], col_diagonal[..., None, :]
    if distance == "gram":
        return torch.add(rows + cols, entries, alpha=-2).clamp_(min=0)
    # The product of two diagonal entries may underflow where its factors do not.
    cosine = entries / torch.where(rows > 0, rows, torch.inf).sqrt()
    cosine /= torch.where(cols > 0, cols, torch.inf).sqrt()
    return 1 - cosine.square_().clamp_(max=1)


def row_batches(
    nodes: Tensor, num_cols: int, max_entries: int = MAX_ENTRIES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut the rows of nodes, so that blocks with ``num_cols`` columns stay small.

    Args:
        nodes: rows of the nodes, (B, m).
        num_cols: number of columns of each block.
        max_entries: number of entries of the blocks that are taken together.

    Yields:
        Rows (b, l), padded with -1, and the nodes that they come from, (b,). Those of a node follow
        each other; l is always the same.
    """
    num_nodes, width = nodes.shape
    longest = max(1, max_entries // max(1, num_cols))
    num_cuts = max(1, -(-width // longest))
    length = max(1, -(-width // num_cuts))
    rows = torch.nn.functional.pad(nodes, (0, num_cuts * length - width), value=-1)
    owners = torch.arange(num_nodes, device=nodes.device).repeat_interleave(num_cuts)
    step = max(1, longest // length)
    yield from zip(rows.view(-1, length).split(step), owners.split(step), strict=True)


def _combine(
    source: EntrySource,
    diagonal: Tensor,
    nodes: Tensor,
    cols: Tensor,
    weights: Tensor,
    distance: Distance,
    max_entries: int,
) -> Tensor:
    """Σ_k weights[b, k] d(nodes[b, i], cols[b, k]), (B, m)."""
    sums = [
        (distances(source, diagonal, rows, cols[owners], distance) * weights[owners, None]).sum(2)
        for rows, owners in row_batches(nodes, cols.shape[1], max_entries)
    ]
    return torch.cat(sums).view(nodes.shape[0], -1)[:, : nodes.shape[1]]


def _farthest(nodes: Tensor, values: Tensor) -> Tensor:
    """The row of each node with the largest value, (B, 1); -1 for an empty node."""
    position = values.masked_fill(nodes < 0, -torch.inf).argmax(1, keepdim=True)
    return nodes.gather(1, position)


def _sample_rows(nodes: Tensor, generator: torch.Generator) -> Tensor:
    """Up to `_CENTROID` different rows of each node, one at random from each of as many runs."""
    sizes = (nodes >= 0).sum(1, keepdim=True)
    starts = torch.arange(_CENTROID + 1, device=nodes.device) * sizes // _CENTROID
    lengths = starts.diff(dim=1)
    draws = torch.rand(lengths.shape, dtype=torch.float64, generator=generator).to(nodes.device)
    positions = starts[:, :-1] + (draws * lengths).long()
    sample = nodes.gather(1, positions.clamp(max=nodes.shape[1] - 1))
    return sample.masked_fill(lengths == 0, -1)


def _bounds(num_rows: int, level: int, device: torch.device) -> Tensor:
    """Where the nodes of a level begin and end, (2**level + 1,)."""
    return torch.arange((1 << level) + 1, device=device) * num_rows // (1 << level)


def node_rows(rows: Tensor, level: int) -> Tensor:
    """Rows of the nodes of a level, (2**level, m), padded with -1 at the end."""
    bounds = _bounds(rows.numel(), level, rows.device)
    width = -(-rows.numel() // (1 << level))
    positions = bounds[:-1, None] + torch.arange(width, device=rows.device)
    padded = torch.cat([rows, rows.new_full((1,), -1)])  # the last node may be one row short
    return padded[positions].masked_fill_(positions >= bounds[1:, None], -1)


def _start(
    source: EntrySource, ordering: str | Tensor, orders: Mapping[str, Tensor] | None
) -> tuple[Tensor, str]:
    """The rows in the order that a tree starts from, and its name."""
    size = source.shape[0]
    if isinstance(ordering, Tensor):
        return _permutation(ordering, source, "ordering"), "given"
    if isinstance(ordering, str) and ordering in _ORDERINGS:
        return torch.arange(size, device=source.device), ordering
    orders = structural_orders(source) if orders is None else orders
    choices = ", ".join(map(repr, [*_ORDERINGS, *orders]))
    expected = f"one of {choices}, or a permutation of the {size} rows as an integer tensor"
    if not isinstance(ordering, str):
        raise TypeError(f"ordering must be {expected}; got {type(ordering).__name__}")
    if ordering not in orders:
        raise ValueError(f"ordering must be {expected}; got {ordering!r}")
    return _permutation(orders[ordering], source, f"order {ordering!r} of the source"), ordering


def _permutation(order: Tensor, source: EntrySource, name: str) -> Tensor:
    """Check that ``order`` is a permutation; return it as int64 on the source's device."""
    size, device, dtype = source.shape[0], source.device, order.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"{name} must hold integers; got values of type {dtype}")
    expected = f"{name} must be a permutation of range({size}), of shape ({size},)"
    if order.shape != (size,):
        raise ValueError(f"{expected}; got shape {tuple(order.shape)}")
    order = order.to(device=device, dtype=torch.long)
    missing = torch.ones(size, dtype=torch.bool, device=device)
    missing[order[(order >= 0) & (order < size)]] = False
    if bool(missing.any()):
        raise ValueError(f"{expected}; row {int(missing.int().argmax())} is missing")
    return order
