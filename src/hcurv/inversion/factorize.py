"""GaussNewton.factorize: choose a way to invert H + D, and go it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from hcurv.damping import Damping, DampingLike, as_damping
from hcurv.factorized import Factorized, warn_of_accuracy
from hcurv.hierarchical.compress import compress
from hcurv.inversion.accuracy import Accuracy, measure_accuracy
from hcurv.inversion.dense import DenseFactorization
from hcurv.inversion.iterative import AIM, IterativeFactorization, StandIn
from hcurv.inversion.kronecker import kronecker_stand_in, promising_stand_in, try_out
from hcurv.inversion.leverage import approximate_scores
from hcurv.inversion.sample_space import SampleSpaceFactorization, dense_kernel_factorization
from hcurv.inversion.sketch import GrowingSketch, Spectrum
from hcurv.inversion.ways import CostModel, InversionPlan, Trial, Way, WayName
from hcurv.memory import require_bytes
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.kernel import TangentKernel
from hcurv.network.point_sum import PointSum
from hcurv.network.problem import Problem
from hcurv.network.random_draws import draw_points

__all__ = ["factorize"]

_EXACT = ("parameters", "samples")
# An exact way is taken if it is predicted to take less than this many seconds, or no longer than
# this many times as long as the fastest way: it has log-determinants and square roots.
_QUICK, _PATIENCE = 1.0, 1.2
# Where solves are iterative, log-determinants are exact if that is predicted to take less than this
# many seconds, or no longer than this many times as long as the solves; beyond so many seconds, no
# longer than the solves.
_LOGDET_SECONDS, _LOGDET_PATIENCE, _LOGDET_MOST = 20.0, 10.0, 120.0
# The first sketch has this many columns, and another doubles it.
_FIRST_COLUMNS = 16
# A hierarchical preconditioner needs no more than this damped tolerance.
_ROUGH = 0.3
# Accuracies are measured on this many probes.
_NUM_PROBES = 16
# The entries of S have relative errors of about this many units of rounding.
_ROUNDING_UNITS = 10
# In single precision, conjugate gradients reach relative residuals of about a tenth of λ₁/λ units
# of rounding (two classifiers at λ/λ₁ of 1e-5 and 1e-6). They shall be half of what is aimed at.
_RESIDUAL_UNITS = 0.2
# Squares of numbers between this one and one over it fit into single precision.
_USUAL = 1e15
# Conjugate gradients in sample space reach relative residuals of about this many units of rounding,
# times the fourth root of λ₁/λ (measured for λ₁/λ of 1e4 in single and 1e8 in double precision).
_INNER_UNITS = 10


def factorize(
    matrix: GaussNewton,
    problem: Problem,
    damping: DampingLike,
    tolerance: float = 1e-2,
    method: str = "auto",
    seed: int = 0,
) -> Factorized:
    """See `GaussNewton.factorize`; ``problem`` is what the matrix was made of."""
    methods = ("auto", *get_args(WayName))
    if method not in methods:
        known = ", ".join(f'"{name}"' for name in methods)
        raise ValueError(f"method must be one of {known}; got {method!r}")
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must be a number between 0 and 1; got {tolerance!r}")
    resolved = as_damping(damping, matrix.shape[0], matrix.layout)
    resolved.require_positive("H may be singular")
    with torch.no_grad():
        return _Inversion(matrix, problem, resolved, float(tolerance), seed).run(method)


class _Inversion:
    """The choice of a way, and what is known by then."""

    def __init__(
        self,
        matrix: GaussNewton,
        problem: Problem,
        damping: Damping,
        tolerance: float,
        seed: int,
    ) -> None:
        self._matrix, self._problem, self._damping = matrix, problem, damping
        self._tolerance, self._seed = tolerance, seed
        diagonal = matrix.diagonal()
        self._rows = diagonal.nonzero().squeeze(1)
        inverse = 1 / damping.diagonal(matrix.shape[0], matrix.device)
        self._trace = float((diagonal.double() * inverse).sum())
        self._sketch = GrowingSketch(matrix, damping, seed)
        self._sketch.grow(_FIRST_COLUMNS)
        spectrum = self._spectrum()
        if not math.isfinite(self._trace) or not math.isfinite(spectrum.largest):
            raise ValueError(
                f"H over the damping overflows {matrix.dtype}: choose a larger damping, or use"
                " float64 or data of a usual scale"
            )
        self._check_precision(spectrum.largest)
        self._dtype = self._working_precision(spectrum.largest)
        self._costs = CostModel(
            matrix,
            self._rows.numel(),
            self._dtype,
            tolerance,
            self._sketch.seconds_per_column,
            self._iterated_precision(float(diagonal.max()), spectrum.largest),
        )
        # EKFAC in place of H, and the way that it gives, once it was made.
        self._kronecker: tuple[StandIn, Way] | None = None

    def _spectrum(self) -> Spectrum:
        size = min(self._rows.numel(), self._matrix.num_root_rows)
        return self._sketch.spectrum(self._trace, size)

    def _check_precision(self, condition: float) -> None:
        """Refuse a tolerance that the entries of S cannot give, however exact the rest is.

        A relative error δ of S changes a solve by about δ‖S(H + D)^-½‖‖S D^-½‖ ≤ δ√(λ₁/λ).
        """
        dtype = self._matrix.dtype
        rounding = _ROUNDING_UNITS * float(torch.finfo(dtype).eps) * condition**0.5
        if rounding > self._tolerance:
            raise ValueError(
                f"a tolerance of {self._tolerance:.0e} is beyond {dtype}: the largest eigenvalue is"
                f" {condition:.1e} times the damping, and rounding changes solves by about"
                f" {rounding:.0e}. Use a model and data in float64, a larger damping, or a larger"
                " tolerance"
            )

    def _working_precision(self, condition: float) -> torch.dtype:
        """The precision of dense factorizations: that of the model, if rounding allows it.

        Rounding changes H by about eps·λ₁, which a solve with damping λ multiplies by 1/λ at worst.
        Measured variances are 100 times more accurate than that.
        """
        rounding = torch.finfo(self._matrix.dtype).eps * condition
        return self._matrix.dtype if rounding <= self._tolerance else torch.float64

    def _iterated_precision(self, largest: float, condition: float) -> torch.dtype:
        """The precision of sketches and iterations: single, if that is good enough.

        Products then take half the time. Residuals have rounding errors of about eps·λ₁/λ, which
        must be well below what solves aim at. Points that are not in memory are read in the
        precision of the model anyway, so that nothing is gained there.
        """
        matrix, dtype = self._matrix, self._matrix.dtype
        if dtype != torch.float64 or isinstance(matrix.root, PointSum):
            return dtype
        scales = (largest, float(self._damping.tensor.min()), float(self._damping.tensor.max()))
        if not all(1 / _USUAL <= scale <= _USUAL for scale in scales):
            return dtype
        rounding = _RESIDUAL_UNITS * float(torch.finfo(torch.float32).eps) * condition
        return torch.float32 if rounding <= AIM * self._tolerance else dtype

    @cached_property
    def _iterated(self) -> FactoredMatrix:
        """H in the precision of iterations."""
        dtype = self._costs.iterated_dtype
        return self._matrix if dtype == self._matrix.dtype else self._matrix.in_precision(dtype)

    def run(self, method: str) -> Factorized:
        """Choose, and factorize."""
        chosen, ways, spectrum = self._choose() if method == "auto" else self._forced(method)
        if chosen.name != "subset":  # its memory is known when points are drawn
            self._require(chosen.name, chosen.nbytes)
        result = self._go(chosen, ways)
        result.plan = InversionPlan(
            chosen, tuple(ways), self._matrix.shape[0], self._matrix.num_root_rows, spectrum
        )
        result._measure_accuracy = lambda: self._accuracy(result, spectrum)
        return result

    def _accuracy(self, result: Factorized, spectrum: Spectrum) -> Accuracy:
        """Measure, and warn if the tolerance was missed."""
        matrix = self._matrix.in_precision(self._dtype)
        rounding = float(torch.finfo(self._dtype).eps) * spectrum.largest
        found = measure_accuracy(matrix, result, rounding, _NUM_PROBES, self._seed)
        if found.solve.value > self._tolerance and matrix.ranks.first:
            warn_of_accuracy(
                f"solves have an estimated relative error of {found.solve}, where"
                f" {self._tolerance:.1e} was asked for. Use a model in float64, or a larger"
                " damping or tolerance"
            )
        return found

    def _ranks(self) -> list[int]:
        """The width of the sketch, and what it could still grow to."""
        most, rank = self._sketch.max_width, max(1, self._sketch.width)
        ranks = [rank]
        while rank < most:
            rank = min(2 * rank, most)
            ranks.append(rank)
        return ranks

    def _ways(self, spectrum: Spectrum) -> list[Way]:
        """All ways that are known, the fastest first."""
        ways = self._costs.ways(spectrum, self._ranks())
        if self._kronecker is not None:
            ways.append(self._kronecker[1])
        return sorted(ways, key=lambda way: way.seconds)

    def _choose(self) -> tuple[Way, list[Way], Spectrum]:
        """The fastest way. The sketch grows as long as a larger one is predicted to pay."""
        has_tried = False
        while True:
            spectrum = self._spectrum()
            ways = self._ways(spectrum)
            fitting = [way for way in ways if way.fits]
            exact = next((way for way in fitting if way.name in _EXACT), None)
            fastest = next(iter(fitting), ways[0])
            chosen = fastest
            if exact is not None and exact.seconds <= max(_QUICK, _PATIENCE * fastest.seconds):
                chosen = exact
            if not has_tried and chosen.seconds > _QUICK:
                has_tried = True
                self._try_kronecker(chosen.seconds)
                continue
            if chosen.name != "iterations" or chosen.size <= self._sketch.width:
                return chosen, ways, spectrum
            self._grow()

    def _grow(self) -> None:
        """Double the sketch."""
        self._sketch = self._sketch.of(self._iterated)
        self._sketch.grow(2 * self._sketch.width)

    def _try_kronecker(self, seconds: float) -> None:
        """Make EKFAC, if it may be faster than this, and see how it does."""
        if self._matrix.ranks.size > 1:
            return  # each rank knows the data of its own points alone
        stand_in = promising_stand_in(
            self._problem, self._damping, self._sketch, self._costs, seconds
        )
        if stand_in is not None:
            self._keep_kronecker(stand_in, seconds)

    def _keep_kronecker(self, stand_in: StandIn, seconds: float | None = None) -> None:
        def pays(trial: Trial) -> bool:
            return seconds is None or self._costs.kronecker(stand_in, trial).seconds < seconds

        aim = AIM * self._tolerance
        trial = try_out(self._matrix, self._damping, stand_in, aim, self._seed, pays)
        self._kronecker = stand_in, self._costs.kronecker(stand_in, trial)

    def _forced(self, method: str) -> tuple[Way, list[Way], Spectrum]:
        """The way that was asked for, if there is memory for it."""
        if method == "kronecker":
            if self._matrix.ranks.size > 1:
                raise ValueError(
                    'method="kronecker" needs the data of all points in one process; with a'
                    ' process_group, use method="auto" or another one'
                )
            self._keep_kronecker(kronecker_stand_in(self._problem, self._damping))
        while True:
            spectrum = self._spectrum()
            ways = self._ways(spectrum)
            chosen = next(way for way in ways if way.name == method)
            if method != "iterations" or chosen.size <= self._sketch.width:
                break
            self._grow()
        return chosen, ways, spectrum

    def _require(self, name: WayName, nbytes: int) -> None:
        """Refuse a way for which there is no memory."""
        with self._matrix.ranks.agreed():
            require_bytes(
                nbytes,
                self._matrix.device,
                f'factorizing with method="{name}" (N = {self._matrix.shape[0]},'
                f" n·q = {self._matrix.num_root_rows})",
                ('use method="iterations", which takes hardly any memory', "use fewer points"),
            )

    def _go(self, way: Way, ways: list[Way]) -> Factorized:
        dtype = self._matrix.dtype
        if way.name == "parameters":
            block = self._matrix.in_precision(self._dtype).block(self._rows, self._rows)
            size = self._matrix.shape[0]
            return DenseFactorization.of(block, self._rows, self._damping, size, dtype)
        if way.name == "samples":
            exact = self._matrix.in_precision(self._dtype)
            return SampleSpaceFactorization.of(exact, self._damping, dtype)
        if way.name == "compressed-samples":
            working = self._inner_precision()
            exact = self._matrix.in_precision(working)
            kernel = exact.kernel(self._damping)
            one = Damping(torch.ones((), dtype=torch.float64))
            finer = self._inner_tolerance(working)
            affordable = any(other.name == "samples" for other in self._affordable(way, ways))
            inner = IterativeFactorization(
                kernel,
                self._compressed(kernel, one),
                one,
                finer,
                working,
                (lambda: dense_kernel_factorization(kernel)) if affordable else None,
            )
            return SampleSpaceFactorization(exact, inner, self._damping, dtype)
        if way.name == "compressed":
            stand_in = self._compressed(self._matrix, self._damping)
        elif way.name == "subset":
            stand_in = self._subset(way.size)
        elif way.name == "kronecker":
            assert self._kronecker is not None
            stand_in = self._kronecker[0]
        else:
            stand_in = self._sketch.stand_in()
        iterated = self._iterated
        is_precise = iterated.dtype == self._dtype
        precise = None if is_precise else lambda: self._matrix.in_precision(self._dtype)
        return IterativeFactorization(
            iterated,
            stand_in,
            self._damping,
            self._tolerance,
            dtype,
            self._fallback(way, ways),
            precise,
        )

    def _inner_precision(self) -> torch.dtype:
        """Double precision, unless the tolerance of inner solves is far above rounding without."""
        finer = self._tolerance / (1 + self._spectrum().largest)
        rounding = 10 * _INNER_UNITS * float(torch.finfo(self._dtype).eps)
        return self._dtype if finer > rounding else torch.float64

    def _inner_tolerance(self, working: torch.dtype) -> float:
        """The tolerance of solves with I + S D⁻¹ Sᵀ.

        For a row b of S, the error of (H + D)⁻¹b is λ₁/λ times as large, because nearly all of b is
        taken away again. Where rounding does not allow that, it is as large as rounding allows.
        """
        condition = 1 + self._spectrum().largest
        rounding = _INNER_UNITS * float(torch.finfo(working).eps) * condition**0.25
        least = float(min(rounding, self._tolerance / condition**0.5))
        return max(self._tolerance / condition, least)

    def _affordable(self, way: Way, ways: list[Way]) -> list[Way]:
        """The exact ways that may be gone for a log-determinant alone, the fastest first."""
        allowed = min(max(_LOGDET_SECONDS, _LOGDET_PATIENCE * way.seconds), _LOGDET_MOST)
        allowed = max(allowed, way.seconds)
        return [
            other
            for other in ways
            if other.name in _EXACT and other.fits and other.seconds <= allowed
        ]

    def _fallback(self, way: Way, ways: list[Way]) -> Callable[[], Factorized] | None:
        """Makes an exact factorization for log-determinants, if that does not take too long."""
        for other in self._affordable(way, ways):
            return lambda other=other: self._go(other, ways)  # type: ignore[misc]
        return None

    def _compressed(self, matrix: GaussNewton | TangentKernel, damping: Damping) -> StandIn:
        """A hierarchical matrix in place of H, or of its kernel."""
        values = damping.diagonal(matrix.shape[0], matrix.device)
        built = compress(matrix, damping=float(values.min()), tolerance=_ROUGH, seed=self._seed)

        def product(columns: Tensor) -> Tensor:
            return torch.addcmul(built @ columns, columns, values[:, None].to(columns.dtype))

        name = f"compressed, {built.num_stored / built.shape[0]:.0f} floats a row"
        return StandIn(name, product, built.factorize(damping.tensor.detach(), warn=False))

    def _subset(self, num_points: int) -> StandIn:
        """Some points in place of all, drawn by leverage scores."""
        scores = approximate_scores(self._matrix, self._damping, self._seed)
        points, weights = draw_points(scores, num_points, self._seed)
        self._require("subset", self._costs.subset_bytes(points.numel()))
        subset = self._matrix.of_points(points, weights).in_precision(self._dtype)
        factorized = SampleSpaceFactorization.of(subset, self._damping, self._dtype)
        values = self._damping.diagonal(subset.shape[0], subset.device).to(self._dtype)

        def product(columns: Tensor) -> Tensor:
            return torch.addcmul(subset @ columns, columns, values[:, None])

        return StandIn(f"{points.numel()} points", product, factorized)
