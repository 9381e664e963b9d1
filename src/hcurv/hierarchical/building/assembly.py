"""From interpolations of single nodes to the batches of blocks that a level stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.building.level_step import NodeSkeletons
from hcurv.hierarchical.parts.levels import Basis, Coupling, LeafBlocks, row_table
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.ranks import OneRank
from hcurv.sources import blocks

__all__ = [
    "Batch",
    "NodeInterpolations",
    "basis_batches",
    "coupling_batches",
    "leaf_blocks",
    "make_bases",
    "make_couplings",
    "skeleton_places",
    "skeleton_scales",
]

# A source is asked for so many entries at a time: 64 MB in double precision.
_BLOCK_ENTRIES = 2**23
# Asking once more takes about as long as so many entries.
_REQUEST_ENTRIES = 2**17


def leaf_blocks(
    source: EntrySource,
    rows: Tensor,
    bounds: Tensor,
    ranks: OneRank | None = None,
    width: int | None = None,
) -> LeafBlocks:
    """Diagonal blocks of all leaves.

    Args:
        source: the matrix.
        rows: all its rows in tree order, (M,).
        bounds: where the leaves begin and end, (number of leaves + 1,).
        ranks: the ranks that do the same for other leaves; None for one process.
        width: rows of the largest leaf of all ranks; None if all leaves are here.
    """
    counts = bounds.diff()
    width = int(counts.max()) if width is None else width  # leaves differ by one row at most
    num_leaves = counts.numel()
    with (OneRank() if ranks is None else ranks).agreed():
        require_bytes(
            num_leaves * width**2 * source.dtype.itemsize,
            source.device,
            f"the diagonal blocks of {num_leaves} leaves",
            ("choose a smaller leaf_size", "use float32"),
        )
    index = _lookup(rows, row_table(bounds[:-1], counts, width, rows.numel()))
    values = torch.empty(num_leaves, width, width, dtype=source.dtype, device=source.device)
    step = max(1, _BLOCK_ENTRIES // max(1, width**2))
    for start in range(0, num_leaves, step):
        part = index[start : start + step]
        values[start : start + step] = blocks(source, part, part)
    return LeafBlocks.of(bounds, values)


def _lookup(rows: Tensor, positions: Tensor) -> Tensor:
    """Matrix rows at positions in ``rows``; -1 for the position after the last: padding."""
    return torch.cat([rows, rows.new_full((1,), -1)])[positions]


@dataclass(frozen=True)
class NodeInterpolations:
    """Skeletons of some nodes, trimmed to what is stored.

    Attributes:
        nodes: numbers of the nodes, (b,).
        ranks: number of skeleton rows, (b,).
        skeleton: places of the skeleton rows within the rows of a node, (b, r).
        rest: places of the other rows, (b, m); meaningful up to the number of them.
        weights: rows ``rest`` from rows ``skeleton``, (b, m, r), zero beyond.
        scales: how much an error in a skeleton row weighs in the whole matrix, (b, r).
    """

    nodes: Tensor
    ranks: Tensor
    skeleton: Tensor
    rest: Tensor
    weights: Tensor
    scales: Tensor

    @classmethod
    def trim(cls, nodes: Tensor, counts: Tensor, found: NodeSkeletons) -> NodeInterpolations:
        """Drop the weights of skeleton rows, which are the identity, and of padding.

        Args:
            nodes: numbers of the nodes, (b,).
            counts: number of their rows, (b,).
            found: their skeletons.
        """
        ranks, weights = found.ranks, found.weights
        num_nodes, width, rank = weights.shape
        within = torch.arange(rank, device=nodes.device) < ranks[:, None]
        is_dropped = torch.arange(width, device=nodes.device) >= counts[:, None]
        is_dropped |= (
            torch.zeros_like(is_dropped, dtype=torch.int8)
            .scatter_add_(1, found.skeleton, within.to(torch.int8))
            .bool()
        )
        num_rest = int((counts - ranks).max()) if num_nodes else 0
        rest = is_dropped.to(torch.int8).argsort(dim=1, stable=True)[:, :num_rest]
        kept = weights.gather(1, rest[:, :, None].expand(-1, -1, rank))
        kept = kept.masked_fill_(is_dropped.gather(1, rest)[:, :, None], 0.0)
        return cls(nodes, ranks, found.skeleton, rest, kept, found.scales)


def skeleton_places(bases: tuple[Basis, ...], ranks: Tensor) -> Tensor:
    """Where the skeleton rows of all nodes lie among the rows of their level, (sum of ranks,)."""
    result = torch.zeros(int(ranks.sum()) + 1, dtype=torch.long, device=ranks.device)
    for basis in bases:
        result[basis.target] = basis.skeleton
    return result[:-1]


def skeleton_scales(interpolations: list[NodeInterpolations], ranks: Tensor) -> Tensor:
    """How much errors in the skeleton rows of all nodes weigh, (sum of ranks + 1,).

    The last number is for padding.
    """
    starts, size = ranks.cumsum(0) - ranks, int(ranks.sum())
    result = interpolations[0].scales.new_ones(size + 1)
    for some in interpolations:
        width = some.scales.shape[1]
        result[row_table(starts[some.nodes], some.ranks, width, size)] = some.scales
    result[-1] = 1.0
    return result


class Batch(NamedTuple):
    """Nodes, or pairs of nodes, whose blocks are stored together.

    Attributes:
        members: their numbers, ascending.
        height: largest number of rows of a block.
        width: largest number of columns.
    """

    members: Tensor
    height: int
    width: int


def basis_batches(counts: Tensor, ranks: Tensor) -> list[Batch]:
    """Group the nodes of a level by the shapes of their bases; nodes of rank 0 have none."""
    found = []
    # A node that consists of skeleton rows stores nothing, but they have to be carried upwards.
    for group in group_by_shape((counts - ranks).clamp(min=1), ranks):
        rank, num_rest = int(ranks[group].max()), int((counts - ranks)[group].max())
        if rank:
            found.append(Batch(group, num_rest, rank))
    return found


def coupling_batches(counts: Tensor, pairs: Tensor) -> list[Batch]:
    """Group pairs of nodes by the shapes of their blocks; empty blocks are left out."""
    sizes, found = counts[pairs], []
    for group in group_by_shape(sizes[:, 0], sizes[:, 1]):
        height, width = sizes[group].amax(0).tolist()
        if int(sizes[group].prod(1).max()):
            found.append(Batch(group, height, width))
    return found


def make_bases(
    interpolations: list[NodeInterpolations],
    starts: Tensor,
    counts: Tensor,
    ranks: Tensor,
    size_below: int,
    batches: list[Batch],
) -> tuple[Basis, ...]:
    """Batch the bases of a level by shape; nodes of rank 0 have none.

    Args:
        interpolations: those of all nodes, in any order.
        starts: first position of each node's rows on the level below, (nodes,).
        counts: number of its rows, (nodes,).
        ranks: ranks of all nodes, (nodes,).
        size_below: number of rows on the level below, the position that stands for padding.
        batches: which nodes are stored together.
    """
    result = []
    for group, num_rest, rank in batches:
        places = torch.full_like(ranks, -1)  # of nodes in the group
        places[group] = torch.arange(group.numel(), device=group.device)
        weights = interpolations[0].weights.new_zeros(group.numel(), num_rest, rank)
        skeleton = ranks.new_full((group.numel(), rank), size_below)
        rest = ranks.new_full((group.numel(), num_rest), size_below)
        for some in interpolations:
            index = (places[some.nodes] >= 0).nonzero().squeeze(1)
            if index.numel() == 0:
                continue
            nodes = some.nodes[index]
            place, first = places[nodes], starts[nodes, None]
            columns = min(rank, some.skeleton.shape[1])
            rows = min(num_rest, some.rest.shape[1])
            beyond = torch.arange(columns, device=nodes.device) >= ranks[nodes, None]
            positions = some.skeleton[index, :columns] + first
            skeleton[place, :columns] = positions.masked_fill(beyond, size_below)
            beyond = torch.arange(rows, device=nodes.device) >= (counts - ranks)[nodes, None]
            positions = some.rest[index, :rows] + first
            rest[place, :rows] = positions.masked_fill(beyond, size_below)
            weights[place, :rows, :columns] = some.weights[index, :rows, :columns]
        result.append(Basis.of(group, ranks, skeleton, rest, weights))
    return tuple(result)


def make_couplings(
    source: EntrySource,
    rows: Tensor,
    counts: Tensor,
    pairs: Tensor,
    batches: list[Batch] | None = None,
) -> tuple[Coupling, ...]:
    """Blocks of entries between the rows of pairs of nodes, batched by shape.

    Args:
        source: the matrix.
        rows: matrix rows of all nodes of a level, node by node.
        counts: number of rows of each node.
        pairs: pairs of nodes, (P, 2).
        batches: which pairs are stored together; None to choose.
    """
    if pairs.shape[0] == 0:
        return ()
    sizes = counts[pairs]
    requests = [
        (group, _coupling_entries(source, rows, counts, pairs[group]))
        for group in group_by_shape(sizes[:, 0], sizes[:, 1], _REQUEST_ENTRIES)
    ]
    places = pairs.new_zeros(pairs.shape[0])
    result = []
    for group, *shape in coupling_batches(counts, pairs) if batches is None else batches:
        is_all = len(requests) == 1 and group.numel() == pairs.shape[0]
        if is_all and list(requests[0][1].shape[1:]) == shape:
            values = requests[0][1]
        else:
            places.fill_(-1)
            places[group] = torch.arange(group.numel(), device=group.device)
            values = torch.zeros(group.numel(), *shape, dtype=source.dtype, device=source.device)
            for members, entries in requests:
                own = places[members]
                found = (own >= 0).nonzero().squeeze(1)
                if found.numel():
                    height, width = (
                        min(a, b) for a, b in zip(shape, entries.shape[1:], strict=True)
                    )
                    values[own[found], :height, :width] = entries[found, :height, :width]
        result.append(Coupling.of(pairs[group], counts, values))
    return tuple(result)


def _coupling_entries(source: EntrySource, rows: Tensor, counts: Tensor, pairs: Tensor) -> Tensor:
    """Blocks of entries between the rows of pairs of nodes, padded, (P, m, k)."""
    offsets = counts.cumsum(0) - counts
    num_left, num_right = counts[pairs].amax(0).tolist()
    left_rows, right_rows = (
        _lookup(rows, row_table(offsets[nodes], counts[nodes], width, rows.numel()))
        for nodes, width in zip(pairs.T, (num_left, num_right), strict=True)
    )
    step = max(1, _BLOCK_ENTRIES // max(1, num_left * num_right))
    parts = [
        blocks(source, left_rows[start : start + step], right_rows[start : start + step])
        for start in range(0, pairs.shape[0], step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
