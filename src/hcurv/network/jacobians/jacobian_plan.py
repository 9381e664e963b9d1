"""What a Jacobian will store, decided and counted before anything is allocated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.jacobians.output_jacobian import OutputJacobian
from hcurv.network.reading import Network
from hcurv.network.trainable_layers import TrainableLayer

__all__ = ["ChainShape", "JacobianPlan", "refuse_overflow", "scale_columns", "store_factors"]


@dataclass(frozen=True)
class ChainShape:
    """A network, its number of points, and the shape of the loss's square root R_i.

    Attributes:
        network: the network.
        layers: its layers with trainable parameters.
        num_points: n.
        num_rows: q, the number of rows of R_i.
        diagonal: whether R_i is diagonal.
    """

    network: Network
    layers: tuple[TrainableLayer, ...]
    num_points: int
    num_rows: int
    diagonal: bool

    @property
    def tail(self) -> TrainableLayer | None:
        """The last layer of the network, if it is trainable and R_i is diagonal."""
        last = self.layers[-1]
        at_the_end = last.position == len(self.network.layers) - 1
        return last if self.diagonal and at_the_end else None

    @property
    def hidden(self) -> tuple[TrainableLayer, ...]:
        """The trainable layers but for the tail."""
        return self.layers if self.tail is None else self.layers[:-1]

    @property
    def num_hidden(self) -> int:
        """Number of units of the hidden layers."""
        return self.hidden[-1].units.stop if self.hidden else 0

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor for all points, (*shape, n)."""
        return self.network.layers[0].weight.new_empty(*shape, self.num_points)


class JacobianPlan(ABC):
    """The memory that one kind of Jacobian takes, and how it is filled.

    Attributes:
        chain: the network.
    """

    chain: ChainShape

    @property
    @abstractmethod
    def num_floats(self) -> int:
        """The number of floats that the Jacobian will store."""

    @property
    @abstractmethod
    def working_floats(self) -> int:
        """The number of temporary floats that `fill` needs for one point."""

    @property
    @abstractmethod
    def read_floats(self) -> int:
        """Floats of a point that each half of a product reads, for each right-hand side."""

    @property
    @abstractmethod
    def weight_products(self) -> int:
        """Multiplications in matrix products for a point and right-hand side, but those with Ŵ."""

    @abstractmethod
    def reserve(self) -> OutputJacobian:
        """A Jacobian whose values are not set yet."""

    @abstractmethod
    def fill(
        self,
        jacobian: OutputJacobian,
        points: slice,
        root: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> None:
        """Set the values at some points.

        Args:
            jacobian: what `reserve` returned.
            points: the points.
            root: R_i of these points, (b, q) if it is diagonal, else (b, q, outputs).
            slopes: the diagonal of M_i for each layer, (b, units); None where it is the identity.

        Raises:
            ValueError: the derivatives of the network overflow.
        """


def scale_columns(factor: Tensor, slopes: Tensor | None) -> Tensor:
    """C M for C of shape (d, q, b) and the diagonal of M, (b, d)."""
    return factor if slopes is None else factor * slopes.T[:, None, :]


def store_factors(
    chain: ChainShape,
    target: Tensor,
    points: slice,
    factor: Tensor,
    position: int,
    slopes: Sequence[Tensor | None],
) -> None:
    """Go back through the layers, C^{ℓ-1} = C^ℓ W_ℓ M^{ℓ-1}, and store C of the hidden units.

    Args:
        chain: the network.
        target: receives C, (hidden, rows, n).
        points: the points of this batch.
        factor: C at the layer to begin with, (d, rows, b).
        position: the position of that layer.
        slopes: as in `JacobianPlan.fill`.
    """
    layers = chain.network.layers
    units_at = {layer.position: layer.units for layer in chain.hidden}
    while True:
        if position in units_at:
            target[units_at[position], :, points] = without_tiny(factor)
        if position == chain.network.first_trainable:
            break
        weight = layers[position].weight
        position -= 1
        moved = (weight.T @ factor.flatten(1)).view(-1, *factor.shape[1:])
        factor = scale_columns(moved, slopes[position])
    refuse_overflow(factor, points)


def refuse_overflow(derivatives: Tensor, points: slice) -> None:
    """Raise a ValueError if the derivatives at some points are not finite."""
    if not all(math.isfinite(extreme) for extreme in torch.aminmax(derivatives)):
        raise ValueError(
            f"the network's derivatives overflow at points {points.start} to {points.stop - 1}:"
            " the weights or the inputs are too large, or a function has no derivative there"
        )
