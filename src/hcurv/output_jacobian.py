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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FEW_COLUMNS", "NarrowJacobian", "OutputJacobian", "WideJacobian"]

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
    def forward(self, columns: Iterable[Tensor], points: slice) -> Tensor:
        """Σ_ℓ C^ℓ u^ℓ at some points, (b, q, k), from one u^ℓ of shape (d_ℓ, b, k) per layer."""

    @abstractmethod
    def backward(self, outputs: Tensor, points: slice) -> Iterator[Tensor]:
        """(C^ℓ)ᵀ y of shape (d_ℓ, b, k) for each layer in turn, from y of shape (b, q, k)."""

    @abstractmethod
    def hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Tensor | None = None
    ) -> Tensor:
        """g[first, second] of pairs of hidden units, (pairs, b)."""

    @abstractmethod
    def cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """g[hidden, tail] of hidden units with units of the tail (numbered from 0), (pairs, b)."""

    def tail_gram(self, tail: Tensor, points: slice) -> Tensor:
        """g[tail, tail] of single units of the tail; between two of them it is zero."""
        assert self.tail is not None
        return self.tail[:, points].index_select(0, tail).square_()

    def squared_norms(self, units: slice, points: slice) -> Tensor:
        """‖C_i[:, μ]‖² for a range of hidden units, (units, b)."""
        index = torch.arange(units.start, units.stop, device=self.tensors[0].device)
        return self.hidden_gram(index, index, points)


def _contract(factor: Tensor, columns: Tensor) -> Tensor:
    """Σ_μ factor[μ, :, i] columns[μ, i, :]: (d, q, b) and (d, b, k) to (b, q, k)."""
    if columns.shape[2] < FEW_COLUMNS:
        parts = [(factor * column[:, None]).sum(0).T for column in columns.unbind(2)]
        return torch.stack(parts, dim=2)
    return torch.bmm(factor.permute(2, 1, 0).contiguous(), columns.permute(1, 0, 2))


def _expand(factor: Tensor, outputs: Tensor) -> Tensor:
    """Σ_q factor[μ, q, i] outputs[i, q, :]: (d, q, b) and (b, q, k) to (d, b, k)."""
    num_units, _, num_points = factor.shape
    num_columns = outputs.shape[2]
    if num_columns < FEW_COLUMNS:
        parts = [(factor * output.T).sum(1) for output in outputs.unbind(2)]
        return torch.stack(parts).permute(1, 2, 0)
    result = factor.new_empty(num_units, num_points, num_columns)
    torch.bmm(factor.permute(2, 0, 1).contiguous(), outputs, out=result.permute(1, 0, 2))
    return result


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
        """Q, the number of rows of C_i."""
        return self.factor.shape[1]

    @property
    def gram_cost(self) -> int:
        """One inner product of columns."""
        return self.num_rows

    def forward(self, columns: Iterable[Tensor], points: slice) -> Tensor:
        """Σ_ℓ C^ℓ u^ℓ."""
        result: Tensor | None = None
        remaining = iter(columns)
        for layer in self.hidden_layers:
            part = _contract(self.factor[layer, :, points], next(remaining))
            result = part if result is None else result.add_(part)
        if self.tail is not None and self.tail_trainable:
            part = (next(remaining) * self.tail[:, points, None]).transpose(0, 1)
            result = part if result is None else result.add_(part)
        assert result is not None
        return result

    def backward(self, outputs: Tensor, points: slice) -> Iterator[Tensor]:
        """(C^ℓ)ᵀ y for each layer."""
        for layer in self.hidden_layers:
            yield _expand(self.factor[layer, :, points], outputs)
        if self.tail is not None and self.tail_trainable:
            yield outputs.transpose(0, 1) * self.tail[:, points, None]

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
    """

    interface: Tensor
    head: Tensor
    gram: Tensor
    tail: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Interface, head, Gram forms and tail."""
        return (self.interface, self.head, self.gram, self.tail)

    @property
    def num_rows(self) -> int:
        """Q, the number of rows of C_i."""
        return self.head.shape[0]

    @property
    def gram_cost(self) -> int:
        """Nothing: the Gram forms are stored."""
        return 0

    def forward(self, columns: Iterable[Tensor], points: slice) -> Tensor:
        """diag(c)(W_L Σ_ℓ B^ℓ u^ℓ + u^L)."""
        remaining = iter(columns)
        reached: Tensor | None = None
        for layer in self.hidden_layers:
            part = _contract(self.interface[layer, :, points], next(remaining))
            reached = part if reached is None else reached.add_(part)
        assert reached is not None
        result = torch.matmul(self.head, reached)
        if self.tail_trainable:
            result += next(remaining).transpose(0, 1)
        return result.mul_(self.tail[:, points].T[:, :, None])

    def backward(self, outputs: Tensor, points: slice) -> Iterator[Tensor]:
        """(B^ℓ)ᵀ W_Lᵀ diag(c) y for the hidden layers, then diag(c) y."""
        scaled = outputs * self.tail[:, points].T[:, :, None]
        reached = torch.matmul(self.head.T, scaled)
        for layer in self.hidden_layers:
            yield _expand(self.interface[layer, :, points], reached)
        if self.tail_trainable:
            yield scaled.transpose(0, 1)

    def hidden_gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Tensor | None = None
    ) -> Tensor:
        """Looked up."""
        return self.gram[:, points].index_select(0, first * self.num_hidden + second)

    def cross_gram(self, hidden: Tensor | int, tail: Tensor | int, points: slice) -> Tensor:
        """c²·(W_L B)."""
        interface = self.interface[:, :, points]
        scale = self.tail[:, points][tail].square()
        if isinstance(hidden, int):
            return (self.head[tail] @ interface[hidden]).mul_(scale)
        if isinstance(tail, int):
            return torch.matmul(self.head[tail], interface[hidden]).mul_(scale)
        products = self.head.index_select(0, tail)[:, :, None] * interface[hidden]
        return products.sum(1).mul_(scale)
