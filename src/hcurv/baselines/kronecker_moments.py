"""Second moments of layer inputs and output gradients: what Kronecker factorizations are made of.

The weights of layer ℓ form a matrix with one row per unit and one column per input, the bias as the
last. The block of the Fisher matrix for layers ℓ and m is Σ_i (g_i^ℓ g_i^mᵀ) ⊗ (x_i^ℓ x_i^mᵀ), and
K-FAC (Martens and Grosse 2015) takes the sums of the two factors apart:

    G_ℓm ⊗ A_ℓm,    G_ℓm = Σ_i E[g_i^ℓ g_i^mᵀ],    A_ℓm = (1/n) Σ_i x_i^ℓ x_i^mᵀ,

g_i the derivatives with respect to pre-activations for targets drawn from the model. The
expectation is exactly Σ_i C_i^ℓᵀ C_i^m, with the factors C_i of `GaussNewton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.batches import Batches, Survey
from hcurv.gauss_newton import GaussNewton
from hcurv.losses import Loss
from hcurv.network import Layer, Network
from hcurv.precompute import forward_pass

__all__ = ["LayerView", "Moments", "Piece", "accumulate", "exact_pieces", "sampled_pieces"]

Pair = tuple[int, int]
_PIECE_FLOATS = 2**23  # of the gradients of a piece
_GRAM_COLUMNS = 256  # of a Gram matrix at a time


@dataclass(frozen=True)
class LayerView:
    """The trainable parameters of a layer as a matrix: a row per unit, a column per input.

    Attributes:
        layer: the layer; its bias is the last column.
    """

    layer: Layer

    @property
    def num_units(self) -> int:
        """Rows."""
        return self.layer.out_features

    @property
    def num_columns(self) -> int:
        """Trainable columns."""
        layer = self.layer
        weights = 0 if layer.weight_offset is None else layer.in_features
        return weights + (layer.bias_offset is not None)

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs of the trainable columns, (b, d_in) to (b, columns)."""
        parts = [] if self.layer.weight_offset is None else [inputs]
        if self.layer.bias_offset is not None:
            parts.append(inputs.new_ones(inputs.shape[0], 1))
        return torch.cat(parts, 1)

    def read(self, flat: Tensor) -> Tensor:
        """The layer's part of flat vectors (N, k), as matrices (k, units, columns)."""
        layer, parts = self.layer, []
        if layer.weight_offset is not None:
            size = layer.weight.numel()
            part = flat[layer.weight_offset : layer.weight_offset + size]
            parts.append(part.view(self.num_units, -1, flat.shape[1]))
        if layer.bias_offset is not None:
            part = flat[layer.bias_offset : layer.bias_offset + self.num_units]
            parts.append(part[:, None])
        return torch.cat(parts, 1).permute(2, 0, 1)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Put matrices (k, units, columns) into flat vectors (N, k)."""
        layer, last = self.layer, self.num_columns
        values = values.permute(1, 2, 0)
        if layer.bias_offset is not None:
            last -= 1
            flat[layer.bias_offset : layer.bias_offset + self.num_units] = values[:, last]
        if layer.weight_offset is not None:
            size = layer.weight.numel()
            part = flat[layer.weight_offset : layer.weight_offset + size]
            part.copy_(values[:, :last].reshape(size, -1))


@dataclass(frozen=True)
class Piece:
    """Some points: inputs and gradients of all trainable layers.

    Attributes:
        inputs: features of each layer, (b, columns).
        gradients: of each layer, (b, m, units), m of them a point, scaled so that their squares
            add up to the Hessian; the last layer's may be (b, units), the diagonal of m = units
            gradients.
    """

    inputs: list[Tensor]
    gradients: list[Tensor]


def sampled_pieces(
    network: Network,
    loss: Loss,
    scale: float,
    batches: Batches,
    survey: Survey,
    num_samples: int,
    seed: int,
) -> Iterator[Piece]:
    """One forward pass over the data, and a backward pass for each sample of the targets."""
    generator = torch.Generator().manual_seed(seed)
    layers = network.layers
    views = [LayerView(layer) for layer in layers]
    widest = max(max(layer.in_features, layer.out_features) for layer in layers)
    step = max(1, _PIECE_FLOATS // (widest * num_samples))
    start = 0
    for inputs, _ in batches.reread(survey):
        for part in inputs.split(step):
            batch = forward_pass(network, part, start)
            start = batch.points.stop
            targets = None if survey.targets is None else survey.targets[batch.points]
            factor = (scale / num_samples) ** 0.5
            draws = [
                loss.sample_gradient(batch.outputs, targets, generator) * factor
                for _ in range(num_samples)
            ]
            adjoint = torch.stack(draws, 1)
            found: list[Tensor] = []
            for position in reversed(range(network.first_trainable, len(layers))):
                slope = batch.slopes[position]
                if slope is not None:
                    adjoint = adjoint * slope[:, None]
                if layers[position].trainable:
                    found.insert(0, adjoint)
                if position > network.first_trainable:
                    adjoint = adjoint @ layers[position].weight
            yield Piece(
                [
                    view.features(values)
                    for view, values in zip(views, batch.inputs, strict=True)
                    if view.layer.trainable
                ],
                found,
            )


def exact_pieces(matrix: GaussNewton) -> Iterator[Piece]:
    """From the stored factors: all rows of C_i as gradients."""
    factors, jacobian = matrix.factors, matrix.factors.jacobian
    hidden = max(1, jacobian.num_hidden)
    step = max(1, _PIECE_FLOATS // (hidden * jacobian.num_rows))
    for start in range(0, factors.num_points, step):
        points = slice(start, min(start + step, factors.num_points))
        inputs, gradients = [], []
        for slot in factors.slots:
            view = LayerView(slot.layer)
            rows = factors.inputs[slot.inputs, points][: slot.layer.in_features]
            inputs.append(view.features(rows.T))
            if slot.units.start >= jacobian.num_hidden:
                assert jacobian.tail is not None
                gradients.append(jacobian.tail[:, points].T)
            else:
                gradients.append(jacobian.hidden_columns(slot.units, points).permute(2, 1, 0))
        yield Piece(inputs, gradients)


@dataclass(frozen=True)
class Moments:
    """A_ℓm and G_ℓm of pairs ℓ ≤ m of layers.

    Attributes:
        inputs: A.
        gradients: G.
    """

    inputs: dict[Pair, Tensor]
    gradients: dict[Pair, Tensor]


def accumulate(
    pieces: Iterator[Piece],
    pairs: list[Pair],
    num_points: int,
    progress: Callable[[int], object] | None = None,
) -> Moments:
    """Add up the moments of some pairs of layers."""
    inputs: dict[Pair, Tensor] = {}
    gradients: dict[Pair, Tensor] = {}
    for piece in pieces:
        for pair in pairs:
            first, second = pair
            _add(inputs, pair, _product(piece.inputs[first], piece.inputs[second]))
            _add(
                gradients, pair, _gradient_product(piece.gradients[first], piece.gradients[second])
            )
        if progress is not None:
            progress(piece.inputs[0].shape[0])
    return Moments({pair: total.div_(num_points) for pair, total in inputs.items()}, gradients)


def _add(sums: dict[Pair, Tensor], pair: Pair, values: Tensor) -> None:
    if pair in sums:
        sums[pair] += values
    else:
        sums[pair] = values


def _gradient_product(first: Tensor, second: Tensor) -> Tensor:
    """Σ over points and rows of first ⊗ second; a tensor (b, units) stands for a diagonal."""
    if first.ndim == 2:  # then the second is the same, last layer
        return torch.diag(first.square().sum(0))
    if second.ndim == 2:
        return torch.einsum("bmu,bm->um", first, second)
    flat = first.flatten(0, 1)
    return _product(flat, flat if first is second else second.flatten(0, 1))


def _product(first: Tensor, second: Tensor) -> Tensor:
    """firstᵀ second; of equal operands only half is computed."""
    if first is not second:
        return first.T @ second
    width = first.shape[1]
    if width < 2 * _GRAM_COLUMNS:
        return first.T @ first
    result = first.new_empty(width, width)
    for start in range(0, width, _GRAM_COLUMNS):
        stop = min(start + _GRAM_COLUMNS, width)
        block = first[:, start:stop].T @ first[:, :stop]
        result[start:stop, :stop] = block
        result[:start, start:stop] = block[:, :start].T
    return result
