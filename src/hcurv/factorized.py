"""Everything that inverts: (A + D)⁻¹ as a matrix, with D a positive diagonal, the damping.

A matrix A that can be inverted has a method ``factorize(damping)``, which returns a `Factorized`:
factor once, solve many times. All that is special about a method lies in four functions of its
subclass; checks, derivatives and sampling are done once, here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import takes_arrays
from hcurv.damping import Damping, DeviceLike
from hcurv.indexing import check_count, check_generator
from hcurv.memory import require_bytes
from hcurv.operators import RowPart, RowSource, SymmetricOperator
from hcurv.precision import full_precision
from hcurv.user_warnings import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AccuracyWarning",
    "Factorizable",
    "Factorized",
    "NotFactorizableError",
    "check_float_type",
    "warn_of_accuracy",
]


# Rows of derivatives are made for so many floats, and so many rows, at a time.
_PANEL_FLOATS, _PANEL_ROWS = 2**26, 2048


class NotFactorizableError(ValueError):
    """The matrix cannot be inverted in this way; the message says what to use instead.

    Examples:
        >>> try:
        ...     hcurv.baselines.MatrixFree(H).factorize(0.1).logdet()
        ... except hcurv.NotFactorizableError as error:
        ...     print(str(error).partition(":")[0])
        conjugate gradients give no log-determinant
    """


class AccuracyWarning(UserWarning):
    """A matrix was factorized at a damping far below its own error.

    Its solves, variances and log-determinants are then wrong by tens of per cent or more. The
    message says what to do.

    Examples:
        >>> import warnings
        >>> rough = hcurv.compress(H, tolerance=0.3)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     F = rough.factorize(1e-4)
        >>> caught[0].category.__name__
        'AccuracyWarning'
        >>> F = hcurv.compress(H, damping=1e-4).factorize(1e-4)  # does not warn
    """


def _finite(covariances: Tensor) -> Tensor:
    """Refuse covariances that leave the range of their type."""
    if not bool(torch.isfinite(covariances).all()):
        raise ValueError(
            f"covariances J (A + D)⁻¹ Jᵀ overflow {covariances.dtype}: the rows J are too large for"
            " this damping (use float64, smaller rows or a larger damping)"
        )
    return covariances


def warn_of_accuracy(message: str) -> None:
    """Warn with an `AccuracyWarning` that points to the line of the user that led here."""
    warn_user(message, AccuracyWarning)


class Factorized(SymmetricOperator):
    """(A + D)⁻¹ as a matrix: ``F @ b`` solves. Made by ``factorize(damping)``; immutable.

    `solve` and `logdet` pass gradients on to a damping, and to a right-hand side, that requires
    them.

    A subclass gives `_matmat` (a solve), `_logdet`, `_inverse_diagonal` and, if it can sample,
    `_half_solve`.

    Args:
        damping: D.

    Attributes:
        plan: the ways that were weighed, where one was chosen; it prints as a table.

    Examples:
        >>> for matrix in (A, hcurv.baselines.LowRank(H, 5), hcurv.baselines.Diagonal(H)):
        ...     x = matrix.factorize(damping=0.1).solve(b)
        ...     print(torch.allclose(matrix @ x + 0.1 * x, b))
        True
        True
        True
    """

    def __init__(self, damping: Damping) -> None:
        self._damping = damping
        self.plan: Any = None
        self._measure_accuracy: Callable[[], Any] | None = None

    @abstractmethod
    def _logdet(self) -> Tensor:
        """log det(A + D), a tensor of no dimension in double precision."""

    @abstractmethod
    def _inverse_diagonal(self) -> Tensor:
        """The diagonal of (A + D)⁻¹, (N,), in double precision."""

    def _half_solve(self, rhs: Tensor) -> Tensor:
        """G times ``rhs`` (N, k), where G Gᵀ = (A + D)⁻¹."""
        raise NotFactorizableError(f"{type(self).__name__} has no square root to sample with")

    @abstractmethod
    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization on another device or in another precision.

        Examples:
            >>> F.to(dtype=torch.float32).solve(b.float()).dtype
            torch.float32
        """

    @cached_property
    def accuracy(self) -> Any:
        """Estimated errors of solves, variances and the log-determinant: an `hcurv.Accuracy`.

        They are measured, when they are first asked for, on probes that the build did not use: 16
        rows of the root S, solved for together. Of iterative ways, other solves are promised the
        tolerance, whatever was reached here.

        Raises:
            NotFactorizableError: the exact matrix is not known here: ask `hcurv.certify`.

        Examples:
            >>> H.factorize(1e-2).accuracy.solve.value < 1e-2
            True
        """
        if self._measure_accuracy is None:
            raise NotFactorizableError(
                "this is a factorization of an approximation, which does not know the exact matrix:"
                " use hcurv.certify(approximation, matrix, damping)"
            )
        return self._measure_accuracy()

    @property
    def damping(self) -> float | Tensor:
        """D: the number that was added to the diagonal, or the (N,) numbers."""
        return self._damping.value

    def __repr__(self) -> str:
        """Size, damping and storage in one line."""
        damping = f"{self.damping:.3g}" if isinstance(self.damping, float) else "for each row"
        return (
            f"{type(self).__name__}(N={self.shape[0]}, damping={damping},"
            f" compression_rate={self.compression_rate:.3g}, dtype={self.dtype})"
        )

    @takes_arrays
    def solve(self, rhs: Tensor) -> Tensor:
        """Solve (A + D) x = rhs, for ``rhs`` (N,) or (N, k), a tensor or a NumPy array.

        Examples:
            >>> x = F.solve(b)
            >>> torch.allclose(A @ x + 1e-2 * x, b)
            True
        """
        self._check_vectors(rhs)
        return self._differentiable_solve(rhs, self._solve_columns)

    def _solve_columns(self, values: Tensor) -> Tensor:
        columns = values if values.ndim == 2 else values[:, None]
        return self._matmat(columns).view_as(values)

    def _differentiable_solve(self, rhs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """``run(rhs)``, a solve, with derivatives with respect to ``rhs`` and the damping."""
        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        damping = self._damping.tensor
        if torch.is_grad_enabled() and (rhs.requires_grad or damping.requires_grad):
            return _Solve.apply(rhs, damping, run)  # type: ignore[no-any-return,no-untyped-call]
        with torch.no_grad():
            return run(rhs.detach())

    def logdet(self) -> Tensor:
        """log |det(A + D)|, in double precision.

        Examples:
            >>> torch.allclose(F.logdet(), torch.logdet(A.to_dense() + 1e-2 * torch.eye(51)))
            True
        """
        damping = self._damping.tensor
        if torch.is_grad_enabled() and damping.requires_grad:
            return _LogDet.apply(damping, self)  # type: ignore[no-any-return,no-untyped-call]
        with torch.no_grad():
            return self._logdet()

    @takes_arrays
    def sqrt_solve(self, rhs: Tensor) -> Tensor:
        """G times ``rhs``, (N,) or (N, k), where G Gᵀ = (A + D)⁻¹.

        Examples:
            >>> G = F.sqrt_solve(torch.eye(51, dtype=b.dtype))
            >>> torch.allclose(G @ (G.T @ b), F.solve(b))
            True
        """
        self._check_vectors(rhs)
        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        with torch.no_grad():
            columns = rhs.detach() if rhs.ndim == 2 else rhs.detach()[:, None]
            return self._half_solve(columns).view_as(rhs)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from the normal distribution N(0, (A + D)⁻¹), (num, N).

        Args:
            num: number of samples.
            generator: of the random numbers; None for torch's own.

        Examples:
            >>> F.sample(10, generator=torch.Generator().manual_seed(0)).shape
            torch.Size([10, 51])
        """
        num = self._check_draws(num, generator)
        return self.sqrt_solve(self._noise(self.shape[0], num, generator)).T.contiguous()

    def _check_draws(self, num: int, generator: torch.Generator | None) -> int:
        """The number of samples, if there is memory for them; their generator is checked, too."""
        num = check_count(num, "num", least=0)
        check_generator(generator)
        require_bytes(
            4 * num * self.shape[0] * self.dtype.itemsize,
            self.device,
            f"drawing num = {num} samples of {self.shape[0]} numbers",
            ("draw fewer samples at a time",),
        )
        return num

    def _noise(self, size: int, num: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers, (size, num)."""
        where = self.device if generator is None else generator.device
        noise = torch.randn(size, num, dtype=self.dtype, device=where, generator=generator)
        return noise.to(self.device)

    @takes_arrays
    def quadratic(self, rows: Tensor | RowSource, *, diagonal: bool = False) -> Tensor:
        """J (A + D)⁻¹ Jᵀ for rows J (m, N): the covariance of J w for w ~ N(0, (A + D)⁻¹).

        Args:
            rows: J, a tensor or `GaussNewton.jacobian`; for the rows of an output's Jacobian the
                result is the output's variance.
            diagonal: give the m variances alone.

        Returns:
            (m, m), or (m,) if ``diagonal``.

        Examples:
            >>> J = torch.eye(51, dtype=b.dtype)[:3]
            >>> torch.allclose(F.quadratic(J, diagonal=True), F.inverse_diagonal()[:3])
            True
            >>> F.quadratic(H.jacobian(inputs)).shape
            torch.Size([60, 60])
        """
        if isinstance(rows, RowSource) and not isinstance(rows, Tensor):
            if diagonal:
                return self.point_covariances(rows).diagonal(dim1=1, dim2=2).reshape(-1)
            self._check_rows(rows)
            rows = torch.cat([chunk.to_dense() for chunk in rows.chunks()])
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != self.shape[0]:
            given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"rows must be a tensor of shape (m, {self.shape[0]}); got {given}")
        check_dense(rows, "rows")
        solved = self.solve(rows.T.contiguous())
        return _finite(torch.linalg.vecdot(rows, solved.T) if diagonal else rows @ solved)

    def point_covariances(self, rows: RowSource, progress: bool = False) -> Tensor:
        """J_i (A + D)⁻¹ J_iᵀ for the q rows of each point i: (n, q, q).

        Rows are made for some points at a time, so that memory does not grow with their number.

        Args:
            rows: such as `GaussNewton.jacobian`, whose result are the covariances of the outputs.
            progress: whether to show a progress bar.

        Examples:
            >>> covariances = F.point_covariances(H.jacobian(inputs))
            >>> whole = F.quadratic(H.jacobian(inputs))
            >>> covariances.shape, torch.allclose(covariances[0], whole[:3, :3])
            (torch.Size([20, 3, 3]), True)
        """
        self._check_rows(rows)
        q = rows.rows_per_point
        step = max(1, min(_PANEL_FLOATS // self.shape[0], _PANEL_ROWS) // q)
        num_rows = min(step * q, rows.shape[0])
        require_bytes(
            self._covariance_floats(num_rows) * self.dtype.itemsize,
            self.device,
            f"variances of {num_rows} rows of derivatives at a time",
            ("use fewer points", "use the diagonal or K-FAC"),
        )
        with torch.no_grad():
            parts = [self._covariances(chunk, q) for chunk in rows.chunks(step, progress)]
        return _finite(torch.cat(parts))

    def _check_rows(self, rows: RowSource) -> None:
        if not isinstance(rows, RowSource) or rows.shape[1] != self.shape[0]:
            given = getattr(rows, "shape", type(rows).__name__)
            raise ValueError(f"rows must be an operator of shape (m, {self.shape[0]}); got {given}")

    def _covariance_floats(self, num_rows: int) -> int:
        """Floats that `_covariances` takes: the rows, their transpose, and what is solved."""
        return 3 * num_rows * self.shape[0]

    def _covariances(self, chunk: RowPart, num_rows: int) -> Tensor:
        """J_i (A + D)⁻¹ J_iᵀ at some points, (b, q, q)."""
        dense = chunk.to_dense()
        solved = self._solve_columns(dense.T.contiguous()).T
        by_point = dense.view(-1, num_rows, dense.shape[1])
        found = torch.bmm(by_point, solved.reshape(by_point.shape).mT)
        return (found + found.mT) / 2

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of (A + D)⁻¹: the variances of the samples, (N,).

        Examples:
            >>> torch.allclose(F.inverse_diagonal(), F.to_dense().diagonal())
            True
        """
        with torch.no_grad():
            return self._inverse_diagonal().to(self.dtype)

    def diagonal(self) -> Tensor:
        """The diagonal of (A + D)⁻¹, as `inverse_diagonal`.

        Examples:
            >>> torch.equal(F.diagonal(), F.inverse_diagonal())
            True
        """
        return self.inverse_diagonal()


@runtime_checkable
class Factorizable(Protocol):
    """A matrix that can be inverted."""

    def factorize(self, damping: float) -> Factorized:
        """Factorize A + damping·I."""


def check_float_type(dtype: torch.dtype | None, device: DeviceLike = None) -> None:
    """Raise unless a matrix can be converted to this type, and moved to this device."""
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
    if device is None:
        return
    try:
        usable = not torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"the device {device!r} cannot be used here: {reason}") from error
    if not usable:
        raise ValueError(f"the device {device!r} holds no values")


class _Solve(torch.autograd.Function):
    """x = (A + D)⁻¹ b. With w = (A + D)⁻¹ ∂f/∂x: ∂f/∂b = w and ∂f/∂D_kk = −w_k x_k."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, damping: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        result = run(rhs.detach())
        ctx.run = run
        ctx.save_for_backward(result, damping)
        return result

    @staticmethod
    @full_precision
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, damping = ctx.saved_tensors
        solved = _Solve.apply(gradients[0].contiguous(), damping, ctx.run)  # type: ignore[no-untyped-call]
        slope = None
        if ctx.needs_input_grad[1]:
            slope = -(solved.double() * result.double())
            if slope.ndim == 2:
                slope = slope.sum(1)
            slope = (slope.sum() if damping.ndim == 0 else slope).to(damping)
        return solved, slope, None


class _LogDet(torch.autograd.Function):
    """log det(A + D). Its derivative with respect to D is the diagonal of the inverse."""

    @staticmethod
    def forward(ctx: Any, damping: Tensor, factorized: Factorized) -> Tensor:
        ctx.factorized = factorized
        ctx.save_for_backward(damping)
        return factorized._logdet().to(damping.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (damping,) = ctx.saved_tensors
        slope = ctx.factorized._inverse_diagonal()
        slope = slope.sum() if damping.ndim == 0 else slope
        return (gradients[0].to(slope) * slope).to(damping), None
