"""Exact products with H = SᵀS and with its root S, the diagonal, and the gradient.

The paper's Table 1 computes a product as a linearised forward and a backward pass through the
network. With the stored factors and u_i^ℓ = Ŵ_ℓ x_i^{ℓ-1} neither pass goes through the layers:

    (a)  y_i = R_i J_i ŵ = Σ_ℓ C_i^ℓ u_i^ℓ
    (d)  (Hŵ)^ℓ = Σ_i ((C_i^ℓ)ᵀ y_i) (x_i^{ℓ-1})ᵀ

This takes 4Nn flops per column in matrix products, and little else, if the factors are small. Where
outputs are many and the network is deep they are not, and `linearised_products` goes through the
layers; `product_costs` says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hcurv.losses import Loss
from hcurv.network.jacobians.contractions import FEW_COLUMNS
from hcurv.network.jacobians.output_jacobian import CacheSizes, UnitGroup
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.linearisation import Linearisation
from hcurv.network.reading import Network
from hcurv.network.trainable_layers import TrainableLayer, number_layers

__all__ = [
    "ProductSizes",
    "diagonal",
    "even_slices",
    "gradient",
    "product",
    "root_columns",
    "root_product",
    "root_transposed",
]

# With fewer columns, one product for all columns and units is faster than one for each unit.
_FOLDED_COLUMNS = 64


@dataclass(frozen=True)
class ProductSizes:
    """How much of a product is computed at a time; the results do not depend on it.

    The defaults keep temporaries in the caches of a desktop processor, and were chosen by timing
    the products in `benchmarks/entries.py`.

    Attributes:
        min_points: with fewer points at a time, reading the operands outweighs the arithmetic.
        max_points: with more points at a time, the temporaries of a few units fill the caches.
        max_columns: with more columns at a time, those of a single unit do.
        stream_floats: most floats of u, and of z, that exist at a time. Larger temporaries would
            cost fresh memory pages.
        caches: sizes inside the Jacobian.
    """

    min_points: int = 512
    max_points: int = 1024
    max_columns: int = 256
    stream_floats: int = 2**21
    caches: CacheSizes = field(default_factory=CacheSizes)


_DEFAULT_SIZES = ProductSizes()


def product(
    factors: LayerFactors, rhs: Tensor, workspace: int, sizes: ProductSizes = _DEFAULT_SIZES
) -> Tensor:
    """H @ rhs for rhs of shape (N, k), within ``workspace`` bytes of temporary memory."""
    rhs = rhs.contiguous()
    result = torch.empty_like(rhs)  # written by the first points, added to by the others
    rows = factors.jacobian.working_rows
    for columns, points in _steps(factors, rhs.shape[1], workspace, rows, sizes):
        stream = _ProductStream(
            factors, rhs[:, columns], result[:, columns], points, workspace, sizes
        )
        factors.jacobian.apply_normal(stream, points, sizes.caches)
    return result


def root_product(
    factors: LayerFactors, rhs: Tensor, workspace: int, sizes: ProductSizes = _DEFAULT_SIZES
) -> Tensor:
    """S @ rhs for rhs of shape (N, k), point by point: (n·q, k)."""
    rhs = rhs.contiguous()
    rows = factors.jacobian.num_rows
    result = rhs.new_empty(factors.num_points, rows, rhs.shape[1])
    for columns, points in _steps(factors, rhs.shape[1], workspace, rows, sizes):
        chosen = rhs[:, columns]
        stream = _ProductStream(factors, chosen, chosen, points, workspace, sizes)
        result[points, :, columns] = factors.jacobian.forward(stream, points, sizes.caches)
    return result.flatten(0, 1)


def root_transposed(
    factors: LayerFactors, values: Tensor, workspace: int, sizes: ProductSizes = _DEFAULT_SIZES
) -> Tensor:
    """Sᵀ @ values for values of shape (n·q, k): (N, k)."""
    rows, num_columns = factors.jacobian.num_rows, values.shape[1]
    outputs = values.reshape(factors.num_points, rows, num_columns)
    result = values.new_empty(factors.num_parameters, num_columns)
    for columns, points in _steps(factors, num_columns, workspace, rows, sizes):
        chosen = result[:, columns]
        stream = _ProductStream(factors, chosen, chosen, points, workspace, sizes)
        factors.jacobian.backward(stream, points, outputs[points, :, columns].contiguous())
    return result


def root_columns(factors: LayerFactors, index: Tensor) -> Tensor:
    """Columns v_k(i) = C_i[:, μ]·x_i[ν] of the root S, (n·q, k)."""
    units, inputs = factors.locate(index)
    rows = factors.jacobian.num_rows
    result = factors.inputs.new_zeros(factors.num_points, rows, index.numel())
    everywhere = slice(0, factors.num_points)
    for place in factors.layers:
        chosen = ((units >= place.units.start) & (units < place.units.stop)).nonzero().squeeze(1)
        if chosen.numel() == 0:
            continue
        columns = factors.jacobian.column_rows(place.units, everywhere)
        local = units[chosen] - place.units.start
        features = factors.inputs[inputs[chosen]].T  # (n, k)
        if columns.ndim == 3:
            result[:, :, chosen] = columns[:, :, local] * features[:, None]
        else:  # the column of an output has a single nonzero, in its own row
            result[:, local, chosen] = columns[:, local] * features
    return result.flatten(0, 1)


def _steps(
    factors: LayerFactors, num_columns: int, workspace: int, rows: int, sizes: ProductSizes
) -> Iterator[tuple[slice, slice]]:
    """Ranges of columns and of points whose temporaries fit into the workspace.

    ``rows`` is the number of floats per point and column that exist at a time.
    """
    # A quarter is for the outputs y, as much for their copies, and the rest for the stream.
    budget = max(1, workspace // (4 * factors.inputs.dtype.itemsize))
    fewest = min(factors.num_points, sizes.min_points)
    most_columns = min(sizes.max_columns, max(FEW_COLUMNS, budget // (rows * fewest)))
    most_columns = max(1, min(num_columns, most_columns))
    most_points = max(1, min(budget // (rows * most_columns), sizes.max_points))
    for columns in even_slices(num_columns, most_columns):
        for points in even_slices(factors.num_points, most_points):
            yield columns, points


class _ProductStream:
    """A `UnitStream` that reads u = Ŵx and adds Σ_i z_i x_iᵀ over some points to a result."""

    def __init__(
        self,
        factors: LayerFactors,
        columns: Tensor,
        target: Tensor,
        points: slice,
        workspace: int,
        sizes: ProductSizes,
    ) -> None:
        self._inputs = factors.inputs[:, points]
        self._columns = columns
        self._target = target
        self._first = points.start == 0
        self._layers = factors.layers
        self.num_columns = columns.shape[1]
        widest = max(place.layer.in_features for place in factors.layers)
        per_unit = max(
            self._inputs.shape[1] * max(self.num_columns, factors.jacobian.unit_floats),
            widest * self.num_columns,
        )
        floats = min(sizes.stream_floats, workspace // (8 * columns.dtype.itemsize))
        self._step = max(1, floats // per_unit)

    def ranges(self, group: UnitGroup) -> Sequence[slice]:
        """The units of a group in ranges of a convenient size, none across layers."""
        return [
            units
            for place in self._layers
            if group.start <= place.units.start < group.stop
            for units in _ranges(place.units, self._step)
        ]

    def _layer(self, units: slice) -> TrainableLayer:
        return next(place for place in self._layers if units.start < place.units.stop)

    def read(self, units: slice) -> Tensor:
        """u = Ŵx, (units, b, k)."""
        place = self._layer(units)
        weight, bias = place.read(self._columns, units)
        inputs = self._inputs[place.inputs]
        return _linearised_forward(weight, bias, inputs, units.stop - units.start, self._columns)

    def write(self, units: slice, values: Tensor) -> None:
        """Add Σ_i z_i x_iᵀ to the result."""
        place = self._layer(units)
        inputs = self._inputs[place.inputs]
        _accumulate(place, units, inputs, values, self._target, keep=not self._first)

    def features(self, units: slice) -> Tensor:
        """x, followed by ones for the biases; without either where it is not trainable."""
        return self._inputs[self._layer(units).trainable_inputs]

    def weights(self, units: slice) -> Tensor:
        """Ŵ, the biases last."""
        weight, bias = self._layer(units).read(self._columns, units)
        columns = [] if weight is None else [weight]
        return torch.cat(columns if bias is None else [*columns, bias[:, None]], 1)

    def write_sums(self, units: slice, sums: Tensor) -> None:
        """Add them to the result."""
        weight, bias = self._layer(units).read(self._target, units)
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
    widest = max(place.units.stop - place.units.start for place in factors.layers)
    cost = max(1, *(jacobian.gram_cost(group, group) for group in jacobian.groups))
    per_point = widest * (2 * cost + 1) + factors.inputs.shape[0]
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in even_slices(factors.num_points, step):
        inputs = factors.inputs[:, points].square()
        for place in factors.layers:
            norms = jacobian.squared_norms(place.units, points)
            _accumulate(place, place.units, inputs[place.inputs], norms[:, :, None], result)
    return result.squeeze(1)


def gradient(
    network: Network,
    stored: LayerFactors | Linearisation,
    loss: Loss,
    targets: Tensor,
    weights: Tensor,
    workspace: int,
) -> Tensor:
    """The flat gradient, (N,), of Σ_i weights[i] f_i by back-propagation (paper, Table 1, left).

    The forward pass begins at the stored inputs of the first trainable layer.

    Args:
        network: the network.
        stored: what was stored of it, for the inputs.
        loss: the loss f of each point.
        targets: the targets of all points.
        weights: the weight of each point, (n,).
        workspace: bytes of temporary memory to stay within.
    """
    result = stored.inputs.new_zeros(stored.num_parameters, 1)
    layers = network.layers[network.first_trainable :]
    places = {place.position - network.first_trainable: place for place in number_layers(network)}
    per_point = 4 * sum(layer.out_features + layer.in_features for layer in layers)
    step = max(1, workspace // (per_point * result.dtype.itemsize))
    for points in even_slices(stored.num_points, step):
        inputs = stored.inputs[:, points]
        current = inputs[places[0].inputs][: layers[0].in_features].T
        slopes = []
        for layer in layers:
            current, slope = layer.propagate(current)
            slopes.append(slope)
        adjoint = loss.gradient(current, targets[points]) * weights[points, None]
        for position in range(len(layers) - 1, -1, -1):
            slope = slopes[position]
            if slope is not None:
                adjoint = adjoint * slope
            if position in places:
                place = places[position]
                values = adjoint.T[:, :, None]
                _accumulate(place, place.units, inputs[place.inputs], values, result)
            adjoint = adjoint @ layers[position].weight
    return result.squeeze(1)


def even_slices(length: int, most: int) -> Iterator[slice]:
    """Slices of nearly equal length, none longer than ``most``."""
    if length:
        count = -(-length // most)
        yield from _ranges(slice(0, length), -(-length // count))


def _linearised_forward(
    weight: Tensor | None, bias: Tensor | None, inputs: Tensor, num_units: int, columns: Tensor
) -> Tensor:
    """u_i = Ŵ x_i, (units, b, k)."""
    num_columns = columns.shape[1]
    if weight is None:
        units = inputs.new_zeros(num_units, inputs.shape[1], num_columns)
    elif num_columns < FEW_COLUMNS:
        features = inputs[: weight.shape[1]]
        rows = weight.permute(2, 0, 1).reshape(-1, weight.shape[1])
        units = (rows @ features).view(num_columns, num_units, -1).permute(1, 2, 0)
    elif num_columns < _FOLDED_COLUMNS:
        # The values of a point lie side by side, as the products with its Jacobian want them.
        folded = weight.permute(1, 0, 2).reshape(weight.shape[1], -1)
        units = inputs[: weight.shape[1]].T @ folded
        units = units.view(-1, num_units, num_columns).transpose(0, 1)
    else:
        units = torch.matmul(inputs[: weight.shape[1]].T, weight)
    return units if bias is None else units.add_(bias[:, None])


def _accumulate(
    place: TrainableLayer,
    units: slice,
    inputs: Tensor,
    values: Tensor,
    target: Tensor,
    keep: bool = True,
) -> None:
    """Add Σ_i values[μ, i, :] x_i[ν] to the layer's rows of ``target``, or write it there."""
    weight, bias = place.read(target, units)
    num_units, _, num_columns = values.shape
    if weight is not None and num_columns < FEW_COLUMNS:
        rows = values.permute(2, 0, 1).reshape(num_columns * num_units, -1)
        added = rows @ inputs[: weight.shape[1]].T
        added = added.view(num_columns, num_units, -1).permute(1, 2, 0)
        _put(weight, added, keep)
    elif weight is not None and num_columns < _FOLDED_COLUMNS:
        folded = values.transpose(0, 1).reshape(-1, num_units * num_columns)
        added = inputs[: weight.shape[1]] @ folded
        _put(weight, added.view(-1, num_units, num_columns).transpose(0, 1), keep)
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
