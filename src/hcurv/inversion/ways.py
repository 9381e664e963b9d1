"""What each way of inverting H + D costs, and which one is the cheapest that fits.

Times are predicted from counts of floating-point operations and from the speed of this machine's
matrix products, which is measured when a plan is made. They are meant to order the ways, not to be
exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hcurv.factorized import Damping
from hcurv.linalg import lanczos
from hcurv.memory import available_bytes, format_bytes
from hcurv.network.gauss_newton import GaussNewton

__all__ = ["InversionPlan", "Spectrum", "Way", "WayName", "plan_ways", "probe_spectrum"]

WayName: TypeAlias = Literal["parameters", "samples", "iterations"]

# A Cholesky factorization of a large matrix reaches about this share of the speed of a product,
# and forming a dense matrix from the factors about this one (measured on two cores of x86).
_CHOLESKY_SPEED, _FORMING_SPEED = 0.6, 0.4
# A pass over a dense kernel (multiply, add, write) costs as much as this many flops per entry.
_PASS_FLOPS = 60
# Plans are made for this many right-hand sides.
NUM_COLUMNS = 16
# The share of free memory that a way may take.
_MEMORY_SHARE = 0.8
# Steps of the Lanczos iteration that finds the largest eigenvalue of D^-½ H D^-½ to a few percent.
_LANCZOS_STEPS = 12
# A product of two square matrices of this size measures the speed of the machine.
_TRIAL_SIZE = 768


@dataclass(frozen=True)
class Spectrum:
    """What a few products tell of D^-½ H D^-½.

    Attributes:
        largest: its largest eigenvalue, λ₁/λ for a damping λ.
        trace: its trace, an upper bound of the effective dimension.
    """

    largest: float
    trace: float


def probe_spectrum(matrix: GaussNewton, damping: Damping) -> Spectrum:
    """Find the largest eigenvalue of D^-½ H D^-½ by a few products, and its trace."""
    roots = damping.diagonal(matrix.shape[0], matrix.device).rsqrt()
    trace = float((matrix.diagonal().double() * roots.square()).sum())
    scale = roots.to(matrix.dtype)

    def product(vector: Tensor) -> Tensor:
        return scale * (matrix @ (scale * vector))

    values, _, residuals = lanczos(
        product, matrix.shape[0], _LANCZOS_STEPS, matrix.dtype, matrix.device
    )
    largest = min(float(values[-1] + residuals[-1]), trace)
    return Spectrum(max(largest, 0.0), trace)


@dataclass(frozen=True)
class Way:
    """One way to invert H + D.

    Attributes:
        name: "parameters" (dense Cholesky factorization of H + D), "samples" (of I + S D⁻¹ Sᵀ) or
            "iterations" (conjugate gradients on the exact H).
        seconds: predicted time of setting up and of solving for 16 right-hand sides.
        nbytes: memory that it takes.
        accuracy: predicted relative error of solves.
        fits: whether there is memory for it.
    """

    name: WayName
    seconds: float
    nbytes: int
    accuracy: float
    fits: bool


@dataclass(frozen=True)
class InversionPlan:
    """The ways that were looked at; prints as a table.

    Attributes:
        chosen: the way that was taken.
        ways: all of them, the fastest first.
        size: N.
        num_root_rows: n·q.
        spectrum: what was known of the matrix.
    """

    chosen: Way
    ways: tuple[Way, ...]
    size: int
    num_root_rows: int
    spectrum: Spectrum

    def __str__(self) -> str:
        """A small table."""
        lines = [
            f"N = {self.size}, n·q = {self.num_root_rows}, largest eigenvalue over damping"
            f" {self.spectrum.largest:.2g} (predictions, {NUM_COLUMNS} right-hand sides)",
            f"  {'way':<12}{'seconds':>9}{'memory':>10}{'error':>9}",
        ]
        for way in self.ways:
            mark = "→" if way is self.chosen else " "
            note = "" if way.fits else "  does not fit"
            lines.append(
                f"{mark} {way.name:<12}{way.seconds:>9.2g}{format_bytes(way.nbytes):>10}"
                f"{way.accuracy:>9.0e}{note}"
            )
        return "\n".join(lines)


def working_precision(matrix: GaussNewton, spectrum: Spectrum, tolerance: float) -> torch.dtype:
    """Double precision, unless rounding in single precision is far below the tolerance.

    Rounding changes H by about eps·λ₁, which a solve with damping λ multiplies by 1/λ.
    """
    rounding = 10 * torch.finfo(matrix.dtype).eps * spectrum.largest
    return matrix.dtype if rounding <= 0.1 * tolerance else torch.float64


def plan_ways(
    matrix: GaussNewton, num_nonzero: int, spectrum: Spectrum, tolerance: float
) -> list[Way]:
    """All ways with their predicted costs, the fastest first.

    Args:
        matrix: H.
        num_nonzero: rows of H that are not zero.
        spectrum: of D^-½ H D^-½.
        tolerance: relative error of solves that is asked for.
    """
    dtype = working_precision(matrix, spectrum, tolerance)
    speed = _speed(dtype, matrix.device)
    free = available_bytes(matrix.device)
    most = math.inf if free is None else _MEMORY_SHARE * free
    points, rows = matrix.num_points, matrix.num_root_rows
    copies = matrix.num_stored * dtype.itemsize if dtype != matrix.dtype else 0
    rounding = float(torch.finfo(dtype).eps) * spectrum.largest

    def way(name: WayName, seconds: float, nbytes: float, accuracy: float) -> Way:
        return Way(name, seconds, int(nbytes), accuracy, nbytes <= most)

    forming = num_nonzero**2 * points / (_FORMING_SPEED * speed)
    solving = 2.0 * NUM_COLUMNS * num_nonzero**2 / (0.1 * speed)
    factoring = num_nonzero**3 / 3 / (_CHOLESKY_SPEED * speed)
    parameters = way(
        "parameters",
        forming + factoring + solving,
        2 * num_nonzero**2 * dtype.itemsize + copies,
        rounding,
    )
    units, inputs = matrix.factors.num_units, matrix.factors.inputs.shape[0]
    per_entry = units + inputs / (rows / points) ** 2 + len(matrix.layout.layers) * _PASS_FLOPS
    forming = rows**2 * per_entry / speed
    factoring = rows**3 / 3 / (_CHOLESKY_SPEED * speed)
    product = 4.0 * matrix.shape[0] * points * NUM_COLUMNS / (0.5 * speed)
    samples = way(
        "samples",
        forming + factoring + product + 2.0 * NUM_COLUMNS * rows**2 / (0.1 * speed),
        2 * rows**2 * dtype.itemsize + copies,
        rounding,
    )
    # Conjugate gradients need ½ √κ log(2/ε) iterations, and at most as many as H has eigenvalues.
    condition = 1 + spectrum.largest
    bound = 0.5 * math.sqrt(condition) * math.log(2 / tolerance)
    iterations = max(1.0, min(bound, num_nonzero, rows, 4 * spectrum.trace + 4))
    own_speed = speed if dtype == matrix.dtype else _speed(matrix.dtype, matrix.device)
    product = 4.0 * matrix.shape[0] * points * NUM_COLUMNS / (0.5 * own_speed)
    iterative = way(
        "iterations",
        iterations * product,
        4 * matrix.shape[0] * NUM_COLUMNS * matrix.dtype.itemsize,
        tolerance,
    )
    return sorted((parameters, samples, iterative), key=lambda found: found.seconds)


def _speed(dtype: torch.dtype, device: torch.device) -> float:
    """Flops per second of a product of matrices of moderate size."""
    trial = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, dtype=dtype, device=device)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        trial @ trial
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * _TRIAL_SIZE**3 / max(best, 1e-9)
