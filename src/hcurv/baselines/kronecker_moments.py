"""Second moments of layer inputs and output gradients: the factors that K-FAC multiplies.

The weights of layer ℓ form a matrix with one row per unit and one column per input, in which the
bias is the last column. The block of the Fisher matrix for layers ℓ and m is
Σ_i E[(g_i^ℓ g_i^mᵀ) ⊗ (x_i^ℓ x_i^mᵀ)], where x_i are the inputs of a layer and g_i the derivatives
of the loss with respect to its pre-activations, for targets drawn from the model. K-FAC (Martens
and Grosse 2015) replaces the sum of products by a product of sums:

    G_ℓm ⊗ A_ℓm,    G_ℓm = Σ_i E[g_i^ℓ g_i^mᵀ],    A_ℓm = (1/n) Σ_i x_i^ℓ x_i^mᵀ.

The expectation is estimated from a few drawn targets, or taken exactly: E[g_i^ℓ g_i^mᵀ] is
C_i^ℓᵀ C_i^m with the factors C_i of `GaussNewton`, whose rows are used like drawn gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hcurv.layout import LinearParameters
from hcurv.network.forward_pass import ForwardPass, forward_pass
from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.problem import Problem
from hcurv.network.reading import Network

__all__ = [
    "GradientBatch",
    "LayerMatrix",
    "Moments",
    "ParameterMatrix",
    "add_moments",
    "gradient_batches",
    "gram",
    "require_finite",
    "write_layers",
]

Pair = tuple[int, int]

# The gradients of one batch of points never take more floats than this. Larger batches do not make
# matrix products faster, they only take more memory.
_BATCH_FLOATS = 2**23
# A Gram matrix is computed in strips of this many rows, each only up to the diagonal. Wider strips
# compute more entries twice, narrower ones make the matrix products less efficient.
_STRIP_ROWS = 256


class ParameterMatrix(Protocol):
    """Some parameters as a matrix with a row per unit; those of a diagonal block are one column."""

    @property
    def num_units(self) -> int:
        """The number of rows."""

    @property
    def num_columns(self) -> int:
        """The number of columns."""

    def rows(self) -> Tensor:
        """The flat indices of all of these parameters, in any order."""

    def read(self, flat: Tensor) -> Tensor:
        """Read these parameters from flat vectors, (N, k), as matrices (k, units, columns)."""

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write matrices (k, units, columns) into flat vectors, (N, k)."""


@dataclass(frozen=True)
class LayerMatrix:
    """The trainable parameters of a layer as a matrix: a row per unit, a column per input.

    Attributes:
        parameters: where the weight and the bias lie; the bias is the last column.
    """

    parameters: LinearParameters

    @property
    def num_units(self) -> int:
        """The number of rows."""
        return self.parameters.num_units

    @property
    def num_columns(self) -> int:
        """The number of trainable columns."""
        weights = 0 if self.parameters.weight is None else self.parameters.num_inputs
        return weights + (self.parameters.bias is not None)

    def rows(self) -> Tensor:
        """The flat indices of all trainable parameters of the layer."""
        places = (self.parameters.weight, self.parameters.bias)
        return torch.cat([torch.arange(p.start, p.stop) for p in places if p is not None])

    def features(self, inputs: Tensor) -> Tensor:
        """Turn the inputs of the layer, (b, d_in), into those of its columns, (b, columns)."""
        columns = [] if self.parameters.weight is None else [inputs]
        if self.parameters.bias is not None:
            columns.append(inputs.new_ones(inputs.shape[0], 1))
        return torch.cat(columns, 1)

    def read(self, flat: Tensor) -> Tensor:
        """Read the layer's rows of flat vectors, (N, k), as matrices (k, units, columns)."""
        weight, bias = self.parameters.read(flat)
        columns = [] if weight is None else [weight]
        if bias is not None:
            columns.append(bias[:, None])
        return torch.cat(columns, 1).permute(2, 0, 1)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write matrices (k, units, columns) into the layer's rows of flat vectors, (N, k)."""
        weight, bias = self.parameters.read(flat)
        values = values.permute(1, 2, 0)
        if bias is not None:
            bias.copy_(values[:, -1])
        if weight is not None:
            weight.copy_(values[:, : weight.shape[1]])


def write_layers(layers: Sequence[ParameterMatrix], values: Sequence[Tensor]) -> Tensor:
    """Join matrices (k, units, columns), one for each layer, into flat vectors (N, k)."""
    size = sum(layer.num_units * layer.num_columns for layer in layers)
    result = values[0].new_empty(size, values[0].shape[0])
    for layer, block in zip(layers, values, strict=True):
        layer.write(result, block)
    return result


@dataclass(frozen=True)
class GradientBatch:
    """The inputs and gradients of all trainable layers at a batch of b points.

    Attributes:
        features: the features of each layer, (b, columns).
        gradients: m gradients per point for each layer, (b, m, units), scaled so that the sum of
            their squares over all points estimates the Hessian. The last layer may have (b, units)
            instead: the diagonal of m = units gradients that have one nonzero entry each.
    """

    features: list[Tensor]
    gradients: list[Tensor]

    @property
    def num_points(self) -> int:
        """The number b of points."""
        return self.features[0].shape[0]


def gradient_batches(
    problem: Problem, num_samples: int | None, seed: int
) -> Iterator[GradientBatch]:
    """Run forward and backward passes over all of the data, batch by batch.

    Args:
        problem: the network, the loss and the data.
        num_samples: the number of targets to draw for each point; None for all rows of C_i, which
            give the exact expectation over the targets.
        seed: the seed of the draws; the same seed gives the same gradients every time.
    """
    network = problem.network
    assert network is not None
    generator = torch.Generator().manual_seed(seed)
    step = _batch_size(problem, num_samples)
    start = 0
    for inputs in problem.inputs():
        assert isinstance(inputs, Tensor)
        for some in inputs.split(step):
            batch = forward_pass(network, some, start)
            start = batch.points.stop
            if num_samples is None:
                outputs = problem.loss_root(batch.outputs, batch.points)
            else:
                outputs = _drawn_gradients(problem, batch, num_samples, generator)
            # Activations can make subnormal numbers, which are slow to compute with. The data
            # itself has none as a rule, and a pass over it would cost as much as the rest.
            activations = [batch.inputs[0], *map(without_tiny, batch.inputs[1:])]
            features = [
                LayerMatrix(layer.parameters).features(values)
                for layer, values in zip(network.layers, activations, strict=True)
                if layer.trainable
            ]
            yield GradientBatch(features, _backpropagate(network, outputs, batch.slopes))


def _batch_size(problem: Problem, num_samples: int | None) -> int:
    """Find how many points fit into one batch."""
    network, few = problem.network, problem.survey.first_inputs
    assert network is not None
    assert isinstance(few, Tensor)
    layers = network.layers
    widest = max(max(layer.in_features, layer.out_features) for layer in layers)
    if num_samples is not None:
        return max(1, _BATCH_FLOATS // (widest * num_samples))
    first = forward_pass(network, few[:1], 0)
    root = problem.loss_root(first.outputs, first.points)
    units = sum(layer.out_features for layer in (layers if root.ndim == 3 else layers[:-1]))
    return max(1, _BATCH_FLOATS // max(widest, units * root.shape[1]))


def _drawn_gradients(
    problem: Problem, batch: ForwardPass, num_samples: int, generator: torch.Generator
) -> Tensor:
    """Gradients with respect to the outputs for targets drawn from the model, (b, m, outputs)."""
    targets = None if problem.targets is None else problem.targets[batch.points]
    factor = (problem.scale / num_samples) ** 0.5
    draws = [
        problem.loss.sample_gradient(batch.outputs, targets, generator) * factor
        for _ in range(num_samples)
    ]
    return torch.stack(draws, 1)


def _backpropagate(network: Network, outputs: Tensor, slopes: list[Tensor | None]) -> list[Tensor]:
    """Pull gradients with respect to the outputs back to the layers: g^{ℓ-1} = M^{ℓ-1} W_ℓᵀ g^ℓ.

    Args:
        network: the network.
        outputs: gradients with respect to the outputs, (b, m, d), or their diagonal, (b, d).
        slopes: the slopes of the activation of each layer, (b, units), or None for the identity.

    Returns:
        The gradients with respect to the pre-activations of the trainable layers, in order.
    """
    result: list[Tensor] = []
    current = outputs
    for position in reversed(range(network.first_trainable, len(network.layers))):
        layer, slope = network.layers[position], slopes[position]
        if slope is not None:
            current = current * (slope if current.ndim == 2 else slope[:, None])
        if layer.trainable:
            result.insert(0, without_tiny(current))
        if position > network.first_trainable:
            diagonal = current.ndim == 2
            current = current[:, :, None] * layer.weight if diagonal else current @ layer.weight
    return result


@dataclass(frozen=True)
class Moments:
    """The factors A_ℓm and G_ℓm for pairs ℓ ≤ m of trainable layers.

    Attributes:
        inputs: A_ℓm by the pair (ℓ, m), (columns of ℓ, columns of m).
        gradients: G_ℓm by the pair (ℓ, m), (units of ℓ, units of m).
    """

    inputs: dict[Pair, Tensor]
    gradients: dict[Pair, Tensor]


def add_moments(
    batches: Iterator[GradientBatch],
    pairs: list[Pair],
    num_points: int,
    progress: Callable[[int], object],
) -> Moments:
    """Add up the moments of some pairs of layers over all batches.

    Args:
        batches: the inputs and gradients of all points.
        pairs: the pairs of layers.
        num_points: n, the number of all points.
        progress: called with the number of points of each batch.

    Raises:
        ValueError: the moments overflow.
    """
    inputs: dict[Pair, Tensor] = {}
    gradients: dict[Pair, Tensor] = {}
    for batch in batches:
        for first, second in pairs:
            features = gram(batch.features[first], batch.features[second])
            products = _gradient_gram(batch.gradients[first], batch.gradients[second])
            _add(inputs, (first, second), features)
            _add(gradients, (first, second), products)
        progress(batch.num_points)
    require_finite((*inputs.values(), *gradients.values()))
    return Moments({pair: total.div_(num_points) for pair, total in inputs.items()}, gradients)


def require_finite(sums: Iterable[Tensor]) -> None:
    """Raise a ValueError if sums of squares overflow."""
    if not all(bool(torch.isfinite(total).all()) for total in sums):
        raise ValueError(
            "the squares of the network's inputs or derivatives overflow: scale the inputs down, or"
            " convert the model and the data to float64"
        )


def _add(sums: dict[Pair, Tensor], pair: Pair, values: Tensor) -> None:
    if pair in sums:
        sums[pair] += values
    else:
        sums[pair] = values


def _gradient_gram(first: Tensor, second: Tensor) -> Tensor:
    """Sum first ⊗ second over points and rows; a tensor (b, units) stands for a diagonal."""
    if first.ndim == 2:  # Only the last layer has a diagonal, so the second is the same layer.
        return torch.diag(first.square().sum(0))
    if second.ndim == 2:
        return torch.einsum("bmu,bm->um", first, second)
    flat = first.flatten(0, 1)
    return gram(flat, flat if first is second else second.flatten(0, 1))


def gram(first: Tensor, second: Tensor) -> Tensor:
    """Compute firstᵀ second; if both are the same tensor, only about half of the entries."""
    if first is not second:
        return first.T @ second
    width = first.shape[1]
    if width < 2 * _STRIP_ROWS:
        return first.T @ first
    result = first.new_empty(width, width)
    for start in range(0, width, _STRIP_ROWS):
        stop = min(start + _STRIP_ROWS, width)
        block = first[:, start:stop].T @ first[:, :stop]
        result[start:stop, :stop] = block
        result[:start, start:stop] = block[:, :start].T
    return result
