"""What the columns of S of some parameters can be asked for, however they are stored.

A parameter that enters a network through z_t = W x_t at positions t = 1…T has the columns

    v_k(i) = Σ_t C_{i,t}[:, μ] · x_{i,t}[ν],     C_{i,t} = R_i ∂f(x_i)/∂z_{i,t}    (q, d_out),

where k is the parameter W[μ, ν]. They are stored as factors, where that takes less memory
(`PlainJacobian` for T = 1, `PositionJacobian`, `LookupJacobian` where x_t is a unit vector), or
multiplied out (`DenseJacobian`). A new form is one more file that implements `LayerJacobian`.

Within one Jacobian parameters are numbered from 0. Points are the last axis of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "LayerJacobian",
    "LinearJacobian",
    "LinearShape",
    "Panel",
    "ZeroJacobian",
    "transposed_product",
]

# Temporaries of a panel, and of sums over positions, hold about this many floats.
PANEL_FLOATS = 2**22
# Points that a tile of a dense kernel has: large enough that products of columns, not making the
# columns, take most of the time.
TILE_POINTS = 128


# With fewer columns, torch's products of tall matrices are ten times faster the other way round.
_FEW_COLUMNS = 16


def transposed_product(matrix: Tensor, columns: Tensor) -> Tensor:
    """matrixᵀ @ columns, (m, p) and (m, k) to (p, k)."""
    if 1 < columns.shape[1] < _FEW_COLUMNS:
        return (columns.T.contiguous() @ matrix).T
    return matrix.T @ columns


class LinearShape(NamedTuple):
    """How the entries of W are numbered.

    Attributes:
        num_units: d_out.
        num_inputs: d_in.
        by_input: whether entry (μ, ν) has the number ν·d_out + μ, as in z = xᵀW, instead of
            μ·d_in + ν.
    """

    num_units: int
    num_inputs: int
    by_input: bool = False

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.num_units * self.num_inputs

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The unit μ and the input ν of each entry."""
        width = self.num_units if self.by_input else self.num_inputs
        first, second = index.div(width, rounding_mode="floor"), index % width
        return (second, first) if self.by_input else (first, second)

    def number(self, units: slice) -> Tensor:
        """The numbers of all entries of some units, (units, d_in)."""
        everything = torch.arange(self.size)
        if self.by_input:
            return everything.view(self.num_inputs, self.num_units).T[units]
        return everything.view(self.num_units, self.num_inputs)[units]

    def rows(self, flat: Tensor) -> Tensor:
        """Columns of numbers (p, k) as k matrices W one above the other, (k·d_out, d_in)."""
        num_columns = flat.shape[1]
        if self.by_input:
            table = flat.view(self.num_inputs, self.num_units, num_columns).permute(2, 1, 0)
        else:
            table = flat.view(self.num_units, self.num_inputs, num_columns).permute(2, 0, 1)
        return table.reshape(-1, self.num_inputs)

    def flat(self, rows: Tensor) -> Tensor:
        """The reverse of `rows`: (k·d_out, d_in) to (p, k)."""
        table = rows.view(-1, self.num_units, self.num_inputs)
        order = (2, 1, 0) if self.by_input else (1, 2, 0)
        return table.permute(order).reshape(self.size, -1)


class Panel(NamedTuple):
    """Columns of some parameters.

    Attributes:
        parameters: their numbers, (m,).
        columns: (m, q, b).
    """

    parameters: Tensor
    columns: Tensor


class LayerJacobian(ABC):
    """The columns of S of p parameters, over b points with q rows each.

    Attributes:
        form: how they are stored, in one word.
    """

    form: ClassVar[str]

    @property
    def has_quick_columns(self) -> bool:
        """Whether a column is read, or multiplied by a number, instead of summed up."""
        return True

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """The number p of parameters."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number q of rows of each point."""

    @property
    @abstractmethod
    def num_points(self) -> int:
        """The number b of points."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that is stored."""

    @abstractmethod
    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Columns of some parameters at a range of points, (m, q, points)."""

    @abstractmethod
    def apply(self, flat: Tensor, result: Tensor) -> None:
        """Add S times ``flat`` (p, k) to ``result``, (b, q, k)."""

    @abstractmethod
    def apply_transposed(self, values: Tensor) -> Tensor:
        """Sᵀ times ``values`` (b, q, k): (p, k)."""

    @abstractmethod
    def select(self, points: Tensor, scale: Tensor) -> LayerJacobian:
        """The rows of some points, multiplied by a number for each of them."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> LayerJacobian:
        """The same columns in another precision."""

    def multiplied(self, num_columns: int, max_floats: int) -> LayerJacobian:
        """The same columns, multiplied out where two products are faster with them.

        Args:
            num_columns: the number of columns that S, and then Sᵀ, is to be multiplied by.
            max_floats: floats that may be taken for it.
        """
        return self

    def for_entries(self) -> LayerJacobian:
        """The same columns, in the order in memory in which entries are read fastest."""
        return self

    @property
    def num_floats(self) -> int:
        """The number of floats that are stored."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def kernel_flops(self) -> float:
        """Flops for each entry of a kernel, half of which are computed: those of `gram`."""
        return float(self.num_parameters)

    def panels(self, points: slice) -> Iterator[Panel]:
        """All columns, a few parameters at a time."""
        width = self.num_rows * max(1, points.stop - points.start)
        step = max(1, PANEL_FLOATS // width)
        for index in torch.arange(self.num_parameters).split(step):
            yield Panel(index, self.columns(index, points))

    def square_sums(self) -> Tensor:
        """‖v_k‖² of all parameters over all points, (p,)."""
        result = torch.zeros(self.num_parameters, dtype=self.tensors[0].dtype)
        result = result.to(self.tensors[0].device)
        for index, columns in self.panels(slice(0, self.num_points)):
            result[index] = columns.square().sum((1, 2))
        return result

    def point_norms(self) -> Tensor:
        """Σ_k ‖v_k(i)‖² of each point, (b,), in double precision."""
        result = torch.zeros(self.num_points, dtype=torch.float64, device=self.tensors[0].device)
        for _, columns in self.panels(slice(0, self.num_points)):
            result += columns.square().sum(1).double().sum(0)
        return result

    def gram(
        self, first: slice, other: LayerJacobian, second: slice, weights: Tensor, result: Tensor
    ) -> None:
        """Add Σ_k weights[k] v_k(i)[a] v_k(j)[b] to ``result``, (q·points, q·points).

        Rows of ``result`` are ordered by row a, then by point.

        Args:
            first: a range of points.
            other: the Jacobian of the same parameters over other points, or this one.
            second: a range of its points.
            weights: a number for each parameter, (p,).
            result: what is added to.
        """
        for index, columns in self.panels(first):
            left = columns.flatten(1) * weights[index, None]
            result.addmm_(left.T, other.columns(index, second).flatten(1))


class LinearJacobian(LayerJacobian):
    """Factors C and inputs x, for z = W x.

    Args:
        factors: C, with the q rows of a point as its second axis.
        inputs: x.
        shape: how the entries of W are numbered.
    """

    def __init__(self, factors: Tensor, inputs: Tensor, shape: LinearShape) -> None:
        self._factors, self._inputs, self._shape = factors, inputs, shape

    @property
    def num_parameters(self) -> int:
        """The number of entries of W."""
        return self._shape.size

    @property
    def num_rows(self) -> int:
        """The number of rows of each point."""
        return self._factors.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """C and x."""
        return (self._factors, self._inputs)


class ZeroJacobian(LayerJacobian):
    """The columns of parameters on which no output depends.

    Args:
        num_parameters: p.
        num_rows: q.
        like: a tensor of the wanted type, (b,).
    """

    form = "unused"

    def __init__(self, num_parameters: int, num_rows: int, like: Tensor) -> None:
        self._num_parameters, self._num_rows, self._like = num_parameters, num_rows, like

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return self._num_parameters

    @property
    def num_rows(self) -> int:
        """The number of rows of each point."""
        return self._num_rows

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._like.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """One number for each point, which tells type and device."""
        return (self._like,)

    @property
    def num_floats(self) -> int:
        """None that count."""
        return 0

    @property
    def kernel_flops(self) -> float:
        """None."""
        return 0.0

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Zeros."""
        return self._like.new_zeros(index.numel(), self._num_rows, points.stop - points.start)

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """Nothing is added."""

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Zeros."""
        return values.new_zeros(self._num_parameters, values.shape[2])

    def panels(self, points: slice) -> Iterator[Panel]:
        """There is nothing to sum over."""
        return iter(())

    def select(self, points: Tensor, scale: Tensor) -> ZeroJacobian:
        """Zeros of other points."""
        return ZeroJacobian(self._num_parameters, self._num_rows, self._like[points])

    def to(self, dtype: torch.dtype) -> ZeroJacobian:
        """Zeros of another type."""
        return ZeroJacobian(self._num_parameters, self._num_rows, self._like.to(dtype))
