"""Uses of a parameter whose rows have been assigned to the points of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from hcurv.network.model.contributions import Contribution
from hcurv.network.model.point_rows import RowOrder

__all__ = ["BatchShape", "Gradients", "OrderedUse", "by_point"]

Gradients: TypeAlias = Callable[[Any], Tensor | None]


class BatchShape(NamedTuple):
    """The sizes of a batch.

    Attributes:
        num_points: b.
        num_rows: q.
        like: a tensor of the wanted type and device.
    """

    num_points: int
    num_rows: int
    like: Tensor


class OrderedUse(NamedTuple):
    """A contribution, and how its rows are ordered."""

    use: Contribution
    order: RowOrder


def by_point(ordered: OrderedUse, rows: Tensor, num_points: int) -> Tensor:
    """Rows (R, d, L) as (b, d, T), with all positions of a point side by side."""
    table = ordered.order.by_point(rows, num_points)  # (b, R/b, d, L)
    return table.transpose(1, 2).flatten(2)
