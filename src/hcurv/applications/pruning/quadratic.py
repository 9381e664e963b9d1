"""The quadratic model of the loss, and its minimiser once some weights are zero.

Around weights θ the loss changes by about q(δ) = gᵀδ + ½ δᵀ(H + λI)δ. Let P be the weights that
must become zero, so that δ_P = −θ_P, and K those that are kept. The best move of the latter solves

    (H_KK + λI) δ_K = −g_K + H_KP θ_P,

and to remove weight k alone, all other kept ones following, costs ½ θ_k²/[(H_KK + λI)⁻¹]_kk.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hcurv.linalg import cg
from hcurv.memory import available_bytes, require_bytes
from hcurv.network.gauss_newton import GaussNewton
from hcurv.operators import SymmetricOperator

__all__ = ["QuadraticModel"]

# Blocks of up to this many kept weights are factorized, in double precision, which takes a second.
# Above it conjugate gradients on exact products are faster (measured on digits and MNIST).
MAX_DENSE = 2048
# A correction moves weights that the next step moves again, so it needs few digits.
_TOLERANCE, _MAX_ITERATIONS = 1e-3, 500
# Weights that are not active get a damping this many times the largest one, which holds them where
# they are.
_HOLD = 1e12


class QuadraticModel:
    """q(δ) = gᵀδ + ½ δᵀ(H + λI)δ around the present weights.

    Args:
        matrix: H.
        weights: θ, flat, (N,).
        gradient: g, flat, (N,); None for zero.
        damping: λ > 0.
    """

    def __init__(
        self, matrix: GaussNewton, weights: Tensor, gradient: Tensor | None, damping: float
    ) -> None:
        self.matrix, self.weights, self.damping = matrix, weights, damping
        self._gradient = gradient
        self._known: tuple[Tensor, Tensor] | None = None

    @property
    def gradient(self) -> Tensor:
        """g, (N,)."""
        return torch.zeros_like(self.weights) if self._gradient is None else self._gradient

    @cached_property
    def diagonal(self) -> Tensor:
        """The diagonal of H, (N,)."""
        return self.matrix.diagonal()

    def minimiser(self, active: Tensor) -> Tensor:
        """The weights θ + δ that minimise q among those that are zero where they are not active.

        Args:
            active: which weights may differ from zero, (N,), boolean.
        """
        kept = torch.where(active, self.weights, 0.0)
        rhs = self.matrix @ (self.weights - kept) - self.gradient
        rhs = torch.where(active, rhs, 0.0)
        if not bool(rhs.any()):
            return kept
        if self.is_dense(active):
            rows = active.nonzero().squeeze(1)
            solved = torch.cholesky_solve(rhs[rows, None].double(), self._factor(active))
            return kept.index_add(0, rows, solved.squeeze(1).to(kept.dtype))
        found = cg(
            _Restricted(self.matrix, active),
            rhs,
            damping=self.damping,
            tolerance=_TOLERANCE,
            max_iterations=_MAX_ITERATIONS,
        )
        return kept + found.solution

    def is_dense(self, active: Tensor) -> bool:
        """Whether the block of the active weights is small enough to be factorized."""
        size = int(active.sum())
        free = available_bytes(self.matrix.device)
        # The block in the precision of the model, and its copy, factor and inverse in double.
        needed = size**2 * (self.matrix.dtype.itemsize + 3 * 8) + self.matrix.workspace
        return size <= MAX_DENSE and (free is None or needed <= free)

    def has_cheap_inverse(self, active: Tensor) -> bool:
        """Whether the diagonal of (H_AA + λI)⁻¹ over the active weights takes seconds, not more."""
        return self.is_dense(active) or self.matrix.num_root_rows <= MAX_DENSE

    def inverse_diagonal(self, active: Tensor) -> Tensor:
        """The diagonal of (H_AA + λI)⁻¹ over the active weights A, and ones elsewhere; (N,)."""
        result = torch.ones_like(self.weights)
        if self.is_dense(active):
            result[active] = self.inverse(active).diagonal().to(result.dtype)
            return result
        damping = torch.where(active, self.damping, _HOLD * self.damping).double()
        values = self.matrix.factorize(damping).inverse_diagonal()
        return torch.where(active, values.to(result), result)

    def inverse(self, active: Tensor) -> Tensor:
        """(H_AA + λI)⁻¹ over the active weights A, in double precision, if it `is_dense`."""
        return torch.cholesky_inverse(self._factor(active))

    def _factor(self, active: Tensor) -> Tensor:
        """The lower Cholesky factor of H_AA + λI, in double precision; the last one is kept."""
        if self._known is not None and torch.equal(self._known[0], active):
            return self._known[1]
        rows = active.nonzero().squeeze(1)
        self._known = None
        require_bytes(
            2 * 8 * rows.numel() ** 2,  # the block and its factor
            self.matrix.device,
            f"a dense factorization over {rows.numel()} weights",
            ("remove more weights in the first step", "use another saliency"),
        )
        block = self.matrix.block(rows, rows).double()
        block.diagonal().add_(self.damping)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(block)
        if int(info):
            raise ValueError(
                f"H + λI is not positive definite with λ = {self.damping:.1e} in"
                f" {self.matrix.dtype}: use a larger damping, or a model and data in float64"
            )
        self._known = (active.clone(), factor)
        return factor


class _Restricted(SymmetricOperator):
    """H with rows and columns of zeros where weights are not active."""

    def __init__(self, matrix: GaussNewton, active: Tensor) -> None:
        self._matrix, self._active = matrix, active[:, None]

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        return self._matrix.device

    @property
    def num_stored(self) -> int:
        return self._matrix.num_stored

    def diagonal(self) -> Tensor:
        return torch.where(self._active[:, 0], self._matrix.diagonal(), 0.0)

    def _matmat(self, rhs: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=rhs.dtype, device=rhs.device)
        product = self._matrix @ torch.where(self._active, rhs, zero)
        return torch.where(self._active, product, zero)
