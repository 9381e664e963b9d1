"""Group small matrices of many shapes into few batches with little padding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_by_shape"]

_MAX_GROUPS = 24
_MAX_PADDING = 0.04  # of the entries


def group_by_shape(num_rows: Tensor, num_cols: Tensor) -> list[Tensor]:
    """Partition matrices, so that padding each group to its largest shape costs little.

    Starting from one group, the cut (by rows or by columns) that saves most entries is made until
    padding is a few per cent or there are two dozen groups.

    Args:
        num_rows: (B,).
        num_cols: (B,).

    Returns:
        Positions of the members of each group, ascending; matrices without entries are in one
        group of their own.
    """
    shapes, members = torch.unique(torch.stack([num_rows, num_cols], 1), dim=0, return_inverse=True)
    counts = members.bincount(minlength=shapes.shape[0])
    entries = counts * shapes.prod(1)
    empty = shapes.prod(1) == 0
    groups = [(~empty).nonzero().squeeze(1)]
    needed = int(entries.sum())
    cuts = [_best_cut(shapes, counts, group) for group in groups]
    while len(groups) < _MAX_GROUPS:
        padding = sum(_padded(shapes, counts, group) for group in groups) - needed
        best = max(range(len(groups)), key=lambda k: cuts[k][0])
        saving, left, right = cuts[best]
        if saving <= 0 or padding <= _MAX_PADDING * needed:
            break
        groups[best : best + 1] = [left, right]
        cuts[best : best + 1] = [_best_cut(shapes, counts, part) for part in (left, right)]
    groups.append(empty.nonzero().squeeze(1))
    found = [torch.isin(members, group).nonzero().squeeze(1) for group in groups]
    return [group for group in found if group.numel()]


def _padded(shapes: Tensor, counts: Tensor, group: Tensor) -> int:
    if group.numel() == 0:
        return 0
    return int(counts[group].sum() * shapes[group].amax(0).prod())


def _best_cut(shapes: Tensor, counts: Tensor, group: Tensor) -> tuple[int, Tensor, Tensor]:
    """The saving of the best cut of a group, and its two parts."""
    best = (0, group, group[:0])
    if group.numel() < 2:
        return best
    whole = _padded(shapes, counts, group)
    for axis in (0, 1):
        order = group[shapes[group, axis].argsort(stable=True)]
        sizes, numbers = shapes[order], counts[order]
        upto = numbers.cumsum(0)
        before = upto * sizes.cummax(0).values.prod(1)
        after = (upto[-1] - upto + numbers) * sizes.flip(0).cummax(0).values.flip(0).prod(1)
        savings = whole - (before[:-1] + after[1:])
        cut = int(savings.argmax())
        if int(savings[cut]) > best[0]:
            best = (int(savings[cut]), order[: cut + 1], order[cut + 1 :])
    return best
