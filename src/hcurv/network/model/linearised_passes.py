"""Products with S by linearised passes: a forward derivative gives S v, a backward one Sᵀ y.

One column takes about as long as two rows of R take to be read, so that passes are for few columns.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp

from hcurv.losses import Loss
from hcurv.network.loss_rows import LossRows
from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.per_point import levels_restored
from hcurv.network.model.snapshot import ModelSnapshot
from hcurv.network.model_inputs import Inputs

__all__ = ["LinearisedPasses", "PassError"]


# What is rounded in Sᵀy may be so many times the machine epsilon.
_ROUNDING = 100


class PassError(Exception):
    """The model has no forward derivatives, or wrong ones."""


class LinearisedPasses:
    """Products with the rows of S of some points.

    Args:
        snapshot: the model.
        loss: the loss, which says how outputs are arranged.
        inputs: the inputs of the points.
        outputs: their outputs, with a graph, (b, t, d).
        rows: the rows of R_i.
    """

    def __init__(
        self, snapshot: ModelSnapshot, loss: Loss, inputs: Inputs, outputs: Tensor, rows: LossRows
    ) -> None:
        self._snapshot, self._loss, self._inputs = snapshot, loss, inputs
        self._outputs, self._rows = outputs, rows
        self._parameters = snapshot.trainable

    def product(self, rhs: Tensor) -> Tensor:
        """SᵀS times (N, k), one column after the other.

        Raises:
            PassError: the model has no forward derivatives, or they are not those of the backward
                passes.
        """
        result = torch.empty_like(rhs)
        for column, target in zip(rhs.unbind(1), result.unbind(1), strict=True):
            values = self._forward(column.contiguous())
            target.copy_(self._backward(values))
            # vᵀSᵀ(Sv) = ‖Sv‖², unless S differs between the two.
            square = float(values.double().square().sum())
            found = float(column.double() @ target.double())
            eps = torch.finfo(rhs.dtype).eps
            rounding = _ROUNDING * eps * float(column.double().norm() * target.double().norm())
            if not abs(found - square) <= eps**0.5 * square + rounding:
                raise PassError
        return result

    def _forward(self, vector: Tensor) -> Tensor:
        """S times (N,): (b, q)."""
        module = self._snapshot.module
        values = {name: p.detach() for name, p in module.named_parameters()}
        values.update({name: buffer.detach() for name, buffer in module.named_buffers()})
        chosen = {name: values.pop(name) for name in self._parameters}
        tangents = {
            name: part.view_as(chosen[name])
            for name, part in zip(
                chosen, vector.split([p.numel() for p in chosen.values()]), strict=True
            )
        }

        def outputs(own: dict[str, Tensor]) -> Tensor:
            def run(*args: Any, **kwargs: Any) -> Any:
                return functional_call(module, {**values, **own}, args, kwargs)

            return self._loss.split_outputs(self._snapshot.outputs(self._inputs, run))

        try:
            with warnings.catch_warnings(), levels_restored():
                warnings.simplefilter("ignore")
                moved: Tensor = jvp(outputs, (chosen,), (tangents,))[1]
        except Exception as error:  # What models raise that have no such derivative differs widely.
            raise PassError from error
        return self._rows.weigh(moved)

    def _backward(self, values: Tensor) -> Tensor:
        """Sᵀ times (b, q): (N,)."""
        gradients = differentiate(
            self._outputs, list(self._parameters.values()), self._rows.combine(values)
        )
        return torch.cat(
            [
                torch.zeros_like(parameter).reshape(-1)
                if gradient is None
                else gradient.to_dense().reshape(-1)
                for parameter, gradient in zip(self._parameters.values(), gradients, strict=True)
            ]
        )
