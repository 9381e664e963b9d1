"""Eigenvalues of EKFAC that are calibrated against the exact inverse of P = H + λI.

EKFAC inverts Q diag(e + λ) Qᵀ, where Q are the eigenvectors of K-FAC and e = diag(QᵀHQ). This
leaves out the correlations of layers, which often makes the variances sᵀP⁻¹s of outputs too large.
It also spreads H over more directions than H has, which makes log|P| too large and, where λ is
small, the variances too small. Here, two numbers c and p describe other eigenvalues:

    d_k = λ (1 + (c e_k/λ)^p)^(1/p),    EKFAC: c = p = 1.

A large p gives max(λ, c e_k). This is the form of the best diagonal: among all d ≥ λ of a given
log-determinant, the mean of Σ_k (q_kᵀs)²/d_k over rows s is the smallest for
d_k = max(λ, c y_k), where y_k is the mean of (q_kᵀs)².
"""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from hcurv.damping import Damping, as_damping
from hcurv.factorized import Factorized

__all__ = ["calibrate", "check_reference"]

# The values of p that are tried. Beyond the last one, d is max(λ, c e) to within 5 %.
_SHARPNESSES = (1.0, 2.0, 4.0, 8.0, 16.0)
# Errors are measured in units of those of EKFAC, and that of the log-determinant counts this much.
# So where many pairs (c, p) give about the same variances, as on classifiers with small λ, the one
# with the best log-determinant is chosen.
_LOGDET_WEIGHT = 0.1
# EKFAC is left alone where it is right to rounding: misfits, and errors of log d on average.
_EXACT = 1e-10
# log c is never beyond this.
_LARGEST = 60.0


def check_reference(
    reference: Factorized | None, rows: Tensor | None, damping: Damping, size: int
) -> tuple[Factorized, Tensor]:
    """Refuse a reference of another size or damping, and rows that say nothing.

    Args:
        reference: the exact inverse.
        rows: the rows, (m, N), whose variances shall be right.
        damping: the damping of EKFAC.
        size: N.

    Returns:
        The reference, and the rows without gradients.

    Raises:
        TypeError, ValueError: they do not fit, or one of them is missing.
    """
    if reference is None or rows is None:
        raise TypeError("a calibration needs both reference= and rows=; one is missing")
    if damping.tensor.requires_grad:
        raise TypeError(
            "calibrated eigenvalues have no gradient with respect to the damping; pass"
            " damping.detach()"
        )
    if reference.shape != (size, size):
        raise ValueError(f"reference must have shape {(size, size)}; got {reference.shape}")
    wanted = damping.diagonal(size, torch.device("cpu"))
    given = as_damping(reference.damping, size).diagonal(size, torch.device("cpu"))
    if not torch.allclose(wanted, given, rtol=1e-6, atol=0.0):
        raise ValueError(
            f"reference must have the damping that is asked for; got {reference!r}, pass"
            " reference=H.factorize(damping)"
        )
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != size:
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"rows must be a tensor of shape (m, {size}); got {shape}")
    norms = rows.detach().norm(dim=1)
    if len(rows) == 0 or not bool((norms.isfinite() & (norms > 0)).all()):
        raise ValueError(f"rows must be one or more, finite and not zero; got {len(rows)}")
    return reference, rows.detach()


def calibrate(
    values: Tensor, damping: Tensor, squares: Tensor, variances: Tensor, logdet: float
) -> Tensor:
    """Fit c and p to variances of some rows, with a log-determinant no worse than EKFAC's.

    What is minimised is the mean square of log(variance found/variance wanted), plus a tenth of the
    square of the error of the log-determinant, both over those of EKFAC.

    Args:
        values: e, (N,), in double precision.
        damping: λ for each of them, (N,).
        squares: (q_kᵀs_i)² for rows s_i, (m, N).
        variances: s_iᵀ(H + λI)⁻¹s_i, (m,), positive.
        logdet: log|H + λI|.

    Returns:
        d, (N,).
    """
    ratios = (values / damping).clamp(min=torch.finfo(values.dtype).tiny).log()
    base = float(damping.log().sum())
    plain = float((values + damping).log().sum()) - logdet
    # Below this, all d are about λ.
    lowest = min(0.0, -float(ratios.max())) - 1.0

    def logarithms(scale: float, sharpness: float) -> Tensor:
        """log(d/λ) for log c = scale."""
        powers = sharpness * (ratios + scale)
        return torch.logaddexp(powers, torch.zeros_like(powers)) / sharpness

    def excess(scale: float, sharpness: float) -> float:
        """The error of the log-determinant, which grows with c."""
        return base + float(logarithms(scale, sharpness).sum()) - logdet

    def misfit(found: Tensor) -> float:
        """The mean square error of the logarithms of variances, for log(d/λ)."""
        wrong = (squares @ (-found).exp().div_(damping) / variances).log()
        return float(wrong.square().mean())

    def loss(scale: float, sharpness: float) -> float:
        found = logarithms(scale, sharpness)
        share = (base + float(found.sum()) - logdet) / plain
        return misfit(found) / plain_misfit + _LOGDET_WEIGHT * share**2

    def scale_of(error: float, sharpness: float) -> float:
        """The log c at which the log-determinant has a given error, as far as there is one."""
        if excess(lowest, sharpness) >= error:
            return lowest
        if excess(_LARGEST, sharpness) <= error:
            return _LARGEST
        return float(brentq(lambda x: excess(x, sharpness) - error, lowest, _LARGEST))

    plain_misfit = misfit(logarithms(0.0, 1.0))
    if plain_misfit < _EXACT or abs(plain) < _EXACT * len(values):
        return values + damping
    best = (loss(0.0, 1.0), 0.0, 1.0)
    for sharpness in _SHARPNESSES:
        bounds = (scale_of(-abs(plain), sharpness), scale_of(abs(plain), sharpness))
        if not math.isclose(*bounds, abs_tol=1e-6):
            found = minimize_scalar(loss, args=(sharpness,), bounds=bounds, method="bounded")
            best = min(best, (float(found.fun), float(found.x), sharpness))
    return damping * logarithms(*best[1:]).exp()
