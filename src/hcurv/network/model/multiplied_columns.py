"""Columns of S that are multiplied out and added over all uses of a parameter.

They are written point by point, (b, q, p), as products of matrices give them. Most of the time of
reading a convolutional network goes into these products, so that several rows of R share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor

from hcurv.network.jacobians.contractions import drop_tiny
from hcurv.network.model.contributions import DirectUse, LinearUse, LookupUse
from hcurv.network.model.ordered_uses import BatchShape, Gradients, OrderedUse, by_point

__all__ = ["MultipliedColumns"]

# A product has at least so many rows, as far as there are rows of R. Lower products are slower, and
# higher ones take more memory (16 units at 1024 positions: 57 Gflop/s one row of R at a time,
# 86 with five of them, 93 with ten).
_HEIGHT = 160


class MultipliedColumns:
    """The columns of one parameter, or of a range of its entries.

    Args:
        size: the number p of entries.
        uses: all uses of them.
        batch: the sizes of the batch.
        start: the number of the first entry.
    """

    @torch.no_grad()
    def __init__(
        self, size: int, uses: list[OrderedUse], batch: BatchShape, start: int = 0
    ) -> None:
        alike = _alike(uses)
        everything = torch.arange(size)
        shape, like = (batch.num_points, batch.num_rows, size), batch.like
        in_order = torch.equal(alike[0][0].use.entries.reshape(-1) - start, everything)
        # What one group writes as a whole needs no zeros to be added to.
        is_whole = len(alike) == 1 and in_order
        self._values = like.new_empty(shape) if is_whole else like.new_zeros(shape)
        self._groups: list[_Group] = []
        for members in alike:
            places: Tensor | None = members[0].use.entries.reshape(-1) - start
            if torch.equal(cast(Tensor, places), everything):
                places = None
            target = _Target(self._values, places, is_whole)
            kind = _Products if isinstance(members[0].use, LinearUse) else _Directly
            self._groups.append(kind(members, batch, target))

    @property
    def working_floats(self) -> int:
        """Floats of temporary memory, about."""
        return sum(group.working_floats for group in self._groups)

    @torch.no_grad()
    def add(self, row: int, gradients: Gradients) -> None:
        """Take one row of R: derivatives with respect to the results of all nodes."""
        for group in self._groups:
            group.add(row, gradients)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The columns, (b, q, p)."""
        return drop_tiny(self._values)


class _Target:
    """Where the columns of some entries are written.

    Args:
        values: columns of all entries, (b, q, p).
        places: the numbers of the entries; None for all of them in order.
        is_whole: whether nothing else writes there.
    """

    def __init__(self, values: Tensor, places: Tensor | None, is_whole: bool) -> None:
        self._values, self._is_whole = values, is_whole
        self._places = None if places is None else places.to(values.device)

    def multiply(self, rows: slice, left: Tensor, right: Tensor) -> None:
        """Write products (b, rows·d, T) times (b, T, e) for some rows of R."""
        target = self._values[:, rows]
        if self._is_whole:
            torch.bmm(left, right, out=target.view(len(left), left.shape[1], right.shape[2]))
        else:
            self.write(rows, torch.bmm(left, right).view(len(left), target.shape[1], -1))

    def write(self, rows: slice, found: Tensor | None) -> None:
        """Write columns (b, rows, entries) for some rows of R; None for zeros."""
        target = self._values[:, rows]
        if self._is_whole:
            target.zero_() if found is None else target.copy_(found)
        elif found is not None and self._places is None:
            target += found
        elif found is not None:
            target.index_add_(2, cast(Tensor, self._places), found)


class _Group(ABC):
    """Uses of one kind that see the same entries in the same order, and what they contribute.

    Args:
        uses: the uses.
        batch: the sizes of the batch.
        target: where their columns are written.
    """

    def __init__(self, uses: list[OrderedUse], batch: BatchShape, target: _Target) -> None:
        self._uses, self._batch, self._target = uses, batch, target

    @property
    @abstractmethod
    def working_floats(self) -> int:
        """Floats of temporary memory, about."""

    @abstractmethod
    def add(self, row: int, gradients: Gradients) -> None:
        """Take one row of R."""


class _Products(_Group):
    """z = W x: one product over the positions of all uses, such as the steps of a recurrent layer.

    The factors of several rows of R are collected, and multiplied at once.
    """

    def __init__(self, uses: list[OrderedUse], batch: BatchShape, target: _Target) -> None:
        super().__init__(uses, batch, target)
        count, num_rows = batch.num_points, batch.num_rows
        inputs = [by_point(o, cast(LinearUse, o.use).inputs, count) for o in uses]
        self._widths = [own.shape[2] for own in inputs]
        self._inputs = (inputs[0] if len(inputs) == 1 else torch.cat(inputs, 2)).mT
        num_units = len(uses[0].use.entries)
        most = -(-_HEIGHT // num_units)
        self._step = -(-num_rows // -(-num_rows // most))
        self._factors = batch.like.new_empty(count, self._step, num_units, sum(self._widths))

    @property
    def working_floats(self) -> int:
        """Factors of the collected rows, and inputs that were joined."""
        joined = self._inputs.numel() if len(self._uses) > 1 else 0
        return self._factors.numel() + joined

    def add(self, row: int, gradients: Gradients) -> None:
        """Collect the factors of one row, and multiply them if they are enough."""
        slot = row % self._step
        positions = self._factors[:, slot].split(self._widths, 2)
        for ordered, target in zip(self._uses, positions, strict=True):
            use = cast(LinearUse, ordered.use)
            gradient = gradients(use.node)
            if gradient is None:
                target.zero_()
            else:
                target.copy_(by_point(ordered, use.factors(gradient), self._batch.num_points))
        if slot == self._step - 1 or row == self._batch.num_rows - 1:
            factors = self._factors[:, : slot + 1].flatten(1, 2)
            self._target.multiply(slice(row - slot, row + 1), factors, self._inputs)


class _Directly(_Group):
    """What is no product."""

    @property
    def working_floats(self) -> int:
        """One row of columns."""
        return self._batch.num_points * self._uses[0].use.entries.numel()

    def add(self, row: int, gradients: Gradients) -> None:
        """Columns of one row, added over all uses."""
        total: Tensor | None = None
        for ordered in self._uses:
            gradient = gradients(ordered.use.node)
            if gradient is not None:
                found = self._columns(ordered, gradient)
                total = found if total is None else total + found
        found_row = None if total is None else total[:, None]
        self._target.write(slice(row, row + 1), found_row)

    def _columns(self, ordered: OrderedUse, gradient: Tensor) -> Tensor:
        """What a use contributes to one row of R, (b, entries)."""
        use, count = ordered.use, self._batch.num_points
        if isinstance(use, LookupUse):
            rows = ordered.order.by_point(use.factors(gradient), count)  # (b, T, d)
            places = ordered.order.by_point(use.places, count)
            height = len(use.entries)
            shift = height * torch.arange(count, device=places.device)[:, None]
            result = rows.new_zeros(count * height, rows.shape[2])
            result.index_add_(0, (places + shift).reshape(-1), rows.flatten(0, 1))
            return result.view(count, -1)
        assert isinstance(use, DirectUse)
        return ordered.order.by_point(use.gradients(gradient), count).sum(1)


def _alike(uses: list[OrderedUse]) -> list[list[OrderedUse]]:
    """Uses of one kind that see the same entries in the same order, together."""
    result: list[list[OrderedUse]] = []
    for ordered in uses:
        for group in result:
            first = group[0].use
            if type(first) is type(ordered.use) and torch.equal(first.entries, ordered.use.entries):
                group.append(ordered)
                break
        else:
            result.append([ordered])
    return result
