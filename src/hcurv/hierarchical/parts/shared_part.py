"""The global part V Vᵀ of a matrix that is spread over ranks: each of them has its rows of V."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.linalg.tall_factors import by_columns

__all__ = ["SharedPart"]


@dataclass(frozen=True)
class SharedPart:
    """V Vᵀ.

    Attributes:
        share: which rows of V each rank has; all others are zero.
        factor: the own rows of V, (m, g), kept as `by_columns` says.
        size: number N of rows of the matrix.
    """

    share: RowShare
    factor: Tensor
    size: int

    def __post_init__(self) -> None:
        """Bring the factor into the layout in which products are fast."""
        object.__setattr__(self, "factor", by_columns(self.factor))

    @property
    def rank(self) -> int:
        """Number g of columns."""
        return self.factor.shape[1]

    @property
    def num_stored(self) -> int:
        """Number of floats that this rank stores."""
        return self.factor.numel()

    @cached_property
    def places(self) -> Tensor:
        """Where rows of the matrix lie in V, and −1 for rows that are zero, (N,)."""
        rows = self.share.rows
        places = rows.new_full((self.size,), -1)
        places[rows] = torch.arange(rows.numel(), device=rows.device)
        return places

    def own_product(self, own: Tensor) -> Tensor:
        """The own rows of V Vᵀ times a tall matrix, from its own rows."""
        return self.factor @ self.share.total(self.factor.T @ own)

    def add_product(self, inputs: Tensor, outputs: Tensor, scale: float = 1.0) -> None:
        """Add V Vᵀ, scaled, times ``inputs`` (N, k) to ``outputs``, whole on every rank."""
        own = self.own_product(inputs[self.share.own_rows])
        outputs.index_add_(0, self.share.rows, self.share.whole(own), alpha=scale)

    def diagonal(self) -> Tensor:
        """The diagonal of V Vᵀ, (N,), on every rank."""
        squares = self.share.whole(self.factor.square().sum(1, keepdim=True))
        return self.factor.new_zeros(self.size).index_copy_(0, self.share.rows, squares[:, 0])

    def rows_of(self, index: Tensor) -> Tensor:
        """Rows of V for rows of the matrix, (…, g), which all ranks have to ask for."""
        places = self.places[index]
        found = self.share.at(self.factor, places.clamp(min=0))
        return found.masked_fill_(places[..., None] < 0, 0.0)

    def gathered(self) -> GlobalPart:
        """All of it on every rank."""
        rows, order = self.share.rows.sort()
        return GlobalPart(rows, self.share.whole(self.factor.contiguous())[order])
