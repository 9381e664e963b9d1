"""The factors C_i^ℓ: how the pre-activations of every unit move the (weighted) network output.

C_i^ℓ = R_i M_i^L W_L … M_i^ℓ (paper, Eq. 3.4) has one column per unit of layer ℓ. All units of all
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

__all__ = [
    "FEW_COLUMNS",
    "OutputJacobian",
    "UnitParts",
    "contract",
    "expand",
    "normalised",
    "project",
    "take",
]


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
        """k, the number of columns."""

    def read(self, units: slice) -> Tensor:
        """u of a range of units; the caller may overwrite it."""

    def write(self, units: slice, values: Tensor) -> None:
        """z of a range of units."""

    def tail_inputs(self) -> Tensor:
        """x of the last layer, as far as its parameters are trainable, (f, b)."""

    def tail_weights(self, units: slice) -> Tensor:
        """Ŵ of units of the tail, u = Ŵx, (units, f, k)."""

    def write_tail(self, units: slice, sums: Tensor) -> None:
        """Σ_i zxᵀ of units of the tail, (units, f, k)."""


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
    def normal_rows(self) -> int:
        """Numbers per point and column that `apply_normal` holds at a time, but for parts."""

    @property
    @abstractmethod
    def gram_cost(self) -> int:
        """Multiplications per point for the Gram form of one pair of hidden units."""

    @abstractmethod
    def apply_normal(self, parts: UnitParts, points: slice) -> None:
        """z = CᵀCu at some points: reads u and writes z part by part."""

    @abstractmethod
    def forward(self, parts: UnitParts, points: slice) -> Tensor:
        """y = Cu at some points, (b, q, k): reads u part by part."""

    @abstractmethod
    def backward(self, parts: UnitParts, points: slice, outputs: Tensor) -> None:
        """z = Cᵀy at some points, y of shape (b, q, k): writes z part by part."""

    @abstractmethod
    def hidden_columns(self, units: slice, points: slice) -> Tensor:
        """C_i[:, μ] of a range of hidden units, (units, q, b)."""

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

    def column_norms(self) -> Tensor:
        """‖C_i[:, μ]‖ of all units with trainable parameters, (units, n)."""
        everywhere = slice(0, self.tensors[0].shape[-1])
        norms = [
            self.squared_norms(slice(unit, unit + 1), everywhere).sqrt_()
            for unit in range(self.num_hidden)
        ]
        if self.tail is not None and self.tail_trainable:
            norms.append(self.tail.abs())
        return torch.cat(norms)

    def gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        """g of pairs of units, each at points of its own, (pairs, c) like ``points``."""
        first, second = torch.minimum(first, second), torch.maximum(first, second)
        result = self.tensors[0].new_zeros(points.shape)
        first_hidden, second_hidden = first < self.num_hidden, second < self.num_hidden
        for kind, evaluate in (
            (second_hidden, self._hidden_at),
            (first_hidden & ~second_hidden, self._cross_at),
            (~first_hidden & (first == second), self._tail_at),
        ):
            index = kind.nonzero().squeeze(1)
            if index.numel() == points.shape[0]:
                return evaluate(first, second, points)
            if index.numel():
                result[index] = evaluate(first[index], second[index], points[index])
        return result

    def orthogonal(self, first: Tensor, second: Tensor) -> Tensor:
        """Whether g of pairs of units is zero at every point by construction."""
        return (first != second) & (torch.minimum(first, second) >= self.num_hidden)

    @abstractmethod
    def _hidden_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        """`gram_at` for hidden units."""

    @abstractmethod
    def _cross_at(self, hidden: Tensor, tail: Tensor, points: Tensor) -> Tensor:
        """`gram_at` for a hidden unit with one of the tail."""

    def _tail_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        assert self.tail is not None
        return take(self.tail, (first - self.num_hidden,), points).square_()

    @abstractmethod
    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """A random projection of the directions of all columns, (num_features, n)."""

    @abstractmethod
    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """C_i at some points, each multiplied by its factor in ``scale``."""


def take(values: Tensor, position: tuple[Tensor, ...], points: Tensor) -> Tensor:
    """values[position][p, points[p, :]]: for each pair p another row, at points of its own."""
    row = position[0]
    for axis, index in enumerate(position[1:], start=1):
        row = row * values.shape[axis] + index
    return values.reshape(-1).take(row[:, None] * values.shape[-1] + points)


def project(values: Tensor, num_features: int, generator: torch.Generator) -> Tensor:
    """A Gaussian projection of the rows of values, (rows, n) to (num_features, n)."""
    weights = torch.randn(
        num_features, values.shape[0], dtype=torch.float64, generator=generator
    ).to(values)
    return weights @ values


def normalised(values: Tensor, norms: Tensor) -> Tensor:
    """Values divided by their norms where these are positive."""
    return values / torch.where(norms > 0, norms, 1)


_CACHE_FLOATS = 2**19  # of an accumulator in elementwise passes over a factor


def contract(factor: Tensor, columns: Tensor, result: Tensor) -> None:
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


def expand(factor: Tensor, outputs: Tensor) -> Tensor:
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
