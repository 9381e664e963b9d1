"""What the precomputation leaves behind: layer inputs and output Jacobians, laid out flat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.network import Layer
from hcurv.output_jacobian import OutputJacobian

__all__ = ["LayerFactors", "LayerSlot"]


@dataclass(frozen=True)
class LayerSlot:
    """Where a layer with trainable parameters lies among units, inputs and flat parameters.

    Attributes:
        layer: the layer.
        position: its place in the network.
        units: its range of units.
        inputs: its range of input rows, a last row of ones included if the layer has a bias.
    """

    layer: Layer
    position: int
    units: slice
    inputs: slice


@dataclass(frozen=True)
class LayerFactors:
    """Everything that entries and products are made of.

    The Jacobian's column for the weight k that joins unit μ to input ν is, at point i,
    v_k(i) = C_i[:, μ]·x_i[ν] (paper, Eq. 3.5), and H_km = Σ_i v_k(i)ᵀ v_m(i) (Eq. 3.2).

    Attributes:
        slots: the layers with trainable parameters, in the order of the network.
        inputs: x_i[ν] of all these layers, stacked, (inputs, n).
        jacobian: C_i[:, μ] of all their units.
        num_parameters: N.
    """

    slots: tuple[LayerSlot, ...]
    inputs: Tensor
    jacobian: OutputJacobian
    num_parameters: int

    @property
    def num_points(self) -> int:
        """The number n of data points."""
        return self.inputs.shape[1]

    @property
    def num_units(self) -> int:
        """Number of units with trainable parameters."""
        return int(self.slots[-1].units.stop)

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.inputs.numel() + sum(t.numel() for t in self.jacobian.tensors)

    def structural_orders(self) -> dict[str, Tensor]:
        """Orders of the N flat indices that follow the network, each a permutation, by name.

        "layer-output-input" goes through the layers, their units, and the inputs of a unit, its
        bias last; "layer-input-output" through the layers, their inputs, the biases last, and the
        units.
        """
        everything = torch.arange(self.num_parameters, device=self.inputs.device)
        units, inputs = self.locate(everything)
        # Units and inputs are both numbered through, layer by layer.
        by_output = units * self.inputs.shape[0] + inputs
        by_input = inputs * self.num_units + units
        return {
            "layer-output-input": by_output.argsort(),
            "layer-input-output": by_input.argsort(),
        }

    def select(self, points: Tensor, scale: Tensor) -> LayerFactors:
        """The factors of some points, their Jacobians multiplied by ``scale``."""
        jacobian = self.jacobian.select(points, scale)
        return replace(self, inputs=self.inputs[:, points], jacobian=jacobian)

    def point_norms(self) -> Tensor:
        """‖V(i)‖_F² = Σ_k ‖v_k(i)‖², the share of each point in trace(H), (n,)."""
        result = self.inputs.new_zeros(self.num_points, dtype=torch.float64)
        squares = self.jacobian.column_norms().double().square_()
        for slot in self.slots:
            layer, inputs = slot.layer, self.inputs[slot.inputs].double()
            features = inputs[: layer.in_features].square().sum(0)
            share = torch.zeros_like(result)
            if layer.weight_offset is not None:
                share += features
            if layer.bias_offset is not None:
                share += 1
            result += share * squares[slot.units].sum(0)
        return result

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The unit μ and the input ν that each flat parameter index joins."""
        table = sorted(
            (offset, units.start, first_input, width)
            for offset, units, first_input, width in self._segments()
        )
        starts, first_units, first_inputs, widths = torch.tensor(table, device=index.device).T
        segment = torch.searchsorted(starts.contiguous(), index.contiguous(), right=True) - 1
        local, width = index - starts[segment], widths[segment]
        units = first_units[segment] + local.div(width, rounding_mode="floor")
        return units, first_inputs[segment] + local % width

    def _segments(self) -> Iterator[tuple[int, slice, int, int]]:
        """(flat offset, units, first input row, inputs per unit) of each parameter tensor."""
        for slot in self.slots:
            layer = slot.layer
            if layer.weight_offset is not None:
                yield layer.weight_offset, slot.units, slot.inputs.start, layer.in_features
            if layer.bias_offset is not None:
                yield layer.bias_offset, slot.units, slot.inputs.stop - 1, 1
