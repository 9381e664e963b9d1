"""The root of a chain of Linear layers, with the fast forms of the paper for each request."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network import block_batches, entries, products
from hcurv.network.chain_kernel import PASS_FLOPS, ChainKernelParts
from hcurv.network.chain_pairs import ChainPairTerms
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.root import Root

__all__ = ["ChainRoot"]


class ChainRoot(Root):
    """S with the columns v_k(i) = C_i[:, μ]·x_i[ν] (paper, Eq. 3.5).

    Args:
        factors: the inputs x_i and the factors C_i of all layers.
    """

    def __init__(self, factors: LayerFactors) -> None:
        self.factors = factors

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""
        return self.factors.layout

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self.factors.num_points

    @property
    def num_rows(self) -> int:
        """The number q of rows of each point."""
        return self.factors.jacobian.num_rows

    @property
    def dtype(self) -> torch.dtype:
        """The type of the factors."""
        return self.factors.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where the factors are stored."""
        return self.factors.inputs.device

    @property
    def num_stored(self) -> int:
        """The number of floats of all factors."""
        return self.factors.num_stored

    @property
    def kernel_flops(self) -> float:
        """Inner products of units and of inputs, and a pass over the kernel for each layer.

        Half of the entries are computed, each with two flops for every unit.
        """
        units, inputs = self.factors.num_units, self.factors.inputs.shape[0]
        return units + inputs / self.num_rows**2 + len(self.layout.layers) * PASS_FLOPS

    def product(self, rhs: Tensor, workspace: int) -> Tensor:
        """SᵀS times (N, k)."""
        return products.product(self.factors, rhs, workspace)

    def apply(self, rhs: Tensor, workspace: int) -> Tensor:
        """S times (N, k)."""
        return products.root_product(self.factors, rhs, workspace)

    def apply_transposed(self, values: Tensor, workspace: int) -> Tensor:
        """Sᵀ times (n·q, k)."""
        return products.root_transposed(self.factors, values, workspace)

    def columns(self, index: Tensor) -> Tensor:
        """Columns of S, (n·q, k)."""
        return products.root_columns(self.factors, index)

    def diagonal(self, workspace: int) -> Tensor:
        """The diagonal of SᵀS, (N,)."""
        return products.diagonal(self.factors, workspace)

    def block(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """A block of SᵀS."""
        return entries.block(self.factors, rows, cols, workspace)

    def blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of equal size."""
        return block_batches.blocks(self.factors, rows, cols, workspace)

    def pairs(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Entries of SᵀS, one for each pair of indices."""
        return entries.pairs(self.factors, rows, cols, workspace)

    def orders(self) -> dict[str, Tensor]:
        """By layers, their units and inputs; and by layers, their inputs and units."""
        return self.factors.structural_orders()

    def point_norms(self) -> Tensor:
        """‖S_i‖_F² of each point, (n,)."""
        return self.factors.point_norms()

    def point_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Projections of the directions of all columns of C_i."""
        return self.factors.jacobian.direction_features(num_features, generator)

    def select(self, points: Tensor, scale: Tensor) -> ChainRoot:
        """The rows of some points, scaled."""
        return ChainRoot(self.factors.select(points, scale))

    def to(self, dtype: torch.dtype) -> ChainRoot:
        """The same root in another precision."""
        return ChainRoot(self.factors.to(dtype))

    def kernel_parts(self, inverse_damping: Tensor) -> ChainKernelParts:
        """Products of inputs times products of factors, layer by layer."""
        return ChainKernelParts(self.factors, inverse_damping)

    def pair_terms(self, order: Tensor | None, workspace: int) -> ChainPairTerms:
        """Gram values of units times inputs."""
        return ChainPairTerms(self.factors, order, workspace)
