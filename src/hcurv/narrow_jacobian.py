"""Output Jacobians by their columns: for networks with few outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.output_jacobian import (
    OutputJacobian,
    UnitParts,
    contract,
    expand,
    normalised,
    project,
    take,
)

__all__ = ["NarrowJacobian"]


@dataclass(frozen=True, kw_only=True)
class NarrowJacobian(OutputJacobian):
    """The columns themselves.

    Attributes:
        factor: C_i[:, μ] of the hidden units, (hidden, q, n).
    """

    factor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The factor and the tail."""
        return (self.factor,) if self.tail is None else (self.factor, self.tail)

    @property
    def num_rows(self) -> int:
        """The number q of rows of C_i."""
        return self.factor.shape[1]

    @property
    def normal_rows(self) -> int:
        """The outputs."""
        return self.num_rows

    @property
    def gram_cost(self) -> int:
        """One inner product of columns."""
        return self.num_rows

    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """y = Cu, then z = Cᵀy."""
        self.backward(parts, points, self.forward(parts, points))

    def forward(self, parts: UnitParts, points: slice) -> Tensor:
        """Sum over the units."""
        num_points = points.stop - points.start
        outputs = self.factor.new_zeros(num_points, self.num_rows, parts.num_columns)
        for units in parts.hidden:
            contract(self.factor[units, :, points], parts.read(units), outputs)
        for units in parts.tail:
            rows = self._tail_rows(units)
            scaled = parts.read(units) * self._tail(rows, points)[:, :, None]
            outputs[:, rows] += scaled.transpose(0, 1)
        return outputs

    def backward(self, parts: UnitParts, points: slice, outputs: Tensor) -> None:
        """Unit by unit."""
        for units in parts.hidden:
            parts.write(units, expand(self.factor[units, :, points], outputs))
        for units in parts.tail:
            rows = self._tail_rows(units)
            scaled = outputs[:, rows].transpose(0, 1) * self._tail(rows, points)[:, :, None]
            parts.write(units, scaled)

    def hidden_columns(self, units: slice, points: slice) -> Tensor:
        """As they are stored."""
        return self.factor[units, :, points]

    def columns(self, units: Tensor, points: slice) -> Tensor:
        """C_i[:, μ] of some hidden units, (units, q, b), a copy."""
        return self.factor[:, :, points].index_select(0, units)

    def hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Tensor | None = None
    ) -> Tensor:
        """Inner products of columns over the q rows."""
        factor = self.factor[:, :, points]
        shape = (second.numel(), *factor.shape[1:])
        if scratch is None or isinstance(first, int):
            columns = factor.index_select(0, second)
            columns.mul_(factor[first] if isinstance(first, int) else factor.index_select(0, first))
            return columns.sum(1)
        # Reused buffers: fresh pages for every call would cost more than the arithmetic.
        size = second.numel() * factor.shape[1] * factor.shape[2]
        left = torch.index_select(factor, 0, first, out=scratch[0, :size].view(shape))
        right = torch.index_select(factor, 0, second, out=scratch[1, :size].view(shape))
        return left.mul_(right).sum(1)

    def cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """One product: the column of a tail unit has a single nonzero."""
        assert self.tail is not None
        product = self.factor[:, :, points][hidden, tail] * self.tail[:, points][tail]
        return product.view(-1, product.shape[-1])

    def _hidden_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        result = self.factor.new_zeros(points.shape)
        for row in range(self.num_rows):
            index = torch.tensor(row, device=first.device)
            left = take(self.factor, (first, index), points)
            result.addcmul_(left, take(self.factor, (second, index), points))
        return result

    def _cross_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        assert self.tail is not None
        tail = tail - self.num_hidden
        product = take(self.factor, (hidden, tail), points)
        return product.mul_(take(self.tail, (tail,), points))

    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """C_i[:, μ] / ‖C_i[:, μ]‖ of all units, projected."""
        result = self.factor.new_zeros(num_features, self.factor.shape[2])
        for unit in self.factor:
            directions = normalised(unit, unit.norm(dim=0))
            result += project(directions, num_features, generator)
        if self.tail is not None and not self.num_hidden:
            result += project(self.tail, num_features, generator)
        return result

    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """Columns at some points, scaled."""
        tail = None if self.tail is None else self.tail[:, points] * scale
        return replace(self, factor=self.factor[:, :, points] * scale, tail=tail)
