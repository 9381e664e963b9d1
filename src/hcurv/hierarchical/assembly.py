"""From interpolations of single nodes to the batches of a level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.hierarchical.buckets import group_by_shape
from hcurv.hierarchical.levels import Basis, Coupling, LeafBlocks, row_table
from hcurv.interpolative import Interpolation
from hcurv.operators import EntrySource
from hcurv.sources import blocks

__all__ = ["NodeInterpolations", "leaf_blocks", "make_bases", "make_couplings"]

_BLOCK_ENTRIES = 2**23  # asked of a source at a time


def leaf_blocks(source: EntrySource, rows: Tensor, bounds: Tensor) -> LeafBlocks:
    """Diagonal blocks of all leaves; ``rows`` are all rows in tree order."""
    counts = bounds.diff()
    width, num_leaves = int(counts.max()), counts.numel()  # leaves differ by one row at most
    index = _lookup(rows, row_table(bounds[:-1], counts, width, rows.numel()))
    values = torch.empty(num_leaves, width, width, dtype=source.dtype, device=source.device)
    step = max(1, _BLOCK_ENTRIES // max(1, width**2))
    for start in range(0, num_leaves, step):
        part = index[start : start + step]
        values[start : start + step] = blocks(source, part, part)
    return LeafBlocks.of(bounds, values)


def _lookup(rows: Tensor, positions: Tensor) -> Tensor:
    """Matrix rows at positions; -1 for the padding."""
    return torch.cat([rows, rows.new_full((1,), -1)])[positions]


@dataclass(frozen=True)
class NodeInterpolations:
    """Interpolations of some nodes, trimmed to what is stored.

    Attributes:
        nodes: (b,).
        ranks: (b,).
        skeleton: places within the node's rows, (b, r).
        rest: places of the other rows, (b, m); meaningful up to the number of them.
        weights: (b, m, r), zero beyond.
    """

    nodes: Tensor
    ranks: Tensor
    skeleton: Tensor
    rest: Tensor
    weights: Tensor

    @classmethod
    def trim(
        cls, nodes: Tensor, counts: Tensor, interpolation: Interpolation
    ) -> NodeInterpolations:
        """Drop the rows of skeletons (identity) and of padding."""
        ranks, weights = interpolation.ranks, interpolation.weights
        num_nodes, width, rank = weights.shape
        places = torch.arange(width, device=nodes.device)
        within = torch.arange(rank, device=nodes.device) < ranks[:, None]
        taken = places >= counts[:, None]
        skeleton = torch.where(within, interpolation.skeleton, 0)
        taken |= (
            torch.zeros_like(taken, dtype=torch.int8)
            .scatter_add_(1, skeleton, within.to(torch.int8))
            .bool()
        )
        num_rest = int((counts - ranks).max()) if num_nodes else 0
        rest = taken.to(torch.int8).argsort(dim=1, stable=True)[:, :num_rest]
        kept = weights.gather(1, rest[:, :, None].expand(-1, -1, rank))
        kept = kept.masked_fill_(taken.gather(1, rest)[:, :, None], 0.0)
        return cls(nodes, ranks, skeleton, rest, kept)


def make_bases(
    parts: list[NodeInterpolations], starts: Tensor, counts: Tensor, ranks: Tensor, size_below: int
) -> tuple[Basis, ...]:
    """Batch the bases of a level by shape; nodes of rank 0 have none.

    Args:
        parts: of all nodes, in any order.
        starts: first position of each node's rows on the level below, (nodes,).
        counts: number of its rows, (nodes,).
        ranks: ranks of all nodes, (nodes,).
        size_below: number of rows on the level below, the position that stands for padding.
    """
    # A node without rest rows stores nothing, but its skeleton still has to be carried upwards.
    groups = group_by_shape((counts - ranks).clamp(min=1), ranks)
    result = []
    for group in groups:
        rank, num_rest = int(ranks[group].max()), int((counts - ranks)[group].max())
        if rank == 0:
            continue
        slots = torch.full_like(ranks, -1)
        slots[group] = torch.arange(group.numel(), device=group.device)
        dtype = parts[0].weights.dtype
        weights = torch.zeros(group.numel(), num_rest, rank, dtype=dtype, device=group.device)
        skeleton = torch.full(
            (group.numel(), rank), size_below, dtype=torch.long, device=group.device
        )
        rest = skeleton.new_full((group.numel(), num_rest), size_below)
        for part in parts:
            index = (slots[part.nodes] >= 0).nonzero().squeeze(1)
            if index.numel() == 0:
                continue
            nodes = part.nodes[index]
            slot, first = slots[nodes], starts[nodes, None]
            columns = min(rank, part.skeleton.shape[1])
            rows = min(num_rest, part.rest.shape[1])
            own = part.skeleton[index, :columns] + first
            beyond = torch.arange(columns, device=nodes.device) >= ranks[nodes, None]
            skeleton[slot, :columns] = own.masked_fill(beyond, size_below)
            other = part.rest[index, :rows] + first
            outside = torch.arange(rows, device=nodes.device) >= (counts - ranks)[nodes, None]
            rest[slot, :rows] = other.masked_fill(outside, size_below)
            weights[slot, :rows, :columns] = part.weights[index, :rows, :columns]
        result.append(Basis.of(group, ranks, skeleton, rest, weights))
    return tuple(result)


def make_couplings(
    source: EntrySource, rows: Tensor, counts: Tensor, pairs: Tensor
) -> tuple[Coupling, ...]:
    """Entries between the rows of pairs of nodes.

    Args:
        source: entries.
        rows: matrix rows of all nodes of a level.
        counts: number of rows of each node.
        pairs: (P, 2).
    """
    if pairs.shape[0] == 0:
        return ()
    offsets = counts.cumsum(0) - counts
    sizes = counts[pairs]
    result = []
    for group in group_by_shape(sizes[:, 0], sizes[:, 1]):
        num_left, num_right = sizes[group].amax(0).tolist()
        if int(sizes[group].prod(1).max()) == 0:
            continue
        left_rows, right_rows = (
            _lookup(rows, row_table(offsets[nodes], counts[nodes], width, rows.numel()))
            for nodes, width in zip(pairs[group].T, (num_left, num_right), strict=True)
        )
        step = max(1, _BLOCK_ENTRIES // (num_left * num_right))
        values = torch.cat(
            [
                blocks(source, left_rows[start : start + step], right_rows[start : start + step])
                for start in range(0, group.numel(), step)
            ]
        )
        result.append(Coupling.of(pairs[group], counts, values))
    return tuple(result)
