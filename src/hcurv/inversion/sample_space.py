"""Exact in sample space: with H = SᵀS and S of few rows, factorize I + S D⁻¹ Sᵀ instead of H + D.

With K = S D⁻¹ Sᵀ, the loss-weighted tangent kernel, and LLᵀ = I + K:

    (H + D)⁻¹ b  = D⁻¹ (b − Sᵀ (I + K)⁻¹ S D⁻¹ b)                     (Woodbury)
    log|H + D|   = log|I + K| + Σ log D                               (determinant lemma)
    (H + D)⁻¹    = D^-½ W Wᵀ D^-½,   W = I − Zᵀ L⁻ᵀ (L + I)⁻¹ Z,   Z = S D^-½.

The last line holds because LLᵀ − I = (L + I)(Lᵀ + I) − (L + I) − (Lᵀ + I), which makes
WWᵀ = I − Zᵀ (LLᵀ)⁻¹ Z.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.factorized import (
    Damping,
    DeviceLike,
    Factorized,
    NotFactorizableError,
    check_float_type,
)
from hcurv.indexing import check_count
from hcurv.network.factored_matrix import FactoredMatrix

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SampleSpaceFactorization"]

# `inverse_diagonal` holds this many floats of columns of S at a time.
_COLUMN_FLOATS = 2**26


class SampleSpaceFactorization(Factorized):
    """(H + D)⁻¹ by a Cholesky factorization of I + S D⁻¹ Sᵀ.

    Args:
        matrix: H = SᵀS, in the precision to work in.
        factor: L, lower triangular, (n·q, n·q).
        damping: D, positive.
        dtype: type of right-hand sides and solutions.
    """

    def __init__(
        self, matrix: FactoredMatrix, factor: Tensor, damping: Damping, dtype: torch.dtype
    ) -> None:
        super().__init__(damping)
        self._matrix, self._factor, self._dtype = matrix, factor, dtype
        self._inverse_damping = 1 / damping.diagonal(matrix.shape[0], matrix.device)

    @classmethod
    def of(
        cls, matrix: FactoredMatrix, damping: Damping, dtype: torch.dtype
    ) -> SampleSpaceFactorization:
        """Form the kernel, and factorize it in place."""
        kernel = matrix.kernel(damping).to_dense()
        kernel.diagonal().add_(1.0)
        return cls(matrix, torch.linalg.cholesky(kernel), damping, dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of right-hand sides and solutions."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the factor is stored."""
        return self._matrix.device

    @property
    def num_stored(self) -> int:
        """The factor, and what products with S need."""
        return self._factor.numel() + self._matrix.num_stored

    @property
    def nbytes(self) -> int:
        """Bytes of these, in the precision that is worked in."""
        return self.num_stored * self._matrix.dtype.itemsize

    def _undamped(self, columns: Tensor, power: float = 1.0) -> Tensor:
        """D^-power times columns (N, k)."""
        return columns * self._inverse_damping.pow(power)[:, None].to(columns.dtype)

    def _matmat(self, rhs: Tensor) -> Tensor:
        scaled = self._undamped(rhs.to(self._matrix.dtype))
        solved = torch.cholesky_solve(self._matrix.root_product(scaled), self._factor)
        return (scaled - self._undamped(self._matrix.root_transposed(solved))).to(rhs.dtype)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        columns = rhs.to(self._matrix.dtype)
        samples = self._matrix.root_product(self._undamped(columns, 0.5))
        shifted = self._factor.clone()
        shifted.diagonal().add_(1.0)
        mixed = torch.linalg.solve_triangular(shifted, samples, upper=False)
        mixed = torch.linalg.solve_triangular(self._factor.T, mixed, upper=True)
        inner = columns - self._undamped(self._matrix.root_transposed(mixed), 0.5)
        return self._undamped(inner, 0.5).to(rhs.dtype)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from N(0, (H + D)⁻¹), (num, N): u − D⁻¹Sᵀ(I + K)⁻¹(Su + ε), u ~ N(0, D⁻¹)."""
        num = check_count(num, "num", least=0)
        with torch.no_grad():
            noise = self._noise(self.shape[0], num, generator).to(self._matrix.dtype)
            prior = self._undamped(noise, 0.5)
            if num == 0:
                return prior.T.to(self.dtype)
            extra = self._noise(self._matrix.num_root_rows, num, generator)
            samples = self._matrix.root_product(prior) + extra.to(self._matrix.dtype)
            solved = torch.cholesky_solve(samples, self._factor)
            back = self._undamped(self._matrix.root_transposed(solved))
            return (prior - back).T.to(self.dtype).contiguous()

    def _logdet(self) -> Tensor:
        logarithms = 2 * self._factor.diagonal().double().log().sum()
        return (logarithms - self._inverse_damping.log().sum()).cpu()

    def _inverse_diagonal(self) -> Tensor:
        result = self._inverse_damping.clone()
        step = max(1, _COLUMN_FLOATS // max(1, self._factor.shape[0]))
        for rows in torch.arange(self.shape[0], device=self.device).split(step):
            columns = self._matrix.root_columns(rows)
            halves = torch.linalg.solve_triangular(self._factor, columns, upper=False)
            squares = halves.double().square().sum(0)
            result[rows] -= squares * self._inverse_damping[rows].square()
        return result

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization with right-hand sides of another precision, on the same device."""
        check_float_type(dtype)
        if device is not None and torch.device(device) != self.device:
            raise NotFactorizableError(
                f"a factorization in sample space is on {self.device}, as its matrix: build the"
                " matrix again from a model on the other device"
            )
        kept = self._dtype if dtype is None else dtype
        return type(self)(self._matrix, self._factor, self._damping, kept)
