"""Functions of the outputs other than the loss, whose change influence scores predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.model_inputs import is_inputs, num_points

__all__ = ["Measure", "MeasureLoss", "with_some_targets"]

Measure: TypeAlias = Callable[[Tensor, Any], Tensor]


class MeasureLoss(Loss):
    """A measurement m(outputs, targets) of single points, seen as a loss; it has a gradient only.

    Args:
        measure: takes outputs (b, *shape) and targets (b, ...), or None where there are none, and
            returns one number for each point, (b,).
        point_shape: the shape of the outputs of one point.
        has_targets: whether the data has targets.
    """

    def __init__(self, measure: Measure, point_shape: tuple[int, ...], has_targets: bool) -> None:
        super().__init__("sum")
        self._measure, self._point_shape, self._has_targets = measure, point_shape, has_targets

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """A measurement has no curvature here."""
        raise TypeError("a measurement is only differentiated once")

    def split_targets(self, targets: Tensor, outputs_shape: tuple[int, ...]) -> Tensor:
        """All outputs of a point belong together, so that targets stay as they are."""
        return targets

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative of each point's measurement with respect to its outputs, by autograd."""
        count = outputs.shape[0]
        with torch.enable_grad():
            leaf = outputs.detach().reshape(count, *self._point_shape).requires_grad_()
            values = self._measure(leaf, targets if self._has_targets else None)
            if not isinstance(values, Tensor) or values.shape != (count,):
                given = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"measure must return one number for each of {count} points, shape ({count},);"
                    f" got {given}"
                )
            if not values.requires_grad:
                raise ValueError(
                    "measure must be a differentiable function of the outputs: its result does not"
                    " depend on them (is there a detach, an argmax or a comparison in it?)"
                )
            (found,) = torch.autograd.grad(values.sum(), leaf)
        return found.reshape(outputs.shape)


def with_some_targets(data: Data) -> tuple[Data, bool]:
    """Data with targets: its own, or zeros if it has none, and whether they are its own."""
    if isinstance(data, Tensor | Mapping):
        return (data, torch.zeros(num_points(data))), False
    if isinstance(data, tuple) or not isinstance(data, Iterable) or isinstance(data, Iterator):
        return data, True  # a pair; or something that is refused when it is read
    first = next(iter(data), None)
    if is_inputs(first) and not (isinstance(first, tuple | list) and len(first) == 2):
        return _ZeroTargets(data), False
    return data, True


class _ZeroTargets:
    """Batches of inputs, each with targets that are zero; it can be read several times."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in self._batches:
            inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch
            yield inputs, torch.zeros(num_points(inputs))
