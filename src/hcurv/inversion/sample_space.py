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

from hcurv.damping import Damping, DampingLike, DeviceLike, as_damping
from hcurv.factorized import Factorized, NotFactorizableError, check_float_type
from hcurv.inversion.dense import DenseFactorization, point_grams
from hcurv.inversion.iterative import IterativeFactorization, estimate_diagonal
from hcurv.memory import require_bytes
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.jacobian_rows import RowChunk
from hcurv.network.kernel import TangentKernel
from hcurv.operators import RowPart

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SampleSpaceFactorization", "dense_kernel_factorization", "factorize_kernel"]

# `inverse_diagonal` holds this many floats of columns of S at a time.
_COLUMN_FLOATS = 2**26


# A factorization is in double precision where rounding in single changes solves by more than this.
_ROUNDING = 1e-2


def factorize_kernel(kernel: TangentKernel, damping: DampingLike) -> DenseFactorization:
    """See `TangentKernel.factorize`."""
    resolved = as_damping(damping, kernel.shape[0])
    resolved.require_positive("the kernel may be singular")
    with torch.no_grad():
        least = float(resolved.diagonal(kernel.shape[0], kernel.device).min())
        condition = float(kernel.diagonal().double().sum()) / least
        is_rough = condition * torch.finfo(kernel.dtype).eps > _ROUNDING
        exact = kernel.in_precision(torch.float64) if is_rough else kernel
        return dense_kernel_factorization(exact, resolved, kernel.dtype)


def dense_kernel_factorization(
    kernel: TangentKernel, damping: Damping | None = None, dtype: torch.dtype | None = None
) -> DenseFactorization:
    """The Cholesky factorization of K + D.

    Args:
        kernel: K, in the precision to factorize in.
        damping: D; the identity by default.
        dtype: type of right-hand sides and solutions, that of K by default.
    """
    size = kernel.shape[0]
    rows = torch.arange(size, device=kernel.device)
    if damping is None:
        damping = Damping(torch.ones((), dtype=torch.float64))
    require_bytes(
        size**2 * kernel.dtype.itemsize + max(size**2 * kernel.dtype.itemsize, kernel.fill_bytes),
        kernel.device,
        f"a dense factorization of a kernel of {size} x {size} entries",
        ("use fewer points", "compress it: hcurv.compress(K, damping=λ).factorize(λ)"),
    )
    lower = torch.zeros(size, size, dtype=kernel.dtype, device=kernel.device)
    block = kernel.fill(lower, lower=True)
    return DenseFactorization.of(block, rows, damping, size, dtype or kernel.dtype)


class SampleSpaceFactorization(Factorized):
    """(H + D)⁻¹ by an inverse of I + S D⁻¹ Sᵀ.

    It can do everything where that inverse is a dense Cholesky factorization. Where it is
    iterative, there is no `sqrt_solve`, and `inverse_diagonal` is estimated from random probes.

    Args:
        matrix: H = SᵀS, in the precision to work in.
        inner: (I + S D⁻¹ Sᵀ)⁻¹, (n·q, n·q), in that precision.
        damping: D, positive.
        dtype: type of right-hand sides and solutions.
    """

    def __init__(
        self, matrix: FactoredMatrix, inner: Factorized, damping: Damping, dtype: torch.dtype
    ) -> None:
        super().__init__(damping)
        self._matrix, self._inner, self._dtype = matrix, inner, dtype
        self._inverse_damping = 1 / damping.diagonal(matrix.shape[0], matrix.device)

    @classmethod
    def of(
        cls, matrix: FactoredMatrix, damping: Damping, dtype: torch.dtype
    ) -> SampleSpaceFactorization:
        """Form the kernel, and factorize it in place."""
        return cls(matrix, dense_kernel_factorization(matrix.kernel(damping)), damping, dtype)

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
        """The inner inverse, and what products with S need."""
        return self._inner.num_stored + self._matrix.num_stored

    @property
    def nbytes(self) -> int:
        """Bytes of these, in the precision that is worked in."""
        return self.num_stored * self._matrix.dtype.itemsize

    @property
    def _dense(self) -> DenseFactorization | None:
        """A dense factorization of I + S D⁻¹ Sᵀ, if there is one to be had."""
        inner = self._inner
        found = inner.exact if isinstance(inner, IterativeFactorization) else inner
        return found if isinstance(found, DenseFactorization) else None

    def _undamped(self, columns: Tensor, power: float = 1.0) -> Tensor:
        """D^-power times columns (N, k)."""
        return columns * self._inverse_damping.pow(power)[:, None].to(columns.dtype)

    def _matmat(self, rhs: Tensor) -> Tensor:
        scaled = self._undamped(rhs.to(self._matrix.dtype))
        solved = self._inner.solve(self._matrix.root_product(scaled))
        return (scaled - self._undamped(self._matrix.root_transposed(solved))).to(rhs.dtype)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        dense = self._dense
        if dense is None:
            raise NotFactorizableError(
                "an iterative inverse in sample space has no square root G with G Gᵀ = (H + D)⁻¹:"
                ' use sample() for samples, or method="samples" where it fits into memory'
            )
        columns = rhs.to(self._matrix.dtype)
        samples = self._matrix.root_product(self._undamped(columns, 0.5))
        shifted = dense.factor.clone()
        shifted.diagonal().add_(1.0)
        mixed = torch.linalg.solve_triangular(shifted, samples, upper=False)
        mixed = torch.linalg.solve_triangular(dense.factor.T, mixed, upper=True)
        inner = columns - self._undamped(self._matrix.root_transposed(mixed), 0.5)
        return self._undamped(inner, 0.5).to(rhs.dtype)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from N(0, (H + D)⁻¹), (num, N): u − D⁻¹Sᵀ(I + K)⁻¹(Su + ε), u ~ N(0, D⁻¹)."""
        num = self._check_draws(num, generator)
        with torch.no_grad():
            noise = self._noise(self.shape[0], num, generator).to(self._matrix.dtype)
            prior = self._undamped(noise, 0.5)
            if num == 0:
                return prior.T.to(self.dtype)
            extra = self._noise(self._matrix.num_root_rows, num, generator)
            samples = self._matrix.root_product(prior) + extra.to(self._matrix.dtype)
            solved = self._inner.solve(samples)
            back = self._undamped(self._matrix.root_transposed(solved))
            return (prior - back).T.to(self.dtype).contiguous()

    def _covariance_floats(self, num_rows: int) -> int:
        """Either the rows thrice, or once, with a kernel between points and what is solved."""
        size, inner = self._matrix.shape[0], self._inner.shape[0]
        return num_rows * max(3 * size, size + 2 * inner)

    def _covariances(self, chunk: RowPart, num_rows: int) -> Tensor:
        """J_i D⁻¹ J_iᵀ − Grams of L⁻¹ S D⁻¹ J_iᵀ; S D⁻¹ Jᵀ is a kernel between points."""
        dense = self._dense
        if dense is None or not isinstance(chunk, RowChunk):
            return super()._covariances(chunk, num_rows)
        rows = chunk.to_dense()
        prior = point_grams(self._undamped(rows.to(self._matrix.dtype).T, 0.5).T, num_rows)
        root = chunk.root.to(self._matrix.dtype)
        between = self._matrix.root.cross(root, self._inverse_damping, self._matrix.workspace)
        halves = torch.linalg.solve_triangular(dense.factor, between, upper=False)
        return (prior - point_grams(halves.T.contiguous(), num_rows)).to(rows.dtype)

    def _logdet(self) -> Tensor:
        return (self._inner.logdet().cpu() - self._inverse_damping.log().sum().cpu()).detach()

    def _inverse_diagonal(self) -> Tensor:
        dense = self._dense
        if dense is None:
            return self._estimated_diagonal()
        result = self._inverse_damping.clone()
        step = max(1, _COLUMN_FLOATS // max(1, dense.shape[0]))
        for rows in torch.arange(self.shape[0], device=self.device).split(step):
            columns = self._matrix.root_columns(rows)
            halves = torch.linalg.solve_triangular(dense.factor, columns, upper=False)
            squares = halves.double().square().sum(0)
            result[rows] -= squares * self._inverse_damping[rows].square()
        return result

    def _estimated_diagonal(self) -> Tensor:
        """1/D, minus an unbiased estimate of the diagonal of 1/D − (H + D)⁻¹."""
        change = estimate_diagonal(
            lambda columns: self._undamped(columns) - self._matmat(columns),
            self.shape[0],
            self._matrix.dtype,
            self.device,
        )
        return self._inverse_damping - change.clamp(min=0).minimum(0.999 * self._inverse_damping)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization with right-hand sides of another precision, on the same device."""
        check_float_type(dtype, device)
        if device is not None and torch.device(device) != self.device:
            raise NotFactorizableError(
                f"a factorization in sample space is on {self.device}, as its matrix: build the"
                " matrix again from a model on the other device"
            )
        kept = self._dtype if dtype is None else dtype
        return type(self)(self._matrix, self._inner, self._damping, kept)
