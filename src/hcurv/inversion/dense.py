"""Exact in parameter space: the Cholesky factorization of a dense matrix A + D."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.damping import Damping, DeviceLike
from hcurv.factorized import Factorized, check_float_type
from hcurv.operators import RowPart

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DenseFactorization", "point_grams"]


def point_grams(rows: Tensor, num_rows: int) -> Tensor:
    """J_i J_iᵀ for rows (b·q, m) of b points: (b, q, q)."""
    by_point = rows.view(-1, num_rows, rows.shape[1])
    return torch.bmm(by_point, by_point.mT)


class DenseFactorization(Factorized):
    """(A + D)⁻¹ by a dense Cholesky factorization over the rows of A that are not zero.

    Args:
        factor: L, lower triangular, of the damped block LLᵀ over ``rows``, (M, M).
        rows: the rows of A that are not zero, ascending, (M,).
        damping: D.
        size: N.
        dtype: type of right-hand sides and solutions.
    """

    def __init__(
        self, factor: Tensor, rows: Tensor, damping: Damping, size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(damping)
        self._factor, self._rows, self._size, self._dtype = factor, rows, size, dtype
        # Rows of zeros are those of the damping alone.
        self._zero_rows = damping.diagonal(size, rows.device).clone()
        self._zero_rows[rows] = 1.0

    @classmethod
    def of(
        cls, block: Tensor, rows: Tensor, damping: Damping, size: int, dtype: torch.dtype
    ) -> DenseFactorization:
        """Factorize a dense block, which is overwritten.

        Args:
            block: A over ``rows``, (M, M), in the precision to factorize in.
            rows: the rows of A that are not zero, ascending, (M,).
            damping: D.
            size: N.
            dtype: type of right-hand sides and solutions.
        """
        damping.require_positive("the matrix may be singular")
        block.diagonal().add_(damping.rows(rows).to(block.dtype))
        factor, info = torch.linalg.cholesky_ex(block)
        if int(info):
            raise ValueError(
                f"A + D is not positive definite in {block.dtype}: choose a larger damping"
                " or use float64"
            )
        return cls(factor, rows, damping, size, dtype)

    @property
    def factor(self) -> Tensor:
        """L, lower triangular."""
        return self._factor

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
        """Where the factor is stored."""
        return self._factor.device

    @property
    def num_stored(self) -> int:
        """M² floats, of which half are used."""
        return self._factor.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the factor, in the precision in which it was computed."""
        return self._factor.nbytes

    def _over_rows(self, rhs: Tensor) -> Tensor:
        return rhs.index_select(0, self._rows).to(self._factor.dtype)

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = rhs / self._zero_rows[:, None].to(rhs.dtype)
        solved = torch.cholesky_solve(self._over_rows(rhs), self._factor)
        return result.index_copy_(0, self._rows, solved.to(rhs.dtype))

    def _half_solve(self, rhs: Tensor) -> Tensor:
        result = rhs / self._zero_rows.sqrt()[:, None].to(rhs.dtype)
        solved = torch.linalg.solve_triangular(self._factor.T, self._over_rows(rhs), upper=True)
        return result.index_copy_(0, self._rows, solved.to(rhs.dtype))

    def _covariances(self, chunk: RowPart, num_rows: int) -> Tensor:
        """Grams of L⁻¹ J_iᵀ: half the work of solves, and positive semi-definite."""
        dense = chunk.to_dense()
        solved = torch.linalg.solve_triangular(self._factor, self._over_rows(dense.T), upper=False)
        halves = dense / self._zero_rows.sqrt().to(dense.dtype)
        halves.index_copy_(1, self._rows, solved.T.to(dense.dtype))
        return point_grams(halves, num_rows)

    def _logdet(self) -> Tensor:
        return (
            2 * self._factor.diagonal().double().log().sum() + self._zero_rows.log().sum()
        ).cpu()

    def _inverse_diagonal(self) -> Tensor:
        result = 1 / self._zero_rows
        inverse = torch.cholesky_inverse(self._factor)
        result[self._rows] = inverse.diagonal().double()
        return result

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization on another device, or with right-hand sides of another precision."""
        check_float_type(dtype, device)
        return type(self)(
            self._factor.to(device),
            self._rows.to(device),
            self._damping.to(device),
            self._size,
            self._dtype if dtype is None else dtype,
        )
