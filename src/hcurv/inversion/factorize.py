"""GaussNewton.factorize: choose a way to invert H + D, and go it."""

from __future__ import annotations

import torch

from hcurv.baselines.matrix_free import MatrixFreeSolver
from hcurv.factorized import DampingLike, Factorized, as_damping
from hcurv.inversion.dense import DenseFactorization
from hcurv.inversion.sample_space import SampleSpaceFactorization
from hcurv.inversion.ways import (
    InversionPlan,
    Way,
    plan_ways,
    probe_spectrum,
    working_precision,
)
from hcurv.memory import require_bytes
from hcurv.network.gauss_newton import GaussNewton

__all__ = ["factorize"]

_METHODS = ("auto", "parameters", "samples", "iterations")
# An exact way is taken if it is predicted to take less than this many seconds, or no longer than
# this many times as long as conjugate gradients.
_QUICK, _PATIENCE = 2.0, 1.3
# Conjugate gradients stop with an error after this many iterations.
_MAX_ITERATIONS = 10_000


def factorize(
    matrix: GaussNewton, damping: DampingLike, tolerance: float = 1e-2, method: str = "auto"
) -> Factorized:
    """See `GaussNewton.factorize`."""
    if method not in _METHODS:
        known = ", ".join(f'"{name}"' for name in _METHODS)
        raise ValueError(f"method must be one of {known}; got {method!r}")
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must be a number between 0 and 1; got {tolerance!r}")
    resolved = as_damping(damping, matrix.shape[0], matrix.layout)
    resolved.require_positive("H may be singular")
    with torch.no_grad():
        rows = matrix.diagonal().nonzero().squeeze(1)
        spectrum = probe_spectrum(matrix, resolved)
        _check_precision(matrix, spectrum.largest, tolerance)
        ways = plan_ways(matrix, rows.numel(), spectrum, tolerance)
        chosen = _choose(ways, method, matrix)
        plan = InversionPlan(chosen, tuple(ways), matrix.shape[0], matrix.num_root_rows, spectrum)
        dtype = working_precision(matrix, spectrum, tolerance)
        if chosen.name == "iterations":
            result: Factorized = MatrixFreeSolver(matrix, resolved, tolerance, _MAX_ITERATIONS)
        else:
            exact = matrix.in_precision(dtype)
            if chosen.name == "samples":
                result = SampleSpaceFactorization.of(exact, resolved, matrix.dtype)
            else:
                block = exact.block(rows, rows)
                result = DenseFactorization.of(block, rows, resolved, matrix.shape[0], matrix.dtype)
    result.plan = plan
    return result


def _check_precision(matrix: GaussNewton, condition: float, tolerance: float) -> None:
    """Refuse a tolerance that the entries of S cannot give, however exact the rest is."""
    rounding = float(torch.finfo(matrix.dtype).eps) * condition
    if rounding > tolerance:
        raise ValueError(
            f"a tolerance of {tolerance:.0e} is beyond {matrix.dtype}: the largest eigenvalue is"
            f" {condition:.1e} times the damping, and rounding of H is"
            f" {rounding:.0e} of it. Use a model and data in float64, a larger"
            " damping, or a larger tolerance"
        )


def _choose(ways: list[Way], method: str, matrix: GaussNewton) -> Way:
    if method != "auto":
        chosen = next(way for way in ways if way.name == method)
        require_bytes(
            chosen.nbytes,
            matrix.device,
            f'factorizing with method="{method}" (N = {matrix.shape[0]},'
            f" n·q = {matrix.num_root_rows})",
            ('use method="iterations", which takes hardly any memory', "use fewer points"),
        )
        return chosen
    iterative = next(way for way in ways if way.name == "iterations")
    exact = next((way for way in ways if way.fits and way is not iterative), None)
    # The exact ways have everything, log-determinants included: they may take a little longer.
    allowed = max(_QUICK, _PATIENCE * iterative.seconds)
    return exact if exact is not None and exact.seconds <= allowed else iterative
