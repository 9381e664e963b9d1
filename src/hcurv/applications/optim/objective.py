"""The loss over a batch, and its gradient, by plain forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hcurv.losses import Loss, as_loss
from hcurv.network.batches import Data, convert_targets
from hcurv.network.model.snapshot import ForwardFunction
from hcurv.network.model_inputs import Inputs, is_inputs, map_inputs, num_points

__all__ = ["Objective", "Pair", "read_batch"]

Pair: TypeAlias = tuple[Inputs, Tensor]

# Forward and backward passes take this many points at a time: enough for fast products, and few
# enough for the activations of large networks.
_PIECE = 1024


def read_batch(batch: Data | Callable[[], Data]) -> list[Pair]:
    """Turn what is passed to ``step`` into a list of (inputs, targets).

    Args:
        batch: (inputs, targets), a list of both as a DataLoader yields it, an iterable of such
            pairs, or a function without arguments that returns one of these.

    Raises:
        TypeError: it is none of these.
        ValueError: there are no targets, or no points.
    """
    found: object = batch() if callable(batch) else batch
    if isinstance(found, Tensor):
        if callable(batch):
            raise TypeError(
                "the closure must return the batch (inputs, targets), not a loss: the optimizer"
                " computes loss, gradient and curvature from the batch by itself"
            )
        raise ValueError("a step needs targets: pass (inputs, targets)")
    if _is_pair(found):
        pairs = [_as_pair(found)]
    elif isinstance(found, Iterable) and not isinstance(found, Mapping | str | bytes):
        pairs = [_as_pair(item) for item in found]
    else:
        raise TypeError(f"{_EXPECTED}; got {type(found).__name__}")
    pairs = [pair for pair in pairs if num_points(pair[0])]
    if not pairs:
        raise ValueError("the batch is empty: at least one point is needed")
    return pairs


_EXPECTED = (
    "a step takes a batch (inputs, targets), an iterable of such batches, or a function that"
    " returns one of these"
)


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and is_inputs(item[0])
        and isinstance(item[1], Tensor)
    )


def _as_pair(item: Any) -> Pair:
    if not _is_pair(item):
        raise TypeError(f"{_EXPECTED}; a batch was {type(item).__name__} without targets")
    inputs: Any = item[0]
    return (tuple(inputs) if isinstance(inputs, list) else inputs), item[1]


class Objective:
    """The loss of a model as a function of a batch.

    Args:
        model: the model, which is called as it is.
        loss: a loss module of torch, or a `Loss` with a ``value``.
        forward_fn: computes the outputs from the model and inputs; None to call the model.

    Raises:
        TypeError, ValueError: the loss has no Hessian, or no value.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module | Loss, forward_fn: ForwardFunction | None
    ) -> None:
        self._model, self._forward_fn = model, forward_fn
        self._loss, self._known = loss, as_loss(loss)
        if isinstance(loss, Loss) and type(loss).value is Loss.value:
            Loss.value(loss, torch.empty(0), torch.empty(0))  # raises, and says what to do

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean over points."""
        return self._known.reduction == "mean"

    def value(self, pairs: Sequence[Pair]) -> float:
        """The loss over all pairs; infinite or NaN where the outputs are."""
        with torch.no_grad():
            parts = [(float(value), count) for value, count in self._pieces(pairs)]
        total = sum(value for value, _ in parts)
        return total / sum(count for _, count in parts) if self.is_mean else total

    def value_and_gradient(
        self, pairs: Sequence[Pair], parameters: list[nn.Parameter]
    ) -> tuple[float, Tensor]:
        """The loss, and its flat gradient with respect to some parameters, (N,)."""
        total, divisor = 0.0, 0.0
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        with torch.enable_grad():
            for value, count in self._pieces(pairs):
                total, divisor = total + float(value.detach()), divisor + count
                found = torch.autograd.grad(value, parameters, allow_unused=True)
                for own, gradient in zip(sums, found, strict=True):
                    if gradient is not None:
                        own += gradient.to_dense() if gradient.is_sparse else gradient
        scale = 1 / divisor if self.is_mean else 1.0
        return total * scale, scale * torch.cat([own.reshape(-1) for own in sums])

    def _pieces(self, pairs: Sequence[Pair]) -> Iterator[tuple[Tensor, float]]:
        """The sum of the losses of some points at a time, and what their mean divides by."""
        like = next(self._model.parameters())
        for inputs, targets in pairs:
            for start in range(0, num_points(inputs), _PIECE):
                some = map_inputs(
                    lambda tensor: tensor[start : start + _PIECE].to(like.device),  # noqa: B023
                    inputs,
                )
                wanted = convert_targets(targets[start : start + _PIECE], like.dtype, like.device)
                outputs = self._outputs(some)
                shape = tuple(outputs.shape)
                self._known.check_targets(shape, wanted)
                count = self._known.divisor(shape, wanted) if self.is_mean else 1.0
                if count > 0:  # points may all be ignored
                    yield self._sum(outputs, wanted, count), count

    def _outputs(self, inputs: Inputs) -> Tensor:
        run: Any = self._model
        if self._forward_fn is not None:
            return self._forward_fn(run, inputs)
        if isinstance(inputs, Tensor):
            return run(inputs)  # type: ignore[no-any-return]
        return run(**inputs) if isinstance(inputs, Mapping) else run(*inputs)  # type: ignore[no-any-return]

    def _sum(self, outputs: Tensor, targets: Tensor, count: float) -> Tensor:
        """The sum of the losses of these points."""
        if isinstance(self._loss, nn.Module):
            value: Tensor = self._loss(outputs, targets)
            return value * count
        known = self._known
        rows = known.split_outputs(outputs).flatten(0, 1)
        return known.value(rows, known.split_targets(targets, tuple(outputs.shape))).sum()
