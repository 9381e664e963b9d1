"""Which rows of a function belong to which point.

Rows of a matrix product or a batch of images are often points times positions: point by point, as
in a sequence model with the points first, or position by position, as in a recurrent network. One
backward pass from a single point shows which: only rows of that point have a derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["RowOrder", "find_order"]


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


def find_order(num_rows: int, num_points: int, nonzero: Mapping[int, Tensor]) -> RowOrder | None:
    """The order that agrees with what was seen, point by point if that does.

    Args:
        num_rows: the number R of rows.
        num_points: the number b of points.
        nonzero: for some points, a mask (R,) of the rows on which their outputs depend.

    Returns:
        None if there is none: rows are then ordered in another way.
    """
    if num_rows % num_points:
        return None
    per_point = num_rows // num_points
    sizes = [size for size in range(per_point, 0, -1) if per_point % size == 0]
    for inner in sizes:
        if all(
            bool(((mask.nonzero().squeeze(1) // inner) % num_points == point).all())
            for point, mask in nonzero.items()
        ):
            return RowOrder(inner)
    return None
