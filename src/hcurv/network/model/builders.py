"""Turn the contributions of all uses of a parameter into its `LayerJacobian`, row by row of R."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.layered.dense_jacobian import DenseJacobian
from hcurv.network.layered.layer_jacobian import LayerJacobian, LinearShape, ZeroJacobian
from hcurv.network.layered.lookup_jacobian import LookupJacobian
from hcurv.network.layered.plain_jacobian import PlainJacobian
from hcurv.network.layered.position_jacobian import PositionJacobian
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from hcurv.network.model.contributions import LinearUse, LookupUse
from hcurv.network.model.multiplied_columns import MultipliedColumns
from hcurv.network.model.ordered_uses import BatchShape, Gradients, OrderedUse, by_point
from hcurv.network.model.point_rows import RowOrder

__all__ = ["Builder", "make_builder"]

# Multiplied out, a layer needs fewer flops for a product wherever there are more positions than
# rows of R. So it may take this much more memory than positions do.
_DENSE_ALLOWANCE = 1.2


class Builder(ABC):
    """Collects the columns of some parameters."""

    @property
    def working_floats(self) -> int:
        """Floats of temporary memory, about, beside what is collected."""
        return 0

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
        self._columns = MultipliedColumns(size, uses, batch, start)

    @property
    def working_floats(self) -> int:
        """What multiplying out takes."""
        return self._columns.working_floats

    def add(self, row: int, gradients: Gradients) -> None:
        """Columns of one row."""
        self._columns.add(row, gradients)

    def finish(self) -> LayerJacobian:
        """Dense."""
        return DenseJacobian(self._columns.finish().permute(2, 1, 0))


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

    @property
    def working_floats(self) -> int:
        """Those of all of them."""
        return sum(part.working_floats for part in self._parts)

    def add(self, row: int, gradients: Gradients) -> None:
        """Each of them."""
        for part in self._parts:
            part.add(row, gradients)

    def finish(self) -> LayerJacobian:
        """One after the other."""
        return StackedJacobian([part.finish() for part in self._parts])
