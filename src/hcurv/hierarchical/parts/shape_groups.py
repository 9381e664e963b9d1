"""Group small matrices of many shapes into few batches with little padding."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_by_shape"]

# More groups mean less padding, but more and smaller batched operations.
_MAX_GROUPS = 24
# Groups are cut until padding is at most this fraction of the entries that are needed.
_MAX_PADDING = 0.04


def group_by_shape(num_rows: Tensor, num_cols: Tensor, least_saving: int = 0) -> list[Tensor]:
    """Partition matrices, so that padding each group to its largest shape costs little.

    All matrices start in one group. The cut (by rows or by columns) that saves most entries is made
    again and again, until padding is a few per cent or there are two dozen groups.

    Args:
        num_rows: number of rows of each matrix, (B,).
        num_cols: number of columns of each matrix, (B,).
        least_saving: entries that a cut has to save. For what is computed and not stored, few
            groups are faster.

    Returns:
        The positions of the members of each group, ascending. Matrices without entries are in a
        group of their own.
    """
    # One number for each shape, in the same order: torch finds unique numbers far faster than rows.
    base = int(num_cols.max()) + 1 if num_cols.numel() else 1
    codes, members = torch.unique(num_rows * base + num_cols, return_inverse=True)
    shapes = torch.stack([codes // base, codes % base], 1)
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
        if saving <= least_saving or padding <= _MAX_PADDING * needed:
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
    """Return how many entries the best cut of a group saves, and its two parts."""
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
