"""Jacobians that store the columns of C_i: for networks with few outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.network.jacobians.chain_jacobian import ChainJacobian
from hcurv.network.jacobians.contractions import (
    contract,
    expand,
    normalised,
    project,
    take,
)
from hcurv.network.jacobians.output_jacobian import (
    CacheSizes,
    FactoredGram,
    OutputJacobian,
    UnitGroup,
    UnitStream,
)
from hcurv.network.scratch import Scratch

__all__ = ["NarrowJacobian"]


@dataclass(frozen=True, kw_only=True)
class NarrowJacobian(ChainJacobian):
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
    def unit_floats(self) -> int:
        """One column, q floats."""
        return self.num_rows

    @property
    def working_rows(self) -> int:
        """The outputs y."""
        return self.num_rows

    def gram_cost(self, first: UnitGroup, second: UnitGroup) -> int:
        """One inner product of columns; columns of the tail have a single nonzero."""
        return self.num_rows if first == second == self.hidden_group else 1

    def factored(self, first: UnitGroup, second: UnitGroup) -> FactoredGram | None:
        """The columns of hidden units."""
        return _Columns(self.factor) if first == second == self.hidden_group else None

    def apply_normal(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> None:
        """y = Cu, then z = Cᵀy."""
        self.backward(stream, points, self.forward(stream, points, sizes))

    def forward(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> Tensor:
        """A sum over the units."""
        num_points = points.stop - points.start
        outputs = self.factor.new_zeros(num_points, self.num_rows, stream.num_columns)
        for units in stream.ranges(self.hidden_group):
            factor = self.factor[units, :, points]
            contract(factor, stream.read(units), outputs, sizes.sum_floats)
        for units in stream.ranges(self.tail_group):
            scaled = stream.read(units) * self._tail(units, points)[:, :, None]
            outputs[:, self._tail_rows(units)] += scaled.transpose(0, 1)
        return outputs

    def backward(self, stream: UnitStream, points: slice, outputs: Tensor) -> None:
        """One range of units after the other."""
        for units in stream.ranges(self.hidden_group):
            stream.write(units, expand(self.factor[units, :, points], outputs))
        for units in stream.ranges(self.tail_group):
            values = outputs[:, self._tail_rows(units)].transpose(0, 1)
            stream.write(units, values * self._tail(units, points)[:, :, None])

    def _hidden_columns(self, units: slice, points: slice) -> Tensor:
        return self.factor[units, :, points]

    def _hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Scratch | None
    ) -> Tensor:
        factor = self.factor[:, :, points]
        if scratch is None or isinstance(first, int):
            columns = factor.index_select(0, second)
            columns.mul_(factor[first] if isinstance(first, int) else factor.index_select(0, first))
            return columns.sum(1)
        left, right = scratch.select(factor, first), scratch.select(factor, second)
        return left.mul_(right).sum(1)

    def _cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        assert self.tail is not None
        product = self.factor[:, :, points][hidden, tail] * self.tail[:, points][tail]
        return product.view(-1, product.shape[-1])

    def _hidden_gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        result = self.factor.new_zeros(points.shape)
        for row in range(self.num_rows):
            index = torch.tensor(row, device=first.device)
            left = take(self.factor, (first, index), points)
            result.addcmul_(left, take(self.factor, (second, index), points))
        return result

    def _cross_gram_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        assert self.tail is not None
        tail = tail - self.num_hidden
        product = take(self.factor, (hidden, tail), points)
        return product.mul_(take(self.tail, (tail,), points))

    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """A projection of C_i[:, μ] / ‖C_i[:, μ]‖ of all hidden units."""
        result = self.factor.new_zeros(num_features, self.num_points)
        for column in self.factor:
            directions = normalised(column, column.norm(dim=0))
            result += project(directions, num_features, generator)
        if self.tail is not None and not self.num_hidden:
            result += project(self.tail, num_features, generator)
        return result

    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """Scaled columns at some points."""
        tail = None if self.tail is None else self.tail[:, points] * scale
        return replace(self, factor=self.factor[:, :, points] * scale, tail=tail)


@dataclass(frozen=True)
class _Columns:
    """g_i[μ, u] = Σ_q C_i[q, μ] C_i[q, u]."""

    factor: Tensor

    @property
    def depth(self) -> int:
        return self.factor.shape[1]

    def simplified(self, first: Tensor) -> FactoredGram:
        return self

    def left(self, units: Tensor, inputs: Tensor, points: slice, scratch: Scratch) -> Tensor:
        return scratch.select(self.factor[:, :, points], units).mul_(inputs[:, None])

    right = left

    def finish(self, values: Tensor, first: Tensor, second: Tensor) -> None:
        pass  # the sums are the Gram values
