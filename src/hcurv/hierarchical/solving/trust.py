"""Whether a compressed matrix is accurate enough for the damping that it is factorized with.

With the error R = H − A, (A + λI)⁻¹ = G Gᵀ and E = Gᵀ R G, output variances are wrong by about
‖E‖_F²/d if R is all of one sign (see `building.damped_error`), where ‖E‖_F ≤ x = ‖R‖_F/λ and
d = Σ μ/(μ + λ) is the effective dimension. ‖R‖_F was estimated by the build, and d is estimated
here. On five networks and λ/λ₁ from 1e-1 to 1e-6, the median error of variances was 0.04 to 1 times
x²/d: where x²/d was above a half, errors were 8 to 60 %, or A + λI was indefinite, if the matrix
had a global part alone, and 2 to 8 % at most if it had a tree.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from hcurv.factorized import AccuracyWarning, Damping
from hcurv.hierarchical.solving.factorization import Factorization

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.build_record import BuildRecord
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = ["warn_of_roughness"]

# Variances that may be wrong by more than this are warned of.
_LARGEST_ERROR = 0.5
# A matrix that was compressed for a damping is trusted at any that is not this many times smaller.
_NEAR = 3.0
# Number of random vectors that estimate the effective dimension, to about 20 %.
_NUM_PROBES = 8
# Below this bound of ‖E‖ nothing needs to be checked.
_HARMLESS = 0.5


def warn_of_roughness(
    matrix: HMatrix, record: BuildRecord, factors: Factorization, damping: Damping, stacklevel: int
) -> None:
    """Warn if variances of a factorization are probably wrong by tens of per cent.

    Args:
        matrix: A.
        record: how it was built.
        factors: (A + D)⁻¹, positive definite.
        damping: D.
        stacklevel: as for `warnings.warn`, counted from here.
    """
    # An error that is spread evenly over the rows is multiplied by the mean of 1/D.
    inverse = float(damping.diagonal(matrix.shape[0], matrix.device).reciprocal().mean())
    if record.damping is not None and inverse <= _NEAR / record.damping:
        return
    bound = record.estimated_error * record.norm * inverse
    if bound <= _HARMLESS:
        return
    generator = torch.Generator().manual_seed(record.seed)
    noise = torch.randn(matrix.shape[0], _NUM_PROBES, dtype=matrix.dtype, generator=generator)
    probes = factors.sqrt_solve(noise.to(matrix.device))
    dimension = float((probes.double() * (matrix @ probes).double()).sum()) / _NUM_PROBES
    if bound**2 <= _LARGEST_ERROR * dimension:
        return
    built = "without a damping"
    if record.damping is not None:
        built = f"for a damping of {record.damping:.1e}"
    number = f"{1 / inverse:.1e}"
    warnings.warn(
        f"this matrix was compressed {built}, and its error (about {bound / inverse:.1e} in the"
        f" Frobenius norm) is far above the damping {number}: solves, variances and"
        " log-determinants may be wrong by tens of per cent or more. Use compress(H,"
        f" damping={number}), or a damping of {bound / inverse:.1e} or more; as a preconditioner"
        " this factorization is fine, and factorize(..., warn=False) says so",
        AccuracyWarning,
        stacklevel=stacklevel + 1,
    )
