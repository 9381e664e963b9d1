"""The precomputation: one pass over the data, after which the network is no longer needed.

The paper's Theorem 3.1 stores, for every layer ℓ and point i, the inputs x_i^{ℓ-1} and the factors
C_i^ℓ. `compute_factors` does so batch by batch, into memory that is reserved beforehand.

Where linearised passes are cheaper, `compute_linearisation` stores the inputs and slopes instead,
and `make_factors` makes the C_i^ℓ from them when entries are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.memory import format_bytes, require_bytes
from hcurv.network.forward_pass import ForwardPass, forward_pass, verify
from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.jacobians.jacobian_plan import ChainShape, JacobianPlan, refuse_overflow
from hcurv.network.jacobians.narrow_plan import NarrowPlan
from hcurv.network.jacobians.wide_plan import WidePlan
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.linearisation import Linearisation
from hcurv.network.problem import Problem
from hcurv.network.product_costs import passes_are_cheaper
from hcurv.network.reading import Network
from hcurv.network.trainable_layers import TrainableLayer, number_layers

__all__ = [
    "FactorPlan",
    "chain_inputs",
    "compute_factors",
    "compute_linearisation",
    "forward_passes",
    "linearise",
    "make_factors",
    "plan_chain",
    "plan_factors",
    "plan_of_factors",
    "read_chain",
]


# Most points propagated at a time, unless the workspace allows fewer.
MAX_BATCH = 512


@dataclass(frozen=True)
class FactorPlan:
    """What the precomputation will store, decided before anything is allocated.

    Attributes:
        layers: the layers with trainable parameters.
        jacobian: the plan for their Jacobian.
        num_points: n.
        num_inputs: rows of the stacked layer inputs.
        num_floats: floats of the inputs and factors.
        working_floats: temporary floats that one point of a batch takes.
        linearised: whether products are cheaper by linearised passes than with the factors. Then
            the inputs, slopes and roots are stored, and the factors when entries are asked for.
        num_linear_floats: floats of the inputs, slopes and roots.
    """

    layers: tuple[TrainableLayer, ...]
    jacobian: JacobianPlan
    num_points: int
    num_inputs: int
    num_floats: int
    working_floats: int
    linearised: bool
    num_linear_floats: int

    @property
    def network(self) -> Network:
        """The network."""
        return self.jacobian.chain.network

    @property
    def root_shape(self) -> tuple[int, ...]:
        """The shape of R_i M_i^L of a point, as `Linearisation` stores it."""
        chain = self.jacobian.chain
        outputs = chain.network.num_outputs
        return (outputs,) if chain.diagonal else (outputs, chain.num_rows)

    def batch_size(self, workspace: int, most: int) -> int:
        """The number of points whose temporaries fit into the workspace."""
        fitting = workspace // (self.working_floats * self.network.dtype.itemsize)
        return max(1, min(fitting, most, self.num_points))

    def working_bytes(self, workspace: int, most: int, *, linear: bool = False) -> int:
        """Bytes of temporary memory of one batch; if ``linear``, of forward passes alone."""
        floats = self.working_floats - (self.jacobian.working_floats if linear else 0)
        return self.batch_size(workspace, most) * floats * self.network.dtype.itemsize


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
    hidden = network.layers[network.first_trainable : -1]
    num_slopes = sum(layer.out_features for layer in hidden if layer.activation is not None)
    root_floats = network.num_outputs * (1 if diagonal else num_rows)
    return FactorPlan(
        layers=layers,
        jacobian=jacobian,
        num_points=num_points,
        num_inputs=num_inputs,
        num_floats=num_points * num_inputs + jacobian.num_floats,
        working_floats=jacobian.working_floats
        + 4 * sum(layer.out_features for layer in network.layers),
        linearised=passes_are_cheaper(chain, jacobian),
        num_linear_floats=num_points * (num_inputs + num_slopes + root_floats),
    )


def _store_inputs(layers: tuple[TrainableLayer, ...], target: Tensor, batch: ForwardPass) -> None:
    """Store the inputs of the trainable layers, (inputs, n), with a row of ones for a bias."""
    for place in layers:
        rows = target[place.inputs, batch.points]
        width = place.layer.in_features
        rows[:width] = without_tiny(batch.inputs[place.position]).T
        rows[width:] = 1.0


def read_chain(
    problem: Problem, workspace: int, progress: Callable[[int], object] | None = None
) -> LayerFactors | Linearisation:
    """Read all of the data once, and keep what products are cheaper with.

    Args:
        problem: the network, the loss and the data.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.

    Returns:
        The factors, or a `Linearisation`, from which `make_factors` makes them.

    Raises:
        InsufficientMemoryError: there is no memory for it; nothing was allocated.
    """
    plan = plan_chain(problem)
    if plan.linearised:
        return compute_linearisation(problem, workspace, progress)
    return compute_factors(problem, workspace, progress)


def compute_factors(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None = None,
    max_batch: int = MAX_BATCH,
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
    plan = plan_chain(problem)
    network = plan.network
    _require(problem, plan.num_floats, plan.working_bytes(workspace, max_batch))
    layer_inputs = network.layers[-1].weight.new_empty(plan.num_inputs, plan.num_points)
    jacobian = plan.jacobian.reserve()
    size = plan.batch_size(workspace, max_batch)
    for batch, root in forward_passes(problem, chain_inputs(problem), size, progress):
        _store_inputs(plan.layers, layer_inputs, batch)
        plan.jacobian.fill(jacobian, batch.points, root, batch.slopes)
    return LayerFactors(plan.layers, layer_inputs, jacobian, network.layout)


def compute_linearisation(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None = None,
    max_batch: int = MAX_BATCH,
) -> Linearisation:
    """Run forward passes over all batches, and keep inputs, slopes and the roots of the loss.

    Args:
        problem: the network, the loss and the data.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.
        max_batch: most points propagated at a time.

    Raises:
        InsufficientMemoryError: there is no memory for them; nothing was allocated.
        ValueError: the derivatives of the network overflow.
    """
    plan = plan_chain(problem)
    working = plan.working_bytes(workspace, max_batch, linear=True)
    _require(problem, plan.num_linear_floats, working)
    size = plan.batch_size(workspace, max_batch)
    return linearise(plan, forward_passes(problem, chain_inputs(problem), size, progress))


def linearise(
    plan: FactorPlan, passes: Iterable[tuple[ForwardPass, Tensor]], *, checked: bool = False
) -> Linearisation:
    """Keep the inputs, slopes and roots of the loss of some forward passes.

    Args:
        plan: the plan for as many points as the passes have.
        passes: forward passes over consecutive points, and R_i at the same points.
        checked: whether derivatives are known not to overflow.

    Raises:
        ValueError: the derivatives of the network overflow.
    """
    network, first = plan.network, plan.network.first_trainable
    empty = network.layers[-1].weight.new_empty
    layer_inputs = empty(plan.num_inputs, plan.num_points)
    slopes = [
        None if layer.activation is None else empty(layer.out_features, plan.num_points)
        for layer in network.layers[first:-1]
    ]
    stored_root = empty(*plan.root_shape, plan.num_points)
    for batch, root in passes:
        _store_inputs(plan.layers, layer_inputs, batch)
        for target, values in zip(slopes, batch.slopes[first:-1], strict=True):
            if target is not None and values is not None:
                target[:, batch.points] = without_tiny(values).T
        last = batch.slopes[-1]
        if last is not None:
            root = root * (last if root.ndim == 2 else last[:, None])
        stored_root[..., batch.points] = without_tiny(root).permute(*range(root.ndim)[::-1])
        if not checked:
            _check_derivatives(network, batch, root)
    return Linearisation(network, layer_inputs, (*slopes, None), stored_root)


def _check_derivatives(network: Network, batch: ForwardPass, root: Tensor) -> None:
    """Send a random combination of the rows of R_i M_i^L back through the layers."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(root.shape[1], generator=generator, dtype=torch.float64).to(root)
    adjoint = root * mix if root.ndim == 2 else mix @ root
    for position in range(len(network.layers) - 1, network.first_trainable, -1):
        adjoint = adjoint @ network.layers[position].weight
        slope = batch.slopes[position - 1]
        if slope is not None:
            adjoint = adjoint * slope
    refuse_overflow(adjoint, batch.points)


def make_factors(
    linearisation: Linearisation, workspace: int, max_batch: int = MAX_BATCH
) -> LayerFactors:
    """The factors C_i of a linearised network; they share its inputs.

    Args:
        linearisation: the network at all points.
        workspace: bytes of temporary memory to stay within.
        max_batch: most points at a time.

    Raises:
        InsufficientMemoryError: the factors do not fit into free memory; nothing was allocated.
        ValueError: the derivatives of the network overflow.
    """
    plan = plan_of_factors(linearisation)
    num_floats = plan.num_floats - linearisation.inputs.numel()
    itemsize = linearisation.dtype.itemsize
    working = plan.working_bytes(workspace, max_batch)
    require_bytes(
        num_floats * itemsize + working,
        linearisation.device,
        f"the factors that entries are made of, for {plan.num_points} points and"
        f" {linearisation.num_parameters} parameters ({format_bytes(working)} of temporary memory"
        " included)",
        ("use products alone, which do not need them", *_WAYS_OUT),
    )
    jacobian = plan.jacobian.reserve()
    batch_size = plan.batch_size(workspace, max_batch)
    for start in range(0, plan.num_points, batch_size):
        points = slice(start, min(start + batch_size, plan.num_points))
        plan.jacobian.fill(jacobian, points, *linearisation.at(points))
    return LayerFactors(plan.layers, linearisation.inputs, jacobian, linearisation.layout)


def plan_of_factors(linearisation: Linearisation) -> FactorPlan:
    """What `make_factors` will store; the inputs, which are stored already, included."""
    root = linearisation.root
    return plan_factors(
        linearisation.network, linearisation.num_points, root.shape[-2], diagonal=root.ndim == 2
    )


def plan_chain(problem: Problem) -> FactorPlan:
    """Find the shape of R_i from the first point, and plan."""
    network, one = problem.network, problem.first_points(1)
    assert network is not None
    first = one.survey.first_inputs
    assert isinstance(first, Tensor)
    sample = forward_pass(network, first, 0)
    root = one.loss_root(sample.outputs, sample.points)
    return plan_factors(network, problem.num_points, root.shape[1], diagonal=root.ndim == 2)


def _require(problem: Problem, num_floats: int, working: int) -> None:
    require_bytes(
        num_floats * problem.dtype.itemsize + working,
        problem.device,
        f"the precomputation for {problem.num_points} points and {problem.layout.size}"
        f" parameters ({format_bytes(working)} of temporary memory included)",
        _WAYS_OUT,
    )


def chain_inputs(problem: Problem) -> Iterator[Tensor]:
    """The inputs of all batches of a chain's data."""
    for inputs in problem.inputs():
        assert isinstance(inputs, Tensor)
        yield inputs


def forward_passes(
    problem: Problem,
    batches: Iterable[Tensor],
    batch_size: int,
    progress: Callable[[int], object] | None = None,
    start: int = 0,
    *,
    verified: bool = False,
) -> Iterator[tuple[ForwardPass, Tensor]]:
    """Forward passes over consecutive points from ``start`` on, and R_i at the same points.

    The points of a pass are numbered from the first of these. Each of them is compared with the
    model, unless that was done before (``verified``).
    """
    assert problem.network is not None
    own = 0
    for inputs in batches:
        for some in inputs.split(batch_size):
            stop = own + some.shape[0]
            batch = forward_pass(problem.network, some, start + own)
            if not verified:
                verify(problem, some, batch)
            root = problem.loss_root(batch.outputs, batch.points)
            yield replace(batch, points=slice(own, stop)), root
            own = stop
            if progress is not None:
                progress(some.shape[0])


_WAYS_OUT = (
    'pass factors="recompute", which stores nothing',
    "use fewer data points (the memory grows in proportion)",
    "convert the model and the data to float32, if they are float64",
    "freeze layers that need not be part of the matrix with requires_grad_(False)",
    "pass a smaller workspace=",
)
