"""Exact products with H = JᵀQJ, its diagonal, and the gradient, from the stored factors.

The paper's Table 1 does a product as a linearised forward and a backward pass through the network.
With the factors at hand neither has to go through the layers: with u_i^ℓ = Ŵ_ℓ x_i^{ℓ-1},

    (a)  y_i = R_i J_i ŵ = Σ_ℓ C_i^ℓ u_i^ℓ
    (d)  (Hŵ)^ℓ = Σ_i ((C_i^ℓ)ᵀ y_i) (x_i^{ℓ-1})ᵀ

which is 4Nn flops per column in matrix products, and little else.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hcurv.layer_factors import LayerFactors, LayerSlot
from hcurv.losses import Loss
from hcurv.network import Network
from hcurv.output_jacobian import FEW_COLUMNS

__all__ = ["diagonal", "gradient", "product", "root_product", "root_transposed"]

# Fewer points per pass, and reading the operands outweighs the arithmetic; more, and the
# temporaries of a few units fill the caches.
_MIN_POINTS, _MAX_POINTS = 512, 1024
# More columns at a time make the temporaries of a single unit too large for the caches.
_MAX_COLUMNS = 256
# Floats of u and of z that exist at a time; larger temporaries cost fresh memory pages.
_PART_FLOATS = 2**21
# Fewer columns: one product for all columns and units rather than one for each unit.
_FOLDED_COLUMNS = 64


def product(factors: LayerFactors, rhs: Tensor, workspace: int) -> Tensor:
    """H @ rhs for rhs of shape (N, k), within ``workspace`` bytes of temporary memory."""
    rhs = rhs.contiguous()
    result = torch.empty_like(rhs)  # written by the first points, added to by the others
    rows = factors.jacobian.normal_rows
    num_columns, num_points = _steps(factors, rhs.shape[1], workspace, rows)
    for columns in _even_slices(rhs.shape[1], num_columns):
        for points in _even_slices(factors.num_points, num_points):
            parts = _ProductParts(factors, rhs[:, columns], result[:, columns], points, workspace)
            factors.jacobian.apply_normal(parts, points)
    return result


def root_product(factors: LayerFactors, rhs: Tensor, workspace: int) -> Tensor:
    """S @ rhs for rhs of shape (N, k), where H = SᵀS and S = RJ, point by point: (n·q, k)."""
    rhs = rhs.contiguous()
    rows = factors.jacobian.num_rows
    result = rhs.new_empty(factors.num_points, rows, rhs.shape[1])
    if rhs.shape[1] == 0:
        return result.flatten(0, 1)
    num_columns, num_points = _steps(factors, rhs.shape[1], workspace, rows)
    for columns in _even_slices(rhs.shape[1], num_columns):
        for points in _even_slices(factors.num_points, num_points):
            part = rhs[:, columns]
            parts = _ProductParts(factors, part, part, points, workspace)
            result[points, :, columns] = factors.jacobian.forward(parts, points)
    return result.flatten(0, 1)


def root_transposed(factors: LayerFactors, values: Tensor, workspace: int) -> Tensor:
    """Sᵀ @ values for values of shape (n·q, k): (N, k)."""
    outputs = values.reshape(factors.num_points, factors.jacobian.num_rows, values.shape[1])
    result = values.new_empty(factors.num_parameters, outputs.shape[2])
    if outputs.shape[2] == 0:
        return result
    rows = factors.jacobian.num_rows
    num_columns, num_points = _steps(factors, outputs.shape[2], workspace, rows)
    for columns in _even_slices(outputs.shape[2], num_columns):
        for points in _even_slices(factors.num_points, num_points):
            part = result[:, columns]
            parts = _ProductParts(factors, part, part, points, workspace)
            factors.jacobian.backward(parts, points, outputs[points, :, columns].contiguous())
    return result


def _steps(factors: LayerFactors, num_columns: int, workspace: int, rows: int) -> tuple[int, int]:
    """Columns and points to take at a time so that temporaries fit into the workspace.

    ``rows`` is what there is of each point and column at a time.
    """
    # A quarter for the outputs y, as much for their copies, the rest for parts and slack.
    budget = max(1, workspace // (4 * factors.inputs.dtype.itemsize))
    points = min(factors.num_points, _MIN_POINTS)
    columns = min(num_columns, _MAX_COLUMNS, max(FEW_COLUMNS, budget // (rows * points)))
    return columns, max(1, min(budget // (rows * columns), _MAX_POINTS))


class _ProductParts:
    """u = Ŵx and the sum (Hŵ) = Σ zxᵀ over some points, by ranges of units."""

    def __init__(
        self,
        factors: LayerFactors,
        columns: Tensor,
        target: Tensor,
        points: slice,
        workspace: int,
    ) -> None:
        self._inputs = factors.inputs[:, points]
        self._columns = columns
        self._target = target
        self._first = points.start == 0
        self.num_columns = columns.shape[1]
        jacobian = factors.jacobian
        rows = jacobian.tensors[0].shape[1]
        widest = max(slot.layer.in_features for slot in factors.slots)
        per_unit = max(
            self._inputs.shape[1] * max(self.num_columns, rows), widest * self.num_columns
        )
        floats = min(_PART_FLOATS, workspace // (8 * columns.dtype.itemsize))
        step = max(1, floats // per_unit)
        pieces = [(u, slot) for slot in factors.slots for u in _ranges(slot.units, step)]
        self._slots = {units.start: slot for units, slot in pieces}
        first_of_tail = jacobian.num_hidden
        last_of_tail = first_of_tail + (0 if jacobian.tail is None else jacobian.num_rows)
        self.hidden = [units for units, _ in pieces if units.start < first_of_tail]
        self.tail = list(_ranges(slice(first_of_tail, last_of_tail), step))

    def read(self, units: slice) -> Tensor:
        """u = Ŵx, (units, b, k)."""
        slot = self._slots[units.start]
        weight, bias = _parts(slot, units, self._columns)
        inputs = self._inputs[slot.inputs]
        return _linearised_forward(weight, bias, inputs, units.stop - units.start, self._columns)

    def write(self, units: slice, values: Tensor) -> None:
        """Add zxᵀ to the result."""
        slot = self._slots[units.start]
        inputs = self._inputs[slot.inputs]
        _accumulate(slot, units, inputs, values, self._target, keep=not self._first)

    @property
    def _tail_slot(self) -> LayerSlot:
        return self._slots[self.tail[0].start]

    def tail_inputs(self) -> Tensor:
        """x and ones for the biases, without either where it is not trainable."""
        slot = self._tail_slot
        width = slot.layer.in_features
        first = width if slot.layer.weight_offset is None else 0
        last = width if slot.layer.bias_offset is None else width + 1
        return self._inputs[slot.inputs][first:last]

    def tail_weights(self, units: slice) -> Tensor:
        """Ŵ, the biases last."""
        weight, bias = _parts(self._tail_slot, units, self._columns)
        parts = [] if weight is None else [weight]
        return torch.cat(parts if bias is None else [*parts, bias[:, None]], 1)

    def write_tail(self, units: slice, sums: Tensor) -> None:
        """Add them to the result."""
        weight, bias = _parts(self._tail_slot, units, self._target)
        if weight is not None:
            _put(weight, sums[:, : weight.shape[1]], keep=not self._first)
        if bias is not None:
            _put(bias, sums[:, -1], keep=not self._first)


def _ranges(whole: slice, step: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, step):
        yield slice(start, min(start + step, whole.stop))


def diagonal(factors: LayerFactors, workspace: int) -> Tensor:
    """H_kk = Σ_i ‖C_i[:, μ]‖² x_i[ν]² for all k: O(n) work each (paper, remark to Theorem 3.2)."""
    result = factors.inputs.new_zeros(factors.num_parameters, 1)
    jacobian = factors.jacobian
    widest = max(slot.units.stop - slot.units.start for slot in factors.slots)
    per_point = widest * (2 * max(1, jacobian.gram_cost) + 1) + factors.inputs.shape[0]
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in _even_slices(factors.num_points, step):
        inputs = factors.inputs[:, points].square()
        for slot in factors.slots:
            if slot.units.start >= jacobian.num_hidden:
                assert jacobian.tail is not None
                norms = jacobian.tail[:, points].square()
            else:
                norms = jacobian.squared_norms(slot.units, points)
            _accumulate(slot, slot.units, inputs[slot.inputs], norms[:, :, None], result)
    return result.squeeze(1)


def gradient(
    network: Network,
    factors: LayerFactors,
    loss: Loss,
    targets: Tensor,
    weights: Tensor,
    workspace: int,
) -> Tensor:
    """The flat gradient, (N,), of Σ_i weights[i] f_i by back-propagation (paper, Table 1, left).

    The pass begins at the stored inputs of the first trainable layer.
    """
    result = factors.inputs.new_zeros(factors.num_parameters, 1)
    layers = network.layers[network.first_trainable :]
    slots = {slot.position - network.first_trainable: slot for slot in factors.slots}
    per_point = 4 * sum(layer.out_features + layer.in_features for layer in layers)
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in _even_slices(factors.num_points, step):
        inputs = factors.inputs[:, points]
        current = inputs[slots[0].inputs][: layers[0].in_features].T
        slopes = []
        for layer in layers:
            current, slope = layer.propagate(current)
            slopes.append(slope)
        adjoint = loss.gradient(current, targets[points]) * weights[points, None]
        for position in range(len(layers) - 1, -1, -1):
            slope = slopes[position]
            if slope is not None:
                adjoint = adjoint * slope
            if position in slots:
                slot = slots[position]
                values = adjoint.T[:, :, None]
                _accumulate(slot, slot.units, inputs[slot.inputs], values, result)
            adjoint = adjoint @ layers[position].weight
    return result.squeeze(1)


def _even_slices(length: int, most: int) -> Iterator[slice]:
    """Slices of nearly equal length, none longer than ``most``."""
    if length:
        count = -(-length // most)
        yield from _ranges(slice(0, length), -(-length // count))


def _parts(slot: LayerSlot, units: slice, flat: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Views of a flat (N, k) array: weights (units, d_in, k) and biases (units, k) of a layer."""
    layer, weight, bias = slot.layer, None, None
    first, last = units.start - slot.units.start, units.stop - slot.units.start
    if layer.weight_offset is not None:
        begin, width = layer.weight_offset, layer.in_features
        weight = flat[begin + first * width : begin + last * width]
        weight = weight.view(last - first, width, flat.shape[1])
    if layer.bias_offset is not None:
        bias = flat[layer.bias_offset + first : layer.bias_offset + last]
    return weight, bias


def _linearised_forward(
    weight: Tensor | None, bias: Tensor | None, inputs: Tensor, num_units: int, columns: Tensor
) -> Tensor:
    """u_i = Ŵ x_i, (units, b, k)."""
    num_columns = columns.shape[1]
    if weight is None:
        units = inputs.new_zeros(num_units, inputs.shape[1], num_columns)
    elif num_columns < _FOLDED_COLUMNS:
        features = inputs[: weight.shape[1]]
        rows = weight.permute(2, 0, 1).reshape(-1, weight.shape[1])
        units = (rows @ features).view(num_columns, num_units, -1).permute(1, 2, 0)
    else:
        units = torch.matmul(inputs[: weight.shape[1]].T, weight)
    return units if bias is None else units.add_(bias[:, None])


def _accumulate(
    slot: LayerSlot,
    units: slice,
    inputs: Tensor,
    values: Tensor,
    target: Tensor,
    keep: bool = True,
) -> None:
    """Add Σ_i values[μ, i, :] x_i[ν] to the layer's part of ``target``, or put it there."""
    weight, bias = _parts(slot, units, target)
    num_units, _, num_columns = values.shape
    if weight is not None and num_columns < _FOLDED_COLUMNS:
        rows = values.permute(2, 0, 1).reshape(num_columns * num_units, -1)
        added = rows @ inputs[: weight.shape[1]].T
        added = added.view(num_columns, num_units, -1).permute(1, 2, 0)
        _put(weight, added, keep)
    elif weight is not None:
        features = inputs[: weight.shape[1]].expand(num_units, -1, -1)
        weight.baddbmm_(features, values, beta=int(keep))
    if bias is not None:
        _put(bias, values.sum(1), keep)


def _put(target: Tensor, added: Tensor, keep: bool) -> None:
    if keep:
        target += added
    else:
        target.copy_(added)
