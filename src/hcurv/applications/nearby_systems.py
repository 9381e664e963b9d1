"""Solve systems near one that is factorized: at another damping, or without some points.

The inverse that is there is the preconditioner of conjugate gradients, or, where it is iterative
itself, what preconditions it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.factorized import Factorized, warn_of_accuracy
from hcurv.inversion.iterative import IterativeFactorization
from hcurv.linalg.block_conjugate_gradients import BlockResult, block_cg
from hcurv.network.gauss_newton import GaussNewton
from hcurv.operators import SymmetricOperator

__all__ = ["solve_at_other_damping", "solve_without_points"]

_MAX_ITERATIONS = 2000


def solve_at_other_damping(
    matrix: SymmetricOperator,
    factorized: Factorized,
    columns: Tensor,
    factor: float,
    tolerance: float,
) -> Tensor:
    """(A + factor·D)⁻¹ times columns (N, k), with an inverse of A + D.

    An exact inverse leaves a condition number of ``factor``, or its inverse.
    """
    return _solve(matrix, factorized, columns, factor, tolerance).solution


def solve_without_points(
    matrix: GaussNewton,
    factorized: Factorized,
    columns: Tensor,
    points: Tensor,
    tolerance: float,
) -> Tensor:
    """(H − Σ_i S_iᵀS_i + D)⁻¹ times columns (N, k), for the points i that are left out.

    With an exact inverse of H + D, all but q eigenvalues for each of these points are one, so that
    few iterations are needed.

    The points that stay are taken in memory. Where they lie on several ranks, those that are left
    out are taken instead if they are fewer, and subtracted from H.
    """
    stays = torch.ones(matrix.num_points, dtype=torch.bool, device=matrix.device)
    stays[points] = False
    rest = stays.nonzero().squeeze(1)
    without: SymmetricOperator
    if matrix.ranks.size > 1 and len(points) < len(rest):
        ones = torch.ones(len(points), device=matrix.device)
        without = matrix - matrix.of_points(points, ones)
    else:
        without = matrix.of_points(rest, torch.ones(len(rest), device=matrix.device))
    found = _solve(without, factorized, columns, 1.0, tolerance)
    if not found.converged and matrix.ranks.first:
        warn_of_accuracy(
            f"conjugate gradients without {len(points)} points stopped at a relative residual of"
            f" {float(found.residuals.max()):.1e}, where {tolerance:.1e} was asked for. Use a"
            " larger damping or tolerance, or a model in float64"
        )
    return found.solution


def _solve(
    matrix: SymmetricOperator,
    factorized: Factorized,
    columns: Tensor,
    factor: float,
    tolerance: float,
) -> BlockResult:
    damping = torch.as_tensor(factorized.damping, dtype=torch.float64).to(columns) * factor
    damping = damping.expand(columns.shape[0])[:, None]
    inner: Factorized = factorized
    if isinstance(factorized, IterativeFactorization):
        inner = factorized.stand_in.factorized

    def precondition(values: Tensor) -> Tensor:
        return (inner @ values.to(inner.dtype)).to(values.dtype)

    return block_cg(
        lambda values: torch.addcmul(matrix @ values, values, damping),
        columns,
        precondition=precondition,
        tolerance=tolerance,
        max_iterations=_MAX_ITERATIONS,
    )
