"""Block-diagonal approximations from exact entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hcurv.damping import Damping, DampingLike, DeviceLike, as_damping
from hcurv.factorized import Factorized, check_float_type
from hcurv.indexing import resolve_indices
from hcurv.layout import layout_of
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource, SymmetricOperator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "BlockDiagonal",
    "BlockDiagonalFactorization",
]


class BlockDiagonal(SymmetricOperator):
    """Exact diagonal blocks, zero elsewhere.

    Args:
        source: a `GaussNewton`, or anything with ``block(rows, cols)`` if ``blocks`` are indices.
        blocks: "layer", "unit" (all weights and the bias of a unit), "parameter", or disjoint
            index tensors. Rows in none of them are zero.

    Examples:
        >>> B = hcurv.baselines.BlockDiagonal(H, "unit")
        >>> len(B.rows), B.values[0].shape
        (9, torch.Size([5, 5]))
    """

    def __init__(
        self,
        source: Any,
        blocks: Literal["layer", "unit", "parameter"] | Sequence[Tensor] = "layer",
    ) -> None:
        if isinstance(source, Tensor) or not isinstance(source, EntrySource):
            raise TypeError(
                "the source must offer entries, as a GaussNewton does (hcurv.EntrySource); got"
                f" {type(source).__name__}"
            )
        size = source.shape[0]
        self._shape = (size, size)
        self._device: torch.device = source.device
        self._dtype: torch.dtype = source.dtype
        self.layout = layout_of(source)
        if isinstance(blocks, str):
            if self.layout is None:
                raise TypeError(
                    f'blocks="{blocks}" needs a GaussNewton; pass index tensors for other matrices'
                )
            chosen: Sequence[Tensor] = self.layout.blocks(blocks)
        else:
            chosen = blocks
        self.rows = [resolve_indices(part, size, self._device, "blocks") for part in chosen]
        everything = torch.cat([*self.rows, torch.zeros(0, dtype=torch.long, device=self._device)])
        if everything.unique().numel() < everything.numel():
            raise ValueError("blocks must not overlap, and a block must not repeat a row")
        floats = sum(part.numel() ** 2 for part in self.rows)
        require_bytes(
            2 * floats * self._dtype.itemsize,
            self._device,
            f"{len(self.rows)} diagonal blocks of up to"
            f" {max((p.numel() for p in self.rows), default=0)} rows",
            ('choose smaller blocks, such as blocks="unit"', "compress the matrix instead"),
        )
        self.values = [source.block(part, part) for part in self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self._device

    @property
    def num_stored(self) -> int:
        """Floats of all blocks."""
        return sum(block.numel() for block in self.values)

    def diagonal(self) -> Tensor:
        """The N diagonal entries.

        Examples:
            >>> B = hcurv.baselines.BlockDiagonal(H, "layer")
            >>> torch.allclose(B.diagonal(), H.diagonal())
            True
        """
        result = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        for rows, block in zip(self.rows, self.values, strict=True):
            result[rows] = block.diagonal()
        return result

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = torch.zeros_like(rhs)
        for rows, block in zip(self.rows, self.values, strict=True):
            result[rows] = block @ rhs[rows]
        return result

    def factorize(self, damping: DampingLike) -> BlockDiagonalFactorization:
        """Cholesky factors of all damped blocks.

        Args:
            damping: positive: a number, a tensor (N,), or numbers by the names of parameters or
                layers.

        Examples:
            >>> B = hcurv.baselines.BlockDiagonal(H, "layer")
            >>> x = B.factorize(0.1).solve(b)
            >>> torch.allclose(B @ x + 0.1 * x, b)
            True
        """
        resolved = as_damping(damping, self.shape[0], self.layout)
        resolved.require_positive("rows outside of all blocks are zero")
        factors = []
        for rows, block in zip(self.rows, self.values, strict=True):
            factor, info = torch.linalg.cholesky_ex(block.double() + resolved.rows(rows).diag())
            if int(info):
                raise ValueError(
                    f"the block of rows {int(rows[0])} to {int(rows[-1])} is not positive definite"
                    " with this damping; choose a larger one"
                )
            factors.append(factor)
        return BlockDiagonalFactorization(self.rows, factors, resolved, self._shape[0], self.dtype)


class BlockDiagonalFactorization(Factorized):
    """Cholesky factors of damped diagonal blocks. Made by `BlockDiagonal.factorize`.

    Args:
        rows: rows of each block, disjoint.
        factors: lower triangular L of each damped block LLᵀ, in double precision.
        damping: D.
        size: N.
        dtype: type of right-hand sides and solutions.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        factors: Sequence[Tensor],
        damping: Damping,
        size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(damping)
        self._rows, self._factors = list(rows), list(factors)
        self._size, self._dtype = size, dtype
        # Rows outside of all blocks are those of the damping alone.
        self._device = self._rows[0].device if self._rows else torch.device("cpu")
        self._outside = damping.diagonal(size, self._device).clone()
        for part in self._rows:
            self._outside[part] = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._size, self._size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of right-hand sides and solutions."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the factors are stored."""
        return self._device

    @property
    def num_stored(self) -> int:
        """Floats of all factors."""
        return sum(factor.numel() for factor in self._factors)

    @property
    def nbytes(self) -> int:
        """The factors are stored in double precision."""
        return 8 * self.num_stored

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = rhs / self._outside[:, None].to(rhs.dtype)
        for rows, factor in zip(self._rows, self._factors, strict=True):
            result[rows] = torch.cholesky_solve(rhs[rows].double(), factor).to(rhs.dtype)
        return result

    def _half_solve(self, rhs: Tensor) -> Tensor:
        result = rhs / self._outside.sqrt()[:, None].to(rhs.dtype)
        for rows, factor in zip(self._rows, self._factors, strict=True):
            solved = torch.linalg.solve_triangular(factor.T, rhs[rows].double(), upper=True)
            result[rows] = solved.to(rhs.dtype)
        return result

    def _logdet(self) -> Tensor:
        total = self._outside.log().sum()
        for factor in self._factors:
            total = total + 2 * factor.diagonal().log().sum()
        return total.cpu()

    def _inverse_diagonal(self) -> Tensor:
        result = 1 / self._outside
        for rows, factor in zip(self._rows, self._factors, strict=True):
            result[rows] = torch.cholesky_inverse(factor).diagonal()
        return result

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization on another device or in another precision."""
        check_float_type(dtype, device)
        return type(self)(
            [rows.to(device) for rows in self._rows],
            [factor.to(device) for factor in self._factors],
            self._damping.to(device),
            self._size,
            self.dtype if dtype is None else dtype,
        )
