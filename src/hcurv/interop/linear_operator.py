"""Matrices for linear_operator and GPyTorch: scale·A + D, whose solves are those of this library.

``A`` is constant; gradients go to the scale, to the damping D and to right-hand sides. Adding a
diagonal or multiplying by a positive number gives another `CurvatureOperator`, so that a GPyTorch
likelihood, which adds its noise, keeps the fast solves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hcurv.damping import as_damping
from hcurv.factorized import Factorizable, Factorized, NotFactorizableError
from hcurv.operators import SymmetricOperator
from hcurv.sources import MatrixProduct, as_operator

try:
    from linear_operator import LinearOperator
    from linear_operator.operators import (
        ConstantDiagLinearOperator,
        DiagLinearOperator,
    )

    from hcurv.interop.fixed_matrix import FixedMatrix, HeldMatrix
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hcurv.interop.linear_operator needs linear_operator: pip install 'hcurv[linear-operator]'",
        name=error.name,
    ) from error

__all__ = ["CurvatureOperator", "InverseOperator", "as_linear_operator"]

_NO_BATCH = torch.Size()


def as_linear_operator(
    matrix: SymmetricOperator | MatrixProduct | Tensor,
    damping: float | Tensor = 0.0,
    scale: float | Tensor = 1.0,
    *,
    preconditioner: Factorizable | None = None,
    **options: Any,
) -> LinearOperator:
    """Make a `linear_operator.LinearOperator` of any matrix of this library.

    Args:
        matrix: A, such as an `HMatrix`, a `GaussNewton` or its kernel, or a `Factorized` F, which
            stands for (A + D)⁻¹.
        damping: D, a number or a tensor (N,). Gradients are passed on to it. A `Factorized` has its
            own damping already, so that it must be 0 for it.
        scale: a positive number. Gradients are passed on to it.
        preconditioner: a matrix near A that can be factorized, such as ``hcurv.compress(H)``. If it
            is given, systems are solved by linear_operator's conjugate gradients with
            scale·A + D, preconditioned by this matrix with the same scale and damping.
        options: passed on to ``matrix.factorize(damping, **options)``, by which systems are solved
            otherwise. Matrices without it, such as sums, are left to linear_operator.

    Returns:
        A `CurvatureOperator`, or an `InverseOperator` for a `Factorized`.

    Raises:
        TypeError, ValueError: the matrix, damping or scale are not what they should be.

    Examples:
        >>> from hcurv.interop.linear_operator import as_linear_operator
        >>> P = as_linear_operator(H, damping=0.1)
        >>> torch.allclose(P @ P.solve(b), b)
        True
        >>> inv_quad, logdet = P.inv_quad_logdet(b[:, None], logdet=True)
        >>> torch.allclose(logdet, H.factorize(0.1).logdet())
        True
        >>> as_linear_operator(F).zero_mean_mvn_samples(10).shape  # of the posterior
        torch.Size([10, 51])
    """
    operator = as_operator(matrix, "the matrix")
    dtype, device = operator.dtype, operator.device
    factor = torch.as_tensor(scale, dtype=dtype, device=device)
    if factor.numel() != 1 or not float(factor) > 0:
        raise ValueError(f"scale must be one positive number; got {scale!r}")
    factor = factor.reshape(())
    shift = as_damping(damping, operator.shape[0]).tensor.to(device, dtype)
    if isinstance(operator, Factorized):
        if bool((shift != 0).any()) or preconditioner is not None or options:
            raise ValueError(
                "F stands for (A + D)⁻¹ and has its own damping: pass no damping, preconditioner or"
                " options with it"
            )
        return InverseOperator(factor, held=HeldMatrix(operator, {}))
    near = None
    if preconditioner is not None:
        is_factorizable = isinstance(preconditioner, Factorizable)
        if not isinstance(preconditioner, SymmetricOperator) or not is_factorizable:
            raise TypeError(
                "the preconditioner must be a matrix with factorize(damping), such as"
                f" hcurv.compress(H); got {type(preconditioner).__name__}"
            )
        near = HeldMatrix(preconditioner, {})
    return CurvatureOperator(factor, shift, held=HeldMatrix(operator, options), near=near)


class CurvatureOperator(FixedMatrix):
    """scale·A + D. Made by `as_linear_operator`.

    Args:
        scale: a positive number, a tensor of no dimension.
        damping: D, a tensor of no dimension or (N,).
        held: A.
        near: a preconditioner, or None.
        batch: the operator stands for so many copies of the matrix.
    """

    def __init__(
        self,
        scale: Tensor,
        damping: Tensor,
        *,
        held: HeldMatrix,
        near: HeldMatrix | None = None,
        batch: torch.Size = _NO_BATCH,
    ) -> None:
        super().__init__(scale, damping, held=held, near=near, batch=batch)
        self._scale, self._damping, self._held, self._near = scale, damping, held, near
        self._batch = batch

    def _with(self, scale: Tensor, damping: Tensor) -> CurvatureOperator:
        return CurvatureOperator(scale, damping, **self._nondifferentiable_kwargs)

    @property
    def _solves_itself(self) -> bool:
        return self._near is None and isinstance(self._held.matrix, Factorizable)

    def _matmul(self, rhs: Tensor) -> Tensor:
        damping = self._damping
        if damping.ndim == 1 and rhs.ndim > 1:
            damping = damping[:, None]
        return self._spread(self._scale * self._held.product(rhs) + damping * rhs)

    def _diagonal(self) -> Tensor:
        diagonal = self._held.matrix.diagonal().to(self.device, self.dtype)
        return (self._scale * diagonal + self._damping).expand(*self._batch, -1)

    def _entries(self, values: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        damping = self._damping if self._damping.ndim == 0 else self._damping[rows.to(self.device)]
        return self._scale * values + damping * (rows == cols).to(self.device)

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        if factor.numel() != 1 or not float(factor) > 0:
            return super()._mul_constant(other)
        factor = factor.reshape(())
        return self._with(factor * self._scale, factor * self._damping)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        """Add a diagonal, (N,) or one number."""
        if diag.numel() == 1:
            return self._with(self._scale, self._damping + diag.reshape(()))
        if tuple(diag.shape) == (self.shape[-1],):
            return self._with(self._scale, self._damping + diag)
        return super().add_diagonal(diag)

    def __add__(self, other: Any) -> Any:
        """Add a number's multiple of the identity or a diagonal to the damping."""
        if isinstance(other, ConstantDiagLinearOperator) and other.shape == self.shape[-2:]:
            return self.add_diagonal(other.diag_values)
        if isinstance(other, DiagLinearOperator) and other.shape == self.shape[-2:]:
            return self.add_diagonal(other._diagonal())
        return super().__add__(other)

    def _preconditioner(self) -> tuple[Any, Any, Any]:
        if self._near is None:
            return None, None, None
        operator = CurvatureOperator(self._scale, self._damping, held=self._near, batch=self._batch)

        def run(rhs: Tensor) -> Tensor:
            return operator.solve(rhs.detach())

        return run, operator, operator.logdet()

    def sqrt_inv_matmul(self, rhs: Tensor, lhs: Tensor | None = None) -> Any:
        """(scale·A + D)^-½ R, the symmetric root.

        With a preconditioner, linear_operator would give another root of the inverse, so that it is
        asked without one.
        """
        if self._near is None:
            return super().sqrt_inv_matmul(rhs, lhs)
        kwargs = {**self._nondifferentiable_kwargs, "near": None}
        return CurvatureOperator(*self._args, **kwargs).sqrt_inv_matmul(rhs, lhs)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """(scale·A + D)⁻¹ R, or L (scale·A + D)⁻¹ R."""
        if not self._solves_itself:
            return super().solve(right_tensor, left_tensor)
        if right_tensor.shape[-min(2, right_tensor.ndim)] != self.shape[-1]:
            raise RuntimeError(
                f"a right-hand side of {tuple(self.shape)} must have {self.shape[-1]} rows;"
                f" got {tuple(right_tensor.shape)}"
            )
        solved: Tensor = _Solve.apply(right_tensor, self._scale, self._damping, self)  # type: ignore[no-untyped-call]
        solved = self._spread(solved)
        return solved if left_tensor is None else left_tensor @ solved

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        if num_tridiag or not self._solves_itself:
            return super()._solve(rhs, preconditioner, num_tridiag)
        return self._spread(self._solved(rhs))

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        """Rᵀ (scale·A + D)⁻¹ R, its diagonal or its trace, and log|scale·A + D|."""
        if not self._solves_itself:
            found: tuple[Tensor, Tensor] = super().inv_quad_logdet(
                inv_quad_rhs, logdet, reduce_inv_quad
            )
            return found
        quad = value = torch.zeros((), dtype=self.dtype, device=self.device)
        if inv_quad_rhs is not None:
            rhs = inv_quad_rhs if inv_quad_rhs.ndim > 1 else inv_quad_rhs[:, None]
            quad = (rhs * self.solve(rhs)).sum(-2)
            if reduce_inv_quad:
                quad = quad.sum(-1)
        if logdet:
            value = _LogDet.apply(self._scale, self._damping, self)  # type: ignore[no-untyped-call]
        return quad, value.expand(self._batch)

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        """Rᵀ (scale·A + D)⁻¹ R."""
        return self.inv_quad_logdet(inv_quad_rhs, False, reduce_inv_quad)[0]

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Samples of N(0, scale·A + D), (num_samples, N).

        With P = scale·A + D and G Gᵀ = P⁻¹, P G z has the covariance P.
        """
        if not self._solves_itself:
            samples: Tensor = super().zero_mean_mvn_samples(num_samples)
            return samples
        factors = self._factors()
        shape = (*self._batch, self.shape[-1], num_samples)
        noise = torch.randn(shape, dtype=self.dtype, device=self.device)
        try:
            half = self._held.columns(noise, factors.sqrt_solve)
        except NotFactorizableError:
            return super().zero_mean_mvn_samples(num_samples)
        return self._matmul(half / self._scale.sqrt()).movedim(-1, 0).contiguous()

    def _factors(self) -> Factorized:
        """(A + D/scale)⁻¹."""
        ratio = (self._damping.detach() / self._scale.detach()).double()
        return self._held.factorized(ratio.to(self._held.matrix.device))

    def _solved(self, rhs: Tensor) -> Tensor:
        return self._held.columns(rhs, self._factors().solve) / self._scale.detach()


class _Solve(torch.autograd.Function):
    """X = P⁻¹ R, P = s·A + D. With W = P⁻¹ ∂f/∂X: ∂f/∂R = W, ∂f/∂s = −⟨W, A X⟩, ∂f/∂D = −W∘X."""

    @staticmethod
    def forward(
        ctx: Any, rhs: Tensor, scale: Tensor, damping: Tensor, operator: CurvatureOperator
    ) -> Tensor:
        found = operator._solved(rhs)
        ctx.operator = operator
        ctx.save_for_backward(found, damping)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found, damping = ctx.saved_tensors
        operator: CurvatureOperator = ctx.operator
        solved = operator._solved(gradients[0])
        for_scale = for_damping = None
        if ctx.needs_input_grad[1]:
            for_scale = -(solved * operator._held.product(found)).sum()
        if ctx.needs_input_grad[2]:
            both = solved * found
            for_damping = -(both.sum() if damping.ndim == 0 else _row_sums(both))
        return solved, for_scale, for_damping, None


def _row_sums(values: Tensor) -> Tensor:
    """The sums over all but the rows of (…, N, k) or (N,)."""
    if values.ndim == 1:
        return values
    return values.movedim(-2, 0).reshape(values.shape[-2], -1).sum(1)


class _LogDet(torch.autograd.Function):
    """log|P|, P = s·A + D: ∂/∂D = diag(P⁻¹) and ∂/∂s = tr(P⁻¹A) = (N − Σ D_i [P⁻¹]_ii)/s."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, damping: Tensor, operator: CurvatureOperator) -> Tensor:
        ctx.operator = operator
        ctx.save_for_backward(scale, damping)
        size = operator.shape[-1]
        return operator._factors().logdet().to(scale) + size * scale.log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale, damping = ctx.saved_tensors
        operator: CurvatureOperator = ctx.operator
        inverse = operator._factors().inverse_diagonal().to(scale) / scale
        for_scale = (operator.shape[-1] - (damping * inverse).sum()) / scale
        for_damping = inverse.sum() if damping.ndim == 0 else inverse
        return gradients[0] * for_scale, gradients[0] * for_damping, None


class InverseOperator(FixedMatrix):
    """scale·(A + D)⁻¹, the covariance of a posterior, from a `Factorized` F.

    Products are solves with F, log-determinants and samples are those of F. Systems with it, which
    are products with A + D, are solved by linear_operator, because F does not know A.

    Args:
        scale: a positive number, a tensor of no dimension.
        held: F.
        batch: the operator stands for so many copies of the matrix.
    """

    def __init__(self, scale: Tensor, *, held: HeldMatrix, batch: torch.Size = _NO_BATCH) -> None:
        super().__init__(scale, held=held, batch=batch)
        self._scale, self._held, self._batch = scale, held, batch

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._spread(self._scale * self._held.product(rhs))

    def _diagonal(self) -> Tensor:
        diagonal = self._held.matrix.diagonal().to(self.device, self.dtype)
        return (self._scale * diagonal).expand(*self._batch, -1)

    def _entries(self, values: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        return self._scale * values

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        if factor.numel() != 1 or not float(factor) > 0:
            return super()._mul_constant(other)
        return InverseOperator(factor.reshape(()) * self._scale, **self._nondifferentiable_kwargs)

    def logdet(self) -> Tensor:
        """log|scale·(A + D)⁻¹|."""
        factors = self._held.matrix
        assert isinstance(factors, Factorized)
        size = self.shape[-1]
        value = size * self._scale.log() - factors.logdet().detach().to(self._scale)
        return value.expand(self._batch)

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        """Rᵀ (A + D) R/scale by solving, and the log-determinant of F."""
        quad = value = torch.zeros((), dtype=self.dtype, device=self.device)
        if inv_quad_rhs is not None:
            rhs = inv_quad_rhs if inv_quad_rhs.ndim > 1 else inv_quad_rhs[:, None]
            quad = (rhs * self.solve(rhs)).sum(-2)
            if reduce_inv_quad:
                quad = quad.sum(-1)
        return quad, self.logdet() if logdet else value

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Samples of N(0, scale·(A + D)⁻¹), (num_samples, N)."""
        factors = self._held.matrix
        assert isinstance(factors, Factorized)
        samples = factors.sample(num_samples * self._batch.numel()).to(self.device, self.dtype)
        return self._scale.sqrt() * samples.view(num_samples, *self._batch, self.shape[-1])
