"""Conjugate gradients that stop as soon as a step is good enough to be taken.

They minimise the quadratic model q(p) = gᵀp + ½ pᵀBp, B = H + D, and stop when q has stopped
falling (Martens 2010), not when the residual is small: on the way to a minimum of the loss, more
accurate steps are not worth their products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Truncated", "dot", "minimise_model"]

# The decrease of q is judged over this many iterations, or over this share of all so far, if that
# is more.
_FEWEST = 5
_SHARE = 0.25


@dataclass(frozen=True)
class Truncated:
    """What conjugate gradients found.

    Attributes:
        step: p, (N,).
        residual: −g − Bp, (N,).
        iterations: the number of iterations.
        values: q at the start and after each iteration.
        seconds: the time of one iteration, on average.
    """

    step: Tensor
    residual: Tensor
    iterations: int
    values: list[float]
    seconds: float


def dot(left: Tensor, right: Tensor) -> float:
    """Multiply two vectors in double precision."""
    return float(left.double() @ right.double())


def minimise_model(
    product: Callable[[Tensor], Tensor],
    gradient: Tensor,
    precondition: Callable[[Tensor], Tensor],
    start: Tensor | None,
    tolerance: float,
    max_iterations: int,
) -> Truncated:
    """Minimise gᵀp + ½ pᵀBp until an iteration lowers it by less than ``tolerance`` of its value.

    Args:
        product: multiplies by B, positive definite.
        gradient: g, (N,).
        precondition: multiplies by an approximation of B⁻¹.
        start: a direction to start with. The first guess is the best multiple of it between 0 and
            1; None to start from zero.
        tolerance: the relative decrease of q for each iteration below which it stops.
        max_iterations: the largest number of iterations.
    """
    step, residual = torch.zeros_like(gradient), -gradient
    if start is not None:
        curved = product(start)
        curvature = dot(start, curved)
        length = min(1.0, max(0.0, -dot(gradient, start) / curvature)) if curvature > 0 else 0.0
        step, residual = length * start, residual - length * curved
    values = [_model(step, gradient, residual)]
    direction, energy = torch.zeros_like(gradient), 1.0
    least = float(torch.finfo(gradient.dtype).eps) * float(gradient.norm())
    began = time.perf_counter()
    while len(values) <= max_iterations and float(residual.norm()) > least:
        preconditioned = precondition(residual)
        previous, energy = energy, dot(residual, preconditioned)
        if not energy > 0:  # rounding, or a preconditioner that is not positive definite
            break
        ratio = energy / previous if len(values) > 1 else 0.0
        direction = preconditioned + ratio * direction
        curved = product(direction)
        curvature = dot(direction, curved)
        if not curvature > 0:
            break
        step = step + (energy / curvature) * direction
        residual = residual - (energy / curvature) * curved
        values.append(_model(step, gradient, residual))
        if _has_stalled(values, tolerance):
            break
    iterations = len(values) - 1
    seconds = (time.perf_counter() - began) / max(1, iterations)
    return Truncated(step, residual, iterations, values, seconds)


def _model(step: Tensor, gradient: Tensor, residual: Tensor) -> float:
    """q(p), which is ½ pᵀ(g − r) because Bp = −g − r."""
    return 0.5 * (dot(step, gradient) - dot(step, residual))


def _has_stalled(values: list[float], tolerance: float) -> bool:
    """Whether the last iterations lowered q by less than ``tolerance`` of it each."""
    iterations = len(values) - 1
    span = max(_FEWEST, int(_SHARE * iterations))
    if iterations < span or not values[-1] < 0:
        return False
    return values[-1 - span] - values[-1] < span * tolerance * -values[-1]
