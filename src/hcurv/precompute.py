"""The precomputation: one pass over the data, after which the network is no longer needed.

The paper's Theorem 3.1 stores, for every layer ℓ and point i, the inputs x_i^{ℓ-1} and the factors
C_i^ℓ. `compute_factors` does that in a stream of batches, into memory reserved beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from hcurv.batches import Batches, Survey
from hcurv.layer_factors import LayerFactors, LayerSlot
from hcurv.losses import Loss
from hcurv.memory import format_bytes, require_bytes
from hcurv.narrow_jacobian import NarrowJacobian
from hcurv.network import Network
from hcurv.output_jacobian import OutputJacobian
from hcurv.wide_jacobian import WideJacobian

__all__ = [
    "FactorPlan",
    "ForwardPass",
    "check_targets",
    "compute_factors",
    "forward_pass",
    "loss_scale",
    "plan_factors",
]

# Points propagated at a time, at most: more fill no larger matrix products, only more memory.
_BATCH_SIZE = 512


@dataclass(frozen=True)
class FactorPlan:
    """What will be stored, decided before anything is allocated.

    Attributes:
        hidden: the trainable layers whose units are hidden.
        tail: the last layer, if it is trainable and the loss's square root is diagonal.
        num_rows: q, the rows of the loss's square root.
        wide: whether the Gram forms of hidden units are stored instead of their columns.
        num_inputs: rows of the stacked layer inputs.
        num_points: n.
        num_floats: floats that will be stored.
        floats_per_point: temporary floats that one point of a batch takes.
    """

    hidden: tuple[LayerSlot, ...]
    tail: LayerSlot | None
    num_rows: int
    wide: bool
    num_inputs: int
    num_points: int
    num_floats: int
    floats_per_point: int

    @property
    def num_hidden(self) -> int:
        """Number of hidden units."""
        return self.hidden[-1].units.stop if self.hidden else 0

    @property
    def slots(self) -> tuple[LayerSlot, ...]:
        """All layers with trainable parameters."""
        return self.hidden if self.tail is None else (*self.hidden, self.tail)


def plan_factors(network: Network, num_points: int, num_rows: int, diagonal: bool) -> FactorPlan:
    """Decide how the factors are stored and what that takes.

    Args:
        network: the network.
        num_points: n.
        num_rows: q, the rows of the loss's square root.
        diagonal: whether that square root is diagonal.
    """
    slots: list[LayerSlot] = []
    num_units = num_inputs = 0
    for position, layer in enumerate(network.layers):
        if layer.trainable:
            units = slice(num_units, num_units + layer.out_features)
            width = layer.in_features + (layer.bias is not None)
            inputs = slice(num_inputs, num_inputs + width)
            slots.append(LayerSlot(layer, position, units, inputs))
            num_units, num_inputs = units.stop, inputs.stop
    last = len(network.layers) - 1
    tail = slots.pop() if diagonal and slots and slots[-1].position == last else None
    hidden = tuple(slots)
    num_hidden = hidden[-1].units.stop if hidden else 0
    # r, the narrow place that all hidden units act through; worth using where q is larger.
    interface = network.layers[-1].in_features
    wide = diagonal and bool(hidden) and num_hidden + interface < num_rows
    widest = max(layer.out_features for layer in network.layers)
    if wide:
        per_point = num_hidden * (num_hidden + interface) + num_rows
        working = 2 * interface * num_rows + 3 * num_hidden * (num_hidden + interface)
    else:
        per_point = num_hidden * num_rows + (num_rows if tail else 0)
        working = 3 * num_rows * widest
    return FactorPlan(
        hidden=hidden,
        tail=tail,
        num_rows=num_rows,
        wide=wide,
        num_inputs=num_inputs,
        num_points=num_points,
        num_floats=num_points * (per_point + num_inputs) + (num_rows * interface if wide else 0),
        floats_per_point=working + 4 * sum(layer.out_features for layer in network.layers),
    )


@dataclass(frozen=True)
class _Storage:
    """Reserved memory for the factors, filled batch by batch."""

    plan: FactorPlan
    inputs: Tensor
    factor: Tensor  # (hidden, q, n), or (hidden, r, n) where the output is wide
    gram: Tensor | None
    tail: Tensor | None

    @classmethod
    def reserve(cls, plan: FactorPlan, network: Network) -> _Storage:
        weight, n = network.layers[-1].weight, plan.num_points
        rows = weight.shape[1] if plan.wide else plan.num_rows
        return cls(
            plan,
            inputs=weight.new_empty(plan.num_inputs, n),
            factor=weight.new_empty(plan.num_hidden, rows, n),
            gram=weight.new_empty(plan.num_hidden**2, n) if plan.wide else None,
            tail=weight.new_empty(plan.num_rows, n) if plan.wide or plan.tail else None,
        )

    def freeze(self, network: Network) -> OutputJacobian:
        plan = self.plan
        hidden_layers = tuple(slot.units for slot in plan.hidden)
        trainable = plan.tail is not None
        if not plan.wide:
            return NarrowJacobian(
                hidden_layers=hidden_layers,
                tail=self.tail,
                tail_trainable=trainable,
                factor=self.factor,
            )
        assert self.tail is not None
        assert self.gram is not None
        last = plan.hidden[-1]
        adjacent = last.position == len(network.layers) - 2
        return WideJacobian(
            hidden_layers=hidden_layers,
            tail=self.tail,
            tail_trainable=trainable,
            interface=self.factor,
            head=network.layers[-1].weight,
            gram=self.gram,
            first_adjacent=last.units.start if adjacent else last.units.stop,
        )


def _without_tiny(values: Tensor) -> Tensor:
    """Replace values whose square would be subnormal, or zero, by zero.

    They cannot reach a diagonal entry, and arithmetic on subnormal numbers is a hundred times
    slower on common processors (softplus tails and black pixels are full of them).
    """
    return hardshrink(values, math.sqrt(torch.finfo(values.dtype).tiny))


def _scale_columns(factor: Tensor, slopes: Tensor | None) -> Tensor:
    """C M for C of shape (d, q, b) and the diagonal of M, (b, d)."""
    return factor if slopes is None else factor * slopes.T[:, None, :]


def _fill(storage: _Storage, network: Network, root: Tensor, batch: ForwardPass) -> None:
    """Store the factors of one batch, from R_i, inputs and slopes: C^{ℓ-1} = C^ℓ W_ℓ M^{ℓ-1}."""
    plan, points = storage.plan, batch.points
    for slot in plan.slots:
        target = storage.inputs[slot.inputs, points]
        target[: slot.layer.in_features] = _without_tiny(batch.inputs[slot.position]).T
        target[slot.layer.in_features :] = 1.0
    position = len(network.layers) - 1
    factor: Tensor | None = None
    if root.ndim == 2:
        slopes = batch.slopes[position]
        tail = _without_tiny(root if slopes is None else root * slopes)
        if storage.tail is not None:
            storage.tail[:, points] = tail.T
        if not plan.hidden:
            return
        weight = network.layers[position].weight
        position -= 1
        slopes = batch.slopes[position]
        if plan.wide:
            width = weight.shape[1]
            ones = weight.new_ones(1) if slopes is None else slopes
            factor = torch.diag_embed(ones.expand(root.shape[0], width)).permute(2, 1, 0)
        else:
            factor = _scale_columns(weight.T[:, :, None] * tail.T, slopes)
    else:
        factor = _scale_columns(root.permute(2, 1, 0), batch.slopes[position])
    units_at = {slot.position: slot.units for slot in plan.hidden}
    while True:
        if position in units_at:
            storage.factor[units_at[position], :, points] = _without_tiny(factor)
        if position == network.first_trainable:
            break
        weight = network.layers[position].weight
        position -= 1
        moved = (weight.T @ factor.flatten(1)).view(-1, *factor.shape[1:])
        factor = _scale_columns(moved, batch.slopes[position])
    if not all(math.isfinite(extreme) for extreme in torch.aminmax(factor)):
        raise ValueError(
            f"the network's derivatives overflow at points {points.start} to {points.stop - 1}"
        )
    if storage.gram is not None:
        _fill_gram(storage, network.layers[-1].weight, tail, points)


def _fill_gram(storage: _Storage, head: Tensor, tail: Tensor, points: slice) -> None:
    """g_i = B_iᵀ (W_Lᵀ diag(c_i²) W_L) B_i for all pairs of hidden units."""
    assert storage.gram is not None
    interface = storage.factor[:, :, points].permute(2, 0, 1).contiguous()
    weighted = head.T[None] * tail.square()[:, None, :]
    gram = interface @ (weighted @ head) @ interface.transpose(1, 2)
    # Symmetric to the last bit, so that H is.
    gram = (gram + gram.transpose(1, 2)) / 2
    # These are products already; what is left stays normal when multiplied by inputs.
    limits = torch.finfo(gram.dtype)
    storage.gram[:, points] = hardshrink(gram, limits.tiny / limits.eps).flatten(1).T


@dataclass(frozen=True)
class ForwardPass:
    """Inputs x^{ℓ-1} and slopes (the diagonal of M^ℓ) of every layer for one batch."""

    points: slice
    inputs: list[Tensor]
    slopes: list[Tensor | None]
    outputs: Tensor


def forward_pass(network: Network, inputs: Tensor, start: int) -> ForwardPass:
    """Step (a) of the gradient evaluation in the paper's Table 1, with slopes."""
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


def _loss_root(loss: Loss, outputs: Tensor, targets: Tensor | None) -> Tensor:
    root = loss.hessian_sqrt(outputs, targets)
    num_points, num_outputs = outputs.shape
    shape = tuple(root.shape)
    if shape != (num_points, num_outputs) and (
        root.ndim != 3 or (shape[0], shape[2]) != (num_points, num_outputs)
    ):
        raise ValueError(
            f"{type(loss).__name__}.hessian_sqrt must return ({num_points}, {num_outputs}) for a"
            f" diagonal or ({num_points}, q, {num_outputs}) for a dense square root; got {shape}"
        )
    if not bool(torch.isfinite(root).all()):
        raise ValueError(
            f"{type(loss).__name__}.hessian_sqrt has NaN or infinite values: is the loss convex?"
        )
    return root


def compute_factors(
    network: Network,
    loss: Loss,
    scale: float,
    batches: Batches,
    survey: Survey,
    workspace: int,
    progress: Callable[[int], object] | None = None,
) -> LayerFactors:
    """Run the precomputation of the paper's Theorem 3.1 over all batches.

    Args:
        network: the network.
        loss: the loss.
        scale: what the sum of the points' losses is multiplied by.
        batches: the data.
        survey: what a first pass over the data found.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.

    Raises:
        InsufficientMemoryError: the factors do not fit into free memory; nothing was allocated.
    """
    targets = survey.targets
    sample = survey.first_inputs[:1]
    root = _loss_root(loss, forward_pass(network, sample, 0).outputs, _part(targets, slice(0, 1)))
    plan = plan_factors(network, survey.num_points, root.shape[1], diagonal=root.ndim == 2)
    require_bytes(
        plan.num_floats * network.dtype.itemsize + workspace,
        network.device,
        f"the precomputation for {survey.num_points} points and {network.num_parameters}"
        f" parameters (its workspace of {format_bytes(workspace)} included)",
        _WAYS_OUT,
    )
    fitting = workspace // (plan.floats_per_point * network.dtype.itemsize)
    batch_size = max(1, min(fitting, _BATCH_SIZE))
    storage = _Storage.reserve(plan, network)
    start = 0
    for inputs, _ in batches.reread(survey):
        for part in inputs.split(batch_size):
            batch = forward_pass(network, part, start)
            root = _loss_root(loss, batch.outputs, _part(targets, batch.points))
            _fill(storage, network, root * math.sqrt(scale), batch)
            start = batch.points.stop
            if progress is not None:
                progress(part.shape[0])
    return LayerFactors(plan.slots, storage.inputs, storage.freeze(network), network.num_parameters)


def check_targets(loss: Loss, num_points: int, num_outputs: int, targets: Tensor | None) -> None:
    """Refuse targets that are missing or do not fit."""
    if targets is not None:
        loss.check_targets((num_points, num_outputs), targets)
    elif loss.needs_targets:
        raise ValueError(
            f"the Hessian of this {type(loss).__name__} loss depends on the targets: pass data as"
            " (inputs, targets) or as batches of both"
        )


def loss_scale(loss: Loss, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
    """What the sum of the points' losses is multiplied by."""
    if loss.reduction == "sum":
        return 1.0
    divisor = loss.divisor(num_points, num_outputs, targets)
    if not divisor > 0:
        raise ValueError(
            "no point counts towards the mean of the loss (all are ignored or weigh nothing)"
        )
    return 1.0 / divisor


def _part(targets: Tensor | None, points: slice) -> Tensor | None:
    return None if targets is None else targets[points]


_WAYS_OUT = (
    "use fewer data points (the memory grows in proportion)",
    "convert the model and the data to float32, if they are float64",
    "freeze layers that need not be part of the matrix with requires_grad_(False)",
    "pass a smaller workspace=",
)
