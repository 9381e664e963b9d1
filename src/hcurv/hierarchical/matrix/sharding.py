"""Between the numbering of one rank and that of the whole tree.

A rank numbers its own nodes and rows from 0 on every level. In the whole tree they begin at some
node, and at some row of the level. Padding is the position after the last row, there as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Basis, Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix

__all__ = ["Offsets", "gathered_tree", "level_offsets", "whole_tensors"]


@dataclass(frozen=True)
class Offsets:
    """Where the nodes and rows of a rank begin on a level.

    Attributes:
        node: the first node.
        below: the first of their rows on the level below.
        num_below: how many rows the rank has there.
        size_below: how many rows all ranks have there.
    """

    node: int
    below: int
    num_below: int
    size_below: int

    def to_whole(self, positions: Tensor) -> Tensor:
        """Positions on the level below, in the whole tree."""
        shifted = positions + self.below
        return shifted.masked_fill_(positions >= self.num_below, self.size_below)

    def to_own(self, positions: Tensor) -> Tensor:
        """Positions of the whole tree as those of this rank."""
        shifted = positions - self.below
        return shifted.masked_fill_(positions >= self.size_below, self.num_below)


def level_offsets(
    nodes: NodeShare, depth: int, node_ranks: Sequence[Tensor], number: int
) -> Offsets:
    """The offsets of a level of own nodes.

    Args:
        nodes: the own nodes.
        depth: depth of the tree.
        node_ranks: ranks of all nodes, from the leaves up.
        number: the level, counted from the leaves.
    """
    depth -= number
    if number == 0:
        share = nodes.share
        return Offsets(nodes.first(depth), share.start, share.num_own, share.num_rows)
    below = node_ranks[number - 1]
    counts = nodes.row_counts(below, depth + 1)
    rank = nodes.share.ranks.rank
    return Offsets(nodes.first(depth), sum(counts[:rank]), counts[rank], int(below.sum()))


def whole_tensors(matrix: DistributedHMatrix) -> dict[str, Tensor]:
    """The tensors of the own subtrees, in the numbering of the whole tree, by name.

    They are named as in `storage`. Every rank has the same names, and of each tensor another part
    of its first axis.
    """
    tensors = {"leaves.values": matrix.leaves.values}
    for number, level in enumerate(matrix.levels):
        offsets = level_offsets(matrix.nodes, matrix.tree.depth, matrix.node_ranks, number)
        for place, basis in enumerate(level.bases):
            name = f"levels.{number}.bases.{place}"
            tensors[f"{name}.nodes"] = basis.nodes + offsets.node
            tensors[f"{name}.skeleton"] = offsets.to_whole(basis.skeleton)
            tensors[f"{name}.rest"] = offsets.to_whole(basis.rest)
            tensors[f"{name}.weights"] = basis.weights
        for place, coupling in enumerate(level.couplings):
            name = f"levels.{number}.couplings.{place}"
            tensors[f"{name}.pairs"] = coupling.pairs + offsets.node
            tensors[f"{name}.values"] = coupling.values
    return tensors


def gathered_tree(matrix: DistributedHMatrix) -> tuple[LeafBlocks, tuple[Level, ...]]:
    """The leaf blocks and levels of all ranks, on every rank."""
    return _assembled(matrix, _gathered(whole_tensors(matrix), matrix.share.ranks))


def _gathered(own: dict[str, Tensor], ranks: OneRank) -> dict[str, Tensor]:
    """Tensors of all ranks, joined along their first axis, in few messages.

    Args:
        own: those of this rank. All ranks have the same names, and sizes of the other axes.
        ranks: the ranks.
    """
    lengths = ranks.gather(torch.tensor([[tensor.shape[0] for tensor in own.values()]]))
    found: dict[str, list[Tensor]] = {name: [] for name in own}
    for is_float in (False, True):
        chosen = [
            (number, name, tensor)
            for number, (name, tensor) in enumerate(own.items())
            if tensor.is_floating_point() == is_float
        ]
        if not chosen:
            continue
        sizes = [
            [int(length[0, number]) * tensor.shape[1:].numel() for number, _, tensor in chosen]
            for length in lengths
        ]
        flat = torch.cat([tensor.reshape(-1) for _, _, tensor in chosen])
        every = ranks.collect(flat, [sum(size) for size in sizes]).split([sum(s) for s in sizes])
        for size, length, values in zip(sizes, lengths, every, strict=True):
            parts = zip(values.split(size), chosen, strict=True)
            for part, (number, name, tensor) in parts:
                shape = (int(length[0, number]), *tensor.shape[1:])
                found[name].append(part.view(shape))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _assembled(
    matrix: DistributedHMatrix, tensors: dict[str, Tensor]
) -> tuple[LeafBlocks, tuple[Level, ...]]:
    """Leaf blocks and levels of the whole tree, from the tensors of all ranks."""
    tree, cut, top = matrix.tree, matrix.nodes.cut, matrix.top.levels
    leaves = LeafBlocks.of(tree.bounds(tree.depth), tensors["leaves.values"])
    levels: list[Level] = []
    size_below = tree.num_kept
    for number, ranks in enumerate(matrix.node_ranks):
        own, bases, couplings = matrix.levels[number], [], []
        for place in range(len(own.bases)):
            name = f"levels.{number}.bases.{place}"
            parts = [tensors[f"{name}.{part}"] for part in ("skeleton", "rest", "weights")]
            bases.append(Basis.of(tensors[f"{name}.nodes"], ranks, *parts))
        for place in range(len(own.couplings)):
            name = f"levels.{number}.couplings.{place}"
            pairs, values = tensors[f"{name}.pairs"], tensors[f"{name}.values"]
            couplings.append(Coupling.of(pairs, ranks, values))
        is_cut = tree.depth - number == cut
        mine = top[0].couplings if is_cut else tuple(couplings)
        levels.append(Level(ranks, size_below, tuple(bases), mine))
        size_below = levels[-1].size
    return leaves, (*levels, *top[1:])
