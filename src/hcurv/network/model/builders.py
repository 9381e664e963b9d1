"""Turn the contributions of all uses of a parameter into its `LayerJacobian`, row by row of R."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.layered.dense_jacobian import DenseJacobian
from hcurv.network.layered.layer_jacobian import LayerJacobian, LinearShape, ZeroJacobian
from hcurv.network.layered.lookup_jacobian import LookupJacobian
from hcurv.network.layered.plain_jacobian import PlainJacobian
from hcurv.network.layered.position_jacobian import PositionJacobian
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from hcurv.network.model.contributions import Contribution, DirectUse, LinearUse, LookupUse
from hcurv.network.model.point_rows import RowOrder

__all__ = ["BatchShape", "Builder", "Gradients", "OrderedUse", "by_point", "make_builder"]

# Multiplied out, a layer needs fewer flops for a product wherever there are more positions than
# rows of R. So it may take this much more memory than positions do.
_DENSE_ALLOWANCE = 1.2

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


class Builder(ABC):
    """Collects the columns of some parameters."""

    @abstractmethod
    def add(self, row: int, gradients: Gradients) -> None:
        """Take one row of R: derivatives with respect to the results of all nodes."""

    @abstractmethod
    def finish(self) -> LayerJacobian:
        """What was collected."""


def make_builder(size: int, uses: list[OrderedUse], batch: BatchShape) -> Builder:
    """The builder for a parameter with ``size`` entries that takes least memory."""
    if size == 0:
        return _ZeroBuilder(0, batch)
    groups = _groups(uses)
    if groups is None:
        return _DenseBuilder(size, uses, batch)
    parts: list[Builder] = []
    end = 0
    for (start, stop), members in sorted(groups.items(), key=lambda item: item[0]):
        if start < end:  # uses overlap without being the same
            return _DenseBuilder(size, uses, batch)
        if start > end:
            parts.append(_ZeroBuilder(start - end, batch))
        parts.append(_part_builder(start, stop, members, batch))
        end = stop
    if end < size:
        parts.append(_ZeroBuilder(size - end, batch))
    return parts[0] if len(parts) == 1 else _StackedBuilder(parts)


def _groups(uses: list[OrderedUse]) -> Mapping[tuple[int, int], list[OrderedUse]] | None:
    """Uses by the range of entries that they see; None if one of them sees no range."""
    result: dict[tuple[int, int], list[OrderedUse]] = {}
    for ordered in uses:
        entries = ordered.use.entries
        start, stop = int(entries.min()), int(entries.max()) + 1
        if stop - start != entries.numel():
            return None
        result.setdefault((start, stop), []).append(ordered)
    return result


def _part_builder(start: int, stop: int, uses: list[OrderedUse], batch: BatchShape) -> Builder:
    """The builder for a range of entries that every use sees as a whole."""
    size = stop - start
    linear = _linear_form(start, uses)
    if linear is not None:
        positions = sum(
            use.num_rows // batch.num_points * use.inputs.shape[2]
            for use, _ in uses
            if isinstance(use, LinearUse)
        )
        factored = positions * (batch.num_rows * linear.num_units + linear.num_inputs)
        if batch.num_rows * size > _DENSE_ALLOWANCE * factored or (
            positions == 1 and factored <= batch.num_rows * size
        ):
            return _LinearBuilder(linear, uses, positions, batch)
    first = uses[0].use
    if len(uses) == 1 and isinstance(first, LookupUse):
        positions = first.num_rows // batch.num_points
        in_order = torch.equal(first.entries.reshape(-1), torch.arange(start, stop))
        if in_order and positions < len(first.entries):
            return _LookupBuilder(first, uses[0].order, batch)
    return _DenseBuilder(size, uses, batch, start)


def _linear_form(start: int, uses: list[OrderedUse]) -> LinearShape | None:
    """How all uses, if they are z = W x, number the entries of W."""
    forms = set()
    for use, _ in uses:
        if not isinstance(use, LinearUse):
            return None
        entries = use.entries - start
        number = torch.arange(entries.numel())
        if torch.equal(entries.reshape(-1), number):
            forms.add(LinearShape(entries.shape[0], entries.shape[1]))
        elif torch.equal(entries.T.reshape(-1), number):
            forms.add(LinearShape(entries.shape[0], entries.shape[1], by_input=True))
        else:
            return None
    return forms.pop() if len(forms) == 1 else None


def by_point(ordered: OrderedUse, rows: Tensor, num_points: int) -> Tensor:
    """Rows (R, d, L) as (b, d, T), with all positions of a point side by side."""
    table = ordered.order.by_point(rows, num_points)  # (b, R/b, d, L)
    return table.transpose(1, 2).flatten(2)


def _inputs_by_point(ordered: OrderedUse, num_points: int) -> Tensor | None:
    """The inputs x of a linear use, (b, T, d_in)."""
    if not isinstance(ordered.use, LinearUse):
        return None
    return by_point(ordered, ordered.use.inputs, num_points).mT


class _LinearBuilder(Builder):
    """Factors C and inputs x, for one position or several."""

    def __init__(
        self, shape: LinearShape, uses: list[OrderedUse], positions: int, batch: BatchShape
    ) -> None:
        self._shape, self._uses, self._batch = shape, uses, batch
        count, q = batch.num_points, batch.num_rows
        self._plain = positions == 1
        inputs = torch.cat([by_point(o, o.use.inputs, count) for o in uses], 2)  # type: ignore[union-attr]
        inputs = without_tiny(inputs)
        if self._plain:
            self._inputs = inputs[:, :, 0].T.contiguous()
            self._factors = batch.like.new_zeros(shape.num_units, q, count)
        else:
            self._inputs = inputs
            self._factors = batch.like.new_zeros(count, q, shape.num_units, positions)

    def add(self, row: int, gradients: Gradients) -> None:
        """Factors of one row."""
        first = 0
        for ordered in self._uses:
            use = ordered.use
            assert isinstance(use, LinearUse)
            gradient = gradients(use.node)
            width = use.num_rows // self._batch.num_points * use.inputs.shape[2]
            if gradient is not None:
                factors = without_tiny(use.factors(gradient))
                found = by_point(ordered, factors, self._batch.num_points)
                if self._plain:
                    self._factors[:, row] = found[:, :, 0].T
                else:
                    self._factors[:, row, :, first : first + width] = found
            first += width

    def finish(self) -> LayerJacobian:
        """Plain or by positions."""
        kind = PlainJacobian if self._plain else PositionJacobian
        return kind(self._factors, self._inputs, self._shape.by_input)


class _LookupBuilder(Builder):
    """Factors C and the rows that were looked up."""

    def __init__(self, use: LookupUse, order: RowOrder, batch: BatchShape) -> None:
        self._use, self._order, self._batch = use, order, batch
        self._places = order.by_point(use.places, batch.num_points)
        shape = (batch.num_points, batch.num_rows, self._places.shape[1], use.entries.shape[1])
        self._factors = batch.like.new_zeros(shape)

    def add(self, row: int, gradients: Gradients) -> None:
        """Factors of one row."""
        gradient = gradients(self._use.node)
        if gradient is not None:
            rows = self._use.factors(gradient)
            self._factors[:, row] = self._order.by_point(rows, self._batch.num_points)

    def finish(self) -> LayerJacobian:
        """A look-up."""
        return LookupJacobian(self._factors, self._places, len(self._use.entries))


class _DenseBuilder(Builder):
    """Columns, multiplied out and added over all uses."""

    def __init__(
        self, size: int, uses: list[OrderedUse], batch: BatchShape, start: int = 0
    ) -> None:
        self._values = batch.like.new_zeros(size, batch.num_rows, batch.num_points)
        self._groups = [_SameEntries(members, batch.num_points) for members in _alike(uses)]
        everything = torch.arange(size)
        places = [group.entries.reshape(-1) - start for group in self._groups]
        self._places = [None if torch.equal(place, everything) else place for place in places]

    def add(self, row: int, gradients: Gradients) -> None:
        """Columns of one row."""
        for group, places in zip(self._groups, self._places, strict=True):
            found = group.columns(gradients)
            if found is None:
                continue
            found = without_tiny(found)
            if places is None:
                self._values[:, row] += found.T
            else:
                self._values[:, row].index_add_(0, places.to(found.device), found.T)

    def finish(self) -> LayerJacobian:
        """Dense."""
        return DenseJacobian(self._values)


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


class _SameEntries:
    """What uses of the same entries contribute together, such as the steps of a recurrent layer."""

    def __init__(self, uses: list[OrderedUse], num_points: int) -> None:
        self._uses, self._count = uses, num_points
        self.entries = uses[0].use.entries
        self._inputs = [_inputs_by_point(ordered, num_points) for ordered in uses]

    def columns(self, gradients: Gradients) -> Tensor | None:
        """Columns of one row of R, (b, entries); None if they are zero."""
        factors: list[Tensor] = []
        inputs: list[Tensor] = []
        total: Tensor | None = None
        for ordered, own in zip(self._uses, self._inputs, strict=True):
            gradient = gradients(ordered.use.node)
            if gradient is None:
                continue
            if isinstance(ordered.use, LinearUse):
                assert own is not None
                factors.append(by_point(ordered, ordered.use.factors(gradient), self._count))
                inputs.append(own)
                continue
            found = self._direct(ordered, gradient)
            total = found if total is None else total + found
        if factors:
            # One product over the positions of all uses.
            return torch.bmm(torch.cat(factors, 2), torch.cat(inputs, 1)).flatten(1)
        return total

    def _direct(self, ordered: OrderedUse, gradient: Tensor) -> Tensor:
        """What a use contributes that is no product, (b, entries)."""
        use, count = ordered.use, self._count
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


class _ZeroBuilder(Builder):
    """Entries that nothing uses."""

    def __init__(self, size: int, batch: BatchShape) -> None:
        self._size, self._batch = size, batch

    def add(self, row: int, gradients: Gradients) -> None:
        """Nothing to add."""

    def finish(self) -> LayerJacobian:
        """Zeros."""
        batch = self._batch
        return ZeroJacobian(self._size, batch.num_rows, batch.like.new_zeros(batch.num_points))


class _StackedBuilder(Builder):
    """Several ranges of entries."""

    def __init__(self, parts: list[Builder]) -> None:
        self._parts = parts

    def add(self, row: int, gradients: Gradients) -> None:
        """Each of them."""
        for part in self._parts:
            part.add(row, gradients)

    def finish(self) -> LayerJacobian:
        """One after the other."""
        return StackedJacobian([part.finish() for part in self._parts])
