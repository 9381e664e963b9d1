"""Three forms of the products that parts of blocks are evaluated by.

- *Gram form*: rows of one unit μ by columns of any units, X_R (g[μ, ·] ⊙ X_C)ᵀ;
- *columns* of a narrow Jacobian: V_R V_Cᵀ with v_k(i) = C_i[:, μ] x_i[ν];
- *columns through the interface* of a wide one: hidden rows by columns of the tail, where
  g_i[μ, u] = Σ_r B_i[r, μ] · W_L[u, r] c_i[u]².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hcurv.entry_batches.parts import (
    PASS,
    Items,
    Places,
    Side,
    distinct,
    evaluate_gram,
    mark_pairs,
)
from hcurv.layer_factors import LayerFactors
from hcurv.narrow_jacobian import NarrowJacobian
from hcurv.wide_jacobian import WideJacobian

__all__ = [
    "ColumnForm",
    "CrossForm",
    "Form",
    "GramForm",
    "Scratch",
    "StoredGram",
    "WholeGram",
    "plan_gram",
]

_WRITE = 500  # flops of a matrix product in the time that it takes to write an entry
_START = 8  # rows and columns that a small product seems to have more than it has


class Scratch:
    """Memory that is used again and again: fresh pages would cost more than the arithmetic.

    Attributes:
        spare: floats that may be allocated besides.
    """

    def __init__(self, like: Tensor, spare: int) -> None:
        self.spare = spare
        self._memory = like.new_empty(0)
        self._used = 0

    def reset(self, size: int) -> None:
        """Give everything back, and see that so many floats can be taken."""
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        self._used = 0

    def select(self, values: Tensor, index: Tensor) -> Tensor:
        """values[index]."""
        shape = (index.numel(), *values.shape[1:])
        return torch.index_select(values, 0, index, out=self.take(shape))

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of any content."""
        start = self._used
        self._used += torch.Size(shape).numel()
        return self._memory[start : self._used].view(shape)


# (items, rows, ·) and (items, cols, ·): the factors of a batched product at some points.
Operands: TypeAlias = Callable[[slice, Scratch], tuple[Tensor, Tensor]]


class Form(Protocol):
    """A way to evaluate items."""

    @property
    def outer(self) -> Side:
        """The side of their rows."""

    @property
    def inner(self) -> Side:
        """The side of their columns."""

    def floats(self, items: Items) -> int:
        """Most floats that the operands of an item take per point."""

    def bind(self, rows: Tensor, cols: Tensor) -> Operands:
        """Operands of items with rows and columns at these places, (items, ·) each."""

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """What remains to be done to the product."""


def _product_work(items: Items, depth: int, num_points: int) -> Tensor:
    """Flops per point of a product over ``depth`` rows and of writing the result."""
    size = (items.num_rows + _START) * (items.num_cols + _START)
    return 2.0 * depth * size + items.num_rows * items.num_cols * (_WRITE / num_points)


class StoredGram:
    """g of pairs of hidden units that many items share.

    Args:
        factors: what entries are made of.
        pairs: first and second units, (2, pairs).
    """

    def __init__(self, factors: LayerFactors, pairs: Tensor) -> None:
        self._factors, self._pairs = factors, pairs
        self._values: Tensor | None = None
        num_hidden = factors.jacobian.num_hidden
        self._slots = pairs.new_zeros(num_hidden, num_hidden)
        every = torch.arange(pairs.shape[1], device=pairs.device)
        self._slots[pairs[0], pairs[1]] = every
        self._slots[pairs[1], pairs[0]] = every

    @property
    def work(self) -> float:
        """Flops per point to compute it."""
        return 4.0 * PASS * self._factors.jacobian.gram_cost * self._pairs.shape[1]

    def rows(self, first: Tensor, second: Tensor) -> Tensor:
        """Which rows of the values hold g[first, second]."""
        return self._slots[first, second]

    def values(self, spare: int) -> Tensor:
        """(pairs, n); the first time they are computed, with ``spare`` floats besides."""
        if self._values is None:
            everywhere = slice(0, self._factors.num_points)
            first, second = self._pairs
            self._values = evaluate_gram(self._factors, first, second, everywhere, spare)
        return self._values


class WholeGram:
    """g of all pairs of hidden units, as a wide Jacobian has it."""

    work = 0.0

    def __init__(self, jacobian: WideJacobian) -> None:
        self._jacobian = jacobian

    def rows(self, first: Tensor, second: Tensor) -> Tensor:
        """Which rows of the values hold g[first, second]."""
        return first * self._jacobian.num_hidden + second

    def values(self, spare: int) -> Tensor:
        """(pairs, n)."""
        return self._jacobian.gram


def plan_gram(
    factors: LayerFactors, rows: Places, cols: Places, max_bytes: int
) -> StoredGram | WholeGram | None:
    """The Gram forms of all pairs of hidden units that blocks have, if that is worth it."""
    num_hidden = factors.jacobian.num_hidden
    if isinstance(factors.jacobian, WideJacobian):
        return WholeGram(factors.jacobian)
    if 20 * (num_hidden + 1) ** 2 > max_bytes:
        return None
    row_units = distinct(rows.units.clamp(max=num_hidden))
    col_units = row_units if rows is cols else distinct(cols.units.clamp(max=num_hidden))
    pairs = mark_pairs(num_hidden, row_units, col_units).nonzero().T
    num_uses = len(row_units) * row_units.shape[1] * col_units.shape[1]
    num_bytes = pairs.shape[1] * factors.num_points * factors.inputs.dtype.itemsize
    if 2 * pairs.shape[1] > num_uses or 2 * num_bytes > max_bytes:
        return None
    return StoredGram(factors, pairs)


@dataclass(frozen=True)
class GramForm:
    """X_R and g[μ, ·] ⊙ X_C; all rows of an item are of one unit μ.

    Attributes:
        factors: what entries are made of.
        outer: the side with one unit per item.
        inner: the other side.
        stored: Gram forms, if both sides are hidden and it pays to have them.
    """

    factors: LayerFactors
    outer: Side
    inner: Side
    stored: StoredGram | WholeGram | None = None

    def _num_units(self, items: Items) -> Tensor:
        run = self.inner.run
        return run[items.col + items.num_cols - 1] - run[items.col] + 1

    def work(self, items: Items) -> Tensor:
        """Flops per point of each item."""
        num_units = self._num_units(items)
        passes = items.num_rows + (2 + (num_units > 1).long()) * items.num_cols
        if self.stored is None:
            passes += 4 * max(1, self.factors.jacobian.gram_cost) * num_units
        return PASS * passes + _product_work(items, 1, self.factors.num_points)

    def floats(self, items: Items) -> int:
        """Inputs of both sides and Gram forms, and what these are computed from."""
        floats = int(items.num_rows.max()) + 2 * int(items.num_cols.max())
        if self.stored is not None:
            return floats
        return floats + 2 * int(self._num_units(items).max())

    def bind(self, rows: Tensor, cols: Tensor) -> Operands:
        """Operands at these places."""
        factors, stored = self.factors, self.stored
        row_inputs, col_inputs = self.outer.inputs[rows].view(-1), self.inner.inputs[cols].view(-1)
        same = torch.equal(row_inputs, col_inputs)
        first, second = self.outer.units[rows[:, 0]], self.inner.units[cols]
        inverse: Tensor | None = None
        if bool((second == second[:, :1]).all()):
            second = second[:, 0]  # one Gram form for an item, or one for each of its columns
        elif stored is not None:
            first, second = first.repeat_interleave(cols.shape[1]), second.view(-1)
        else:
            item = torch.arange(len(first), device=first.device)[:, None]
            keys = (item * factors.num_units + second).view(-1)
            keys, inverse = torch.unique_consecutive(keys, return_inverse=True)
            first = first[keys.div(factors.num_units, rounding_mode="floor")]
            second = keys % factors.num_units
        first, second = torch.minimum(first, second), torch.maximum(first, second)

        def operands(points: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
            inputs = factors.inputs[:, points]
            if stored is not None:
                values = stored.values(scratch.spare)
                gram = scratch.select(values[:, points], stored.rows(first, second))
            else:
                gram = evaluate_gram(factors, first, second, points, scratch.spare)
            if inverse is not None:
                gram = scratch.select(gram, inverse)
            left = scratch.select(inputs, row_inputs)
            right = scratch.take(left.shape) if same else scratch.select(inputs, col_inputs)
            shape = (len(gram), -1, gram.shape[1])
            source = left if same else right
            torch.mul(source.view(shape), gram[:, None], out=right.view(shape))
            return left.view(*rows.shape, -1), right.view(*cols.shape, -1)

        return operands

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """Nothing."""


@dataclass(frozen=True)
class ColumnForm:
    """V_R and V_C, for hidden units of a narrow Jacobian."""

    factors: LayerFactors
    jacobian: NarrowJacobian
    outer: Side
    inner: Side

    def work(self, items: Items) -> Tensor:
        """Flops per point of each item."""
        num_columns = items.num_rows
        if self.outer is not self.inner:
            num_columns = num_columns + items.num_cols
        depth = self.jacobian.num_rows
        passes = 3 * depth * num_columns
        return PASS * passes + _product_work(items, depth, self.factors.num_points)

    def floats(self, items: Items) -> int:
        """The columns and the inputs that they are multiplied with."""
        num_rows, num_cols = int(items.num_rows.max()), int(items.num_cols.max())
        return (self.jacobian.num_rows + 1) * (num_rows + num_cols)

    def bind(self, rows: Tensor, cols: Tensor) -> Operands:
        """Operands at these places."""
        sides = [(self.outer, rows)]
        if self.outer is not self.inner:
            sides.append((self.inner, cols))

        def operands(points: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
            result = []
            for side, places in sides:
                columns = scratch.select(
                    self.jacobian.factor[:, :, points], side.units[places].view(-1)
                )
                inputs = scratch.select(
                    self.factors.inputs[:, points], side.inputs[places].view(-1)
                )
                result.append(columns.mul_(inputs[:, None]).view(*places.shape, -1))
            return result[0], result[-1]

        return operands

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """Nothing."""


@dataclass(frozen=True)
class CrossForm:
    """X_R ⊙ B[r, μ] and X_C ⊙ W_L[u, r] c[u]², for hidden rows and columns of the tail.

    Next to the tail B has a single nonzero, r = r(μ): there W_L[u, r] is left for the end.
    """

    factors: LayerFactors
    jacobian: WideJacobian
    outer: Side
    inner: Side

    def _adjacent(self, hidden: Tensor) -> bool:
        return int(hidden.min()) >= self.jacobian.first_adjacent

    def _tail(self, cols: Tensor) -> Tensor:
        return self.inner.units[cols] - self.jacobian.num_hidden

    def floats(self, items: Items) -> int:
        """Both operands and what they are multiplied with."""
        num_rows, num_cols = int(items.num_rows.max()), int(items.num_cols.max())
        return (self.jacobian.head.shape[1] + 1) * (num_rows + num_cols) + num_cols

    def bind(self, rows: Tensor, cols: Tensor) -> Operands:
        """Operands at these places."""
        jacobian = self.jacobian
        hidden, tail = self.outer.units[rows].view(-1), self._tail(cols).view(-1)
        row_inputs, col_inputs = self.outer.inputs[rows].view(-1), self.inner.inputs[cols].view(-1)
        adjacent = self._adjacent(hidden)

        def operands(points: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
            inputs, interface = self.factors.inputs[:, points], jacobian.interface[:, :, points]
            left, right = scratch.select(inputs, row_inputs), scratch.select(inputs, col_inputs)
            right.mul_(jacobian.tail_gram(tail, points))
            if adjacent:
                left.mul_(interface[hidden, hidden - jacobian.first_adjacent])
            else:
                left = scratch.select(interface, hidden).mul_(left[:, None])
                right = right[:, None] * jacobian.head[tail][:, :, None]
            return left.view(*rows.shape, -1), right.view(*cols.shape, -1)

        return operands

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """W_L[u, r(μ)] next to the tail."""
        hidden = self.outer.units[rows]
        if self._adjacent(hidden):
            row = hidden - self.jacobian.first_adjacent
            values.mul_(self.jacobian.head[self._tail(cols)[:, None, :], row[:, :, None]])
