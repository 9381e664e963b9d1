"""H.factorize: exact in either space, by iterations, and the choice between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import CASES, DTYPES, NETWORKS, Case, labels, normal, pairwise, seeded
from conformance import check_factorized
from hcurv.inversion.sketch import Spectrum
from hcurv.inversion.ways import CostModel

EXACT = ("parameters", "samples")


def by_row(size: int) -> Tensor:
    """A damping for each row, over two orders of magnitude."""
    return 10 ** (-1 - 2 * torch.rand(size, generator=torch.Generator().manual_seed(0)).double())


def small_network(num_points: int, num_outputs: int = 3) -> Case:
    return Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, num_outputs)),
        nn.CrossEntropyLoss(),
        normal(num_points, 5),
        labels(num_points, num_outputs),
    )


@pairwise(name=NETWORKS, method=EXACT)
def test_every_network_equals_the_dense_inverse(name: str, method: str) -> None:
    operator = CASES[name].operator()
    damping = 1e-2 * max(operator.trace(), 1e-3)
    check_factorized(
        lambda given: operator.factorize(given, method=method), operator.to_dense(), damping
    )


@pairwise(num_points=(1, 13, 16, 40), method=EXACT, dtype=DTYPES)
def test_more_and_fewer_rows_than_parameters(
    num_points: int, method: str, dtype: torch.dtype
) -> None:
    """N = 39: n·q is less, equal for 13 points, and more."""
    operator = small_network(num_points).operator(dtype)
    check_factorized(
        lambda given: operator.factorize(given, method=method),
        operator.to_dense(),
        by_row(operator.shape[0]),
    )


@pytest.mark.parametrize("method", EXACT)
def test_dampings_by_name(method: str) -> None:
    operator = small_network(10).operator()
    names = {"0": 0.1, "2.weight": 0.02, "2.bias": 0.3}
    check_factorized(
        lambda given: operator.factorize(given, method=method),
        operator.to_dense(),
        operator.layout.expand(names),
        names=names,
    )


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("exponent", range(-8, 0))
def test_small_dampings(method: str, exponent: int) -> None:
    operator = small_network(30).operator()
    dense = operator.to_dense()
    largest = float(torch.linalg.matrix_norm(dense, 2))
    check_factorized(
        lambda given: operator.factorize(given, method=method), dense, 10.0**exponent * largest
    )


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("exponent", [-2, -4])
def test_single_precision_is_computed_in_double_where_that_matters(
    method: str, exponent: int
) -> None:
    """Variances of a float32 model are right although eps·λ₁/λ is not small."""
    case = small_network(30)
    exact, rounded = case.operator(), case.operator(torch.float32)
    largest = float(torch.linalg.matrix_norm(exact.to_dense(), 2))
    damping = 10.0**exponent * largest
    variances = rounded.factorize(damping, method=method).inverse_diagonal().double()
    expected = exact.factorize(damping, method=method).inverse_diagonal()
    assert float((variances / expected - 1).abs().max()) < 1e-2


def test_samples_have_the_right_covariance() -> None:
    operator = small_network(4).operator()
    damping = by_row(operator.shape[0])
    inverse = torch.linalg.inv(operator.to_dense() + damping.diag())
    spread = (inverse.square() + torch.outer(inverse.diagonal(), inverse.diagonal())).sqrt()
    for method in (*EXACT, "iterations"):
        factorized = operator.factorize(damping, 1e-6, method=method)
        samples = factorized.sample(5_000, torch.Generator().manual_seed(0))
        difference = samples.T @ samples / len(samples) - inverse
        assert float((difference / spread).abs().max()) < 5.5 / len(samples) ** 0.5


def test_iterations_solve_to_the_tolerance() -> None:
    operator = small_network(40).operator()
    rhs = normal(operator.shape[0], 3)
    damping = 1e-3 * operator.trace()
    for tolerance in (1e-2, 1e-6):
        factorized = operator.factorize(damping, tolerance, method="iterations")
        solved = factorized.solve(rhs)
        residual = operator @ solved + damping * solved - rhs
        assert float((residual.norm(dim=0) / rhs.norm(dim=0)).max()) <= 1.01 * tolerance


def test_the_plan_shows_all_ways_and_takes_a_fast_one() -> None:
    operator = small_network(30).operator()
    factorized: Any = operator.factorize(1e-2)
    plan = factorized.plan
    assert {way.name for way in plan.ways} == {
        "parameters",
        "samples",
        "iterations",
        "subset",
        "compressed",
        "compressed-samples",
    }
    assert plan.chosen.name in ("parameters", "samples")  # small: one that can do everything
    assert [way.seconds for way in plan.ways] == sorted(way.seconds for way in plan.ways)
    text = str(plan)
    assert f"N = 39, n·q = {30 * 3}" in text
    assert f"→ {plan.chosen.name}" in text


def test_ways_that_do_not_fit_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)))
    matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(200, 40).float())
    for module in ("hcurv.memory", "hcurv.inversion.ways"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device: 2 * 10**6)
    factorized: Any = matrix.factorize(1e-2)
    assert factorized.plan.chosen.name == "iterations"
    assert "does not fit" in str(factorized.plan)
    with pytest.raises(hcurv.InsufficientMemoryError, match='with method="parameters"'):
        matrix.factorize(1e-2, method="parameters")


def test_a_sketch_that_does_not_fit_is_replaced_by_a_narrower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 3)))
    matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(200, 60).float())
    values = 10 ** (6 - torch.arange(64).double() / 8)
    spectrum = Spectrum(values, 1.01 * float(values.sum()), size=600)
    found = []
    for free in (10**9, 2_400_000):
        monkeypatch.setattr("hcurv.inversion.ways.available_bytes", lambda device, free=free: free)
        costs = CostModel(matrix, 1923, torch.float32, 1e-2, 1.0, torch.float32)
        ways = costs.ways(spectrum, [16, 32, 64])
        found += [(way.size, way.fits) for way in ways if way.name == "iterations"]
    assert found == [(64, True), (32, True)]


def test_bad_input_is_refused() -> None:
    operator = CASES["classifier"].operator(torch.float32)
    with pytest.raises(ValueError, match='method must be one of "auto", "parameters"'):
        operator.factorize(1.0, method="dense")
    with pytest.raises(ValueError, match="tolerance must be a number between 0 and 1; got 0"):
        operator.factorize(1.0, 0)
    with pytest.raises(ValueError, match="damping must be positive: H may be singular; got -1"):
        operator.factorize(-1.0)
    with pytest.raises(ValueError, match=r"a tolerance of 1e-02 is beyond torch\.float32"):
        operator.factorize(1e-9 * operator.trace())


def test_covariances_that_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(20, 3).float())
    solver, rows = H.factorize(0.1), 1e25 * torch.ones(2, H.shape[0])
    for diagonal in (True, False):
        with pytest.raises(ValueError, match="the rows J are too large"):
            solver.quadratic(rows, diagonal=diagonal)
