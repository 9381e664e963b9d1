"""What the Jacobians of a chain of layers have in common: hidden units and the tail.

If the loss has a diagonal square root R_i, the units of the last layer are the *tail*: C_i of that
layer is diagonal, its columns have a single nonzero each, and one number for each unit and point is
stored. All other units are *hidden*.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.network.jacobians.contractions import take
from hcurv.network.jacobians.output_jacobian import OutputJacobian, UnitGroup
from hcurv.network.scratch import Scratch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChainJacobian"]


@dataclass(frozen=True, kw_only=True)
class ChainJacobian(OutputJacobian):
    """Hidden units and the tail.

    Attributes:
        num_hidden: the number of hidden units; the units that follow are the tail.
        tail: the diagonal of C_i^L, (d_L, n); None if it is not needed.
        tail_trainable: whether the units of the tail have trainable parameters.
    """

    num_hidden: int
    tail: Tensor | None
    tail_trainable: bool

    @cached_property
    def hidden_group(self) -> UnitGroup:
        """The hidden units; there may be none."""
        return UnitGroup(0, self.num_hidden)

    @cached_property
    def tail_group(self) -> UnitGroup:
        """The units of the tail that have trainable parameters; there may be none."""
        width = self.num_rows if self.tail_trainable else 0
        return UnitGroup(self.num_hidden, self.num_hidden + width, orthogonal=True)

    @cached_property
    def groups(self) -> tuple[UnitGroup, ...]:
        """The hidden units and the tail, as far as they exist."""
        return tuple(g for g in (self.hidden_group, self.tail_group) if g.stop > g.start)

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self.tensors[0].shape[-1]

    @abstractmethod
    def _hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Scratch | None
    ) -> Tensor:
        """`gram` of hidden units."""

    @abstractmethod
    def _cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """`gram` of hidden units with units of the tail, the latter numbered from 0."""

    @abstractmethod
    def _hidden_gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        """`gram_at` of hidden units."""

    @abstractmethod
    def _cross_gram_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        """`gram_at` of hidden units with units of the tail, the latter numbered from 0."""

    @abstractmethod
    def _hidden_columns(self, units: slice, points: slice) -> Tensor:
        """C_i[:, μ] of a range of hidden units, (units, q, b)."""

    def _tail(self, units: slice, points: slice) -> Tensor:
        """The diagonal of C_i at a range of units of the tail, (units, b)."""
        assert self.tail is not None
        return self.tail[self._tail_rows(units), points]

    def _tail_rows(self, units: slice) -> slice:
        """A range of units of the tail, numbered from 0."""
        return slice(units.start - self.num_hidden, units.stop - self.num_hidden)

    def _tail_squares(self, tail: Tensor, points: slice) -> Tensor:
        """c_i² of units of the tail, numbered from 0, (units, b)."""
        assert self.tail is not None
        return self.tail[:, points].index_select(0, tail).square_()

    def gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Scratch | None = None
    ) -> Tensor:
        """Inner products of columns; the kind of the units decides how they are computed."""
        num_hidden = self.num_hidden
        first_hidden = (first if isinstance(first, int) else int(first[0])) < num_hidden
        second_hidden = int(second[0]) < num_hidden
        if first_hidden and second_hidden:
            return self._hidden_gram(first, second, points, scratch)
        if first_hidden:
            return self._cross_gram(first, second - num_hidden, points)
        if second_hidden:
            return self._cross_gram(second, first - num_hidden, points)
        result = self._tail_squares(second - num_hidden, points)
        different = second != first
        return result.masked_fill_(different[:, None], 0.0) if bool(different.any()) else result

    def gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        """Inner products of columns, for each kind of pair in turn."""
        first, second = torch.minimum(first, second), torch.maximum(first, second)
        result = self.tensors[0].new_zeros(points.shape)
        first_hidden, second_hidden = first < self.num_hidden, second < self.num_hidden
        for chosen, evaluate in (
            (second_hidden, self._hidden_gram_at),
            (first_hidden & ~second_hidden, self._cross_gram_at),
            (~first_hidden & (first == second), self._tail_gram_at),
        ):
            index = chosen.nonzero().squeeze(1)
            if index.numel() == points.shape[0]:
                return evaluate(first, second, points)
            if index.numel():
                result[index] = evaluate(first[index], second[index], points[index])
        return result

    def _tail_gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        assert self.tail is not None
        return take(self.tail, (first - self.num_hidden,), points).square_()

    def squared_norms(self, units: slice, points: slice) -> Tensor:
        """Squares of the tail, or Gram values of hidden units with themselves."""
        if units.start >= self.num_hidden:
            return self._tail(units, points).square()
        index = torch.arange(units.start, units.stop, device=self.tensors[0].device)
        return self._hidden_gram(index, index, points, None)

    def column_norms(self) -> Tensor:
        """Unit by unit, so that temporaries stay small."""
        everywhere = slice(0, self.num_points)
        norms = [
            self.squared_norms(slice(unit, unit + 1), everywhere).sqrt_()
            for unit in range(self.num_hidden)
        ]
        if self.tail is not None and self.tail_trainable:
            norms.append(self.tail.abs())
        return torch.cat(norms)

    def to(self, dtype: torch.dtype) -> Self:
        """All stored tensors converted."""
        stored = {field.name: getattr(self, field.name) for field in fields(self)}
        converted: dict[str, Any] = {
            name: value.to(dtype) for name, value in stored.items() if isinstance(value, Tensor)
        }
        return replace(self, **converted)

    def column_rows(self, units: slice, points: slice) -> Tensor:
        """The diagonal of the tail, or columns of hidden units."""
        if units.start >= self.num_hidden:
            return self._tail(units, points).T
        return self._hidden_columns(units, points).permute(2, 1, 0)

    @property
    def row_floats(self) -> int:
        """Whole columns of hidden units, and one diagonal."""
        return (self.num_hidden + self.tail_trainable) * self.num_rows
