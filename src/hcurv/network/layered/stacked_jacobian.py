"""Jacobians of several groups of parameters, side by side: parts of a layer, or a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hcurv.network.layered.layer_jacobian import LayerJacobian, Panel

__all__ = ["StackedJacobian"]


class StackedJacobian(LayerJacobian):
    """The columns of one group of parameters after those of the other.

    Args:
        parts: Jacobians over the same points; one at least.
    """

    form = "parts"

    def __init__(self, parts: Sequence[LayerJacobian]) -> None:
        self.parts = tuple(parts)
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.num_parameters)
        self._places = [slice(a, b) for a, b in pairwise(starts)]

    @property
    def num_parameters(self) -> int:
        """The number of all parameters."""
        return self._places[-1].stop

    @property
    def num_rows(self) -> int:
        """The number of rows of each point."""
        return self.parts[0].num_rows

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self.parts[0].num_points

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def num_floats(self) -> int:
        """The floats of all parts."""
        return sum(part.num_floats for part in self.parts)

    @property
    def kernel_flops(self) -> float:
        """The flops of all parts."""
        return sum(part.kernel_flops for part in self.parts)

    @property
    def has_quick_columns(self) -> bool:
        """Whether all parts have."""
        return all(part.has_quick_columns for part in self.parts)

    @cached_property
    def _starts(self) -> Tensor:
        return torch.tensor([place.start for place in self._places])

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Columns of each part, put into their places."""
        # The last of several parts with one start is taken, since the others are empty.
        starts = self._starts.to(index.device)
        owner = torch.searchsorted(starts, index.contiguous(), right=True) - 1
        numbers: list[int] = owner.unique().tolist()
        if len(numbers) == 1:
            number = numbers[0]
            return self.parts[number].columns(index - self._places[number].start, points)
        like = self.parts[0].tensors[0]
        result = like.new_empty(index.numel(), self.num_rows, points.stop - points.start)
        for number in numbers:
            chosen = (owner == number).nonzero().squeeze(1)
            own = index[chosen] - self._places[number].start
            result[chosen] = self.parts[number].columns(own, points)
        return result

    def panels(self, points: slice) -> Iterator[Panel]:
        """The panels of all parts."""
        for place, part in zip(self._places, self.parts, strict=True):
            for index, columns in part.panels(points):
                yield Panel(index + place.start, columns)

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """The sum over all parts."""
        for place, part in zip(self._places, self.parts, strict=True):
            part.apply(flat[place], result)

    def apply_transposed(self, values: Tensor) -> Tensor:
        """One part after the other."""
        return torch.cat([part.apply_transposed(values) for part in self.parts])

    def square_sums(self) -> Tensor:
        """One part after the other."""
        return torch.cat([part.square_sums() for part in self.parts])

    def point_norms(self) -> Tensor:
        """The sum over all parts."""
        return torch.stack([part.point_norms() for part in self.parts]).sum(0)

    def gram(
        self, first: slice, other: LayerJacobian, second: slice, weights: Tensor, result: Tensor
    ) -> None:
        """The sum over all parts, if the other Jacobian has the same ones."""
        if not isinstance(other, StackedJacobian) or other._places != self._places:
            super().gram(first, other, second, weights, result)
            return
        for place, part, another in zip(self._places, self.parts, other.parts, strict=True):
            part.gram(first, another, second, weights[place], result)

    def select(self, points: Tensor, scale: Tensor) -> StackedJacobian:
        """The rows of some points, scaled."""
        return StackedJacobian([part.select(points, scale) for part in self.parts])

    def multiplied(self, num_columns: int, max_floats: int) -> StackedJacobian:
        """As many parts as there is room for."""
        ready: list[LayerJacobian] = []
        for part in self.parts:
            ready.append(part.multiplied(num_columns, max_floats))
            if ready[-1] is not part:
                max_floats -= ready[-1].num_floats
        return StackedJacobian(ready)

    def for_entries(self) -> StackedJacobian:
        """The same parts, each in its order."""
        return StackedJacobian([part.for_entries() for part in self.parts])

    def to(self, dtype: torch.dtype) -> StackedJacobian:
        """The same columns in another precision."""
        return StackedJacobian([part.to(dtype) for part in self.parts])
