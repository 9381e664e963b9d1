"""Group small matrices of many shapes into few batches with little padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["group_by_shape"]

_Numbers = npt.NDArray[np.int64]

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
    rows, cols = num_rows.cpu().numpy(), num_cols.cpu().numpy()
    # One number for each shape, in the same order: these are found far faster than pairs.
    base = int(cols.max()) + 1 if cols.size else 1
    codes, members, counts = np.unique(rows * base + cols, return_inverse=True, return_counts=True)
    shapes = np.stack([codes // base, codes % base], 1)
    sizes = shapes.prod(1)
    needed = int((counts * sizes).sum())
    groups = [np.flatnonzero(sizes)]
    cuts = [_best_cut(shapes, counts, groups[0])]
    padding = _padded(shapes, counts, groups[0]) - needed
    while len(groups) < _MAX_GROUPS and padding > _MAX_PADDING * needed:
        best = max(range(len(groups)), key=lambda k: cuts[k][0])
        saving, left, right = cuts[best]
        if saving <= least_saving:
            break
        padding -= saving
        groups[best : best + 1] = [left, right]
        cuts[best : best + 1] = [_best_cut(shapes, counts, part) for part in (left, right)]
    groups.append(np.flatnonzero(sizes == 0))
    number = np.empty(len(codes), dtype=np.int64)
    for place, group in enumerate(groups):
        number[group] = place
    of_member = number[members]
    found = (np.flatnonzero(of_member == place) for place in range(len(groups)))
    return [torch.from_numpy(group).to(num_rows.device) for group in found if group.size]


def _padded(shapes: _Numbers, counts: _Numbers, group: _Numbers) -> int:
    if group.size == 0:
        return 0
    return int(counts[group].sum() * shapes[group].max(0).prod())


def _best_cut(
    shapes: _Numbers, counts: _Numbers, group: _Numbers
) -> tuple[int, _Numbers, _Numbers]:
    """Return how many entries the best cut of a group saves, and its two parts."""
    best = (0, group, group[:0])
    if group.size < 2:
        return best
    whole = _padded(shapes, counts, group)
    for axis in (0, 1):
        order = group[shapes[group, axis].argsort(kind="stable")]
        sizes, numbers = shapes[order], counts[order]
        upto = numbers.cumsum()
        before = upto * np.maximum.accumulate(sizes).prod(1)
        after = (upto[-1] - upto + numbers) * np.maximum.accumulate(sizes[::-1])[::-1].prod(1)
        savings = whole - (before[:-1] + after[1:])
        cut = int(savings.argmax())
        if int(savings[cut]) > best[0]:
            best = (int(savings[cut]), order[: cut + 1], order[cut + 1 :])
    return best
