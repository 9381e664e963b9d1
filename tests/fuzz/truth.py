"""The dense oracle: loops of `torch.autograd.grad` over the user's own forward pass.

It shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def plain_state() -> Iterator[None]:
    """The usual state of torch, whatever state the package is tried in.

    The fused LSTM of mkldnn cannot be differentiated if its result is changed in place later, so
    the composite one is used, which computes the same and can.
    """
    before, backend = torch.get_default_dtype(), torch.backends.mkldnn
    fused = backend.enabled
    torch.set_default_dtype(torch.float32)
    backend.enabled = False  # type: ignore[assignment]
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)
        backend.enabled = fused


Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Truth:
    """All that is asked of a model, a loss and data, dense.

    Attributes:
        model: the model, in double precision.
        call: its outputs at the inputs of all points.
        value: the scalar loss of outputs and targets.
        targets: the targets of all points.
        root_hessian: the diagonal of the Hessian of the loss with respect to the outputs, where it
            is not that of ``value``.
    """

    model: nn.Module
    call: Callable[[nn.Module], Tensor]
    value: Loss
    targets: Tensor
    root_hessian: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @cached_property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def _flat(self, gradients: Any) -> Tensor:
        filled = [
            torch.zeros_like(p) if g is None else g.to_dense()
            for g, p in zip(gradients, self.parameters, strict=True)
        ]
        return torch.cat([g.reshape(-1).double() for g in filled])

    @cached_property
    def _outputs_and_jacobian(self) -> tuple[Tensor, Tensor]:
        with plain_state():
            outputs = self.call(self.model)
            rows = [
                self._flat(
                    torch.autograd.grad(o, self.parameters, retain_graph=True, allow_unused=True)
                )
                if o.requires_grad
                else torch.zeros(self.size, dtype=outputs.dtype)
                for o in outputs.reshape(-1)
            ]
        return outputs.detach(), torch.stack(rows)

    @property
    def outputs(self) -> Tensor:
        return self._outputs_and_jacobian[0]

    @property
    def jacobian(self) -> Tensor:
        """(n·outputs, N)."""
        return self._outputs_and_jacobian[1]

    @cached_property
    def loss_hessian(self) -> Tensor:
        """The Hessian of the loss with respect to all outputs."""
        if self.root_hessian is not None:
            return torch.diag(self.root_hessian(self.outputs, self.targets).reshape(-1))
        with plain_state():
            outputs = self.outputs.clone().requires_grad_()
            value = self.value(outputs, self.targets)
            (first,) = torch.autograd.grad(value, outputs, create_graph=True)
            rows = []
            for entry in first.reshape(-1):
                row = None
                if entry.requires_grad:
                    (row,) = torch.autograd.grad(
                        entry, outputs, retain_graph=True, allow_unused=True
                    )
                rows.append((torch.zeros_like(outputs) if row is None else row).reshape(-1))
        return torch.stack(rows).detach()

    @cached_property
    def matrix(self) -> Tensor:
        """The Gauss-Newton Hessian, (N, N)."""
        found = self.jacobian.T @ self.loss_hessian @ self.jacobian
        return (found + found.T) / 2

    @cached_property
    def output_gradient(self) -> Tensor:
        """The derivatives of the loss with respect to all outputs."""
        return self._output_gradient(self.outputs)

    def _output_gradient(self, outputs: Tensor) -> Tensor:
        with plain_state():
            outputs = outputs.clone().requires_grad_()
            (found,) = torch.autograd.grad(self.value(outputs, self.targets), outputs)
        return found

    @cached_property
    def gradient_rounding(self) -> Tensor:
        """By how much rounding may change the gradients of points here, (n, N).

        Where a network is certain, p − t cancels, and automatic differentiation has no digit left.
        How large p and t are, the derivatives at outputs of zero tell.
        """
        terms = self._output_gradient(torch.zeros_like(self.outputs))
        terms = torch.nan_to_num(terms, 0.0, 0.0, 0.0).abs().reshape(-1)[:, None]
        weighted = terms * self.jacobian.abs()
        sums = weighted.reshape(len(self.outputs), -1, self.size).sum(1)
        return 30 * torch.finfo(torch.float64).eps * sums

    @cached_property
    def gradient(self) -> Tensor:
        """The flat gradient of the loss."""
        return self.output_gradient.reshape(-1) @ self.jacobian

    @cached_property
    def point_gradients(self) -> Tensor:
        """The gradients of the points' shares of the loss, its reduction included, (n, N)."""
        n = len(self.outputs)
        weighted = self.output_gradient.reshape(-1)[:, None] * self.jacobian
        return weighted.reshape(n, -1, self.size).sum(1)
