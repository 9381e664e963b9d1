"""A factorization solves random systems when it is made, and says so if the residual is large.

Rounding changes a solve by about eps·λ₁/λ, so that in single precision solves with a damping λ far
below 1e-4 λ₁ have few right digits, whatever the method is.
"""

from __future__ import annotations

import math

import torch

from hcurv.factorized import Factorized, warn_of_accuracy
from hcurv.operators import PROBE_SEED, SymmetricOperator

__all__ = ["warn_of_residual"]

# A relative residual ‖b − (A + D) x‖/‖b‖ above this is warned of.
_LARGE = 1e-2
# Number of right-hand sides. The residual may lie in one direction alone, of which a random vector
# has less than half of what is usual in 38 % of all cases.
_NUM_PROBES = 4


def warn_of_residual(matrix: SymmetricOperator, factorized: Factorized, remedy: str = "") -> None:
    """Solve (A + D) x = b for some random b, and warn if x is not a solution.

    Args:
        matrix: A.
        factorized: (A + D)⁻¹.
        remedy: what to do beside larger dampings and higher precision, an imperative clause.

    Warns:
        AccuracyWarning: the relative residual is above 1e-2.
    """
    size = matrix.shape[0]
    generator = torch.Generator().manual_seed(PROBE_SEED)
    rhs = torch.randn(size, _NUM_PROBES, dtype=matrix.dtype, generator=generator)
    rhs = rhs.to(matrix.device)
    with torch.no_grad():
        solved = factorized._matmat(rhs)
        damping = factorized._damping.diagonal(size, matrix.device)
        found = (matrix @ solved).double() + damping[:, None] * solved.double()
        residual = float((rhs.double() - found).norm() / rhs.double().norm())
    if residual <= _LARGE:
        return
    higher = ", a matrix in torch.float64" if matrix.dtype == torch.float32 else ""
    other = f", or {remedy}" if remedy else ""
    size_of = "NaN" if math.isnan(residual) else f"{residual:.1e}"
    warn_of_accuracy(
        f"solves with this factorization have a relative residual of about {size_of}: the damping"
        f" ({float(damping.min()):.1e} at least) is too small for {matrix.dtype}. Use a larger"
        f" damping{higher}{other}"
    )
