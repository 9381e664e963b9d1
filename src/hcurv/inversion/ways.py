"""What each way of inverting H + D costs, and which one is the fastest that fits.

Times are predicted from counts of floating-point operations, from the speed of this machine's
matrix products, and from the time of products with H; both are measured when a plan is made. They
are meant to order the ways, not to be exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch

from hcurv.inversion.iterative import StandIn
from hcurv.inversion.sketch import Spectrum
from hcurv.memory import available_bytes, format_bytes
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.reading import Network

__all__ = ["CostModel", "InversionPlan", "Trial", "Way", "WayName"]

WayName: TypeAlias = Literal[
    "parameters",
    "samples",
    "iterations",
    "kronecker",
    "subset",
    "compressed",
    "compressed-samples",
]

# A Cholesky factorization of a large matrix reaches about this share of the speed of a product,
# forming a dense matrix from the factors about this one, and triangular solves with few columns
# this one (measured on two cores of x86).
_CHOLESKY_SPEED, _FORMING_SPEED, _TRIANGULAR_SPEED = 0.6, 0.4, 0.1
# Plans are made for this many right-hand sides.
NUM_COLUMNS = 16
# The share of free memory that a way may take.
_MEMORY_SHARE = 0.8
# A product of two square matrices of this size measures the speed of the machine.
_TRIAL_SIZE = 768
# Block conjugate gradients behave as if the preconditioner had taken away this share of the columns
# of the sketch, and the block itself as many eigenvalues as it has columns (fitted, see sketch.py).
_TAKEN_SHARE = 0.6
# One iteration passes over its blocks of vectors about this many times, at this many floats per
# second.
_VECTOR_PASSES, _FLOATS_PER_SECOND = 24, 1e9
# Work of the Nyström step for r columns, in flops over N·r². Half of it is in double precision.
_NYSTROM_FLOPS = 20
# The eigenvectors of a matrix of size d, in double precision, take as long as this many times d³
# flops of a product in single precision, and a pass over the points at least as long as products
# with this many columns.
_EIGENVECTOR_FLOPS, _PASS_COLUMNS = 30, 4
# A subset of points is given this many rows for each effective dimension, within these bounds. The
# condition number with M rows was about 1 + 7·(10 d/M)² on a classifier of 4,978 parameters.
_SUBSET_SHARE, _SUBSET_LEAST, _SUBSET_MOST = 10, 512, 12_000
# Estimating leverage scores costs about as much as products with this many columns.
_SCORE_COLUMNS = 24
# A compressed matrix stores about this many floats a row for each effective dimension (0.2 to 0.35
# on classifiers and regressions; far less on autoencoders, where it is still not the fastest way).
_BUILT_SHARE = 0.25
# With f floats a row it takes products with this many columns, this many more for each f, and this
# many flops for each row and f² (fitted on 28 builds with 5 networks, of 331 to 16,474 rows).
_BUILD_COLUMNS, _COLUMNS_PER_FLOAT, _BUILD_FLOPS = 400, 4, 130
# As a preconditioner it needs about this many iterations.
_BUILT_ITERATIONS = 5


@dataclass(frozen=True)
class Way:
    """One way to invert H + D.

    Attributes:
        name: "parameters" (dense Cholesky factorization of H + D), "samples" (of I + S D⁻¹ Sᵀ), or
            conjugate gradients on the exact H, preconditioned by a low-rank sketch ("iterations"),
            by EKFAC ("kronecker"), by a subset of the points, drawn by leverage scores and
            factorized in sample space ("subset"), or by a hierarchical matrix, of H ("compressed")
            or of S D⁻¹ Sᵀ ("compressed-samples").
        size: the rank of the sketch, or the number of points of the subset; 0 for the others.
        seconds: predicted time of setting up and of solving for 16 right-hand sides.
        nbytes: memory that it takes.
        accuracy: predicted relative error of solves.
        fits: whether there is memory for it.
    """

    name: WayName
    size: int
    seconds: float
    nbytes: int
    accuracy: float
    fits: bool

    @property
    def description(self) -> str:
        """The name, with the size."""
        if self.name == "iterations":
            return f"iterations, rank {self.size}"
        return f"subset, {self.size} points" if self.name == "subset" else self.name


@dataclass(frozen=True)
class Trial:
    """What was seen of a preconditioner.

    Attributes:
        num_iterations: the iterations that a solve needs, predicted from a few of them.
        seconds: the time that it takes to apply it to the columns that plans are made for.
    """

    num_iterations: float
    seconds: float


@dataclass(frozen=True)
class InversionPlan:
    """The ways that were looked at; prints as a table.

    Attributes:
        chosen: the way that was taken.
        ways: all of them, the fastest first.
        size: N.
        num_root_rows: n·q.
        spectrum: what was known of the eigenvalues of D^-½ H D^-½.
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
            f" {self.spectrum.largest:.2g}, effective dimension about"
            f" {self.spectrum.effective_dimension:.2g}",
            f"predictions for {NUM_COLUMNS} right-hand sides:",
            f"  {'way':<24}{'seconds':>9}{'memory':>10}{'error':>9}",
        ]
        for way in self.ways:
            mark = "→" if way is self.chosen else " "
            note = "" if way.fits else "  does not fit"
            lines.append(
                f"{mark} {way.description:<24}{way.seconds:>9.2g}{format_bytes(way.nbytes):>10}"
                f"{way.accuracy:>9.0e}{note}"
            )
        return "\n".join(lines)


class CostModel:
    """Predicts times and memory.

    Args:
        matrix: H.
        num_nonzero: rows of H that are not zero.
        dtype: the precision that is worked in.
        tolerance: relative error of solves that is asked for.
        seconds_per_column: time of a product of H with one of several columns.
        iterated_dtype: the precision of sketches and iterations.
    """

    def __init__(
        self,
        matrix: GaussNewton,
        num_nonzero: int,
        dtype: torch.dtype,
        tolerance: float,
        seconds_per_column: float,
        iterated_dtype: torch.dtype,
    ) -> None:
        self._matrix, self._num_nonzero = matrix, num_nonzero
        self._dtype, self._tolerance, self.iterated_dtype = dtype, tolerance, iterated_dtype
        free = available_bytes(matrix.device)
        figures = (
            machine_speed(dtype, matrix.device),
            seconds_per_column,
            -math.inf if free is None else -_MEMORY_SHARE * free,
            matrix.num_stored,
            matrix.root.num_stored_with_entries,
        )
        # All ranks must choose the same way, so they use the same figures.
        speed, column, most, stored, with_entries = matrix.ranks.most(figures)
        self._speed, self._most = speed, math.inf if free is None else -most
        # Products in double precision take twice as long as in single.
        is_halved = iterated_dtype != matrix.dtype
        self._column = column / 2 if is_halved else column
        self._for_iterations = int(stored) * iterated_dtype.itemsize if is_halved else 0
        self._exact_column = (2.0 if dtype != matrix.dtype else 1.0) * column
        # What conversion to another precision takes, and what entries take that products do not.
        converted = dtype != matrix.dtype
        self._copies = int(stored) * dtype.itemsize if converted else 0
        self._for_entries = int(with_entries - (0 if converted else stored)) * dtype.itemsize
        self._for_entries -= self._copies

    def ways(self, spectrum: Spectrum, ranks: list[int]) -> list[Way]:
        """All ways, the fastest first; conjugate gradients with the best rank that fits."""
        found = [self.parameters(spectrum), self.samples(spectrum)]
        iterations = [self.iterations(spectrum, rank) for rank in ranks]
        found.append(min(iterations, key=lambda way: (not way.fits, way.seconds)))
        found += [self.subset(spectrum), self.compressed(spectrum)]
        found.append(self.compressed_samples(spectrum))
        return sorted(found, key=lambda way: way.seconds)

    def _way(
        self,
        name: WayName,
        seconds: float,
        floats: float,
        accuracy: float,
        size: int = 0,
        entries: float = 1.0,
    ) -> Way:
        """A way that asks for entries over this share of the points."""
        nbytes = int(floats * self._dtype.itemsize) + self._copies
        nbytes += int(entries * self._for_entries)
        if name in ("subset", "compressed"):
            nbytes += self._for_iterations
        return Way(name, size, seconds, nbytes, accuracy, nbytes <= self._most)

    def _rounding(self, spectrum: Spectrum) -> float:
        return float(torch.finfo(self._dtype).eps) * spectrum.largest

    def parameters(self, spectrum: Spectrum) -> Way:
        """A dense Cholesky factorization of H + D."""
        size = self._num_nonzero
        forming = size**2 * self._matrix.num_points / (_FORMING_SPEED * self._speed)
        seconds = forming + self._factoring(size) + self._triangular(size)
        return self._way("parameters", seconds, 2 * size**2, self._rounding(spectrum))

    def samples(self, spectrum: Spectrum) -> Way:
        """A dense Cholesky factorization of I + S D⁻¹ Sᵀ."""
        rows = self._matrix.num_root_rows
        seconds = self._kernel(rows) + self._triangular(rows) + NUM_COLUMNS * self._exact_column
        return self._way("samples", seconds, 2 * rows**2, self._rounding(spectrum))

    def iterations(self, spectrum: Spectrum, rank: int) -> Way:
        """Conjugate gradients with a low-rank preconditioner, of which nothing is made yet."""
        size = self._matrix.shape[0]
        index = int(_TAKEN_SHARE * rank) + NUM_COLUMNS
        count = self._num_iterations(1 + spectrum.eigenvalue(index))
        nystrom = _NYSTROM_FLOPS * size * rank**2 / self._speed
        one = self._iteration() + 4 * size * rank * NUM_COLUMNS / (0.3 * self._speed)
        seconds = rank * self._column + nystrom + count * one
        nbytes = size * (6 * NUM_COLUMNS + 4 * rank) * self.iterated_dtype.itemsize
        nbytes += self._for_iterations
        fits = nbytes <= self._most
        return Way("iterations", rank, seconds, nbytes, self._tolerance, fits)

    def kronecker_seconds(self, network: Network) -> tuple[float, float]:
        """Seconds for the factors of K-FAC, and for the eigenvalues of EKFAC after that."""
        points = self._matrix.num_points
        rows = self._matrix.num_root_rows / points
        passing, eigenvectors = 0.0, 0.0
        for layer in network.layers:
            if layer.trainable:
                units, inputs = layer.weight.shape
                # Behind the last layer, many rows are those of a diagonal matrix.
                width = 1 if units == rows else rows
                passing += 2 * points * (inputs**2 + width * units**2)
                eigenvectors += _EIGENVECTOR_FLOPS * (units**3 + inputs**3)
        once = passing / (_FORMING_SPEED * self._speed) + _PASS_COLUMNS * self._column
        return once, once + eigenvectors / self._speed

    def kronecker(self, stand_in: StandIn, trial: Trial) -> Way:
        """Conjugate gradients, preconditioned by EKFAC, which is made already."""
        seconds = trial.num_iterations * (self._iteration() + trial.seconds)
        floats = stand_in.factorized.num_stored + 6 * NUM_COLUMNS * self._matrix.shape[0]
        nbytes = floats * self._matrix.dtype.itemsize + self._for_iterations
        fits = nbytes <= self._most
        return Way("kronecker", 0, seconds, nbytes, self._tolerance, fits)

    def subset(self, spectrum: Spectrum) -> Way:
        """Conjugate gradients, preconditioned by some of the points."""
        per_point = self._matrix.num_root_rows / self._matrix.num_points
        dimension = spectrum.effective_dimension
        wanted = min(max(_SUBSET_SHARE * dimension, _SUBSET_LEAST), _SUBSET_MOST)
        points = max(1, min(int(wanted / per_point), self._matrix.num_points))
        rows = points * per_point
        count = self._num_iterations(1 + 7 * (10 * dimension / rows) ** 2)
        share = points / self._matrix.num_points
        one = self._iteration() + self._triangular(rows) + share * NUM_COLUMNS * self._column
        seconds = _SCORE_COLUMNS * self._column + self._kernel(rows) + count * one
        # Points are drawn with replacement, and each of them is stored once.
        kept = 1 - math.exp(-share)
        floats = self._subset_floats(kept)
        return self._way("subset", seconds, floats, self._tolerance, points, entries=kept)

    def _subset_floats(self, kept: float) -> float:
        """A kernel of a share of the points with its factor, their root, and blocks of vectors."""
        floats = 2 * (kept * self._matrix.num_root_rows) ** 2 + kept * self._matrix.num_stored
        return floats + 6 * NUM_COLUMNS * self._matrix.shape[0]

    def subset_bytes(self, num_points: int) -> int:
        """Memory of a subset whose distinct points have been counted."""
        kept = num_points / self._matrix.num_points
        floats = self._subset_floats(kept)
        way = self._way("subset", 0.0, floats, self._tolerance, num_points, entries=kept)
        return way.nbytes

    def compressed(self, spectrum: Spectrum) -> Way:
        """Conjugate gradients, preconditioned by a hierarchical matrix."""
        return self._built("compressed", self._matrix.shape[0], spectrum)

    def compressed_samples(self, spectrum: Spectrum) -> Way:
        """The same in sample space, where solves are made more accurate by √(λ₁/λ)."""
        return self._built("compressed-samples", self._matrix.num_root_rows, spectrum)

    def _built(self, name: WayName, size: int, spectrum: Spectrum) -> Way:
        width = min(max(1.0, _BUILT_SHARE * spectrum.effective_dimension), size)
        columns = min(_BUILD_COLUMNS + _COLUMNS_PER_FLOAT * width, size)
        building = columns * self._column + _BUILD_FLOPS * size * width**2 / self._speed
        digits = max(1.0, math.log10(1 + spectrum.largest))
        count = _BUILT_ITERATIONS * (digits if name == "compressed-samples" else 1)
        one = self._iteration() + 4 * NUM_COLUMNS * size * width / (_TRIANGULAR_SPEED * self._speed)
        # The matrix, its factorization, and what is in between.
        return self._way(name, building + count * one, 3 * width * size, self._tolerance)

    def _kernel(self, rows: float) -> float:
        """Seconds to form and factorize a kernel."""
        forming = rows**2 * self._matrix.root.kernel_flops / self._speed
        return forming + self._factoring(rows)

    def _factoring(self, size: float) -> float:
        return size**3 / 3 / (_CHOLESKY_SPEED * self._speed)

    def _triangular(self, size: float) -> float:
        return 2.0 * NUM_COLUMNS * size**2 / (_TRIANGULAR_SPEED * self._speed)

    def _num_iterations(self, condition: float) -> float:
        """½ √κ log(2/ε), and two at least."""
        return max(2.0, 0.5 * math.sqrt(condition) * math.log(2 / self._tolerance))

    def _iteration(self) -> float:
        """Seconds of an iteration without the preconditioner."""
        size = self._matrix.shape[0]
        vectors = _VECTOR_PASSES * NUM_COLUMNS * size / _FLOATS_PER_SECOND
        return NUM_COLUMNS * self._column + vectors


def machine_speed(dtype: torch.dtype, device: torch.device) -> float:
    """Flops per second of a product of matrices of moderate size, measured once per process."""
    return _measured_speed(dtype, device, torch.get_num_threads())


@lru_cache
def _measured_speed(dtype: torch.dtype, device: torch.device, num_threads: int) -> float:
    trial = torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, dtype=dtype, device=device)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        trial @ trial
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * _TRIAL_SIZE**3 / max(best, 1e-9)
