"""The factors C_i^ℓ: how the pre-activations of every unit move the (weighted) network output.

C_i^ℓ = R_i M_i^L W_L … M_i^ℓ (paper, Eq. 3.5) has one column per unit of layer ℓ. All units of all
layers with trainable parameters are numbered through; the *tail* are the units of the last layer
when the loss has a diagonal R, for then their columns have a single nonzero each and are kept as
one number per point. All other units are *hidden*. Points are the last, contiguous axis.

Entries of the matrix need only inner products of columns, g_i[μ, μ'] = C_i[:, μ]·C_i[:, μ']: the
Gram form. `NarrowJacobian` stores the columns; `WideJacobian`, for autoencoders and the like, never
forms them: with a diagonal R they are C_i^ℓ = diag(c_i) W_L B_i^ℓ with B_i^ℓ as narrow as the last
hidden layer, and the Gram forms of hidden units are stored instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["FEW_COLUMNS", "NarrowJacobian", "OutputJacobian", "UnitParts", "WideJacobian"]


class UnitParts(Protocol):
    """A quantity u[μ, i, :] per unit, point and column that is read, and one, z, that is written.

    Neither is ever there as a whole: they come and go in ranges of units, (units, b, k) at a time.
    """

    @property
    def hidden(self) -> Sequence[slice]:
        """Ranges of hidden units, none across layers."""

    @property
    def tail(self) -> Sequence[slice]:
        """Ranges of units of the tail."""

    @property
    def num_columns(self) -> int:
        """K."""

    def read(self, units: slice) -> Tensor:
        """U of a range of units; the caller may overwrite it."""

    def write(self, units: slice, values: Tensor) -> None:
        """Z of a range of units."""


# Below this many right-hand sides elementwise passes over the factors beat batched products.
FEW_COLUMNS = 16


@dataclass(frozen=True, kw_only=True)
class OutputJacobian(ABC):
    """Columns of C_i for all units and points.

    Attributes:
        hidden_layers: the range of hidden units of each layer, in the order of the network.
        tail: the diagonal of C_i^L, (d_L, n), or None if the last layer counts as hidden.
        tail_trainable: whether the units of the tail have trainable parameters.
    """

    hidden_layers: tuple[slice, ...]
    tail: Tensor | None
    tail_trainable: bool

    @property
    def num_hidden(self) -> int:
        """Number of hidden units; units from here on are the tail."""
        return self.hidden_layers[-1].stop if self.hidden_layers else 0

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything stored."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """q, the number of rows of C_i."""

    @property
    @abstractmethod
    def gram_cost(self) -> int:
        """Multiplications per point for the Gram form of one pair of hidden units."""

    @abstractmethod
    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """Z = CᵀCu at some points: reads u and writes z part by part."""

    @abstractmethod
    def hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Tensor | None = None
    ) -> Tensor:
        """g[first, second] of pairs of hidden units, (pairs, b)."""

    @abstractmethod
    def cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """g[hidden, tail] of hidden units with units of the tail (numbered from 0), (pairs, b)."""

    def _tail_rows(self, units: slice) -> slice:
        """Units of the tail, numbered from 0."""
        return slice(units.start - self.num_hidden, units.stop - self.num_hidden)

    def _tail(self, rows: slice, points: slice) -> Tensor:
        assert self.tail is not None
        return self.tail[rows, points]

    def tail_gram(self, tail: Tensor, points: slice) -> Tensor:
        """g[tail, tail] of single units of the tail; between two of them it is zero."""
        assert self.tail is not None
        return self.tail[:, points].index_select(0, tail).square_()

    def squared_norms(self, units: slice, points: slice) -> Tensor:
        """‖C_i[:, μ]‖² for a range of hidden units, (units, b)."""
        index = torch.arange(units.start, units.stop, device=self.tensors[0].device)
        return self.hidden_gram(index, index, points)


_CACHE_FLOATS = 2**19  # of an accumulator in elementwise passes over a factor


def _contract(factor: Tensor, columns: Tensor, result: Tensor) -> None:
    """Add Σ_μ factor[μ, :, i] columns[μ, i, :]: (d, q, b) and (d, b, k) to (b, q, k)."""
    if columns.shape[2] >= FEW_COLUMNS:
        result.baddbmm_(factor.permute(2, 1, 0).contiguous(), columns.permute(1, 0, 2))
        return
    step = max(1, _CACHE_FLOATS // (factor.shape[1] * factor.shape[2]))
    for column, output in zip(columns.unbind(2), result.unbind(2), strict=True):
        sums = factor[:step] * column[:step, None]
        for rest, weights in zip(factor[step:].split(step), column[step:].split(step), strict=True):
            sums[: rest.shape[0]].addcmul_(rest, weights[:, None])
        output += sums.sum(0).T


def _expand(factor: Tensor, outputs: Tensor) -> Tensor:
    """Σ_q factor[μ, q, i] outputs[i, q, :]: (d, q, b) and (b, q, k) to (d, b, k)."""
    num_units, num_rows, num_points = factor.shape
    num_columns = outputs.shape[2]
    if num_columns >= FEW_COLUMNS:
        return torch.bmm(factor.permute(2, 0, 1).contiguous(), outputs).transpose(0, 1)
    result = factor.new_zeros(num_columns, num_units, num_points)
    for target, output in zip(result, outputs.permute(2, 1, 0).contiguous(), strict=True):
        for row in range(num_rows):
            target.addcmul_(factor[:, row], output[row])
    return result.permute(1, 2, 0)


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
    def gram_cost(self) -> int:
        """One inner product of columns."""
        return self.num_rows

    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """Y = Cu, then z = Cᵀy."""
        num_points = points.stop - points.start
        outputs = self.factor.new_zeros(num_points, self.num_rows, parts.num_columns)
        for units in parts.hidden:
            _contract(self.factor[units, :, points], parts.read(units), outputs)
        for units in parts.tail:
            rows = self._tail_rows(units)
            scaled = parts.read(units) * self._tail(rows, points)[:, :, None]
            outputs[:, rows] += scaled.transpose(0, 1)
        for units in parts.hidden:
            parts.write(units, _expand(self.factor[units, :, points], outputs))
        for units in parts.tail:
            rows = self._tail_rows(units)
            scaled = outputs[:, rows].transpose(0, 1) * self._tail(rows, points)[:, :, None]
            parts.write(units, scaled)

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
    def gram_cost(self) -> int:
        """Nothing: the Gram forms are stored."""
        return 0

    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """With s = Bu: z_L = c²(W_L s + u_L) and z = Bᵀ W_Lᵀ z_L; no q x b x k array is formed."""
        num_points, num_columns = points.stop - points.start, parts.num_columns
        reached = self.head.new_zeros(num_points, self.head.shape[1], num_columns)
        for units in parts.hidden:
            _contract(self.interface[units, :, points], parts.read(units), reached)
        reached = reached.transpose(0, 1).reshape(-1, num_points * num_columns)
        returned = torch.zeros_like(reached)
        for units in parts.tail:
            rows = self._tail_rows(units)
            head = self.head[rows]
            through = (head @ reached).view(-1, num_points, num_columns)
            if self.tail_trainable:
                through += parts.read(units)
            through *= self._tail(rows, points).square()[:, :, None]
            if self.tail_trainable:
                parts.write(units, through)
            returned.addmm_(head.T, through.view(head.shape[0], -1))
        returned = returned.view(-1, num_points, num_columns).transpose(0, 1).contiguous()
        for units in parts.hidden:
            parts.write(units, _expand(self.interface[units, :, points], returned))

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
