"""Forward passes of a chain of Linear layers, compared with the model that it was read from.

A chain is read by tracing, so that it may do something else than the model itself: hooks, functions
with derivatives of their own, blocks without gradients, functions that act elementwise on most
points only. So the model is run on every batch. Its outputs, and their derivatives by autograd
along one random direction for each point, must be those of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.independence import agree, require_independent
from hcurv.network.problem import Problem
from hcurv.network.reading import Network

__all__ = ["ChainMismatchError", "ForwardPass", "forward_pass", "verified", "verify"]


class ChainMismatchError(Exception):
    """The model does something else than the chain that was read; it is read as any other."""


@dataclass(frozen=True)
class ForwardPass:
    """What a forward pass over one batch of b points computes.

    Attributes:
        points: the range of the points in the data.
        inputs: the inputs x^{ℓ-1} of every layer, (b, d_in).
        slopes: the diagonal of M^ℓ of every layer, (b, units); None where it is the identity.
        outputs: the outputs of the network, (b, d_L).
    """

    points: slice
    inputs: list[Tensor]
    slopes: list[Tensor | None]
    outputs: Tensor


def forward_pass(network: Network, inputs: Tensor, start: int) -> ForwardPass:
    """Propagate a batch through the network (paper, Table 1, step (a)), and keep the slopes.

    Args:
        network: the network.
        inputs: inputs of the model, (b, …).
        start: the number of the first of these points in the data.

    Raises:
        ValueError: the outputs are NaN or infinite.
    """
    current = network.prepare_inputs(inputs)
    layer_inputs, slopes = [], []
    for layer in network.layers:
        layer_inputs.append(current)
        current, slope = layer.propagate(current)
        slopes.append(slope)
    if not bool(torch.isfinite(current).all()):
        raise ValueError(
            f"the network's outputs are NaN or infinite at points {start} to"
            f" {start + inputs.shape[0] - 1}: its weights or the inputs are too large"
        )
    return ForwardPass(slice(start, start + inputs.shape[0]), layer_inputs, slopes, current)


def verify(problem: Problem, inputs: Tensor, batch: ForwardPass) -> None:
    """Compare a forward pass of the chain with the model, at all points of a batch.

    Args:
        problem: the model, and the chain that was read from it.
        inputs: the inputs of the points.
        batch: what the chain made of them.

    Raises:
        ChainMismatchError: the outputs or the derivatives differ.
        UnsupportedModelError: points influence each other, or the forward pass is random.
    """
    with torch.enable_grad():
        outputs = problem.snapshot.outputs(inputs)
    require_independent(problem.snapshot.outputs, inputs, outputs.detach(), batch.points)
    if outputs.grad_fn is None or not bool(agree(batch.outputs, outputs.detach()).all()):
        raise ChainMismatchError
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
    parameters = problem.snapshot.trainable
    found = differentiate(outputs, list(parameters.values()), weights)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    expected = problem.layout.flatten(gradients)
    read = _gradient(problem.network, batch, weights)  # type: ignore[arg-type]
    # Layers with small derivatives are compared as carefully as those with large ones.
    tolerance, floor = torch.finfo(outputs.dtype).eps ** 0.5, 1e-3 * float(expected.norm())
    for name in problem.layout.names:
        own = problem.layout.slices[name]
        difference = float((read[own] - expected[own]).norm())
        if not difference <= tolerance * (float(expected[own].norm()) + floor):
            raise ChainMismatchError


def _gradient(network: Network, batch: ForwardPass, weights: Tensor) -> Tensor:
    """The flat gradient of the weighted outputs, by the slopes of the chain, (N,)."""
    result = weights.new_zeros(network.num_parameters)
    adjoint = weights
    for position in range(len(network.layers) - 1, network.first_trainable - 1, -1):
        layer, slope = network.layers[position], batch.slopes[position]
        if slope is not None:
            adjoint = adjoint * slope
        if layer.parameters.weight is not None:
            result[layer.parameters.weight] = (adjoint.T @ batch.inputs[position]).reshape(-1)
        if layer.parameters.bias is not None:
            result[layer.parameters.bias] = adjoint.sum(0)
        if position > network.first_trainable:
            adjoint = adjoint @ layer.weight
    return result


def verified(problem: Problem, max_batch: int = 512) -> Problem:
    """The same problem, without its chain if the model does something else at any point.

    Args:
        problem: the model and the data, which is read once.
        max_batch: most points propagated at a time.

    Raises:
        UnsupportedModelError: points influence each other, or the forward pass is random.
    """
    start = 0
    for inputs in problem.inputs() if problem.network is not None else ():
        assert isinstance(inputs, Tensor)
        for some in inputs.split(max_batch):
            batch = forward_pass(problem.network, some, start)  # type: ignore[arg-type]
            start = batch.points.stop
            try:
                verify(problem, some, batch)
            except ChainMismatchError:
                return replace(problem, network=None)
    return problem
