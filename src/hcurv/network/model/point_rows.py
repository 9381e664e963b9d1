"""Which rows of a function belong to which point.

Rows of a matrix product or a batch of images are often points times positions: point by point, as
in a sequence model with the points first, or position by position, as in a recurrent network. A
backward pass from some of the points shows which: only rows of these points have a derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Probe", "RowOrder", "find_orders", "halves"]


@dataclass(frozen=True)
class RowOrder:
    """Rows are numbered (t·b + i)·inner + s, for point i and positions (t, s).

    Attributes:
        inner: the number of rows of one point that follow each other.
    """

    inner: int

    def by_point(self, rows: Tensor, num_points: int) -> Tensor:
        """Rows (R, …) as (b, R/b, …)."""
        table = rows.reshape(-1, num_points, self.inner, *rows.shape[1:])
        return table.transpose(0, 1).flatten(1, 2)

    def owners(self, num_rows: int, num_points: int) -> Tensor:
        """The point of each row, (R,)."""
        return torch.arange(num_rows).div(self.inner, rounding_mode="floor") % num_points


class Probe(NamedTuple):
    """What a backward pass from some points shows.

    Attributes:
        points: which points, a mask (b,).
        rows: the rows on which their outputs depend, a mask (R,).
    """

    points: Tensor
    rows: Tensor


def halves(num_points: int) -> list[Tensor]:
    """For each binary digit of a point's number, the points that have it and those that do not.

    No two points are in the same halves. So a row that is read as that of a wrong point has a
    derivative in some half to which that point does not belong.

    Returns:
        Masks (b,), none of them empty: two for each digit.
    """
    numbers = torch.arange(num_points)
    digits = [numbers // 2**k % 2 == 1 for k in range((num_points - 1).bit_length())]
    return [half for digit in digits for half in (digit, ~digit)]


def find_orders(num_rows: int, num_points: int, probes: Sequence[Probe]) -> list[RowOrder]:
    """All orders that agree with what was seen, point by point first.

    Args:
        num_rows: the number R of rows.
        num_points: the number b of points.
        probes: what was seen from all `halves`.

    Returns:
        Every one of them is right for these rows. There are several if rows have no derivatives,
        and none if rows are ordered in another way, or are shared by points.
    """
    if num_rows % num_points:
        return []
    per_point = num_rows // num_points
    found = []
    for inner in (size for size in range(per_point, 0, -1) if per_point % size == 0):
        order = RowOrder(inner)
        owners = order.owners(num_rows, num_points)
        if not any(bool((rows & ~points[owners]).any()) for points, rows in probes):
            found.append(order)
    return found
