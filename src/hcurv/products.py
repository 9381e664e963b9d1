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

__all__ = ["diagonal", "gradient", "jacobian_product", "jacobian_transpose_product", "product"]

# Fewer points than this per pass, and reading the operands outweighs the arithmetic.
_MIN_POINTS = 512


def product(factors: LayerFactors, rhs: Tensor, workspace: int) -> Tensor:
    """H @ rhs for rhs of shape (N, k), within ``workspace`` bytes of temporary memory."""
    result = torch.zeros_like(rhs, memory_format=torch.contiguous_format)
    step, points_step = _steps(factors, rhs.shape[1], workspace)
    for start in range(0, rhs.shape[1], step):
        columns = rhs[:, start : start + step].contiguous()
        target = result if columns.shape == rhs.shape else torch.zeros_like(columns)
        for points in _point_slices(factors.num_points, points_step):
            outputs = jacobian_product(factors, columns, points)
            jacobian_transpose_product(factors, outputs, points, target)
        if target is not result:
            result[:, start : start + step] = target
    return result


def jacobian_product(factors: LayerFactors, columns: Tensor, points: slice) -> Tensor:
    """R_i J_i ŵ at some points, (b, q, k), for contiguous columns ŵ of shape (N, k)."""
    inputs = factors.inputs[:, points]
    units = (_linearised_forward(slot, inputs[slot.inputs], columns) for slot in factors.slots)
    return factors.jacobian.forward(units, points)


def jacobian_transpose_product(
    factors: LayerFactors, outputs: Tensor, points: slice, target: Tensor
) -> None:
    """Add Σ_i (R_i J_i)ᵀ y_i over some points to ``target``, (N, k), from y of shape (b, q, k)."""
    inputs = factors.inputs[:, points]
    for slot, units in zip(
        factors.slots, factors.jacobian.backward(outputs, points), strict=True
    ):
        _accumulate(slot, inputs[slot.inputs], units, target)


def diagonal(factors: LayerFactors, workspace: int) -> Tensor:
    """H_kk = Σ_i ‖C_i[:, μ]‖² x_i[ν]² for all k: O(n) work each (paper, remark to Theorem 3.2)."""
    result = factors.inputs.new_zeros(factors.num_parameters, 1)
    jacobian = factors.jacobian
    widest = max(slot.units.stop - slot.units.start for slot in factors.slots)
    per_point = widest * (2 * max(1, jacobian.gram_cost) + 1) + factors.inputs.shape[0]
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in _point_slices(factors.num_points, step):
        inputs = factors.inputs[:, points].square()
        for slot in factors.slots:
            if slot.units.start >= jacobian.num_hidden:
                assert jacobian.tail is not None
                norms = jacobian.tail[:, points].square()
            else:
                norms = jacobian.squared_norms(slot.units, points)
            _accumulate(slot, inputs[slot.inputs], norms[:, :, None], result)
    return result.squeeze(1)


def gradient(
    network: Network,
    factors: LayerFactors,
    loss: Loss,
    targets: Tensor,
    scale: float,
    workspace: int,
) -> Tensor:
    """The flat gradient, (N,), by back-propagation (paper, Table 1, left).

    The pass begins at the stored inputs of the first trainable layer.
    """
    result = factors.inputs.new_zeros(factors.num_parameters, 1)
    layers = network.layers[network.first_trainable :]
    slots = {slot.position - network.first_trainable: slot for slot in factors.slots}
    per_point = 4 * sum(layer.out_features + layer.in_features for layer in layers)
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in _point_slices(factors.num_points, step):
        inputs = factors.inputs[:, points]
        current = inputs[slots[0].inputs][: layers[0].in_features].T
        slopes = []
        for layer in layers:
            current, slope = layer.propagate(current)
            slopes.append(slope)
        adjoint = loss.gradient(current, targets[points]) * scale
        for position in range(len(layers) - 1, -1, -1):
            slope = slopes[position]
            if slope is not None:
                adjoint = adjoint * slope
            if position in slots:
                slot = slots[position]
                _accumulate(slot, inputs[slot.inputs], adjoint.T[:, :, None], result)
            adjoint = adjoint @ layers[position].weight
    return result.squeeze(1)


def _steps(factors: LayerFactors, num_columns: int, workspace: int) -> tuple[int, int]:
    """Columns and points to take at a time so that temporaries fit into the workspace."""
    itemsize = factors.inputs.dtype.itemsize
    jacobian = factors.jacobian
    widest = max(slot.units.stop - slot.units.start for slot in factors.slots)
    copied = widest * jacobian.tensors[0].shape[1]  # a layer's factor, transposed or multiplied
    per_column = 3 * jacobian.num_rows + 2 * widest
    budget = max(1, workspace // itemsize)
    points = min(factors.num_points, _MIN_POINTS)
    columns = max(1, (budget // points - copied) // per_column)
    columns = min(num_columns, max(columns, FEW_COLUMNS))
    return columns, max(1, budget // (copied + per_column * columns))


def _point_slices(num_points: int, step: int) -> Iterator[slice]:
    for start in range(0, num_points, step):
        yield slice(start, min(start + step, num_points))


def _parts(slot: LayerSlot, flat: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Views of a flat (N, k) array: the layer's weight (d, d_in, k) and bias (d, k)."""
    layer, num_columns = slot.layer, flat.shape[1]
    weight = bias = None
    if layer.weight_offset is not None:
        rows = flat[layer.weight_offset : layer.weight_offset + layer.weight.numel()]
        weight = rows.view(layer.out_features, layer.in_features, num_columns)
    if layer.bias_offset is not None:
        bias = flat[layer.bias_offset : layer.bias_offset + layer.out_features]
    return weight, bias


def _linearised_forward(slot: LayerSlot, inputs: Tensor, columns: Tensor) -> Tensor:
    """u_i = Ŵ x_i, (d, b, k)."""
    weight, bias = _parts(slot, columns)
    features = inputs[: slot.layer.in_features]
    num_units, num_columns = slot.layer.out_features, columns.shape[1]
    if weight is None:
        units = columns.new_zeros(num_units, inputs.shape[1], num_columns)
    elif num_columns < FEW_COLUMNS:
        rows = weight.permute(2, 0, 1).reshape(-1, slot.layer.in_features)
        units = (rows @ features).view(num_columns, num_units, -1).permute(1, 2, 0)
    else:
        units = torch.matmul(features.T, weight)
    return units if bias is None else units.add_(bias[:, None])


def _accumulate(slot: LayerSlot, inputs: Tensor, units: Tensor, target: Tensor) -> None:
    """Add Σ_i units[μ, i, :] x_i[ν] to the layer's part of ``target``."""
    weight, bias = _parts(slot, target)
    features = inputs[: slot.layer.in_features]
    num_units, _, num_columns = units.shape
    if weight is not None and num_columns < FEW_COLUMNS:
        rows = units.permute(2, 0, 1).reshape(num_columns * num_units, -1)
        weight += (rows @ features.T).view(num_columns, num_units, -1).permute(1, 2, 0)
    elif weight is not None:
        weight.baddbmm_(features.expand(num_units, -1, -1), units)
    if bias is not None:
        bias += units.sum(1)
