"""Global low rank, H ≈ V Λ Vᵀ: the paper's RSVD (§4.3), and its symmetric variant.

The paper sketches the Jacobian S = RJ, H = SᵀS, with linearised forward and backward passes: Q
spans the range of SΩ, and the singular vectors of QᵀS are the eigenvectors. The symmetric variant
(Nyström) sketches H itself, Y = HΩ, H ≈ Y (ΩᵀY)⁻¹ Yᵀ (Tropp, Yurtsever, Udell, Cevher 2017), at the
same number of passes, and needs nothing but products.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from hcurv.indexing import check_count
from hcurv.memory import require_bytes
from hcurv.nystrom import leading, nystrom, orthonormal
from hcurv.operators import SymmetricOperator

__all__ = ["LowRank"]

_COPIES = 7  # of the sketch at a time, at most, those of the SVD or QR included


class LowRank(SymmetricOperator):
    """The leading eigenpairs of a positive semi-definite matrix, by random sketches.

    Args:
        source: any `SymmetricOperator` or dense tensor; ``method="jacobian"`` needs a
            `GaussNewton`.
        rank: number of eigenpairs, at most N.
        method: "symmetric" (sketch of H) or "jacobian" (the paper's, sketch of J).
        oversampling: further columns of the sketch.
        power_iterations: further rounds of products, each of which sharpens the spectrum.
        seed: of the sketch.

    Attributes:
        values: eigenvalues, descending, (r,), r ≤ rank: those that are zero are left out.
        vectors: orthonormal eigenvectors, (N, r).
    """

    def __init__(
        self,
        source: Any,
        rank: int,
        *,
        method: Literal["symmetric", "jacobian"] = "symmetric",
        oversampling: int = 10,
        power_iterations: int = 0,
        seed: int = 0,
    ) -> None:
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
        require_bytes(
            _COPIES * size * width * self._dtype.itemsize,
            self._device,
            f"a sketch of {width} columns of a matrix of N = {size}",
            ("choose a smaller rank",),
        )
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(size, width, dtype=self._dtype, generator=generator).to(self._device)
        with torch.no_grad():
            if method == "symmetric":
                values, vectors = nystrom(source.__matmul__, start, power_iterations)
            else:
                values, vectors = _jacobian(source, start, power_iterations)
        rank = min(rank, int((values > 0).sum()))
        self.values = values[:rank]
        self.vectors = vectors[:, :rank].contiguous()

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
        """The N diagonal entries."""
        return self.vectors.square() @ self.values

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._apply(self.values, rhs)

    def _apply(self, values: Tensor, rhs: Tensor) -> Tensor:
        scale = values if rhs.ndim == 1 else values[:, None]
        return self.vectors @ (scale * (self.vectors.T @ rhs))

    def solve(self, rhs: Tensor, damping: float) -> Tensor:
        """(VΛVᵀ + damping·I)⁻¹ rhs, rhs (N,) or (N, k)."""
        self._check_vectors(rhs)
        damping = _check_damping(damping)
        # 1/(λ + Λ) − 1/λ on the eigenvectors, 1/λ everywhere.
        change = -self.values / ((self.values + damping) * damping)
        with torch.no_grad():
            return rhs / damping + self._apply(change, rhs)

    def logdet(self, damping: float) -> Tensor:
        """log det(VΛVᵀ + damping·I), in double precision."""
        damping = _check_damping(damping)
        known = (self.values.double() + damping).log().sum()
        rest: Tensor = known + (self.shape[0] - self.values.numel()) * math.log(damping)
        return rest

    def sample(self, num: int, damping: float, generator: torch.Generator | None = None) -> Tensor:
        """Samples of N(0, (VΛVᵀ + damping·I)⁻¹), (num, N)."""
        num = check_count(num, "num", least=0)
        damping = _check_damping(damping)
        where = self.device if generator is None else generator.device
        noise = torch.randn(self.shape[0], num, dtype=self.dtype, device=where, generator=generator)
        noise = noise.to(self.device)
        change = (self.values + damping).rsqrt() - 1 / math.sqrt(damping)
        samples = noise / math.sqrt(damping) + self._apply(change, noise)
        return samples.T.contiguous()


def _check_damping(damping: float) -> float:
    if not (math.isfinite(damping) and damping > 0):
        raise ValueError(f"damping must be positive: low rank alone is singular; got {damping}")
    return float(damping)


def _jacobian(source: Any, start: Tensor, power_iterations: int) -> tuple[Tensor, Tensor]:
    if start.shape[1] == 0:
        return start.new_zeros(0), start
    basis = orthonormal(source.root_product(start))
    for _ in range(power_iterations):
        basis = orthonormal(source.root_product(orthonormal(source.root_transposed(basis))))
    values, vectors = leading(source.root_transposed(basis))
    return values.to(start.dtype), vectors
