"""Columns of a weight that is used once for each point: v_k(i) = C_i[:, μ] · x_i[ν]."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.network.chain_kernel import PASS_FLOPS
from hcurv.network.jacobians.contractions import contract, expand
from hcurv.network.layered.layer_jacobian import LayerJacobian, LinearJacobian, LinearShape

__all__ = ["PlainJacobian"]

# Floats of a running sum in elementwise passes, which then stays in the cache of the processor.
_SUM_FLOATS = 2**19


class PlainJacobian(LinearJacobian):
    """C_i and x_i, for z_i = W x_i.

    Args:
        factors: C_i, (d_out, q, b).
        inputs: x_i, (d_in, b).
        by_input: whether the entries of W are numbered input by input.
    """

    form = "plain"

    def __init__(self, factors: Tensor, inputs: Tensor, by_input: bool = False) -> None:
        super().__init__(factors, inputs, LinearShape(factors.shape[0], inputs.shape[0], by_input))

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._inputs.shape[1]

    @property
    def kernel_flops(self) -> float:
        """Inner products of units and of inputs, and a pass over the kernel."""
        return self._shape.num_units + self._shape.num_inputs / self.num_rows**2 + PASS_FLOPS

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Products of rows of both."""
        units, inputs = self._shape.locate(index.to(self._inputs.device))
        result = self._factors[:, :, points].index_select(0, units)
        return result.mul_(self._inputs[:, points].index_select(0, inputs)[:, None])

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """u = Ŵx, then Cu."""
        values = self._shape.rows(flat) @ self._inputs
        values = values.view(flat.shape[1], -1, self.num_points).permute(1, 2, 0)
        contract(self._factors, values, result, _SUM_FLOATS)

    def apply_transposed(self, values: Tensor) -> Tensor:
        """z = Cᵀy, then Σ_i z_i x_iᵀ."""
        found = expand(self._factors, values).permute(2, 0, 1).reshape(-1, self.num_points)
        return self._shape.flat(found @ self._inputs.T)

    def _unit_squares(self) -> Tensor:
        """‖C_i[:, μ]‖², (d_out, b)."""
        return self._factors.square().sum(1)

    def square_sums(self) -> Tensor:
        """Σ_i ‖C_i[:, μ]‖² x_i[ν]²."""
        sums = self._unit_squares() @ self._inputs.square().T
        return self._shape.flat(sums).squeeze(1)

    def point_norms(self) -> Tensor:
        """‖C_i‖² ‖x_i‖²."""
        return self._unit_squares().double().sum(0) * self._inputs.double().square().sum(0)

    def gram(
        self, first: slice, other: LayerJacobian, second: slice, weights: Tensor, result: Tensor
    ) -> None:
        """(x_i · x_j)(C_i[a] · C_j[b]), where the weights do not differ between units."""
        table = self._shape.rows(weights[:, None])
        if not isinstance(other, PlainJacobian) or not bool((table == table[:1]).all()):
            super().gram(first, other, second, weights, result)
            return
        inner = (self._inputs[:, first] * table[0][:, None]).T @ other._inputs[:, second]
        left = self._factors[:, :, first].flatten(1)
        right = other._factors[:, :, second].flatten(1)
        repeats = (self.num_rows, self.num_rows)
        result.addcmul_(left.T @ right, inner.repeat(repeats))

    def select(self, points: Tensor, scale: Tensor) -> PlainJacobian:
        """Factors of some points."""
        factors = self._factors[:, :, points] * scale
        return PlainJacobian(factors, self._inputs[:, points], self._shape.by_input)

    def to(self, dtype: torch.dtype) -> PlainJacobian:
        """Factors of another type."""
        factors, inputs = self._factors.to(dtype), self._inputs.to(dtype)
        return PlainJacobian(factors, inputs, self._shape.by_input)
