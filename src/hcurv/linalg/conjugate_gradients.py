"""Preconditioned conjugate gradients for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hcurv.arguments import check_dense, check_number
from hcurv.arrays import as_tensor
from hcurv.damping import Damping, DampingLike, as_damping
from hcurv.indexing import check_count
from hcurv.layout import layout_of
from hcurv.operators import SymmetricOperator
from hcurv.precision import full_precision
from hcurv.sources import MatrixProduct, as_operator

__all__ = ["CGResult", "ConvergenceWarning", "cg"]

# A preconditioner is a tensor (N,), an object with a method ``solve``, a callable, or None.
Preconditioner: TypeAlias = object


class ConvergenceWarning(UserWarning):
    """An iteration ended before it reached its tolerance.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     step = hcurv.gauss_newton_step(
        ...         model, loss, (inputs, targets), damping=1e-8, max_iterations=1
        ...     )
        >>> caught[0].category is hcurv.ConvergenceWarning
        True
    """


@dataclass(frozen=True)
class CGResult:
    """What conjugate gradients found.

    Attributes:
        solution: x, of the shape of the right-hand side, (N,) or (N, k).
        converged: whether every column reached the tolerance.
        num_iterations: number of iterations of each column, (k,).
        residuals: relative residual ‖b − (A + D)x‖/‖b‖ of each column, (k,). It is computed from
            the solution at the end, not taken from the recursion.
        history: relative residuals before the first and after each iteration, as the recursion
            has them, (iterations + 1, k).
        num_products: number of products with the operator. Each has as many columns as were not
            finished.
        message: how the iteration ended, in words.

    Examples:
        >>> result = hcurv.cg(H, b, damping=1e-2, tolerance=1e-8)
        >>> result.converged, bool(result.residuals.max() < 1.1e-8)
        (True, True)
        >>> len(result.history) == int(result.num_iterations) + 1
        True
    """

    solution: Tensor
    converged: bool
    num_iterations: Tensor
    residuals: Tensor
    history: Tensor
    num_products: int
    message: str


@full_precision
def cg(
    operator: SymmetricOperator | MatrixProduct | Tensor,
    rhs: Tensor,
    *,
    damping: DampingLike | Damping = 0.0,
    preconditioner: Preconditioner = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    start: Tensor | None = None,
    progress: bool = False,
) -> CGResult:
    """Solve (A + D) x = b by preconditioned conjugate gradients.

    The right-hand sides are solved independently of each other but share products with A. A column
    that has converged takes no part in further products. Inner products accumulate in double
    precision.

    Args:
        operator: A, any `SymmetricOperator` or a dense symmetric tensor (N, N). A + D must be
            positive definite.
        rhs: b, (N,) or (N, k), of the type of the operator; or a NumPy array, with which the
            solution is one, too.
        damping: the diagonal matrix D: a number, a tensor (N,), or, where the operator has a
            ``layout``, a mapping from names of parameters or layers to numbers.
        preconditioner: an approximation of A + D that is easily inverted: a `Factorization` or
            anything else with a method ``solve``; a tensor (N,), the diagonal of a matrix; or a
            callable that maps (N, k) to (N, k).
        tolerance: relative residual ‖b − (A + D)x‖/‖b‖ to reach.
        max_iterations: largest number of iterations.
        start: first guess, of the shape of ``rhs``; None for zero.
        progress: whether to show a progress bar.

    Returns:
        The last iterate, whether it converged or not: look at ``converged`` and ``message``.

    Examples:
        >>> result = hcurv.cg(H, b, damping=1e-2)
        >>> x = result.solution
        >>> bool((H @ x + 1e-2 * x - b).norm() < 1e-5 * b.norm())
        True

        A factorization of a compressed matrix is a good preconditioner:

        >>> faster = hcurv.cg(H, b, damping=1e-2, preconditioner=F)
        >>> bool(faster.num_iterations < result.num_iterations)
        True
    """
    matrix = as_operator(operator)
    if is_array := isinstance(rhs, np.ndarray):
        rhs = as_tensor(rhs, matrix.dtype, matrix.device)
    if isinstance(start, np.ndarray):
        start = as_tensor(start, matrix.dtype, matrix.device)
    _check_system(matrix, rhs, tolerance)
    resolved = as_damping(damping, matrix.shape[0], layout_of(matrix))
    max_iterations = check_count(max_iterations, "max_iterations", least=0)
    if start is not None and not isinstance(start, Tensor):
        raise TypeError(f"start must be a tensor or None; got {type(start).__name__}")
    if start is not None:
        check_dense(start, "start")
    if start is not None and (start.shape != rhs.shape or start.dtype != rhs.dtype):
        raise ValueError(
            f"start must be like the right-hand side, {tuple(rhs.shape)} of {rhs.dtype};"
            f" got {tuple(start.shape)} of {start.dtype}"
        )
    precondition = _as_function(preconditioner, rhs)
    with torch.no_grad():
        columns = rhs.detach() if rhs.ndim == 2 else rhs.detach()[:, None]
        first = torch.zeros_like(columns) if start is None else start.detach().view_as(columns)
        run = _ConjugateGradients(matrix, columns, resolved, precondition, first)
        with tqdm(total=max_iterations, unit="iteration", disable=not progress) as bar:
            while run.iterations < max_iterations and run.active.numel():
                run.step(tolerance)
                bar.update()
                bar.set_postfix_str(f"residual {float(run.history[-1].max()):.1e}")
        residuals = run.true_residuals()
    # In low precision the residual of the recursion may go on falling where the true one cannot.
    reached = residuals <= 1.01 * tolerance
    converged = bool(reached.all())
    solution = run.solution.view_as(rhs)
    return CGResult(
        solution.cpu().numpy() if is_array else solution,
        converged,
        run.counts,
        residuals,
        torch.stack(run.history),
        run.num_products,
        _describe(run, reached, residuals, tolerance, rhs.dtype),
    )


def _describe(
    run: _ConjugateGradients, reached: Tensor, residuals: Tensor, tolerance: float, dtype: object
) -> str:
    if bool(reached.all()):
        return f"converged to {tolerance:.1e} in {run.iterations} iterations"
    worst = f"{int((~reached).sum())} of {reached.numel()} right-hand sides reached only"
    worst += f" {float(residuals.max()):.1e} of {tolerance:.1e} in {run.iterations} iterations"
    if bool(run.broken.any()):
        return f"{worst}: the matrix or the preconditioner is not positive definite"
    if run.active.numel() == 0:
        return f"{worst}: this is as far as {dtype} goes; use float64 or a larger damping"
    return f"{worst}; allow more iterations or use a better preconditioner"


class _ConjugateGradients:
    """The state of an iteration over all columns.

    Args:
        operator: A.
        rhs: b, (N, k).
        damping: D.
        precondition: maps (N, k) to (N, k).
        start: first guess, (N, k).
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        rhs: Tensor,
        damping: Damping,
        precondition: Callable[[Tensor], Tensor],
        start: Tensor,
    ) -> None:
        self._operator, self._rhs = operator, rhs
        self._damping = damping.tensor.detach().to(rhs)
        if self._damping.ndim:
            self._damping = self._damping[:, None]
        self._precondition = precondition
        num_columns = rhs.shape[1]
        self.num_products = 0
        self.iterations = 0
        self.solution = start.clone()
        self.counts = torch.zeros(num_columns, dtype=torch.long, device=rhs.device)
        self.broken = torch.zeros(num_columns, dtype=torch.bool, device=rhs.device)
        self._norms = _norms(rhs)
        self._safe = torch.where(self._norms > 0, self._norms, 1.0)
        is_zero = not bool(start.any())
        residual = rhs.clone() if is_zero else rhs - self._product(start)
        self._relative = _norms(residual) / self._safe
        self.history = [self._relative.clone()]
        self.active = (self._relative > 0).nonzero().squeeze(1)
        self._residual = residual[:, self.active]
        self._direction = torch.zeros_like(self._residual)
        self._previous = torch.ones_like(self._norms[self.active])

    def _product(self, values: Tensor) -> Tensor:
        self.num_products += 1
        return torch.addcmul(self._operator @ values, values, self._damping)

    def step(self, tolerance: float) -> None:
        """Make one iteration with all columns that are not finished."""
        done = self._relative[self.active] <= tolerance
        if bool(done.any()):
            self._keep(~done)
            if not self.active.numel():
                return
        preconditioned = self._precondition(self._residual)
        energy = _dots(self._residual, preconditioned)
        # A column whose numbers break down stops where it is.
        fine = (energy > 0) & torch.isfinite(energy)
        if not bool(fine.all()):
            self.broken[self.active[~fine]] = True
            preconditioned, energy = preconditioned[:, fine], energy[fine]
            self._keep(fine)
            if not self.active.numel():
                return
        ratio = energy / self._previous if self.iterations else torch.zeros_like(energy)
        self._direction.mul_(ratio.to(self._direction.dtype)).add_(preconditioned)
        product = self._product(self._direction)
        curvature = _dots(self._direction, product)
        fine = (curvature > 0) & torch.isfinite(curvature)
        length = torch.where(fine, energy / curvature, 0.0).to(product.dtype)
        self.solution[:, self.active] += self._direction * length
        self._residual.sub_(product.mul_(length))
        self._previous = energy
        self.iterations += 1
        self.counts[self.active] = self.iterations
        self._relative[self.active] = _norms(self._residual) / self._safe[self.active]
        self.history.append(self._relative.clone())
        if not bool(fine.all()):
            self.broken[self.active[~fine]] = True
            self._keep(fine)
        self._keep(self._relative[self.active] > tolerance)

    def _keep(self, which: Tensor) -> None:
        """Go on with some of the active columns only."""
        if bool(which.all()):
            return
        self.active = self.active[which]
        self._residual = self._residual[:, which]
        self._direction = self._direction[:, which]
        self._previous = self._previous[which]

    def true_residuals(self) -> Tensor:
        """Relative residuals of the solution, (k,)."""
        return _norms(self._rhs - self._product(self.solution)) / self._safe


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=0, dtype=torch.float64)
    return norms


def _dots(left: Tensor, right: Tensor) -> Tensor:
    dots: Tensor = torch.linalg.vecdot(left.double(), right.double(), dim=0)
    return dots


def _check_system(operator: SymmetricOperator, rhs: Tensor, tolerance: float) -> None:
    size = operator.shape[0]
    if not isinstance(rhs, Tensor) or rhs.ndim not in (1, 2) or rhs.shape[0] != size:
        given = tuple(rhs.shape) if isinstance(rhs, Tensor) else type(rhs).__name__
        raise ValueError(
            f"the right-hand side must be a tensor of shape ({size},) or ({size}, k); got {given}"
        )
    if rhs.dtype != operator.dtype:
        raise TypeError(
            f"the right-hand side must be {operator.dtype}, like the operator; got {rhs.dtype}"
        )
    check_number(tolerance, "tolerance", above=0)
    check_dense(rhs, "the right-hand side")
    if not bool(torch.isfinite(rhs).all()):
        raise ValueError("the right-hand side has entries that are NaN or infinite")


def _as_function(preconditioner: Preconditioner, rhs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a preconditioner of any kind as a function that maps (N, k) to (N, k)."""
    if preconditioner is None:
        return lambda values: values
    if isinstance(preconditioner, np.ndarray):
        preconditioner = as_tensor(preconditioner, rhs.dtype, rhs.device)
    if isinstance(preconditioner, Tensor):
        if preconditioner.shape != rhs.shape[:1]:
            raise ValueError(
                f"a diagonal preconditioner must have shape ({rhs.shape[0]},);"
                f" got {tuple(preconditioner.shape)}"
            )
        if not bool((preconditioner > 0).all()):
            raise ValueError("a diagonal preconditioner must be positive (add the damping to it)")
        scale = preconditioner.detach().to(rhs)[:, None]
        return lambda values: values / scale
    solve = getattr(preconditioner, "solve", preconditioner)
    if not callable(solve):
        raise TypeError(
            "a preconditioner must be a Factorization (or have a method solve), a tensor (N,) or"
            f" a callable; got {type(preconditioner).__name__}"
        )
    shape = getattr(preconditioner, "shape", None)
    if shape is not None and tuple(shape) != (rhs.shape[0], rhs.shape[0]):
        raise ValueError(
            f"the preconditioner must have shape ({rhs.shape[0]}, {rhs.shape[0]});"
            f" got {tuple(shape)}"
        )
    dtype = getattr(preconditioner, "dtype", rhs.dtype)
    return lambda values: solve(values.to(dtype)).to(values.dtype)
