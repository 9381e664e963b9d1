"""Diagonal of the inverse, from the root down, with the diagonal blocks of the inverse alone.

Given Σ, the block of the inverse for the skeleton S of a node as the parent leaves it, the rows R
that were eliminated have (notation of `elimination`)

    V = E J Z,   C_RR = E J Eᵀ + V Σ Vᵀ,   C_RS = −V Σ − C_RR W,
    C_SS = Σ + Σ Vᵀ W + Wᵀ V Σ + Wᵀ C_RR W,

which is the block of the inverse for all rows of the node; its diagonal blocks for the skeletons of
the children are their Σ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hcurv.hierarchical.solving.elimination import Elimination, LevelFactor, Split, permute

__all__ = ["inverse_diagonal", "skeleton_blocks"]

# Blocks are computed in batches of at most this many floats, which bounds the memory.
_BLOCK_FLOATS = 2**24


def skeleton_blocks(
    levels: tuple[LevelFactor, ...], known: Sequence[tuple[Tensor, Tensor]] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Return nodes of the lowest level, ascending, and their Σ, by groups.

    Args:
        levels: from the leaves to the root.
        known: the same for the nodes of the uppermost level, if that is not the root.
    """
    found = list(known)
    for level in reversed(levels[1:]):
        found = [
            part
            for elimination in level.eliminations
            for part in _children(elimination, level.split, found)
        ]
    return found


def inverse_diagonal(
    levels: tuple[LevelFactor, ...], above: Sequence[tuple[Tensor, Tensor]] = ()
) -> Tensor:
    """Return the diagonal of the inverse in tree order, (rows,), in double precision.

    Args:
        levels: from the leaves to the root.
        above: Σ of the nodes of the uppermost level, if that is not the root.
    """
    known, leaves = skeleton_blocks(levels, above), levels[0]
    result = torch.zeros(
        leaves.size_below + 1, dtype=torch.float64, device=leaves.split.starts.device
    )
    for elimination in leaves.eliminations:
        for part in _batches(elimination):
            _set_diagonal(result, elimination, part, _select(known, elimination, part))
    return result[:-1]


def _batches(elimination: Elimination) -> list[slice]:
    """Return ranges of the nodes of an elimination whose blocks fit into a batch."""
    number, num_rest, rank = elimination.weights.shape
    step = max(1, _BLOCK_FLOATS // max(1, (num_rest + rank) ** 2))
    return [slice(start, start + step) for start in range(0, number, step)]


def _select(known: list[tuple[Tensor, Tensor]], elimination: Elimination, part: slice) -> Tensor:
    """Return Σ of some nodes, (B, r, r)."""
    nodes, rank = elimination.nodes[part], elimination.weights.shape[2]
    result = torch.zeros(nodes.numel(), rank, rank, dtype=torch.float64, device=nodes.device)
    for owners, values in known:
        place = torch.searchsorted(owners, nodes).clamp_(max=owners.numel() - 1)
        own = owners[place] == nodes
        size = min(rank, values.shape[1])
        result[own, :size, :size] = values[place[own], :size, :size]
    return result


def _factors_of(elimination: Elimination, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, E, E J and V = E J Z of some nodes."""
    weights, root, cross = (
        values[part].double()
        for values in (elimination.weights, elimination.root, elimination.cross)
    )
    signed = root if elimination.signs is None else root * elimination.signs[part, None].double()
    return weights, root, signed, signed @ cross


def _children(
    elimination: Elimination, split: Split, known: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Return Σ of the left and of the right children of nodes."""
    found = []
    for part in _batches(elimination):
        weights, root, signed, mixed = _factors_of(elimination, part)
        above = _select(known, elimination, part)
        rank, num_rest = weights.shape[2], weights.shape[1]
        spread = mixed @ above
        block = torch.zeros(
            weights.shape[0],
            rank + num_rest + 1,
            rank + num_rest + 1,
            dtype=torch.float64,
            device=weights.device,
        )
        rest = torch.baddbmm(signed @ root.transpose(1, 2), spread, mixed.transpose(1, 2))
        turned = rest @ weights
        back = spread.transpose(1, 2) @ weights
        block[:, rank:-1, rank:-1] = rest
        block[:, rank:-1, :rank] = -spread - turned
        block[:, :rank, rank:-1] = block[:, rank:-1, :rank].transpose(1, 2)
        block[:, :rank, :rank] = (
            above + back + back.transpose(1, 2) + weights.transpose(1, 2) @ turned
        )
        nodes = elimination.nodes[part]
        order = torch.cat([elimination.skeleton[part], elimination.rest[part]], 1)
        places = split.places(nodes, order)
        left, right = split.widths(nodes)
        # Where each row of the padded pair of children lies in the block; the last is zero.
        inverse = torch.full(
            (nodes.numel(), left + right + 1), rank + num_rest, device=nodes.device
        )
        numbers = torch.arange(rank + num_rest, device=nodes.device).expand_as(places)
        inverse.scatter_(1, places, numbers)
        inverse = inverse[:, :-1]
        found.append((2 * nodes, permute(block, inverse[:, :left])))
        found.append((2 * nodes + 1, permute(block, inverse[:, left:])))
    return found


def _set_diagonal(result: Tensor, elimination: Elimination, part: slice, above: Tensor) -> None:
    """Set the diagonal of the inverse for the rows of some leaves."""
    weights, root, signed, mixed = _factors_of(elimination, part)
    spread = mixed @ above
    result[elimination.rest[part]] = (signed * root).sum(2) + (spread * mixed).sum(2)
    kept = above.diagonal(dim1=1, dim2=2).clone()
    back = mixed.transpose(1, 2) @ weights  # VᵀW
    kept += 2 * (above * back.transpose(1, 2)).sum(2)
    inner = root.transpose(1, 2) @ weights
    outer = signed.transpose(1, 2) @ weights
    kept += (inner * outer).sum(1)
    kept += (back * (above @ back)).sum(1)
    result[elimination.skeleton[part]] = kept
