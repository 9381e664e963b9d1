"""The precomputation: one pass over the data, after which the network is no longer needed.

The paper's Theorem 3.1 stores, for every layer ℓ and point i, the inputs x_i^{ℓ-1} and the factors
C_i^ℓ. `compute_factors` does so batch by batch, into memory that is reserved beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.memory import format_bytes, require_bytes
from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.jacobians.jacobian_plan import ChainShape, JacobianPlan
from hcurv.network.jacobians.narrow_plan import NarrowPlan
from hcurv.network.jacobians.wide_plan import WidePlan
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.problem import Problem
from hcurv.network.reading import Network
from hcurv.network.trainable_layers import TrainableLayer, number_layers

__all__ = [
    "FactorPlan",
    "ForwardPass",
    "compute_factors",
    "forward_pass",
    "plan_factors",
]


@dataclass(frozen=True)
class FactorPlan:
    """What the precomputation will store, decided before anything is allocated.

    Attributes:
        layers: the layers with trainable parameters.
        jacobian: the plan for their Jacobian.
        num_points: n.
        num_inputs: rows of the stacked layer inputs.
        num_floats: floats that will be stored.
        working_floats: temporary floats that one point of a batch takes.
    """

    layers: tuple[TrainableLayer, ...]
    jacobian: JacobianPlan
    num_points: int
    num_inputs: int
    num_floats: int
    working_floats: int


def plan_factors(network: Network, num_points: int, num_rows: int, diagonal: bool) -> FactorPlan:
    """Decide how the factors are stored, and count the floats that this takes.

    Args:
        network: the network.
        num_points: n.
        num_rows: q, the rows of the loss's square root.
        diagonal: whether that square root is diagonal.
    """
    layers = number_layers(network)
    chain = ChainShape(network, layers, num_points, num_rows, diagonal)
    jacobian = WidePlan(chain) if WidePlan.suits(chain) else NarrowPlan(chain)
    num_inputs = layers[-1].inputs.stop
    return FactorPlan(
        layers=layers,
        jacobian=jacobian,
        num_points=num_points,
        num_inputs=num_inputs,
        num_floats=num_points * num_inputs + jacobian.num_floats,
        working_floats=jacobian.working_floats
        + 4 * sum(layer.out_features for layer in network.layers),
    )


def _store_inputs(layers: tuple[TrainableLayer, ...], target: Tensor, batch: ForwardPass) -> None:
    """Store the inputs of the trainable layers, (inputs, n), with a row of ones for a bias."""
    for place in layers:
        rows = target[place.inputs, batch.points]
        width = place.layer.in_features
        rows[:width] = without_tiny(batch.inputs[place.position]).T
        rows[width:] = 1.0


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


def compute_factors(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None = None,
    max_batch: int = 512,
) -> LayerFactors:
    """Run the precomputation of the paper's Theorem 3.1 over all batches.

    Args:
        problem: the network, the loss and the data.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.
        max_batch: most points propagated at a time. Larger batches take more memory, and matrix
            products are not faster for them.

    Raises:
        InsufficientMemoryError: the factors do not fit into free memory; nothing was allocated.
    """
    network, num_points = problem.network, problem.num_points
    assert network is not None
    first = problem.survey.first_inputs
    assert isinstance(first, Tensor)
    sample = forward_pass(network, first[:1], 0)
    root = problem.loss_root(sample.outputs, sample.points)
    plan = plan_factors(network, num_points, root.shape[1], diagonal=root.ndim == 2)
    require_bytes(
        plan.num_floats * network.dtype.itemsize + workspace,
        network.device,
        f"the precomputation for {num_points} points and {network.num_parameters}"
        f" parameters (its workspace of {format_bytes(workspace)} included)",
        _WAYS_OUT,
    )
    fitting = workspace // (plan.working_floats * network.dtype.itemsize)
    batch_size = max(1, min(fitting, max_batch))
    layer_inputs = network.layers[-1].weight.new_empty(plan.num_inputs, plan.num_points)
    jacobian = plan.jacobian.reserve()
    start = 0
    for inputs in problem.inputs():
        assert isinstance(inputs, Tensor)
        for some in inputs.split(batch_size):
            batch = forward_pass(network, some, start)
            root = problem.loss_root(batch.outputs, batch.points)
            _store_inputs(plan.layers, layer_inputs, batch)
            plan.jacobian.fill(jacobian, batch.points, root, batch.slopes)
            start = batch.points.stop
            if progress is not None:
                progress(some.shape[0])
    return LayerFactors(plan.layers, layer_inputs, jacobian, network.layout)


_WAYS_OUT = (
    "use fewer data points (the memory grows in proportion)",
    "convert the model and the data to float32, if they are float64",
    "freeze layers that need not be part of the matrix with requires_grad_(False)",
    "pass a smaller workspace=",
)
