"""What every way of storing the factors C_i can be asked for.

C_i^ℓ = R_i M_i^L W_L … M_i^ℓ (paper, Eq. 3.4) has one column for each unit of layer ℓ: it says how
the pre-activation of the unit moves the outputs of the network, weighted by the loss. The units of
all layers with trainable parameters are numbered through. Points are the last, contiguous axis of
every stored tensor.

Entries of the matrix need only inner products of columns, g_i[μ, μ'] = C_i[:, μ]·C_i[:, μ'], the
*Gram values* of a pair of units. A new kind of Jacobian is one more file that implements
`OutputJacobian` here and a `JacobianPlan` for its memory; nothing else has to know how it stores
the columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Protocol

import torch
from torch import Tensor

from hcurv.network.scratch import Scratch

__all__ = ["CacheSizes", "FactoredGram", "OutputJacobian", "UnitGroup", "UnitStream"]


@dataclass(frozen=True)
class UnitGroup:
    """Consecutive units that a Jacobian treats alike.

    Attributes:
        start: the first unit.
        stop: one more than the last unit.
        orthogonal: whether the columns of any two different units of the group are orthogonal at
            every point, which makes all entries between these units zero.
    """

    start: int
    stop: int
    orthogonal: bool = False

    def contains(self, units: Tensor) -> Tensor:
        """Which of the units belong to the group, a mask."""
        return (units >= self.start) & (units < self.stop)

    def selects(self, other: UnitGroup, first: Tensor, second: Tensor) -> Tensor:
        """Which pairs join a unit of this group to one of ``other`` and need not be zero."""
        chosen = self.contains(first) & other.contains(second)
        return chosen & (first == second) if self == other and self.orthogonal else chosen


class FactoredGram(Protocol):
    """Gram values as inner products: g_i[μ, u] = s[μ, u] · Σ_r L_i[μ, r] R_i[u, r].

    Here μ belongs to one group of units and u to another. For a group with itself L and R are the
    same. With L and R, a block of the matrix is one product with inner dimension n·depth.
    """

    @property
    def depth(self) -> int:
        """The number of terms r."""

    def simplified(self, first: Tensor) -> FactoredGram:
        """A form with fewer terms that holds for these units μ, or the same form."""

    def left(self, units: Tensor, inputs: Tensor, points: slice, scratch: Scratch) -> Tensor:
        """L_i[μ, r] · inputs[·, i] for units μ, (units, depth, b); ``inputs`` is overwritten."""

    def right(self, units: Tensor, inputs: Tensor, points: slice, scratch: Scratch) -> Tensor:
        """R_i[u, r] · inputs[·, i] for units u, (units, depth, b); ``inputs`` is overwritten."""

    def finish(self, values: Tensor, first: Tensor, second: Tensor) -> None:
        """Multiply sums (…, rows, cols) by s[first, second], units (…, rows) and (…, cols)."""


@dataclass(frozen=True)
class CacheSizes:
    """How much of a product with the Jacobian exists at a time.

    Smaller temporaries stay in the cache of the processor; larger ones need fewer calls.

    Attributes:
        sum_floats: floats of a running sum in elementwise passes over a stored factor.
        output_floats: floats of the weighted outputs, where a product goes through all of them.
    """

    sum_floats: int = 2**19
    output_floats: int = 2**17


class UnitStream(Protocol):
    """Values u[μ, i, :] of units that a product reads, and values z[μ, i, :] that it writes.

    Neither exists as a whole. They come and go in ranges of units of one layer, (units, b, k) at a
    time, where b is the number of points at hand and k the number of right-hand sides. What is
    read is u = Ŵx; what is written goes into the sums Σ_i z_i x_iᵀ, the product's result.
    """

    @property
    def num_columns(self) -> int:
        """k, the number of right-hand sides."""

    def ranges(self, group: UnitGroup) -> Sequence[slice]:
        """The units of a group in ranges of a convenient size, none across layers."""

    def read(self, units: slice) -> Tensor:
        """u of a range of units, (units, b, k); the caller may overwrite it."""

    def write(self, units: slice, values: Tensor) -> None:
        """z of a range of units, (units, b, k)."""

    def features(self, units: slice) -> Tensor:
        """The inputs x of the layer of these units that belong to trainable parameters, (f, b)."""

    def weights(self, units: slice) -> Tensor:
        """Ŵ of a range of units, with u = Ŵx, (units, f, k)."""

    def write_sums(self, units: slice, sums: Tensor) -> None:
        """Σ_i z_i x_iᵀ of a range of units, (units, f, k), instead of z itself."""


class OutputJacobian(ABC):
    """The columns of C_i for all units and points, however they are stored."""

    @property
    @abstractmethod
    def groups(self) -> tuple[UnitGroup, ...]:
        """The groups of units that are treated alike, in order; they cover all units."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that is stored."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """q, the number of rows of C_i."""

    @property
    @abstractmethod
    def num_points(self) -> int:
        """n, the number of points."""

    @property
    @abstractmethod
    def unit_floats(self) -> int:
        """The number of floats that a product reads for each unit and point."""

    @property
    @abstractmethod
    def working_rows(self) -> int:
        """Floats per point and right-hand side that `apply_normal` holds besides the stream."""

    @abstractmethod
    def gram_cost(self, first: UnitGroup, second: UnitGroup) -> int:
        """Floats per point that g of one pair of units is computed from; 0 if it is stored."""

    def row_cost(self, first: UnitGroup, second: UnitGroup) -> int:
        """Multiplications per point and pair, where one unit is paired with many.

        It is less than `gram_cost` where a matrix product gives all these pairs at once.
        """
        return self.gram_cost(first, second)

    @abstractmethod
    def gram(
        self, first: Tensor | int, second: Tensor, points: slice, scratch: Scratch | None = None
    ) -> Tensor:
        """g of pairs of units, (pairs, b).

        All first units must belong to one group, and all second units to one group. A single
        first unit is paired with every second unit.
        """

    @abstractmethod
    def gram_at(self, first: Tensor, second: Tensor, points: Tensor) -> Tensor:
        """g of any pairs of units, each at points of its own, (pairs, c) like ``points``."""

    @abstractmethod
    def factored(self, first: UnitGroup, second: UnitGroup) -> FactoredGram | None:
        """The Gram values between two groups as inner products; None where there is no such form.

        ``first`` must not come after ``second``.
        """

    @abstractmethod
    def squared_norms(self, units: slice, points: slice) -> Tensor:
        """‖C_i[:, μ]‖² for a range of units of one group, (units, b)."""

    @abstractmethod
    def column_norms(self) -> Tensor:
        """‖C_i[:, μ]‖ of all units, (units, n)."""

    @abstractmethod
    def column_rows(self, units: slice, points: slice) -> Tensor:
        """C_i restricted to a range of units of one group, (b, q, units).

        Where C_i of all units of the group is diagonal, the diagonal is returned, (b, units); then
        the range must be the whole group.
        """

    @property
    @abstractmethod
    def row_floats(self) -> int:
        """Floats per point that `column_rows` of all units together take."""

    @abstractmethod
    def apply_normal(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> None:
        """z = CᵀCu at some points."""

    @abstractmethod
    def forward(self, stream: UnitStream, points: slice, sizes: CacheSizes) -> Tensor:
        """y = Cu at some points, (b, q, k)."""

    @abstractmethod
    def backward(self, stream: UnitStream, points: slice, outputs: Tensor) -> None:
        """z = Cᵀy at some points, for y of shape (b, q, k)."""

    @abstractmethod
    def direction_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """A random projection of the directions of all columns, (num_features, n)."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> OutputJacobian:
        """The same C_i, converted to another precision."""

    @abstractmethod
    def select(self, points: Tensor, scale: Tensor) -> OutputJacobian:
        """C_i at some points, each multiplied by its number in ``scale``."""

    def group_pairs(self) -> Iterator[tuple[UnitGroup, UnitGroup]]:
        """All unordered pairs of groups, the earlier group first."""
        return combinations_with_replacement(self.groups, 2)

    def orthogonal(self, first: Tensor, second: Tensor) -> Tensor:
        """For which pairs of units g is known to be zero at every point, a mask."""
        result = torch.zeros_like(first, dtype=torch.bool)
        for group in self.groups:
            if group.orthogonal:
                result |= group.contains(first) & group.contains(second) & (first != second)
        return result
