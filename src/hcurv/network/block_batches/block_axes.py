"""Rows and columns of many blocks, and the sub-blocks that are evaluated together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.network.jacobians.output_jacobian import UnitGroup
from hcurv.network.layer_factors import Connections

__all__ = ["BlockAxis", "SubBlocks", "distinct", "mark_pairs"]


class SubBlocks(NamedTuple):
    """Rectangles of entries, each within one block, given by ranges of rows and of columns.

    Rows and columns are numbered through all blocks, as `BlockAxis` does.

    Attributes:
        row: the first row of each sub-block.
        num_rows: how many rows it has.
        col: its first column.
        num_cols: how many columns it has.
    """

    row: Tensor
    num_rows: Tensor
    col: Tensor
    num_cols: Tensor

    def select(self, chosen: Tensor | slice) -> SubBlocks:
        """The sub-blocks that a mask, an index or a slice chooses."""
        return SubBlocks(*(values[chosen] for values in self))


class BlockAxis:
    """The rows, or the columns, of B blocks: sorted by unit in each block, then numbered through.

    Args:
        connections: unit and input of each row, (B, m).
        groups: the groups of units.

    Attributes:
        width: m, the rows of one block.
        units: the unit of each row, (B · m,).
        inputs: the input of each row.
        order: the position of each row in its block.
        run: the number of the run of equal units that each row belongs to.
    """

    def __init__(self, connections: Connections, groups: tuple[UnitGroup, ...]) -> None:
        units, order = connections.units.sort(dim=1, stable=True)
        begins = torch.ones_like(units, dtype=torch.bool)
        begins[:, 1:] = units[:, 1:] != units[:, :-1]
        self.width = units.shape[1]
        self.units, self.order = units.view(-1), order.view(-1)
        self.inputs = connections.inputs.gather(1, order).view(-1)
        self.run = begins.view(-1).cumsum(0)
        self._begins = begins.view(-1)
        first = torch.arange(0, units.numel(), self.width, device=units.device)
        self._segments = {
            group: (first + (units < group.start).sum(1), group.contains(units).sum(1))
            for group in groups
        }

    def block(self, rows: Tensor) -> Tensor:
        """The block that each of some rows belongs to."""
        return rows.div(self.width, rounding_mode="floor")

    def segments(self, group: UnitGroup) -> tuple[Tensor, Tensor]:
        """First row and number of rows of a group in each block, (B,) each."""
        return self._segments[group]

    def runs(self, group: UnitGroup) -> tuple[Tensor, Tensor]:
        """First row and number of rows of every run of equal units of a group."""
        rows = self._begins.nonzero().squeeze(1)
        lengths = torch.diff(rows, append=rows.new_tensor([self.units.numel()]))
        chosen = group.contains(self.units[rows])
        return rows[chosen], lengths[chosen]


def distinct(values: Tensor) -> Tensor:
    """The distinct values of each row, as a matrix; shorter rows repeat one of their values."""
    ordered = values.sort(1).values
    position = torch.zeros_like(ordered)
    position[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    width = int(position[:, -1].max()) + 1
    return ordered[:, :1].repeat(1, width).scatter_(1, position, ordered)


def mark_pairs(size: int, rows: Tensor, cols: Tensor) -> Tensor:
    """The unordered pairs of numbers below ``size`` that occur in some block.

    Args:
        size: the numbers run from 0 to size - 1; ``size`` itself stands for no number.
        rows: numbers of the rows of each block, (B, m).
        cols: numbers of the columns of each block, (B, k).

    Returns:
        Marks, (size + 1, size + 1); only the upper triangle is set.
    """
    marks = torch.zeros(size + 1, size + 1, dtype=torch.bool, device=rows.device)
    marks[rows[:, :, None], cols[:, None, :]] = True
    marks = (marks | marks.T).triu_()
    marks[:, size] = False
    return marks
