"""The layers with trainable parameters, and how their units and inputs are numbered."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hcurv.network.reading import Layer, Network

__all__ = ["TrainableLayer", "number_layers"]


@dataclass(frozen=True)
class TrainableLayer:
    """A layer with trainable parameters.

    Attributes:
        layer: the layer.
        position: its position in the network.
        units: the range of its units; units are numbered through all trainable layers.
        inputs: the range of its rows among the stacked inputs of all trainable layers. The last
            row holds ones if the layer has a bias.
    """

    layer: Layer
    position: int
    units: slice
    inputs: slice

    @property
    def trainable_inputs(self) -> slice:
        """The range of the input rows that belong to trainable parameters."""
        parameters, width = self.layer.parameters, self.layer.in_features
        first = width if parameters.weight is None else 0
        last = width if parameters.bias is None else width + 1
        return slice(self.inputs.start + first, self.inputs.start + last)

    def read(self, flat: Tensor, units: slice) -> tuple[Tensor | None, Tensor | None]:
        """Views of flat columns (N, k) for a range of units of this layer.

        Returns:
            Weights (units, d_in, k) and biases (units, k); None for what is not trainable.
        """
        first = self.units.start
        return self.layer.parameters.read(flat, slice(units.start - first, units.stop - first))


def number_layers(network: Network) -> tuple[TrainableLayer, ...]:
    """Number the units and inputs of the layers with trainable parameters, in network order."""
    result: list[TrainableLayer] = []
    num_units = num_inputs = 0
    for position, layer in enumerate(network.layers):
        if layer.trainable:
            units = slice(num_units, num_units + layer.out_features)
            width = layer.in_features + (layer.bias is not None)
            inputs = slice(num_inputs, num_inputs + width)
            result.append(TrainableLayer(layer, position, units, inputs))
            num_units, num_inputs = units.stop, inputs.stop
    return tuple(result)
