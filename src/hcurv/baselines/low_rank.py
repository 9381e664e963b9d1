"""Global low rank, H ≈ V Λ Vᵀ: the paper's RSVD (§4.3), and its symmetric variant.

The paper sketches the Jacobian S = RJ, H = SᵀS, with linearised forward and backward passes: Q
spans the range of SΩ, and the singular vectors of QᵀS are the eigenvectors. The symmetric variant
(Nyström) sketches H itself, Y = HΩ, H ≈ Y (ΩᵀY)⁻¹ Yᵀ (Tropp, Yurtsever, Udell, Cevher 2017), at the
same number of passes, and needs nothing but products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from hcurv.damping import Damping, DampingLike, DeviceLike, as_damping
from hcurv.factorized import Factorized, check_float_type
from hcurv.indexing import check_count, check_seed
from hcurv.layout import layout_of
from hcurv.linalg.nystrom import leading, nystrom, orthonormal, outer_eigenpairs
from hcurv.linalg.tall_factors import by_columns
from hcurv.memory import require_bytes
from hcurv.operators import SymmetricOperator
from hcurv.residuals import warn_of_residual
from hcurv.sources import as_operator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LowRank", "LowRankFactorization"]

# A build holds at most this many copies of the sketch at a time, those of its SVD or QR included.
_COPIES = 7


class LowRank(SymmetricOperator):
    """The leading eigenpairs of a positive semi-definite matrix, by random sketches.

    Args:
        source: any `SymmetricOperator` or dense tensor; ``method="jacobian"`` needs a
            `GaussNewton`.
        rank: number of eigenpairs, at most N.
        method: "symmetric" (sketch of H) or "jacobian" (the paper's, sketch of J).
        oversampling: further columns of the sketch.
        power_iterations: further rounds of products, each of which sharpens the spectrum. Without
            any, the error was 2.2 times the optimum on a small classifier.
        seed: of the sketch.

    Attributes:
        values: eigenvalues, descending, (r,), r ≤ rank: those that are zero are left out.
        vectors: orthonormal eigenvectors, (N, r).

    Examples:
        >>> L = hcurv.baselines.LowRank(H, rank=10)
        >>> L.vectors.shape, bool((L.values.diff() <= 0).all())
        (torch.Size([51, 10]), True)
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        *,
        method: Literal["symmetric", "jacobian"] = "symmetric",
        oversampling: int = 10,
        power_iterations: int = 1,
        seed: int = 0,
    ) -> None:
        checked = as_operator(source, "the source")
        if isinstance(source, np.ndarray):
            source = checked
        size = source.shape[0]
        rank = check_count(rank, "rank", least=0, most=size)
        oversampling = check_count(oversampling, "oversampling", least=0)
        power_iterations = check_count(power_iterations, "power_iterations", least=0)
        if method not in ("symmetric", "jacobian"):
            raise ValueError(f'method must be "symmetric" or "jacobian"; got {method!r}')
        if method == "jacobian" and not hasattr(source, "root_product"):
            raise ValueError(
                'method="jacobian" needs a GaussNewton; for other matrices use method="symmetric"'
            )
        width = min(size, rank + oversampling)
        self._device: torch.device = source.device
        self._dtype: torch.dtype = source.dtype
        self.layout = layout_of(source)
        require_bytes(
            _COPIES * size * width * self._dtype.itemsize,
            self._device,
            f"a sketch of {width} columns of a matrix of N = {size}",
            ("choose a smaller rank",),
        )
        generator = torch.Generator().manual_seed(check_seed(seed))
        start = torch.randn(size, width, dtype=self._dtype, generator=generator).to(self._device)
        with torch.no_grad():
            if method == "symmetric":
                values, vectors = nystrom(source.__matmul__, start, power_iterations)
            else:
                values, vectors = _jacobian(source, start, power_iterations)
        rank = min(rank, int((values > 0).sum()))
        self.values = values[:rank]
        self.vectors = by_columns(vectors[:, :rank])

    def __repr__(self) -> str:
        """Size and rank in one line."""
        return f"LowRank(N={self.shape[0]}, rank={self.values.numel()}, dtype={self.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self.vectors.shape[0], self.vectors.shape[0])

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
        """r (N + 1) floats."""
        return self.vectors.numel() + self.values.numel()

    def diagonal(self) -> Tensor:
        """The N diagonal entries.

        Examples:
            >>> L = hcurv.baselines.LowRank(H, rank=51)
            >>> torch.allclose(L.diagonal(), H.diagonal())
            True
        """
        return self.vectors.square() @ self.values

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self.vectors @ (self.values[:, None] * (self.vectors.T @ rhs))

    def factorize(self, damping: DampingLike, *, warn: bool = True) -> LowRankFactorization:
        """Factorize VΛVᵀ + D.

        Args:
            damping: D, positive because a matrix of low rank is singular: a number, a tensor (N,),
                or numbers by the names of parameters or layers.
            warn: whether to warn of a large residual, which a preconditioner may have.

        Warns:
            AccuracyWarning: the damping is too small for the precision: a random residual, which
                is measured once, here, is above 1e-2.

        Examples:
            >>> L = hcurv.baselines.LowRank(H, rank=5)
            >>> x = L.factorize(0.1).solve(b)
            >>> torch.allclose(L @ x + 0.1 * x, b)
            True
        """
        resolved = as_damping(damping, self.shape[0], self.layout)
        resolved.require_positive("a matrix of low rank is singular")
        factors = self._factorize(resolved)
        if warn:
            warn_of_residual(self, factors)
        return factors

    def _factorize(self, resolved: Damping) -> LowRankFactorization:
        with torch.no_grad():
            if resolved.is_number:
                shares = self.values.double() / resolved.number
                return LowRankFactorization(self.vectors, shares, resolved)
            roots = resolved.diagonal(self.shape[0], self.device).rsqrt().to(self.dtype)
            scaled = self.vectors * self.values.sqrt() * roots[:, None]
            return LowRankFactorization(*outer_eigenpairs(scaled), resolved)


class LowRankFactorization(Factorized):
    """(D^½ (I + QΣQᵀ) D^½)⁻¹ with orthonormal Q: Woodbury's formula and the determinant lemma.

    Made by `LowRank.factorize`.

    Args:
        basis: Q, (N, r).
        shares: the diagonal of Σ, (r,), in double precision.
        damping: D.
    """

    def __init__(self, basis: Tensor, shares: Tensor, damping: Damping) -> None:
        super().__init__(damping)
        self._basis, self._shares = by_columns(basis), shares
        self._roots = damping.diagonal(basis.shape[0], basis.device).rsqrt()

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._basis.shape[0], self._basis.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self._basis.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self._basis.device

    @property
    def num_stored(self) -> int:
        """r (N + 1) floats."""
        return self._basis.numel() + self._shares.numel()

    def _change(self, columns: Tensor, changes: Tensor) -> Tensor:
        """(I + Q diag(changes) Qᵀ) columns."""
        mixed = changes[:, None].to(columns.dtype) * (self._basis.T @ columns)
        return torch.addmm(columns, self._basis, mixed)

    def _matmat(self, rhs: Tensor) -> Tensor:
        roots = self._roots[:, None].to(rhs.dtype)
        return roots * self._change(roots * rhs, -self._shares / (1 + self._shares))

    def _half_solve(self, rhs: Tensor) -> Tensor:
        roots = self._roots[:, None].to(rhs.dtype)
        return roots * self._change(rhs, (1 + self._shares).rsqrt() - 1)

    def _logdet(self) -> Tensor:
        return (self._shares.log1p().sum() - 2 * self._roots.log().sum()).cpu()

    def _inverse_diagonal(self) -> Tensor:
        changes = -self._shares / (1 + self._shares)
        return self._roots.square() * (1 + self._basis.double().square() @ changes)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization on another device or in another precision."""
        check_float_type(dtype, device)
        return type(self)(
            self._basis.to(device, dtype), self._shares.to(device), self._damping.to(device)
        )


def _jacobian(source: Any, start: Tensor, power_iterations: int) -> tuple[Tensor, Tensor]:
    if start.shape[1] == 0:
        return start.new_zeros(0), start
    basis = orthonormal(source.root_product(start))
    for _ in range(power_iterations):
        basis = orthonormal(source.root_product(orthonormal(source.root_transposed(basis))))
    values, vectors = leading(source.root_transposed(basis))
    return values.to(start.dtype), vectors
