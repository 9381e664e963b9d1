"""Solutions refined against another operator than the one that was factorized.

A factorization F of A + D solves with an operator H that A approximates only as well as A does. A
few steps with products of H make up for the rest: conjugate gradients on H + D, with F as the
preconditioner. They converge also where A is so rough that plain iterative refinement, which adds
F times the residual, would diverge. Refinement is left for indefinite A + D, where conjugate
gradients do not work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.linalg import ConvergenceWarning, cg
from hcurv.operators import SymmetricOperator
from hcurv.user_warnings import warn_user

__all__ = ["Solver", "default_tolerance", "refined_solve"]


class Solver(Protocol):
    """What refinement needs of a factorization."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the vectors that it solves for."""

    @property
    def is_definite(self) -> bool:
        """Whether the factorized matrix is positive definite."""

    def __matmul__(self, rhs: Tensor) -> Tensor:
        """Solve for (N, k)."""


def default_tolerance(dtype: torch.dtype) -> float:
    """The relative residual that refined solutions are meant to reach.

    In single precision, residuals of ill-conditioned systems get little smaller than this.
    """
    return 1e-6 if dtype == torch.float64 else 1e-4


def refined_solve(
    solver: Solver,
    operator: SymmetricOperator,
    damping: Damping,
    rhs: Tensor,
    num_steps: int,
    tolerance: float,
) -> Tensor:
    """Solve (H + D) x = rhs, starting from the solution of the factorization.

    The residual of every column is at most that of the plain solution.

    Args:
        solver: the factorization, of a matrix near H + D.
        operator: H.
        damping: D.
        rhs: (N, k), of the type of ``operator``.
        num_steps: largest number of steps, each with one product with H.
        tolerance: relative residual at which a column is finished.

    Warns:
        ConvergenceWarning: a column did not reach the tolerance.
    """

    def solve(values: Tensor) -> Tensor:
        return (solver @ values.to(solver.dtype)).to(values.dtype)

    first = solve(rhs)
    if num_steps == 0:
        return first
    if solver.is_definite:
        result = cg(
            operator,
            rhs,
            damping=damping,
            preconditioner=solve,
            tolerance=tolerance,
            max_iterations=num_steps,
            start=first,
        )
        before = result.history[0]
        better = result.residuals <= before
        solution = torch.where(better, result.solution, first)
        residuals = torch.where(better, result.residuals, before)
    else:
        solution, residuals = _iterate(solve, operator, damping, rhs, first, num_steps, tolerance)
    missed = ~(residuals <= 1.01 * tolerance)
    if bool(missed.any()):
        warn_user(
            f"{int(missed.sum())} of {missed.numel()} refined solutions have a relative residual of"
            f" up to {float(residuals.max()):.1e} against the operator, above the tolerance"
            f" {tolerance:.1e}, after {num_steps} steps. Allow more steps (num_refinements),"
            " compress with a smaller tolerance, or use hcurv.cg with this factorization as the"
            " preconditioner",
            ConvergenceWarning,
        )
    return solution


def _iterate(
    solve: Callable[[Tensor], Tensor],
    operator: SymmetricOperator,
    damping: Damping,
    rhs: Tensor,
    first: Tensor,
    num_steps: int,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Iterative refinement: the best solution of each column, and its relative residual, (k,)."""
    diagonal = damping.diagonal(rhs.shape[0], rhs.device).to(rhs.dtype)[:, None]
    scale = torch.linalg.vector_norm(rhs, dim=0, dtype=torch.float64)
    scale = torch.where(scale > 0, scale, 1.0)

    def residual(values: Tensor) -> tuple[Tensor, Tensor]:
        rest = rhs - (operator @ values + diagonal * values)
        return rest, torch.linalg.vector_norm(rest, dim=0, dtype=torch.float64) / scale

    best = first
    rest, smallest = residual(first)
    for _ in range(num_steps):
        if not bool((smallest > tolerance).any()):
            break
        trial = best + solve(rest)
        trial_rest, norms = residual(trial)
        better = norms < smallest
        if not bool(better.any()):
            break
        best = torch.where(better, trial, best)
        rest = torch.where(better, trial_rest, rest)
        smallest = torch.where(better, norms, smallest)
    return best, smallest
