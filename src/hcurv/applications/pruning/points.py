"""The model at given weights on the data: its loss, its accuracy, and its curvature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hcurv.losses import HalfSquaredError, Loss, as_loss
from hcurv.network.batches import Batches, Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.model.snapshot import ForwardFunction, ModelSnapshot, check_parameters
from hcurv.network.model_inputs import Inputs, map_inputs, num_points, split_inputs, tensors_of

__all__ = ["Points"]

# The model runs on this many points at a time.
_CHUNK = 1000


class Points:
    """A copy of a model whose weights can be set, a loss, and all of the data in memory.

    Args:
        model: the user's model, which is not changed.
        loss: the loss.
        data: the data.
        forward_fn: as for `GaussNewton`.

    Attributes:
        snapshot: the copy.
        inputs: all inputs.
        targets: all targets; None if the data has none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        forward_fn: ForwardFunction | None,
    ) -> None:
        self._known = as_loss(loss)
        dtype, device = check_parameters(model)
        self.snapshot = ModelSnapshot(model, forward_fn)
        self._loss, self._forward_fn = loss, forward_fn
        batches = Batches(data, dtype, device)
        survey = batches.survey()
        self.targets = survey.targets
        self.inputs = _joined([inputs for inputs, _ in batches.reread(survey)])

    @property
    def count(self) -> int:
        """The number of points."""
        return num_points(self.inputs)

    @property
    def weights(self) -> Tensor:
        """A copy of the trainable parameters, flat, (N,)."""
        values = {name: p.detach() for name, p in self.snapshot.trainable.items()}
        return self.snapshot.layout.flatten(values).clone()

    def set_weights(self, weights: Tensor) -> None:
        """Write flat weights into the copy of the model."""
        with torch.no_grad():
            for part, parameter in zip(
                self.snapshot.layout.unflatten(weights).values(),
                self.snapshot.trainable.values(),
                strict=True,
            ):
                parameter.copy_(part)

    def gauss_newton(self, chosen: Tensor | None) -> GaussNewton:
        """H at the present weights, over all points or over some of them."""
        inputs, targets = self.inputs, self.targets
        if chosen is not None:
            inputs = map_inputs(lambda tensor: tensor[chosen.to(tensor.device)], inputs)
            targets = None if targets is None else targets[chosen.to(targets.device)]
        data: Any = [(inputs,)] if targets is None else (inputs, targets)
        return GaussNewton(self.snapshot.module, self._loss, data, forward_fn=self._forward_fn)

    def gradient(self, num_points: int) -> Tensor:
        """The gradient of the loss over all points at the present weights, flat, (N,).

        It costs one pass over the data, where H costs many, so that all points are worth it. If the
        loss is a sum, it is scaled to as many points as H has.
        """
        assert self.targets is not None
        parameters = list(self.snapshot.trainable.values())
        result = torch.zeros_like(self.weights)
        divisor, start = 0.0, 0
        for inputs in split_inputs(self.inputs, _CHUNK):
            targets = self.targets[start : start + _CHUNK]
            start += _CHUNK
            with torch.enable_grad():
                outputs = self.snapshot.outputs(inputs)
                rows = self._known.split_outputs(outputs).flatten(0, 1)
            answers = self._known.split_targets(targets, tuple(outputs.shape))
            slopes = self._known.gradient(rows.detach(), answers)
            found = torch.autograd.grad(rows, parameters, slopes, allow_unused=True)
            for part, slope in zip(self.snapshot.layout.slices.values(), found, strict=True):
                if slope is not None:
                    result[part] += slope.to_dense().reshape(-1)
            divisor += self._known.divisor(tuple(outputs.shape), targets)
        scale = 1 / divisor if self._known.reduction == "mean" else num_points / self.count
        return result * scale

    def measure(self, weights: Tensor) -> tuple[float | None, float | None]:
        """The loss and the accuracy at some weights; the model keeps these weights.

        Returns:
            The loss with its reduction, over all points; None without targets, and for a loss of
            the user's own, which has derivatives alone. The share of points whose largest output
            is their label; None if targets are no labels.
        """
        self.set_weights(weights)
        if self.targets is None:
            return None, None
        outputs = self._outputs()
        accuracy = None
        if outputs.ndim == 2 and self.targets.shape == outputs.shape[:1]:
            if not self.targets.is_floating_point() and outputs.shape[1] > 1:
                accuracy = float((outputs.argmax(1) == self.targets).double().mean())
        return self._value(outputs), accuracy

    def _outputs(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.snapshot.outputs(p) for p in split_inputs(self.inputs, _CHUNK)])

    def _value(self, outputs: Tensor) -> float | None:
        with torch.no_grad():
            if isinstance(self._loss, nn.Module):
                return float(self._loss(outputs, self.targets))
            if type(self._loss) is HalfSquaredError:
                assert self.targets is not None
                divisor = len(outputs) if self._loss.reduction == "mean" else 1
                return 0.5 * float((outputs - self.targets).square().sum()) / divisor
        return None

    def last_module(self, kinds: tuple[type[nn.Module], ...]) -> str | None:
        """The name of the module of some kinds that is called last, on the first point."""
        called: list[str] = []
        handles = []
        for name, module in self.snapshot.module.named_modules():
            if isinstance(module, kinds):
                handles.append(
                    module.register_forward_hook(lambda *_, name=name: called.append(name))
                )
        try:
            with torch.no_grad():
                self.snapshot.outputs(map_inputs(lambda tensor: tensor[:1], self.inputs))
        finally:
            for handle in handles:
                handle.remove()
        return called[-1] if called else None


def _joined(parts: list[Inputs]) -> Inputs:
    """The inputs of all batches as one."""
    if len(parts) == 1:
        return parts[0]
    tensors = [torch.cat(same) for same in zip(*map(tensors_of, parts), strict=True)]
    first = parts[0]
    if isinstance(first, Tensor):
        return tensors[0]
    if isinstance(first, Mapping):
        return dict(zip(first, tensors, strict=True))
    return tuple(tensors)
