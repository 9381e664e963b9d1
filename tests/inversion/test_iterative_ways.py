"""H.factorize by conjugate gradients: every way, odd networks, estimates with their error bars."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import CASES, Case, assert_close, both_dtypes, labels, normal
from conformance import check_factorized
from hcurv.inversion.iterative import IterativeFactorization
from hcurv.inversion.sample_space import SampleSpaceFactorization

METHODS = ("iterations", "kronecker", "subset", "compressed", "compressed-samples")
every_method = pytest.mark.parametrize("method", METHODS)
NETWORKS = (
    "classifier",
    "one point",
    "dead units",
    "zero inputs",
    "one layer",
    "autoencoder",
    "middle layer frozen",
)
# Every network at the smallest damping, and some at larger ones.
SMALLEST = [(name, 1e-8) for name in NETWORKS]
LARGER = [(n, ratio) for n in ("classifier", "dead units", "autoencoder") for ratio in (1e-1, 1e-4)]
# Double precision allows solves that are this accurate for all dampings that are tested.
FINE = 1e-8


@cache
def small_network(num_points: int) -> Case:
    """N = 39 parameters, and three rows of the root for each point."""
    return Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(),
        normal(num_points, 5),
        labels(num_points, 3),
    )


def by_row(size: int) -> Tensor:
    """A damping for each row, over two orders of magnitude."""
    return 10 ** (-1 - 2 * torch.rand(size, generator=torch.Generator().manual_seed(0)).double())


class Truth:
    """H of a case, by `torch.func`, and the inverse of H + D, in double precision."""

    def __init__(self, case: Case, ratio: float, damping: Tensor | None = None) -> None:
        self.dense = case.dense
        size = len(self.dense)
        self.largest = float(torch.linalg.eigvalsh(self.dense)[-1])
        self.damping = ratio * (self.largest if self.largest > 0 else 1.0)
        diagonal = (
            torch.full((size,), self.damping, dtype=torch.float64) if damping is None else damping
        )
        self.damped = self.dense + diagonal.diag()
        self.inverse = torch.linalg.inv(self.damped)
        self.condition = float(torch.linalg.cond(self.damped))
        self.rhs = normal(size, 3, seed=4)

    def solve_errors(self, solved: Tensor) -> Tensor:
        """‖x − (H + D)⁻¹b‖/‖(H + D)⁻¹b‖ in the norm of H + D."""
        wrong = solved.double() - self.inverse @ self.rhs
        energies = (self.rhs * (self.inverse @ self.rhs)).sum(0)
        return ((wrong * (self.damped @ wrong)).sum(0).clamp(min=0) / energies).sqrt()

    def check(self, factorized: hcurv.Factorized, tolerance: float) -> None:
        """All results are right to the tolerance, or to what rounding of H allows."""
        kind = factorized.dtype
        # Solves are in double precision where that matters, but the entries of S are rounded,
        # which changes H + D by about √κ units. Rounding of H itself comes in a product with it.
        rounding = 100 * torch.finfo(kind).eps * self.condition**0.5
        rounding += 100 * torch.finfo(torch.float64).eps * self.condition
        allowed = 2 * tolerance + rounding
        rhs = self.rhs.to(kind)
        assert float(self.solve_errors(factorized.solve(rhs)).max()) < allowed
        expected = self.rhs.T @ self.inverse @ self.rhs
        # Variances have twice the relative error of solves at most.
        found = factorized.quadratic(rhs.T.contiguous()).double()
        assert float((found - expected).abs().max()) < 2 * allowed * float(expected.abs().max())
        variances = factorized.inverse_diagonal().double()
        wrong = (variances / self.inverse.diagonal() - 1).abs()
        assert float(wrong.max()) < 2 * allowed + 10 * rounding
        logdet = float(torch.linalg.slogdet(self.damped).logabsdet)
        assert abs(float(factorized.logdet()) - logdet) < (allowed + 10 * rounding) * len(self.rhs)


@cache
def operator(name: str, dtype: torch.dtype = torch.float64) -> hcurv.GaussNewton:
    return CASES[name].operator(dtype)


@every_method
@pytest.mark.parametrize(("name", "ratio"), SMALLEST + LARGER)
def test_every_network_is_solved_to_the_tolerance(name: str, method: str, ratio: float) -> None:
    truth = Truth(CASES[name], ratio)
    truth.check(operator(name).factorize(truth.damping, FINE, method=method), FINE)


@every_method
@pytest.mark.parametrize(("name", "ratio"), [(name, 1e-4) for name in NETWORKS] + LARGER[:1])
def test_single_precision_is_solved_to_the_tolerance(name: str, method: str, ratio: float) -> None:
    truth = Truth(CASES[name], ratio)
    matrix = operator(name, torch.float32)
    tolerance = 1e-3
    factorized = matrix.factorize(truth.damping, tolerance, method=method)
    assert factorized.dtype == torch.float32
    truth.check(factorized, tolerance)


@pytest.mark.parametrize("method", ["iterations", "kronecker", "subset", "compressed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_double_network_is_iterated_in_single_precision_where_that_is_enough(
    name: str, method: str
) -> None:
    for ratio, tolerance, single in ((1e-1, 1e-2, True), (1e-4, 1e-2, True), (1e-4, 1e-6, False)):
        truth = Truth(CASES[name], ratio)
        factorized = operator(name).factorize(truth.damping, tolerance=tolerance, method=method)
        assert isinstance(factorized, IterativeFactorization)
        working = torch.float32 if single and truth.largest > 0 else torch.float64
        assert factorized.product(truth.rhs.to(working)).dtype == working
        solved = factorized.solve(truth.rhs)
        assert solved.dtype == factorized.dtype == torch.float64
        assert bool((truth.solve_errors(solved) <= tolerance).all())
        assert factorized.sample(2).dtype == torch.float64


def test_a_damping_or_a_scale_beyond_single_precision_is_left_to_double() -> None:
    case = CASES["classifier"]
    for ratio, scale in ((1e-7, 1.0), (1e-2, 1e-20), (1e-2, 1e20)):
        damping = ratio * scale * Truth(case, 1.0).largest
        loss = hcurv.losses.HalfSquaredError(reduction="sum")
        model = nn.Linear(5, 4, dtype=torch.float64)
        inputs = scale**0.5 * normal(30, 5)
        factorized = hcurv.GaussNewton(model, loss, inputs).factorize(damping, method="iterations")
        rhs = normal(24, 2)
        # A product in single precision refuses vectors in double precision.
        assert factorized.product(rhs).dtype == torch.float64


@every_method
@pytest.mark.parametrize("num_points", [1, 13, 40])
def test_all_that_a_factorization_can_do(method: str, num_points: int) -> None:
    """N = 39: n·q is less, equal for 13 points, and more. A damping for each parameter."""
    matrix = small_network(num_points).operator()
    check_factorized(
        lambda given: matrix.factorize(given, FINE, method=method),
        small_network(num_points).dense,
        by_row(39),
        # Half of the 16 digits are left by the tolerance.
        digits=0.5,
        gradients=num_points == 13,
    )


@every_method
def test_one_damping_and_its_derivative(method: str) -> None:
    case = small_network(10)
    matrix = case.operator()
    check_factorized(
        lambda given: matrix.factorize(given, FINE, method=method), case.dense, 0.02, digits=0.5
    )


@every_method
def test_dampings_by_name(method: str) -> None:
    case = small_network(10)
    matrix = case.operator()
    names = {"0": 0.1, "2.weight": 0.02, "2.bias": 0.3}
    check_factorized(
        lambda given: matrix.factorize(given, FINE, method=method),
        case.dense,
        matrix.layout.expand(names),
        names=names,
        digits=0.5,
    )


@every_method
def test_derivatives_by_names_are_finite_differences(method: str) -> None:
    matrix = small_network(10).operator()
    rhs = normal(39, seed=4)

    def value(first: Tensor, second: Tensor) -> Tensor:
        factorized = matrix.factorize({"0": first, "2": second}, FINE, method=method)
        return rhs @ factorized.solve(rhs) + factorized.logdet()

    given = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.1, 0.03)]
    slopes = torch.autograd.grad(value(*given), given)
    for index, slope in enumerate(slopes):
        step = 1e-3 * float(given[index].detach())
        ends = []
        for sign in (-1, 1):
            moved = [x.detach().clone() for x in given]
            moved[index] += sign * step
            ends.append(float(value(*moved)))
        difference = (ends[1] - ends[0]) / (2 * step)
        # Central differences have a relative error of about the square of the relative step.
        assert abs(float(slope) - difference) < 1e-4 * abs(difference)


@every_method
def test_samples_have_the_right_covariance(method: str) -> None:
    case = small_network(4)
    damping = by_row(39)
    truth = Truth(case, 1.0, damping)
    factorized: Any = without_exact(case.operator().factorize(damping, 1e-3, method=method))
    samples = factorized.sample(2000, torch.Generator().manual_seed(0))
    inverse = truth.inverse
    spread = (inverse.square() + torch.outer(inverse.diagonal(), inverse.diagonal())).sqrt()
    difference = samples.T @ samples / len(samples) - inverse
    # The largest of 780 standard scores is below 5 unless something is wrong.
    assert float((difference / spread).abs().max()) < 5 / len(samples) ** 0.5


def without_exact(factorized: Any) -> Any:
    """The same solver where a dense factorization would take too long."""
    if isinstance(factorized, SampleSpaceFactorization):
        inner = without_exact(factorized._inner)
        matrix, dtype = factorized._matrix, factorized.dtype
        return SampleSpaceFactorization(matrix, inner, factorized._damping, dtype)
    return IterativeFactorization(
        factorized._matrix,
        factorized.stand_in,
        factorized._damping,
        factorized.tolerance,
        factorized.dtype,
        None,
    )


@every_method
@both_dtypes
def test_estimated_log_determinants_are_within_their_error_bars(
    method: str, dtype: torch.dtype
) -> None:
    case = small_network(100)
    matrix = case.operator(dtype)
    for ratio in (1e-1, 1e-3):
        truth = Truth(case, ratio)
        factorized = without_exact(matrix.factorize(truth.damping, 1e-2, method=method))
        with warnings.catch_warnings():
            # The preconditioner may be too bad for the error bar that was aimed at.
            warnings.simplefilter("ignore", hcurv.AccuracyWarning)
            logdet = float(factorized.logdet())
        inner = getattr(factorized, "_inner", factorized)
        assert inner.logdet_error > 0
        assert inner.logdet_error < 0.05 * len(truth.dense)
        rounding = torch.finfo(dtype).eps * truth.condition * len(truth.dense)
        expected = float(torch.linalg.slogdet(truth.damped).logabsdet)
        assert abs(logdet - expected) < 4 * inner.logdet_error + rounding


@every_method
def test_estimated_diagonals_of_the_inverse_are_right_on_average(method: str) -> None:
    """Hutchinson's variance with 128 signs: 2 Σ_{l≠k} B_kl²/128 for the matrix B it is used for."""
    case = small_network(100)
    truth = Truth(case, 1e-2)
    factorized = without_exact(case.operator().factorize(truth.damping, 1e-3, method=method))
    found = factorized.inverse_diagonal()
    if isinstance(factorized, SampleSpaceFactorization):
        base = torch.eye(39, dtype=torch.float64) / truth.damping
    else:
        base = factorized.stand_in.factorized.to_dense().double()
    change = truth.inverse - base
    beside = change - change.diagonal().diag()
    # Each B_kl s_k s_l has mean 0 and variance B_kl²; clamping can only help.
    error = (beside.square().sum(1) / 128).sqrt()
    # The relative tolerance of solves is in the norm of H + D, whose entries are at most 1/λ.
    floor = 1e-3 * truth.inverse.diagonal().max()
    assert bool(((found - truth.inverse.diagonal()).abs() < 4.5 * error + floor).all())
    assert float(found.min()) > 0
    assert float(found.max()) <= (1 + FINE) / truth.damping


@every_method
def test_without_a_dense_factorization_there_is_no_square_root(method: str) -> None:
    matrix = small_network(30).operator()
    factorized = without_exact(matrix.factorize(1e-2, method=method))
    with pytest.raises(hcurv.NotFactorizableError, match=r"use sample\(\) for samples"):
        factorized.sqrt_solve(normal(39))


@every_method
def test_results_are_reproducible_and_differ_between_seeds(method: str) -> None:
    matrix = small_network(100).operator()
    rhs = normal(39, 2)
    rough = [matrix.factorize(1e-3, 0.1, method=method, seed=seed).solve(rhs) for seed in (3, 3, 4)]
    assert torch.equal(rough[0], rough[1])
    fine = [matrix.factorize(1e-3, FINE, method=method, seed=seed) for seed in (3, 4)]
    # The damping of 1e-3 loses no more than three digits here.
    solved = [factorized.solve(rhs) for factorized in fine]
    assert float((solved[0] - solved[1]).norm() / solved[0].norm()) < 1e3 * FINE
    if method in ("iterations", "subset"):
        assert not torch.equal(rough[0], rough[2])


def test_a_solve_that_misses_is_warned_of() -> None:
    """Single precision cannot reach 1e-8, which `factorize` would refuse."""
    matrix = small_network(100).operator(torch.float32)
    given: Any = matrix.factorize(1e-4, method="iterations")
    low = matrix.in_precision(torch.float32)
    strict = IterativeFactorization(low, given.stand_in, given._damping, 1e-9, torch.float32)
    with pytest.warns(hcurv.AccuracyWarning, match=r"where 1\.0e-09 was asked for") as caught:
        solved = strict.solve(normal(39, 2).float())
    assert bool(torch.isfinite(solved).all())
    assert caught[0].filename == __file__


def test_an_error_bar_that_misses_is_warned_of() -> None:
    """A tolerance of 1e-8 would need far more than 128 probes."""
    given: Any = small_network(100).operator().factorize(1e-4, FINE, method="iterations")
    with pytest.warns(hcurv.AccuracyWarning, match="after 128 probes") as caught:
        without_exact(given).logdet()
    assert caught[0].filename == __file__


@every_method
def test_another_precision_solves_the_same_system(method: str) -> None:
    case = small_network(30)
    truth = Truth(case, 1e-2)
    factorized = case.operator().factorize(truth.damping, FINE, method=method)
    single = factorized.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    # It is still worked in double precision: only the right-hand side and the result are rounded.
    rounding = 10 * torch.finfo(torch.float32).eps
    solved = single.solve(truth.rhs.float())
    assert float(truth.solve_errors(solved).max()) < rounding * truth.condition**0.5
    assert_close(single.inverse_diagonal(), truth.inverse.diagonal(), 10)
    with pytest.raises(ValueError, match="'meta' holds no values"):
        factorized.to("meta")


def test_a_solve_without_memory_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    H = small_network(20).operator()
    solver = H.factorize(0.1, method="iterations")
    columns = torch.ones(39, 5, dtype=H.dtype)
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    with pytest.raises(hcurv.InsufficientMemoryError, match="solving for 5 columns of 39 numbers"):
        solver.solve(columns)


def test_builds_are_predicted_to_be_slow_where_many_eigenvalues_count() -> None:
    model = nn.Sequential(nn.Linear(60, 30), nn.Tanh(), nn.Linear(30, 10))
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(500, 60).float())
    largest = float(hcurv.eigsh(H, 1).values[0])
    fewest = []
    for ratio in (1e-1, 1e-6):
        predictions = []
        for _ in range(3):  # the shortest, since the speeds that are measured for it are noisy
            ways = H.factorize(ratio * largest, method="iterations").plan.ways
            predictions.append(next(way.seconds for way in ways if way.name == "compressed"))
        fewest.append(min(predictions))
    assert fewest[1] > 5 * fewest[0]
