"""The root of a chain of Linear layers, with the fast forms of the paper for each request."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network import block_batches, entries, linearised_products, products
from hcurv.network.chain_kernel import PASS_FLOPS, ChainKernelParts
from hcurv.network.chain_pairs import ChainPairTerms
from hcurv.network.layer_factors import LayerFactors, chain_orders
from hcurv.network.linearisation import Linearisation
from hcurv.network.precompute import make_factors, plan_of_factors
from hcurv.network.root import Root

__all__ = ["ChainRoot"]


class ChainRoot(Root):
    """S with the columns v_k(i) = C_i[:, μ]·x_i[ν] (paper, Eq. 3.5).

    Products use what was stored when the data was read. If that is a `Linearisation`, the factors
    are made when entries are first asked for, and kept.

    Args:
        stored: the inputs x_i and the factors C_i of all layers, or the linearised network.
        workspace: bytes of temporary memory for making factors.
        many: products with this many columns at least are made with factors, even if that takes
            making them; None to use what is stored.
    """

    def __init__(
        self, stored: LayerFactors | Linearisation, workspace: int, many: int | None = None
    ) -> None:
        self.stored, self._workspace, self._many = stored, workspace, many
        # Two threads that ask at the same time both make factors, and those of one are kept.
        self._factors = stored if isinstance(stored, LayerFactors) else None
        self._last_parts: tuple[Tensor, ChainKernelParts] | None = None

    @property
    def factors(self) -> LayerFactors:
        """The factors C_i.

        Raises:
            InsufficientMemoryError: they are not there yet, and do not fit into free memory.
        """
        if self._factors is None:
            assert isinstance(self.stored, Linearisation)
            with torch.no_grad():
                self._factors = make_factors(self.stored, self._workspace)
        return self._factors

    def _some_factors(self, workspace: int) -> Iterator[LayerFactors]:
        """Factors of all points; if there are none, of a few points at a time, not to be kept.

        Those of a few points, and making them, take half of the workspace.
        """
        if self._factors is not None or not isinstance(self.stored, Linearisation):
            yield self.factors
            return
        per_point = plan_of_factors(self.stored).num_floats // self.num_points
        share = workspace // 4
        most = max(1, share // (per_point * self.dtype.itemsize))
        for points in products.even_slices(self.num_points, most):
            yield make_factors(self.stored.range(points), share)

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""
        return self.stored.layout

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self.stored.num_points

    @property
    def num_rows(self) -> int:
        """The number q of rows of each point."""
        return self.stored.num_rows

    @property
    def dtype(self) -> torch.dtype:
        """The type of the factors."""
        return self.stored.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where the factors are stored."""
        return self.stored.inputs.device

    @property
    def num_stored(self) -> int:
        """The number of floats that are stored at this time."""
        if self._factors is None or self._factors is self.stored:
            return self.stored.num_stored
        return self.num_stored_with_entries

    @property
    def num_stored_with_entries(self) -> int:
        """The number of floats that are stored once entries were asked for."""
        if isinstance(self.stored, LayerFactors):
            return self.stored.num_stored
        plan = plan_of_factors(self.stored)
        return self.stored.num_stored + plan.num_floats - self.stored.inputs.numel()

    @property
    def kernel_flops(self) -> float:
        """Inner products of units and of inputs, and a pass over the kernel for each layer.

        Half of the entries are computed, each with two flops for every unit.
        """
        units, inputs = self.stored.num_units, self.stored.inputs.shape[0]
        return units + inputs / self.num_rows**2 + len(self.layout.layers) * PASS_FLOPS

    def _for_products(self, columns: Tensor) -> LayerFactors | Linearisation:
        """What products with these columns are made with."""
        if self._many is not None and columns.shape[1] >= self._many:
            return self.factors
        return self.stored

    def product(self, rhs: Tensor, workspace: int) -> Tensor:
        """SᵀS times (N, k)."""
        used = self._for_products(rhs)
        if isinstance(used, Linearisation):
            return linearised_products.product(used, rhs, workspace)
        return products.product(used, rhs, workspace)

    def apply(self, rhs: Tensor, workspace: int) -> Tensor:
        """S times (N, k)."""
        used = self._for_products(rhs)
        if isinstance(used, Linearisation):
            return linearised_products.root_product(used, rhs, workspace)
        return products.root_product(used, rhs, workspace)

    def apply_transposed(self, values: Tensor, workspace: int) -> Tensor:
        """Sᵀ times (n·q, k)."""
        used = self._for_products(values)
        if isinstance(used, Linearisation):
            return linearised_products.root_transposed(used, values, workspace)
        return products.root_transposed(used, values, workspace)

    def columns(self, index: Tensor) -> Tensor:
        """Columns of S, (n·q, k)."""
        return products.root_columns(self.factors, index)

    def diagonal(self, workspace: int) -> Tensor:
        """The diagonal of SᵀS, (N,)."""
        result = self.stored.inputs.new_zeros(self.layout.size)
        for factors in self._some_factors(workspace):
            result += products.diagonal(factors, workspace // 2)
        return result

    def block(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """A block of SᵀS."""
        return entries.block(self.factors, rows, cols, workspace)

    def block_bytes(self, rows: Tensor, cols: Tensor, workspace: int) -> int:
        """Bytes of temporary memory that `block` takes beyond its result."""
        return entries.block_bytes(self.factors, rows, cols, workspace)

    def blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of equal size."""
        return block_batches.blocks(self.factors, rows, cols, workspace)

    def pairs(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Entries of SᵀS, one for each pair of indices."""
        return entries.pairs(self.factors, rows, cols, workspace)

    def orders(self) -> dict[str, Tensor]:
        """By layers, their units and inputs; and by layers, their inputs and units."""
        if isinstance(self.stored, Linearisation):
            return chain_orders(tuple(self.stored.places.values()), self.layout, self.device)
        return chain_orders(self.stored.layers, self.layout, self.device)

    def point_norms(self) -> Tensor:
        """‖S_i‖_F² of each point, (n,)."""
        parts = self._some_factors(self._workspace)
        return torch.cat([factors.point_norms() for factors in parts])

    def point_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Projections of the directions of all columns of C_i."""
        return self.factors.jacobian.direction_features(num_features, generator)

    def select(self, points: Tensor, scale: Tensor) -> ChainRoot:
        """The rows of some points, scaled."""
        return ChainRoot(self.stored.select(points, scale), self._workspace)

    def to(self, dtype: torch.dtype) -> ChainRoot:
        """The same root in another precision."""
        return ChainRoot(self.stored.to(dtype), self._workspace, self._many)

    def kernel_parts(self, inverse_damping: Tensor) -> ChainKernelParts:
        """Products of inputs times products of factors, layer by layer."""
        return ChainKernelParts(self.factors, inverse_damping)

    def cross(self, other: Root, inverse_damping: Tensor, workspace: int) -> Tensor:
        """S D⁻¹ S'ᵀ, layer by layer where each layer has one damping."""
        if isinstance(other, ChainRoot):
            parts = self._cross_parts(inverse_damping)
            if parts.separates:
                return parts.between(other.kernel_parts(inverse_damping))
        return super().cross(other, inverse_damping, workspace)

    def _cross_parts(self, inverse_damping: Tensor) -> ChainKernelParts:
        """The parts of the kernel for this damping; those of the last one are kept."""
        if self._last_parts is None or not torch.equal(self._last_parts[0], inverse_damping):
            self._last_parts = (inverse_damping, self.kernel_parts(inverse_damping))
        return self._last_parts[1]

    def pair_terms(self, order: Tensor | None, workspace: int) -> ChainPairTerms:
        """Gram values of units times inputs."""
        return ChainPairTerms(self.factors, order, workspace)
