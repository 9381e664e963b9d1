"""The network linearised at every point: what products need where they do not use factors C_i.

The factors C_i^ℓ = R_i M_i^L W_L … M_i^ℓ (paper, Eq. 3.4) take q floats for each unit and point,
and a product reads all of them. The slopes M_i^ℓ that they are made of take one. Where outputs are
many and the network is deep, `linearised_products` computes products from the slopes in less time,
and the factors are needed for entries alone. They are then made when entries are first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network.reading import Layer, Network
from hcurv.network.trainable_layers import TrainableLayer, number_layers

__all__ = ["Linearisation"]


@dataclass(frozen=True)
class Linearisation:
    """Inputs, slopes and weighted outputs of a network at all points.

    Layers are counted from the first trainable one.

    Attributes:
        network: the network.
        inputs: x_i[ν] of the trainable layers, stacked, (inputs, n), as in `LayerFactors`.
        slopes: the diagonal of M_i of each layer but the last, (units, n), and None for the last;
            None where it is the identity.
        root: R_i M_i^L, whose diagonal is stored if it is diagonal, (d_L, n); else its columns,
            (d_L, q, n).
    """

    network: Network
    inputs: Tensor
    slopes: tuple[Tensor | None, ...]
    root: Tensor

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers from the first trainable one on."""
        return self.network.layers[self.network.first_trainable :]

    @property
    def num_layers(self) -> int:
        """The number of these layers."""
        return len(self.layers)

    @cached_property
    def places(self) -> dict[int, TrainableLayer]:
        """The trainable layers, by their number."""
        first = self.network.first_trainable
        return {place.position - first: place for place in number_layers(self.network)}

    @property
    def layout(self) -> ParameterLayout:
        """Where the parameters lie in the flat vector."""
        return self.network.layout

    @property
    def num_parameters(self) -> int:
        """The number N of trainable parameters."""
        return self.network.num_parameters

    @property
    def dtype(self) -> torch.dtype:
        """The type of all values."""
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where they are stored."""
        return self.inputs.device

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self.inputs.shape[1]

    @property
    def num_rows(self) -> int:
        """The number q of rows of R_i."""
        return self.root.shape[-2]

    @property
    def num_units(self) -> int:
        """The number of units with trainable parameters."""
        return sum(place.layer.out_features for place in self.places.values())

    @property
    def num_stored(self) -> int:
        """The number of stored floats; the weights belong to the network."""
        slopes = sum(slope.numel() for slope in self.slopes if slope is not None)
        return self.inputs.numel() + slopes + self.root.numel()

    @property
    def num_outputs(self) -> int:
        """The number d_L of outputs."""
        return self.network.num_outputs

    @cached_property
    def widest(self) -> int:
        """The number of units of the widest hidden layer; 1 if there is none."""
        return max((layer.out_features for layer in self.layers[:-1]), default=1)

    @property
    def pass_floats(self) -> int:
        """Floats for each point and right-hand side that a product holds at the most.

        The values of two hidden layers and of the outputs, and again of the outputs and of y in
        another order if R_i is not diagonal.
        """
        outputs = self.num_outputs
        return 2 * self.widest + (outputs if self.root.ndim == 2 else 2 * outputs + self.num_rows)

    @cached_property
    def sums_are_cheaper(self) -> bool:
        """Whether R_i M_i^L is one number for all outputs, and using it saves multiplications.

        For each point and column they are 4·q·r through all q outputs, from the r units before
        them, and 3·r² by sums over points, which take 3·q·r² more at the end.
        """
        if self.root.ndim == 3 or self.num_layers == 1:
            return False
        rows, width = self.layers[-1].weight.shape
        num_points = self.num_points
        shorter = 3 * width * (num_points + rows) < 4 * num_points * rows
        return shorter and bool((self.root == self.root[:1]).all())

    def select(self, points: Tensor, scale: Tensor) -> Linearisation:
        """Some of the points, whose roots R_i are multiplied by ``scale``."""
        return replace(
            self,
            inputs=self.inputs[:, points],
            slopes=tuple(None if slope is None else slope[:, points] for slope in self.slopes),
            root=self.root[..., points] * scale,
        )

    def range(self, points: slice) -> Linearisation:
        """A range of the points; nothing is copied."""
        return replace(
            self,
            inputs=self.inputs[:, points],
            slopes=tuple(None if slope is None else slope[:, points] for slope in self.slopes),
            root=self.root[..., points],
        )

    def to(self, dtype: torch.dtype) -> Linearisation:
        """The same values, and the weights, converted to another precision."""
        if dtype == self.inputs.dtype:
            return self
        layers = tuple(
            replace(layer, weight=layer.weight.to(dtype)) for layer in self.network.layers
        )
        return replace(
            self,
            network=replace(self.network, layers=layers),
            inputs=self.inputs.to(dtype),
            slopes=tuple(None if slope is None else slope.to(dtype) for slope in self.slopes),
            root=self.root.to(dtype),
        )

    def at(self, points: slice) -> tuple[Tensor, list[Tensor | None]]:
        """R_i M_i^L and the slopes of all layers at some points, as `JacobianPlan.fill` takes them.

        Returns:
            The root, (b, q) if it is diagonal, else (b, q, d_L), and the slopes, (b, units), None
            for the last layer and for those before the first trainable one.
        """
        root = self.root[..., points]
        slopes = [None if slope is None else slope[:, points].T for slope in self.slopes]
        return root.permute(*range(root.ndim)[::-1]), [None] * self.network.first_trainable + slopes
