"""Rows and columns of many blocks, and parts of blocks that are evaluated together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.entries import pair_gram
from hcurv.layer_factors import LayerFactors

__all__ = ["PASS", "Items", "Places", "Side", "distinct", "evaluate_gram", "mark_pairs"]

PASS = 20  # flops of a matrix product in the time that one elementwise pass takes per number
_CACHE_FLOATS = 2**19  # of the operands of Gram forms


class Places(NamedTuple):
    """The units μ and the inputs ν that flat indices join, (B, m) each."""

    units: Tensor
    inputs: Tensor


class Items(NamedTuple):
    """Parts of blocks: so many rows from one place on by so many columns from another.

    Places are numbered through all blocks.
    """

    row: Tensor
    num_rows: Tensor
    col: Tensor
    num_cols: Tensor

    def select(self, chosen: Tensor | slice) -> Items:
        """Some of them."""
        return Items(*(values[chosen] for values in self))


class Side:
    """Rows or columns of blocks, sorted by unit in each block, then numbered through.

    Attributes:
        width: m.
        num_hidden: rows of hidden units in each block, (B,).
        units: μ of each place, (B · m,).
        inputs: ν of each place.
        order: position of each place in its block.
        run: number of the run of equal units that each place is in.
    """

    def __init__(self, places: Places, num_hidden: int) -> None:
        units, order = places.units.sort(dim=1, stable=True)
        begins = torch.ones_like(units, dtype=torch.bool)
        begins[:, 1:] = units[:, 1:] != units[:, :-1]
        self.width = units.shape[1]
        self.num_hidden = (units < num_hidden).sum(1)
        self.units, self.order = units.view(-1), order.view(-1)
        self.inputs = places.inputs.gather(1, order).view(-1)
        self.run = begins.view(-1).cumsum(0)
        self._begins = begins.view(-1)

    def block(self, place: Tensor) -> Tensor:
        """The block that a place is in."""
        return place.div(self.width, rounding_mode="floor")

    def segments(self, tail: bool) -> tuple[Tensor, Tensor]:
        """Place and length of the hidden rows, or those of the tail, of each block."""
        first = torch.arange(0, self.units.numel(), self.width, device=self.units.device)
        if tail:
            return first + self.num_hidden, self.width - self.num_hidden
        return first, self.num_hidden

    def runs(self, tail: bool) -> tuple[Tensor, Tensor]:
        """Place and length of every run of rows of one unit, of hidden units or of the tail."""
        place = self._begins.nonzero().squeeze(1)
        length = torch.diff(place, append=place.new_tensor([self.units.numel()]))
        chosen = (place % self.width >= self.num_hidden[self.block(place)]) == tail
        return place[chosen], length[chosen]


def distinct(values: Tensor) -> Tensor:
    """The distinct values of each row, in a matrix; where there are fewer, one is repeated."""
    ordered = values.sort(1).values
    place = torch.zeros_like(ordered)
    place[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    width = int(place[:, -1].max()) + 1
    return ordered[:, :1].repeat(1, width).scatter_(1, place, ordered)


def mark_pairs(size: int, rows: Tensor, cols: Tensor) -> Tensor:
    """The unordered pairs below ``size`` that some block has, as an upper triangle of marks.

    A number ``size`` stands for nothing; its row and column stay empty.
    """
    marks = torch.zeros(size + 1, size + 1, dtype=torch.bool, device=rows.device)
    marks[rows[:, :, None], cols[:, None, :]] = True
    marks = (marks | marks.T).triu_()
    marks[:, size] = False
    return marks


def evaluate_gram(
    factors: LayerFactors, first: Tensor, second: Tensor, points: slice, budget: int
) -> Tensor:
    """g of pairs of units of one kind, first ≤ second, (pairs, b), within ``budget`` more floats.

    Some pairs at a time: to take few points instead would mean to gather short rows.
    """
    jacobian, num_points = factors.jacobian, points.stop - points.start
    floats = max(1, jacobian.gram_cost) * num_points
    step = min(first.numel(), max(1, min(budget, _CACHE_FLOATS) // (2 * floats)))
    scratch = factors.inputs.new_empty(2, step * floats)
    result = factors.inputs.new_empty(first.numel(), num_points)
    for start in range(0, first.numel(), step):
        part = slice(start, start + step)
        result[part] = pair_gram(jacobian, first[part], second[part], points, scratch)
    return result
