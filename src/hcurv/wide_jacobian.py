"""Output Jacobians in Gram form: for outputs wider than the hidden layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

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

__all__ = ["WideJacobian"]

_CACHE_FLOATS = 2**17  # of z_L at a time


@dataclass(frozen=True, kw_only=True)
class WideJacobian(OutputJacobian):
    """C_i^ℓ = diag(c_i) W_L B_i^ℓ for ℓ < L and C_i^L = diag(c_i), with c_i the tail.

    Attributes:
        interface: B_i^ℓ = M_i^{L-1} W_{L-1} … M_i^ℓ of the hidden units, (hidden, r, n).
        head: W_L, (q, r).
        gram: g_i of all pairs of hidden units, (hidden · hidden, n).
        first_adjacent: first unit of the layer before the tail, where B is diagonal; the number
            of hidden units if that layer is not trainable.
    """

    interface: Tensor
    head: Tensor
    gram: Tensor
    tail: Tensor
    first_adjacent: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Interface, head, Gram forms and tail."""
        return (self.interface, self.head, self.gram, self.tail)

    @property
    def num_rows(self) -> int:
        """The number q of rows of C_i."""
        return self.head.shape[0]

    @property
    def normal_rows(self) -> int:
        """s, with the inputs of the last layer."""
        return 2 * self.head.shape[1] + 1

    @property
    def gram_cost(self) -> int:
        """Nothing: the Gram forms are stored."""
        return 0

    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """With s = Bu: z_L = c²(W_L s + u_L) and z = Bᵀ W_Lᵀ z_L; no q x b x k array is formed."""
        num_points = points.stop - points.start
        reached = self.head.new_zeros(num_points, self.head.shape[1], parts.num_columns)
        for units in parts.hidden:
            contract(self.interface[units, :, points], parts.read(units), reached)
        # Multiplications per column: 4·b·q·r of outputs, or 3·r²·(b + q) of sums over points.
        num_rows, width = self.head.shape
        even = self._even and 3 * width * (num_points + num_rows) < 4 * num_points * num_rows
        returned = (self._through_sums if even else self._through_outputs)(parts, points, reached)
        for units in parts.hidden:
            parts.write(units, expand(self.interface[units, :, points], returned))

    @cached_property
    def _even(self) -> bool:
        """Whether c_i is one number for all outputs, as for squared errors of linear outputs."""
        return bool((self.tail == self.tail[:1]).all())

    def _through_sums(self, parts: UnitParts, points: slice, reached: Tensor) -> Tensor:
        """`_through_outputs` where c_i is one number: without any z_L.

        With u_L = Ŵx the sum Σ_i z_L xᵀ is W_L (Σ_i c² s xᵀ) + Ŵ (Σ_i c² x xᵀ), and W_Lᵀz_L is
        c²(W_LᵀW_L s + (W_LᵀŴ) x): nothing but sums is as wide as the outputs.
        """
        squares = self.tail[0, points].square()
        num_points, width, num_columns = reached.shape
        returned = _times(self.head.T @ self.head, reached)
        if self.tail_trainable:
            inputs = parts.tail_inputs()
            scaled = inputs * squares
            gram = scaled @ inputs.T
            moments = (scaled @ reached.view(num_points, -1)).view(-1, width, num_columns)
            moments = moments.transpose(0, 1).reshape(width, -1)  # r x fk
            crossed = torch.zeros_like(moments)
            step = max(16, _CACHE_FLOATS // (inputs.shape[0] * num_columns))
            for rows, units in self._tail_ranges(step):
                head, weights = self.head[rows], parts.tail_weights(units)
                crossed.addmm_(head.T, weights.view(head.shape[0], -1))
                sums = _times(gram, weights)
                sums.view(head.shape[0], -1).addmm_(head, moments)
                parts.write_tail(units, sums)
            crossed = crossed.view(width, -1, num_columns).transpose(0, 1)
            returned.view(num_points, -1).addmm_(inputs.T, crossed.reshape(inputs.shape[0], -1))
        return returned.mul_(squares[:, None, None])

    def _through_outputs(self, parts: UnitParts, points: slice, reached: Tensor) -> Tensor:
        """W_Lᵀz_L from s, both (b, r, k), writing z_L.

        Column by column and few units at a time, z_L = c² [W_L, Ŵ] [s; x] stays in the cache for
        the two products that it is needed for: with x, and with W_L.
        """
        num_points, width, num_columns = reached.shape
        inputs = parts.tail_inputs() if self.tail_trainable else self.tail[:0, points]
        stacked = reached.new_empty(num_columns, width + inputs.shape[0], num_points)
        stacked[:, :width] = reached.permute(2, 1, 0)
        stacked[:, width:] = inputs
        returned = reached.new_zeros(num_columns, width, num_points)
        step = max(16, _CACHE_FLOATS // num_points // 16 * 16)
        scratch = reached.new_empty(min(step, self.num_rows), num_points)
        for rows, units in self._tail_ranges(step):
            head, squares = self.head[rows], self.tail[rows, points].square()
            through = scratch[: head.shape[0]]
            weights = head.expand(num_columns, -1, -1)
            if self.tail_trainable:
                weights = torch.cat([weights, parts.tail_weights(units).permute(2, 0, 1)], 2)
            backwards = head.T.contiguous()
            sums = head.new_empty(num_columns, inputs.shape[0], head.shape[0])
            for column in range(num_columns):
                torch.mm(weights[column], stacked[column], out=through).mul_(squares)
                returned[column].addmm_(backwards, through)
                if self.tail_trainable:
                    torch.mm(inputs, through.T, out=sums[column])
            if self.tail_trainable:
                parts.write_tail(units, sums.permute(2, 1, 0))
        return returned.permute(2, 1, 0).contiguous()

    def _tail_ranges(self, step: int) -> Iterator[tuple[slice, slice]]:
        """Rows of outputs, and the units that they are."""
        for start in range(0, self.num_rows, step):
            stop = min(start + step, self.num_rows)
            yield slice(start, stop), slice(start + self.num_hidden, stop + self.num_hidden)

    def forward(self, parts: UnitParts, points: slice) -> Tensor:
        """y = c(W_L s + u_L) with s = Bu."""
        num_points, num_columns = points.stop - points.start, parts.num_columns
        reached = self.head.new_zeros(num_points, self.head.shape[1], num_columns)
        for units in parts.hidden:
            contract(self.interface[units, :, points], parts.read(units), reached)
        outputs = torch.matmul(self.head, reached)
        for units in parts.tail:
            rows = self._tail_rows(units)
            if self.tail_trainable:
                outputs[:, rows] += parts.read(units).transpose(0, 1)
        return outputs.mul_(self.tail[:, points].T[:, :, None])

    def backward(self, parts: UnitParts, points: slice, outputs: Tensor) -> None:
        """z_L = cy and z = Bᵀ W_Lᵀ z_L."""
        scaled = outputs * self.tail[:, points].T[:, :, None]
        if self.tail_trainable:
            for units in parts.tail:
                parts.write(units, scaled[:, self._tail_rows(units)].transpose(0, 1).contiguous())
        returned = torch.matmul(self.head.T, scaled)
        for units in parts.hidden:
            parts.write(units, expand(self.interface[units, :, points], returned))

    def hidden_columns(self, units: slice, points: slice) -> Tensor:
        """diag(c) W_L B."""
        through = torch.matmul(self.head, self.interface[units, :, points])
        return through.mul_(self.tail[:, points])

    def hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Tensor | None = None
    ) -> Tensor:
        """Looked up."""
        return self.gram[:, points].index_select(0, first * self.num_hidden + second)

    def cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """c²·(W_L B); of units next to the tail, B has a single nonzero."""
        interface = self.interface[:, :, points]
        scale = self.tail[:, points][tail].square()
        first = hidden if isinstance(hidden, int) else int(hidden.min())
        if first >= self.first_adjacent:
            row = hidden - self.first_adjacent
            product = interface[hidden, row] * self.head[tail, row][..., None]
        elif isinstance(hidden, int):
            product = self.head[tail] @ interface[hidden]
        elif isinstance(tail, int):
            product = torch.matmul(self.head[tail], interface[hidden])
        else:
            product = torch.bmm(self.head[tail][:, None], interface[hidden]).squeeze(1)
        return product.mul_(scale).view(-1, product.shape[-1])

    def _hidden_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        return take(self.gram, (first * self.num_hidden + second,), points)

    def _cross_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        tail = tail - self.num_hidden
        product = self.head.new_zeros(points.shape)
        for row in range(self.head.shape[1]):
            index = torch.tensor(row, device=hidden.device)
            weights = self.head[tail, row][:, None]
            product.addcmul_(weights, take(self.interface, (hidden, index), points))
        return product.mul_(take(self.tail, (tail,), points).square_())

    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Cosines between hidden columns, and the direction of the tail, projected."""
        diagonal = torch.arange(self.num_hidden, device=self.gram.device) * (self.num_hidden + 1)
        norms = self.gram[diagonal].sqrt()
        result = project(normalised(self.tail, self.tail.norm(dim=0)), num_features, generator)
        for row, norm in zip(
            self.gram.view(self.num_hidden, self.num_hidden, -1), norms, strict=True
        ):
            result += project(normalised(row, norms * norm), num_features, generator)
        return result

    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """Columns at some points, scaled: through the tail and the Gram forms."""
        return replace(
            self,
            interface=self.interface[:, :, points],
            gram=self.gram[:, points] * scale.square(),
            tail=self.tail[:, points] * scale,
        )


def _times(symmetric: Tensor, values: Tensor) -> Tensor:
    """symmetric @ values[i] for all i, as one product: (f, f) and (b, f, k) to (b, f, k)."""
    return (values.transpose(1, 2) @ symmetric).transpose(1, 2).contiguous()
