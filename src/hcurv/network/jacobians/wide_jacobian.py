"""Jacobians in Gram form: for networks whose outputs are wider than their hidden layers.

With a diagonal R_i the columns of hidden units are C_i^ℓ = diag(c_i) W_L B_i^ℓ. The *interface*
B_i^ℓ = M_i^{L-1} W_{L-1} … M_i^ℓ has only as many rows as the last hidden layer has units, so the
columns themselves, which are as long as the output, are never formed. The Gram values of all pairs
of hidden units are stored instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

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

__all__ = ["WideJacobian"]


@dataclass(frozen=True, kw_only=True)
class WideJacobian(ChainJacobian):
    """C_i^ℓ = diag(c_i) W_L B_i^ℓ for ℓ < L and C_i^L = diag(c_i), with c_i the tail.

    Attributes:
        interface: B_i of the hidden units, (hidden, r, n).
        head: W_L, (q, r).
        hidden_pairs: g_i of all pairs of hidden units, (hidden · hidden, n).
        first_adjacent: the first unit of the layer before the tail, where B_i is diagonal; equal
            to the number of hidden units if that layer is not trainable.
    """

    interface: Tensor
    head: Tensor
    hidden_pairs: Tensor
    tail: Tensor
    first_adjacent: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Interface, head, Gram values and tail."""
        return (self.interface, self.head, self.hidden_pairs, self.tail)

    @property
    def num_rows(self) -> int:
        """The number q of rows of C_i."""
        return self.head.shape[0]

    @property
    def unit_floats(self) -> int:
        """One column of B, r floats."""
        return self.head.shape[1]

    @property
    def working_rows(self) -> int:
        """s = Bu before and after the outputs, and the inputs of the last layer."""
        return 2 * self.head.shape[1] + 1

    def gram_cost(self, first: UnitGroup, second: UnitGroup) -> int:
        """Nothing for hidden units; a product with W_L between them and the tail."""
        if first == second == self.hidden_group:
            return 0
        return 1 if first == second else _ThroughInterface.whole(self).depth

    def row_cost(self, first: UnitGroup, second: UnitGroup) -> int:
        """A matrix product with W_L or B is about as fast as one elementwise multiplication."""
        return min(1, self.gram_cost(first, second))

    def factored(self, first: UnitGroup, second: UnitGroup) -> FactoredGram | None:
        """Hidden units with the tail, through the interface."""
        cross = first == self.hidden_group and second == self.tail_group
        return _ThroughInterface.whole(self) if cross else None

    def apply_normal(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> None:
        """With s = Bu: z_L = c²(W_L s + u_L) and z = Bᵀ W_Lᵀ z_L; no q x b x k array is formed."""
        reached = self._reach_interface(stream, points, sizes)
        num_points, (num_rows, width) = len(reached), self.head.shape
        # Multiplications per column: 4·b·q·r of outputs, or 3·r²·(b + q) of sums over points.
        shorter = 3 * width * (num_points + num_rows) < 4 * num_points * num_rows
        through = self._through_sums if self._even and shorter else self._through_outputs
        returned = through(stream, points, reached, sizes.output_floats)
        for units in stream.ranges(self.hidden_group):
            stream.write(units, expand(self.interface[units, :, points], returned))

    def _reach_interface(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> Tensor:
        """s = Bu, (b, r, k)."""
        num_points = points.stop - points.start
        reached = self.head.new_zeros(num_points, self.head.shape[1], stream.num_columns)
        for units in stream.ranges(self.hidden_group):
            interface = self.interface[units, :, points]
            contract(interface, stream.read(units), reached, sizes.sum_floats)
        return reached

    @cached_property
    def _even(self) -> bool:
        """Whether c_i is one number for all outputs, as for squared errors of linear outputs."""
        return bool((self.tail == self.tail[:1]).all())

    def _through_sums(
        self, stream: UnitStream, points: slice, reached: Tensor, output_floats: int
    ) -> Tensor:
        """`_through_outputs` where c_i is one number: without any z_L.

        With u_L = Ŵx the sum Σ_i z_L xᵀ is W_L (Σ_i c² s xᵀ) + Ŵ (Σ_i c² x xᵀ), and W_Lᵀz_L is
        c²(W_LᵀW_L s + (W_LᵀŴ) x), so that nothing but sums over points is as wide as the outputs.
        """
        squares = self.tail[0, points].square()
        num_points, width, num_columns = reached.shape
        returned = _times(self.head.T @ self.head, reached)
        if self.tail_trainable:
            inputs = stream.features(self._tail_units)
            scaled = inputs * squares
            gram = scaled @ inputs.T
            moments = (scaled @ reached.view(num_points, -1)).view(-1, width, num_columns)
            moments = moments.transpose(0, 1).reshape(width, -1)  # r x fk
            crossed = torch.zeros_like(moments)
            step = max(16, output_floats // (inputs.shape[0] * num_columns))
            for rows, units in self._tail_ranges(step):
                head, weights = self.head[rows], stream.weights(units)
                crossed.addmm_(head.T, weights.view(head.shape[0], -1))
                sums = _times(gram, weights)
                sums.view(head.shape[0], -1).addmm_(head, moments)
                stream.write_sums(units, sums)
            crossed = crossed.view(width, -1, num_columns).transpose(0, 1)
            returned.view(num_points, -1).addmm_(inputs.T, crossed.reshape(inputs.shape[0], -1))
        return returned.mul_(squares[:, None, None])

    def _through_outputs(
        self, stream: UnitStream, points: slice, reached: Tensor, output_floats: int
    ) -> Tensor:
        """W_Lᵀz_L from s, both (b, r, k); z_L is written on the way.

        One column and a few units at a time, z_L = c² [W_L, Ŵ] [s; x] stays in the cache for the
        two products that need it: with x, and with W_L.
        """
        num_points, width, num_columns = reached.shape
        inputs = self.tail[:0, points]
        if self.tail_trainable:
            inputs = stream.features(self._tail_units)
        stacked = reached.new_empty(num_columns, width + inputs.shape[0], num_points)
        stacked[:, :width] = reached.permute(2, 1, 0)
        stacked[:, width:] = inputs
        returned = reached.new_zeros(num_columns, width, num_points)
        step = max(16, output_floats // num_points // 16 * 16)
        memory = reached.new_empty(min(step, self.num_rows), num_points)
        for rows, units in self._tail_ranges(step):
            head, squares = self.head[rows], self.tail[rows, points].square()
            through = memory[: head.shape[0]]
            weights = head.expand(num_columns, -1, -1)
            if self.tail_trainable:
                weights = torch.cat([weights, stream.weights(units).permute(2, 0, 1)], 2)
            backwards = head.T.contiguous()
            sums = head.new_empty(num_columns, inputs.shape[0], head.shape[0])
            for column in range(num_columns):
                torch.mm(weights[column], stacked[column], out=through).mul_(squares)
                returned[column].addmm_(backwards, through)
                if self.tail_trainable:
                    torch.mm(inputs, through.T, out=sums[column])
            if self.tail_trainable:
                stream.write_sums(units, sums.permute(2, 1, 0))
        return returned.permute(2, 1, 0).contiguous()

    @property
    def _tail_units(self) -> slice:
        return slice(self.tail_group.start, self.tail_group.stop)

    def _tail_ranges(self, step: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of outputs, and the units that they are."""
        for start in range(0, self.num_rows, step):
            stop = min(start + step, self.num_rows)
            yield slice(start, stop), slice(start + self.num_hidden, stop + self.num_hidden)

    def forward(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> Tensor:
        """y = c(W_L s + u_L) with s = Bu."""
        outputs = torch.matmul(self.head, self._reach_interface(stream, points, sizes))
        for units in stream.ranges(self.tail_group):
            outputs[:, self._tail_rows(units)] += stream.read(units).transpose(0, 1)
        return outputs.mul_(self.tail[:, points].T[:, :, None])

    def backward(self, stream: UnitStream, points: slice, outputs: Tensor) -> None:
        """z_L = cy and z = Bᵀ W_Lᵀ z_L."""
        scaled = outputs * self.tail[:, points].T[:, :, None]
        for units in stream.ranges(self.tail_group):
            stream.write(units, scaled[:, self._tail_rows(units)].transpose(0, 1).contiguous())
        returned = torch.matmul(self.head.T, scaled)
        for units in stream.ranges(self.hidden_group):
            stream.write(units, expand(self.interface[units, :, points], returned))

    def _hidden_columns(self, units: slice, points: slice) -> Tensor:
        through = torch.matmul(self.head, self.interface[units, :, points])
        return through.mul_(self.tail[:, points])

    def _hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Scratch | None
    ) -> Tensor:
        values, rows = self.hidden_pairs[:, points], first * self.num_hidden + second
        return values.index_select(0, rows) if scratch is None else scratch.select(values, rows)

    def _cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """c²·(W_L B); B has a single nonzero for units next to the tail."""
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

    def _hidden_gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        return take(self.hidden_pairs, (first * self.num_hidden + second,), points)

    def _cross_gram_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        tail = tail - self.num_hidden
        product = self.head.new_zeros(points.shape)
        for row in range(self.head.shape[1]):
            index = torch.tensor(row, device=hidden.device)
            weights = self.head[tail, row][:, None]
            product.addcmul_(weights, take(self.interface, (hidden, index), points))
        return product.mul_(take(self.tail, (tail,), points).square_())

    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """A projection of the cosines between hidden columns and of the direction of the tail."""
        diagonal = torch.arange(self.num_hidden, device=self.head.device) * (self.num_hidden + 1)
        norms = self.hidden_pairs[diagonal].sqrt()
        result = project(normalised(self.tail, self.tail.norm(dim=0)), num_features, generator)
        for row, norm in zip(
            self.hidden_pairs.view(self.num_hidden, self.num_hidden, -1), norms, strict=True
        ):
            result += project(normalised(row, norms * norm), num_features, generator)
        return result

    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """The scale goes into the tail and the Gram values."""
        return replace(
            self,
            interface=self.interface[:, :, points],
            hidden_pairs=self.hidden_pairs[:, points] * scale.square(),
            tail=self.tail[:, points] * scale,
        )


@dataclass(frozen=True)
class _ThroughInterface:
    """g_i[μ, u] = Σ_r B_i[r, μ] · W_L[u, r] c_i[u]² for hidden units μ and units u of the tail.

    Attributes:
        jacobian: the Jacobian.
        adjacent: whether all units μ are next to the tail. Then B_i has a single nonzero in row
            r(μ), and W_L[u, r(μ)], which does not depend on the point, is left for the end.
    """

    jacobian: WideJacobian
    adjacent: bool

    @classmethod
    def whole(cls, jacobian: WideJacobian) -> _ThroughInterface:
        """The form that holds for all hidden units."""
        return cls(jacobian, jacobian.first_adjacent == 0)

    @property
    def depth(self) -> int:
        return 1 if self.adjacent else self.jacobian.head.shape[1]

    def simplified(self, first: Tensor) -> FactoredGram:
        if self.adjacent or int(first.min()) < self.jacobian.first_adjacent:
            return self
        return replace(self, adjacent=True)

    def left(self, units: Tensor, inputs: Tensor, points: slice, scratch: Scratch) -> Tensor:
        interface = self.jacobian.interface[:, :, points]
        if self.adjacent:
            return inputs.mul_(interface[units, units - self.jacobian.first_adjacent])[:, None]
        return scratch.select(interface, units).mul_(inputs[:, None])

    def right(self, units: Tensor, inputs: Tensor, points: slice, scratch: Scratch) -> Tensor:
        tail, head = units - self.jacobian.num_hidden, self.jacobian.head
        squares = scratch.select(self.jacobian.tail[:, points], tail).square_()
        inputs.mul_(squares)
        if self.adjacent:
            return inputs[:, None]
        result = scratch.take((len(inputs), head.shape[1], inputs.shape[1]))
        return torch.mul(inputs[:, None], head[tail][:, :, None], out=result)

    def finish(self, values: Tensor, first: Tensor, second: Tensor) -> None:
        if self.adjacent:
            row, tail = first - self.jacobian.first_adjacent, second - self.jacobian.num_hidden
            values.mul_(self.jacobian.head[tail[..., None, :], row[..., :, None]])


def _times(symmetric: Tensor, values: Tensor) -> Tensor:
    """symmetric @ values[i] for all i, as one product: (f, f) and (b, f, k) to (b, f, k)."""
    return (values.transpose(1, 2) @ symmetric).transpose(1, 2).contiguous()
