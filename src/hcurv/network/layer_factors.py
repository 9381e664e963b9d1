"""What the precomputation leaves behind: the inputs of all layers and the Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network.jacobians.output_jacobian import OutputJacobian
from hcurv.network.trainable_layers import TrainableLayer

__all__ = ["Connections", "LayerFactors", "chain_orders"]


class Connections(NamedTuple):
    """The unit μ and the input ν that each of some parameters joins.

    The bias of a unit joins it to an input that is always one.
    """

    units: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class LayerFactors:
    """Everything that entries and products are made of.

    The column of the root for the parameter k that joins unit μ to input ν is, at point i,
    v_k(i) = C_i[:, μ]·x_i[ν] (paper, Eq. 3.5), and H_km = Σ_i v_k(i)ᵀ v_m(i) (Eq. 3.2).

    Attributes:
        layers: the layers with trainable parameters, in the order of the network.
        inputs: x_i[ν] of all these layers, stacked, (inputs, n).
        jacobian: C_i[:, μ] of all their units.
        layout: where their parameters lie in the flat vector.
    """

    layers: tuple[TrainableLayer, ...]
    inputs: Tensor
    jacobian: OutputJacobian
    layout: ParameterLayout

    @property
    def num_parameters(self) -> int:
        """The number N of trainable parameters."""
        return self.layout.size

    @property
    def num_points(self) -> int:
        """The number n of data points."""
        return self.inputs.shape[1]

    @property
    def num_rows(self) -> int:
        """The number q of rows of each C_i."""
        return self.jacobian.num_rows

    @property
    def num_units(self) -> int:
        """Number of units with trainable parameters."""
        return int(self.layers[-1].units.stop)

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.inputs.numel() + sum(t.numel() for t in self.jacobian.tensors)

    def select(self, points: Tensor, scale: Tensor) -> LayerFactors:
        """The factors of some points, their Jacobians multiplied by ``scale``."""
        jacobian = self.jacobian.select(points, scale)
        return replace(self, inputs=self.inputs[:, points], jacobian=jacobian)

    def to(self, dtype: torch.dtype) -> LayerFactors:
        """The same factors, converted to another precision."""
        if dtype == self.inputs.dtype:
            return self
        return replace(self, inputs=self.inputs.to(dtype), jacobian=self.jacobian.to(dtype))

    def point_norms(self) -> Tensor:
        """‖V(i)‖_F² = Σ_k ‖v_k(i)‖², the share of each point in trace(H), (n,)."""
        result = self.inputs.new_zeros(self.num_points, dtype=torch.float64)
        squares = self.jacobian.column_norms().double().square_()
        for place in self.layers:
            inputs = self.inputs[place.trainable_inputs].double()
            result += inputs.square().sum(0) * squares[place.units].sum(0)
        return result

    def locate(self, index: Tensor) -> Connections:
        """The unit μ and the input ν that each flat parameter index joins."""
        return _locate(index, self.layout, self._first_connections)

    @cached_property
    def _first_connections(self) -> Tensor:
        return _first_connections(self.layers, self.layout)


def chain_orders(
    layers: Sequence[TrainableLayer], layout: ParameterLayout, device: torch.device
) -> dict[str, Tensor]:
    """Orders of the N flat indices that follow the network, by name, each a permutation.

    "layer-output-input" lists layer after layer, in a layer unit after unit, and for a unit its
    inputs, the bias last. "layer-input-output" lists in each layer input after input, the biases
    last, and for an input all units.
    """
    everything = torch.arange(layout.size, device=device)
    units, inputs = _locate(everything, layout, _first_connections(layers, layout))
    # Units and inputs are both numbered through, layer by layer.
    by_output = units * layers[-1].inputs.stop + inputs
    by_input = inputs * layers[-1].units.stop + units
    return {
        "layer-output-input": by_output.argsort(),
        "layer-input-output": by_input.argsort(),
    }


def _locate(index: Tensor, layout: ParameterLayout, first_connections: Tensor) -> Connections:
    parameter, row, column = layout.locate(index)
    first_units, first_inputs = first_connections.to(index.device)
    return Connections(first_units[parameter] + row, first_inputs[parameter] + column)


def _first_connections(layers: Sequence[TrainableLayer], layout: ParameterLayout) -> Tensor:
    """The first unit and the first input of each parameter of the layout, (2, parameters)."""
    first = {}
    for place in layers:
        parameters = place.layer.parameters
        if parameters.weight is not None:
            first[parameters.weight.start] = (place.units.start, place.inputs.start)
        if parameters.bias is not None:
            first[parameters.bias.start] = (place.units.start, place.inputs.stop - 1)
    return torch.tensor([first[part.start] for part in layout.slices.values()]).T
