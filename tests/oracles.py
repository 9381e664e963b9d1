"""Dense float64 references from `torch.func` and autograd; they share no code with the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

LossOfOutputs = Callable[[Tensor], Tensor]
Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def _double(inputs: Tensor) -> Tensor:
    return inputs.double() if inputs.is_floating_point() else inputs


def _split(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model).double()
    parameters = dict(model.named_parameters())
    trainable = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    fixed = {name: p.detach() for name, p in parameters.items() if not p.requires_grad}
    return model, trainable, fixed


def hessian(function: LossOfOutputs) -> LossOfOutputs:
    """The Hessian of a scalar function.

    It is `torch.func.hessian` with reverse mode twice, because forward mode makes torch import what
    it has deprecated itself, and warnings are errors here.
    """
    return jacrev(jacrev(function))


def gauss_newton(model: nn.Module, loss: LossOfOutputs, inputs: Tensor) -> Tensor:
    """JᵀQJ with J the Jacobian of all outputs and Q the Hessian of the scalar loss of them."""
    model, trainable, fixed = _split(model)

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, {**fixed, **parameters}, (_double(inputs),))

    values = outputs(trainable).detach()
    jacobian = jacrev(outputs)(trainable)
    matrix = torch.cat([jacobian[name].reshape(values.numel(), -1) for name in trainable], dim=1)
    curvature = hessian(lambda flat: loss(flat.view_as(values)))(values.reshape(-1))
    return matrix.T @ curvature @ matrix


def gradient(model: nn.Module, loss: LossOfOutputs, inputs: Tensor) -> Tensor:
    """Flat gradient of the scalar loss by autograd."""
    model, trainable, _ = _split(model)
    del trainable
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss(model(_double(inputs)))
    gradients = torch.autograd.grad(value, parameters)
    return torch.cat([g.reshape(-1) for g in gradients])


def jacobian_of_model(
    model: nn.Module, inputs: Inputs, forward_fn: Callable[[Any, Any], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs and their Jacobian, (outputs, N), one backward pass for each output of the batch.

    Unlike `torch.func`, this works for every model. Parameters that are not used have zeros.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    values = call(model, inputs, forward_fn)
    rows = []
    for output in values.reshape(-1):
        found = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        rows.append(_flat(found, parameters))
    return values.detach(), torch.stack(rows)


def gauss_newton_of_model(
    model: nn.Module,
    loss: LossOfOutputs,
    inputs: Inputs,
    forward_fn: Callable[[Any, Any], Tensor] | None = None,
) -> Tensor:
    """JᵀQJ of any model, with inputs of any structure."""
    values, matrix = jacobian_of_model(model, inputs, forward_fn)
    curvature = hessian(lambda flat: loss(flat.view_as(values)))(values.reshape(-1))
    return matrix.T @ curvature @ matrix


def gradient_of_model(
    model: nn.Module,
    loss: LossOfOutputs,
    inputs: Inputs,
    forward_fn: Callable[[Any, Any], Tensor] | None = None,
) -> Tensor:
    """Flat gradient of the scalar loss of any model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss(call(model, inputs, forward_fn))
    return _flat(torch.autograd.grad(value, parameters, allow_unused=True), parameters)


def call(
    model: nn.Module, inputs: Inputs, forward_fn: Callable[[Any, Any], Tensor] | None = None
) -> Tensor:
    """Run a model on a tensor, a tuple of arguments or a dictionary of keyword arguments."""
    if forward_fn is not None:
        return forward_fn(model, inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _flat(gradients: Sequence[Tensor | None], parameters: list[nn.Parameter]) -> Tensor:
    filled = [
        torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    return torch.cat([gradient.reshape(-1) for gradient in filled])
