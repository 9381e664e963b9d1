"""The inverse of a damped K-FAC or EKFAC matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.arrays import takes_arrays
from hcurv.baselines.kronecker_chain import Identity, InverseChain
from hcurv.baselines.kronecker_moments import ParameterMatrix, write_layers
from hcurv.damping import Damping, DeviceLike
from hcurv.factorized import Factorized, NotFactorizableError, check_float_type

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["KFACFactorization"]


class KFACFactorization(Factorized):
    """The inverse of a damped K-FAC approximation. Made by `KFAC.factorize`.

    K-FAC damps the factors of each layer: the matrix that is inverted has the diagonal blocks
    (G + √λ/π I) ⊗ (A + π√λ I), not G ⊗ A + λI. To diagonal blocks it adds λI. EKFAC adds λ to its
    eigenvalues, which is the same as adding λI, unless they are calibrated.

    Args:
        layers: where the parameters of each layer lie.
        chain: the inverse.
        damping: λ, a number for all layers or (N,) numbers that are equal within each layer.
        shifts: what was added to the diagonals of A and of G of each layer, or None for a diagonal
            block, to which λ was added; None for EKFAC.
    """

    def __init__(
        self,
        layers: Sequence[ParameterMatrix],
        chain: InverseChain,
        damping: Damping,
        shifts: Sequence[tuple[float, float] | None] | None,
    ) -> None:
        super().__init__(damping)
        self._layers, self._chain = tuple(layers), chain
        self._shifts = None if shifts is None else tuple(shifts)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        size = sum(layer.num_units * layer.num_columns for layer in self._layers)
        return (size, size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of right-hand sides and solutions."""
        return self._chain.blocks[0].like.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the factors are stored."""
        return self._chain.blocks[0].like.device

    @property
    def num_stored(self) -> int:
        """The number of floats of all inverted factors."""
        return self._chain.num_stored

    def _matmat(self, rhs: Tensor) -> Tensor:
        values = self._chain.solve([layer.read(rhs) for layer in self._layers])
        return write_layers(self._layers, values)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        values = self._chain.half_solve([layer.read(rhs) for layer in self._layers])
        return write_layers(self._layers, values)

    def _logdet(self) -> Tensor:
        return self._chain.logdet()

    def _inverse_diagonal(self) -> Tensor:
        values = [diagonal[None] for diagonal in self._chain.diagonals()]
        return write_layers(self._layers, values).squeeze(1)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """Return this factorization on another device or in another precision.

        Args:
            device: the device; None for the present one.
            dtype: torch.float32 or torch.float64; None for the present one.
        """
        check_float_type(dtype, device)
        chain = self._chain.to(device, dtype)
        return type(self)(self._layers, chain, self._damping.to(device), self._shifts)

    @takes_arrays
    def solve(self, rhs: Tensor) -> Tensor:
        """Solve for ``rhs``, (N,) or (N, k).

        Gradients pass to ``rhs`` and, unless the structure is block-tridiagonal, to the damping.

        Raises:
            NotFactorizableError: the damping requires a gradient that is not available.
        """
        self._check_vectors(rhs)
        if rhs.numel() == 0 or self._shifts is None or not self._wants_damping_gradient():
            return super().solve(rhs)
        return _Solve.apply(rhs, self._layer_dampings(), self)  # type: ignore[no-any-return,no-untyped-call]

    def logdet(self) -> Tensor:
        """Compute the log-determinant of the damped matrix, in double precision.

        Gradients pass to the damping, unless the structure is block-tridiagonal.

        Raises:
            NotFactorizableError: the damping requires a gradient that is not available.
        """
        if self._shifts is None or not self._wants_damping_gradient():
            return super().logdet()
        return _LogDet.apply(self._layer_dampings(), self)  # type: ignore[no-any-return,no-untyped-call]

    def _wants_damping_gradient(self) -> bool:
        wanted = torch.is_grad_enabled() and self._damping.tensor.requires_grad
        if wanted and self._chain.links:
            raise NotFactorizableError(
                'K-FAC with structure="block-tridiagonal" has no gradients with respect to its'
                ' damping; use structure="block-diagonal", or pass damping.detach()'
            )
        return wanted

    def _layer_dampings(self) -> Tensor:
        """The damping of each layer, (layers,), with its gradient."""
        damping = self._damping.tensor
        if damping.ndim == 0:
            return damping.expand(len(self._layers))
        first = [int(layer.rows()[0]) for layer in self._layers]
        return damping[torch.tensor(first, device=damping.device)]

    # With a = π√λ and c = √λ/π, M = (G + cI) ⊗ (A + aI) has the derivative
    # dM/dλ = (a (G + cI) ⊗ I + c I ⊗ (A + aI)) / 2λ, because da/dλ = a/2λ and dc/dλ = c/2λ.

    def _solve_slopes(self, rhs: Tensor, adjoint: Tensor) -> Tensor:
        """Compute −wᵀ (dM/dλ) x of each layer, where Mx = rhs and w is ``adjoint``, (layers,).

        (G + cI) X = B (A + aI)⁻¹ and X (A + aI) = (G + cI)⁻¹ B, with (A + aI)⁻¹ = K_A K_Aᵀ and
        (G + cI)⁻¹ = K_G K_Gᵀ, need no factor beyond those of the inverse.
        """
        assert self._shifts is not None
        slopes = []
        for layer, block, shift in zip(self._layers, self._chain.blocks, self._shifts, strict=True):
            b, w = layer.read(rhs).double(), layer.read(adjoint).double()
            if shift is None or isinstance(block.basis, Identity):  # dM/dλ = I
                slopes.append(-(w * b * block.diagonal()).sum())
                continue
            a, c = shift
            inputs, gradients = block.basis.inputs.double(), block.basis.gradients.double()
            by_inputs = ((w @ inputs) * (b @ inputs)).sum()
            by_gradients = ((gradients.T @ w) * (gradients.T @ b)).sum()
            slopes.append(-(a * by_inputs + c * by_gradients) / (2 * a * c))
        return torch.stack(slopes)

    def _logdet_slopes(self) -> Tensor:
        """Compute tr(M⁻¹ dM/dλ) of each layer, (layers,)."""
        assert self._shifts is not None
        slopes = []
        for block, shift in zip(self._chain.blocks, self._shifts, strict=True):
            if shift is None or isinstance(block.basis, Identity):
                slopes.append(block.diagonal().sum())
                continue
            a, c = shift
            inputs, gradients = block.basis.inputs.double(), block.basis.gradients.double()
            by_inputs = gradients.shape[0] * inputs.square().sum()
            by_gradients = inputs.shape[0] * gradients.square().sum()
            slopes.append((a * by_inputs + c * by_gradients) / (2 * a * c))
        return torch.stack(slopes)


class _Solve(torch.autograd.Function):
    """x = M⁻¹ b, with derivatives with respect to b and to the damping of each layer."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, dampings: Tensor, factorized: KFACFactorization) -> Tensor:
        ctx.factorized = factorized
        ctx.save_for_backward(rhs, dampings)
        return factorized._solve_columns(rhs.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rhs, dampings = ctx.saved_tensors
        adjoint = ctx.factorized._solve_columns(gradients[0].contiguous())
        columns = (rhs, adjoint) if rhs.ndim == 2 else (rhs[:, None], adjoint[:, None])
        return adjoint, ctx.factorized._solve_slopes(*columns).to(dampings), None


class _LogDet(torch.autograd.Function):
    """log det M, with derivatives with respect to the damping of each layer."""

    @staticmethod
    def forward(ctx: Any, dampings: Tensor, factorized: KFACFactorization) -> Tensor:
        ctx.factorized = factorized
        ctx.save_for_backward(dampings)
        return factorized._logdet()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dampings,) = ctx.saved_tensors
        slopes = ctx.factorized._logdet_slopes()
        return (gradients[0].to(slopes) * slopes).to(dampings), None
