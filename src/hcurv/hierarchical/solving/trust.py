"""Whether a compressed matrix is accurate enough for the damping that it is factorized with.

With the error R = H − A, F = (A + D)⁻¹ = G Gᵀ and E = Gᵀ R G, output variances are wrong by up to
about ‖E‖_F²/d (see `building.damped_error`), d = tr(F A) the effective dimension. If R is spread
evenly over the rows, ‖E‖_F is about x = ‖R‖_F tr(F)/N. The build estimated ‖R‖_F, and d and tr(F)
are estimated here. On the networks of the tests, variances were wrong by 9 % or more wherever x²/d
was above the threshold, and by less than 16 % elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hcurv.damping import Damping
from hcurv.factorized import AccuracyWarning
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.user_warnings import warn_user

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.build_record import BuildRecord
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = ["warn_of_roughness"]

# Variances that may be wrong by more than this are warned of.
_LARGEST_ERROR = 0.5
# A matrix that was compressed for a damping is trusted at any that is not this many times smaller.
_NEAR = 3.0
# Number of random vectors that estimate traces, to about 20 %.
_NUM_PROBES = 8


def warn_of_roughness(
    matrix: HMatrix, record: BuildRecord, factors: Factorization, damping: Damping
) -> None:
    """Warn if variances of a factorization are probably wrong by tens of per cent.

    Args:
        matrix: A.
        record: how it was built.
        factors: (A + D)⁻¹, positive definite.
        damping: D.
    """
    lowest = float(damping.tensor.detach().min())
    if record.damping is not None and record.damping <= _NEAR * lowest:
        return
    error = record.estimated_error * record.norm  # ‖R‖_F
    if error <= lowest:  # then ‖E‖ < 1
        return
    generator, size = torch.Generator().manual_seed(record.seed), matrix.shape[0]
    noise = torch.randn(size, _NUM_PROBES, dtype=matrix.dtype, generator=generator)
    probes = factors.sqrt_solve(noise.to(matrix.device))
    trace = float(probes.double().square().sum()) / _NUM_PROBES
    dimension = float((probes.double() * (matrix @ probes).double()).sum()) / _NUM_PROBES
    if (error * trace / size) ** 2 <= _LARGEST_ERROR * dimension:
        return
    if matrix.nodes is not None and not matrix.nodes.share.ranks.first:
        return
    built = "without a damping"
    if record.damping is not None:
        built = f"for a damping of {record.damping:.1e}"
    remedy = f"damping={lowest:.1e}" if lowest > 0 else "tolerance=…"
    warn_user(
        f"this matrix was compressed {built}, and its error (about {error:.1e} in the Frobenius"
        f" norm) is too large for the damping {lowest:.1e}: solves, variances and log-determinants"
        f" may be wrong by tens of per cent or more. Use compress(H, {remedy}), or a damping of"
        f" about {error:.1e}. If this is for a preconditioner, which may be rough, pass warn=False",
        AccuracyWarning,
    )
