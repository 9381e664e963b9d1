"""Columns of a weight that is used at several positions of each point.

A Linear layer over a sequence, a convolution (x_t is then a patch of the image), and a layer that
is called several times: v_k(i) = Σ_t C_{i,t}[:, μ] · x_{i,t}[ν].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hcurv.network.layered.dense_jacobian import DenseJacobian
from hcurv.network.layered.layer_jacobian import (
    PANEL_FLOATS,
    TILE_POINTS,
    LayerJacobian,
    LinearJacobian,
    LinearShape,
    Panel,
    transposed_product,
)

__all__ = ["PositionJacobian"]

# Where more than one of so many columns is asked for, it is faster to multiply out all of them.
_FEW_SHARE = 16


class PositionJacobian(LinearJacobian):
    """C_{i,t} and x_{i,t}, for z_{i,t} = W x_{i,t}.

    Args:
        factors: C_{i,t}, (b, q, d_out, T).
        inputs: x_{i,t}, (b, d_in, T).
        by_input: whether the entries of W are numbered input by input.
    """

    form = "positions"

    def __init__(self, factors: Tensor, inputs: Tensor, by_input: bool = False) -> None:
        super().__init__(factors, inputs, LinearShape(factors.shape[2], inputs.shape[1], by_input))

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._inputs.shape[0]

    @property
    def has_quick_columns(self) -> bool:
        """No: a column is a sum over positions."""
        return False

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Sums over the positions, a few parameters at a time."""
        if index.numel() * _FEW_SHARE > self.num_parameters:
            result = self._factors.new_empty(
                self.num_parameters, self.num_rows, points.stop - points.start
            )
            for numbers, found in self._multiplied(points):
                result[numbers] = found.permute(2, 1, 0)
            return result.index_select(0, index.to(result.device))
        factors, inputs = self._factors[points], self._inputs[points]
        per_parameter = factors[:, :, 0].numel()
        parts = []
        for some in index.to(inputs.device).split(max(1, PANEL_FLOATS // max(1, per_parameter))):
            units, places = self._shape.locate(some)
            chosen = factors.index_select(2, units)
            chosen.mul_(inputs.index_select(1, places)[:, None])
            parts.append(chosen.sum(3).permute(2, 1, 0))
        return torch.cat(parts) if parts else factors.new_zeros(0, self.num_rows, len(inputs))

    def _multiplied(
        self, points: slice, step: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All inputs of some units at a time: one matrix product for each point.

        Args:
            points: a range of points.
            step: the number of units at a time; None for as many as a panel holds.

        Yields:
            The numbers of the parameters, (units·d_in,), and their columns, (b, q, units·d_in).
        """
        factors, inputs = self._factors[points], self._inputs[points].mT
        count, rows = len(inputs), self.num_rows
        if step is None:
            step = self._panel_units(count)
        for start in range(0, self._shape.num_units, step):
            units = slice(start, min(start + step, self._shape.num_units))
            chosen = factors[:, :, units].reshape(count, -1, factors.shape[3])
            found = torch.bmm(chosen, inputs).view(count, rows, -1)
            yield self._shape.number(units).reshape(-1), found

    def _panel_units(self, num_points: int) -> int:
        """The number of units whose columns a panel holds."""
        per_unit = num_points * self.num_rows * self._shape.num_inputs
        return max(1, PANEL_FLOATS // max(1, per_unit))

    @property
    def kernel_flops(self) -> float:
        """Those of multiplied columns, and of multiplying them out, for tiles of some points."""
        positions = self._factors.shape[3]
        return self.num_parameters * (1 + 2 * positions / (TILE_POINTS * self.num_rows))

    def gram(
        self, first: slice, other: LayerJacobian, second: slice, weights: Tensor, result: Tensor
    ) -> None:
        """Products of columns that are multiplied out on both sides, some units at a time."""
        if not isinstance(other, PositionJacobian) or other._shape != self._shape:
            super().gram(first, other, second, weights, result)
            return
        step = self._panel_units(max(first.stop - first.start, second.stop - second.start))
        for (index, above), (_, beside) in zip(
            self._multiplied(first, step), other._multiplied(second, step), strict=True
        ):
            left, right = (side.transpose(0, 1).flatten(0, 1) for side in (above, beside))
            result.addmm_(left * weights[index], right.T)

    def panels(self, points: slice) -> Iterator[Panel]:
        """Multiplied out, some units at a time."""
        for index, found in self._multiplied(points):
            yield Panel(index, found.permute(2, 1, 0).contiguous())

    def square_sums(self) -> Tensor:
        """Multiplied out, some units at a time."""
        result = self._factors.new_empty(self.num_parameters)
        for index, found in self._multiplied(slice(0, self.num_points)):
            result[index] = found.square().sum((0, 1))
        return result

    def multiplied(self, num_columns: int, max_floats: int) -> LayerJacobian:
        """One product for each point, where there is room for the result."""
        floats = self.num_parameters * self.num_rows * self.num_points
        if self._shape.by_input or floats > max_floats:
            return self
        if not self._is_faster_multiplied(num_columns):
            return self
        found = torch.bmm(self._factors.flatten(1, 2), self._inputs.mT)
        by_point = found.view(self.num_points, self.num_rows, self.num_parameters)
        return DenseJacobian(by_point.permute(2, 1, 0))

    def _is_faster_multiplied(self, num_columns: int) -> bool:
        """Whether a product takes fewer flops with columns that are multiplied out for it."""
        positions = self._factors.shape[3]
        return self.num_rows * (positions + num_columns) < positions * num_columns

    def _point_ranges(self, num_columns: int) -> Iterator[slice]:
        """Points whose values u, (k·d_out, T), stay small."""
        floats = num_columns * self._shape.num_units * self._factors.shape[3]
        step = max(1, PANEL_FLOATS // max(1, floats))
        for start in range(0, self.num_points, step):
            yield slice(start, min(start + step, self.num_points))

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """u_t = Ŵx_t, then Σ_t C_t u_t."""
        if self._is_faster_multiplied(flat.shape[1]):
            for index, found in self._multiplied(slice(0, self.num_points)):
                result += found @ flat[index]
            return
        rows, num_columns = self._shape.rows(flat), flat.shape[1]
        for points in self._point_ranges(num_columns):
            values = torch.matmul(rows, self._inputs[points])
            values = values.view(values.shape[0], num_columns, -1)
            result[points].baddbmm_(self._factors[points].flatten(2), values.mT)

    def apply_transposed(self, values: Tensor) -> Tensor:
        """z_t = C_tᵀy, then Σ z_t x_tᵀ over points and positions."""
        num_columns, num_units = values.shape[2], self._shape.num_units
        if self._is_faster_multiplied(num_columns):
            found_rows = values.new_empty(self.num_parameters, num_columns)
            outputs = values.reshape(-1, num_columns)
            for index, found in self._multiplied(slice(0, self.num_points)):
                found_rows[index] = transposed_product(found.flatten(0, 1), outputs)
            return found_rows
        result = values.new_zeros(num_columns * num_units, self._shape.num_inputs)
        for points in self._point_ranges(num_columns):
            found = torch.bmm(values[points].mT, self._factors[points].flatten(2))
            found = found.view(found.shape[0], num_columns * num_units, -1)
            result.addbmm_(found, self._inputs[points].mT)
        return self._shape.flat(result)

    def select(self, points: Tensor, scale: Tensor) -> PositionJacobian:
        """Factors of some points."""
        factors = self._factors[points] * scale[:, None, None, None]
        return PositionJacobian(factors, self._inputs[points], self._shape.by_input)

    def to(self, dtype: torch.dtype) -> PositionJacobian:
        """Factors of another type."""
        factors, inputs = self._factors.to(dtype), self._inputs.to(dtype)
        return PositionJacobian(factors, inputs, self._shape.by_input)
