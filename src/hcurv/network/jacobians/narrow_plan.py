"""The memory of a `NarrowJacobian`, and how it is filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.jacobians.jacobian_plan import (
    ChainShape,
    JacobianPlan,
    scale_columns,
    store_factors,
)
from hcurv.network.jacobians.narrow_jacobian import NarrowJacobian
from hcurv.network.jacobians.output_jacobian import OutputJacobian

__all__ = ["NarrowPlan"]


@dataclass(frozen=True)
class NarrowPlan(JacobianPlan):
    """q floats for each hidden unit and point, and one for each unit of a trainable tail.

    Attributes:
        chain: the network.
    """

    chain: ChainShape

    @property
    def num_floats(self) -> int:
        """Hidden columns and the tail."""
        chain = self.chain
        columns = chain.num_hidden + (chain.tail is not None)
        return chain.num_points * columns * chain.num_rows

    @property
    def working_floats(self) -> int:
        """C of the widest layer in three stages."""
        return 3 * self.chain.num_rows * max(x.out_features for x in self.chain.network.layers)

    @property
    def read_floats(self) -> int:
        """The columns."""
        return self.chain.num_hidden * self.chain.num_rows

    @property
    def weight_products(self) -> int:
        """None."""
        return 0

    def reserve(self) -> NarrowJacobian:
        """Memory for the columns and the tail."""
        chain = self.chain
        return NarrowJacobian(
            num_hidden=chain.num_hidden,
            tail=None if chain.tail is None else chain.empty(chain.num_rows),
            tail_trainable=chain.tail is not None,
            factor=chain.empty(chain.num_hidden, chain.num_rows),
        )

    def fill(
        self,
        jacobian: OutputJacobian,
        points: slice,
        root: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> None:
        """Begin with C^L = R M^L."""
        assert isinstance(jacobian, NarrowJacobian)
        layers = self.chain.network.layers
        position = len(layers) - 1
        if not self.chain.diagonal:
            factor = scale_columns(root.permute(2, 1, 0), slopes[position])
        else:
            slope = slopes[position]
            tail = without_tiny(root if slope is None else root * slope)
            if jacobian.tail is not None:
                jacobian.tail[:, points] = tail.T
            if not self.chain.hidden:
                return
            weight = layers[position].weight
            position -= 1
            factor = scale_columns(weight.T[:, :, None] * tail.T, slopes[position])
        store_factors(self.chain, jacobian.factor, points, factor, position, slopes)
