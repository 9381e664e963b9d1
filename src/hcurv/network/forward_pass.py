"""Forward passes of a chain of Linear layers, compared with the model that it was read from.

A chain is read by tracing, so that it may do something else than the model itself: hooks, functions
with derivatives of their own, blocks without gradients, functions that act elementwise on most
points only. So the model is run on every batch. Its outputs, and their derivatives by autograd
along one random direction for each point, must be those of the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.network.jacobians.jacobian_plan import refuse_overflow
from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.independence import PARITIES, agree
from hcurv.network.problem import Problem
from hcurv.network.reading import Layer, Network

__all__ = ["ChainMismatchError", "ForwardPass", "forward_pass", "verified", "verify"]

# Products with gradients of weights that are compared.
_PROBES = 2


class ChainMismatchError(Exception):
    """The model does something else than the chain that was read; it is read as any other."""


@dataclass(frozen=True)
class ForwardPass:
    """What a forward pass over one batch of b points computes.

    Attributes:
        points: the range of the points in the data.
        inputs: the inputs x^{ℓ-1} of every layer, (b, d_in).
        preactivations: W·x + b of every layer, (b, units).
        slopes: the diagonal of M^ℓ of every layer, (b, units); None where it is the identity.
        outputs: the outputs of the network, (b, d_L).
    """

    points: slice
    inputs: list[Tensor]
    preactivations: list[Tensor]
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
    layer_inputs, preactivations, slopes = [], [], []
    for layer in network.layers:
        layer_inputs.append(current)
        preactivations.append(layer.preactivation(current))
        current, slope = layer.activate(preactivations[-1])
        slopes.append(slope)
    if not bool(torch.isfinite(current).all()):
        raise ValueError(
            f"the network's outputs are NaN or infinite at points {start} to"
            f" {start + inputs.shape[0] - 1}: its weights or the inputs are too large"
        )
    points = slice(start, start + inputs.shape[0])
    return ForwardPass(points, layer_inputs, preactivations, slopes, current)


def verify(problem: Problem, inputs: Tensor, batch: ForwardPass) -> None:
    """Compare a forward pass of the chain with the model, at all points of a batch.

    Args:
        problem: the model, and the chain that was read from it.
        inputs: the inputs of the points.
        batch: what the chain made of them.

    Raises:
        ChainMismatchError: the outputs or the derivatives differ.
        ValueError: the derivatives overflow.
    """
    network = problem.network
    assert network is not None
    with torch.enable_grad():
        outputs = problem.snapshot.outputs(inputs)
    if outputs.grad_fn is None or not bool(agree(batch.outputs, outputs).all()):
        raise ChainMismatchError
    _verify_independence(network, inputs, batch)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(batch.outputs)

    weights = draw(len(inputs), 1) * draw(1, network.num_outputs)
    parameters = problem.snapshot.trainable
    found = differentiate(outputs, list(parameters.values()), weights)
    expected = problem.layout.flatten(
        {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
        }
    )
    refuse_overflow(expected, batch.points)
    tolerance = torch.finfo(outputs.dtype).eps ** 0.5
    # Layers with small derivatives are compared as carefully as those with large ones.
    floor = 1e-3 * float(expected.norm())

    def compare(read: Tensor, right: Tensor, scale: Tensor) -> None:
        if not float((read - right).norm()) <= tolerance * (float(scale.norm()) + floor):
            raise ChainMismatchError

    for layer, adjoint, values in _adjoints(network, batch, weights):
        place = layer.parameters
        if place.bias is not None:
            compare(adjoint.sum(0), expected[place.bias], expected[place.bias])
        if place.weight is not None:
            # The gradient is adjointᵀ·values. A few products aᵀ·gradient·b are cheaper than that.
            gradient = expected[place.weight].view(layer.out_features, layer.in_features)
            left, right = draw(layer.out_features, _PROBES), draw(layer.in_features, _PROBES)
            read = ((adjoint @ left) * (values @ right)).sum(0)
            compare(read, ((gradient @ right) * left).sum(0), gradient)


def _adjoints(
    network: Network, batch: ForwardPass, weights: Tensor
) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Layers from the last one on, derivatives of the weighted outputs, and the layers' inputs."""
    adjoint = weights
    for position in range(len(network.layers) - 1, network.first_trainable - 1, -1):
        layer, slope = network.layers[position], batch.slopes[position]
        if slope is not None:
            adjoint = adjoint * slope
        yield layer, adjoint, batch.inputs[position]
        if position > network.first_trainable:
            adjoint = adjoint @ layer.weight


def _verify_independence(network: Network, inputs: Tensor, batch: ForwardPass) -> None:
    """Run the functions between layers on even and on odd points apart.

    The products with weights cannot mix points. So if these functions do not either, and the
    outputs are those of the model, then the model does not.
    """
    if len(inputs) == 1:
        return
    results = [*batch.inputs[1:], batch.outputs]
    for own in PARITIES:
        pairs = []
        if network.input_map is not None:
            pairs.append((network.prepare_inputs(inputs[own]), batch.inputs[0]))
        for layer, values, after in zip(network.layers, batch.preactivations, results, strict=True):
            if layer.activation is not None:
                pairs.append((layer.activation(values[own].clone()), after))
        for alone, together in pairs:
            if not bool(agree(alone, together[own]).all()):
                raise ChainMismatchError


def verified(problem: Problem, max_batch: int = 512) -> Problem:
    """The same problem, without its chain if the model does something else at any point.

    Args:
        problem: the model and the data, which is read once.
        max_batch: most points propagated at a time.

    Returns:
        What can be read as a chain at all points, or must be read as any other model.
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
