"""Products by linearised passes, and factors that are made when entries are first asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import hcurv
import oracles
from cases import (
    CASES,
    Case,
    all_cases,
    all_forms,
    assert_close,
    both_dtypes,
    labels,
    normal,
    seeded,
)
from conformance import check_operator
from hcurv.network import linearised_products, precompute, products
from hcurv.network.chain_root import ChainRoot
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.linearisation import Linearisation
from hcurv.network.linearised_products import PassSizes
from hcurv.network.precompute import compute_factors, compute_linearisation
from hcurv.network.problem import Problem, read_problem

WORKSPACE = 2**22
ODD_SIZES = PassSizes(max_columns=3, min_points=2, hidden_floats=7, output_floats=40, sum_floats=5)


def read(case: Case, dtype: torch.dtype = torch.float64) -> Problem:
    targets = case.targets.to(dtype) if case.targets.is_floating_point() else case.targets
    return read_problem(case.build(dtype), case.loss, (case.inputs.to(dtype), targets))


def linearised(case: Case, dtype: torch.dtype = torch.float64) -> FactoredMatrix:
    """The matrix of a case, whose products are linearised passes whatever is cheaper."""
    with torch.no_grad():
        stored = compute_linearisation(read(case, dtype), WORKSPACE, max_batch=4)
    return FactoredMatrix(ChainRoot(stored, WORKSPACE), WORKSPACE)


@both_dtypes
@all_cases
def test_linearised_products_are_those_of_the_gauss_newton_hessian(
    case: Case, dtype: torch.dtype
) -> None:
    matrix, expected = linearised(case, dtype), case.dense
    for count in (1, 3, 20):
        rhs = normal(len(expected), count).to(dtype)
        assert_close(matrix @ rhs, expected @ rhs.double(), 300)
        root = matrix.root_product(rhs)
        assert_close(root.T @ root, rhs.double().T @ expected @ rhs.double(), 300)
        assert_close(matrix.root_transposed(root), expected @ rhs.double(), 300)
    assert_close(matrix.diagonal(), expected.diagonal())
    assert_close(matrix.to_dense(), expected)


@all_forms
def test_both_ways_agree(case: Case) -> None:
    problem = read(case)
    with torch.no_grad():
        passes = compute_linearisation(problem, WORKSPACE)
        factors = compute_factors(problem, WORKSPACE)
        for count, sizes, workspace in (
            (1, PassSizes(), WORKSPACE),
            (4, ODD_SIZES, 400),
            (19, PassSizes(), WORKSPACE),
        ):
            rhs = normal(factors.num_parameters, count)
            values = products.root_product(factors, rhs, WORKSPACE)
            found = linearised_products.product(passes, rhs, workspace, sizes)
            assert_close(found, products.product(factors, rhs, WORKSPACE), 300)
            found = linearised_products.root_product(passes, rhs, workspace, sizes)
            assert_close(found, values, 300)
            found = linearised_products.root_transposed(passes, values, workspace, sizes)
            assert_close(found, products.root_transposed(factors, values, WORKSPACE), 300)


@all_cases
def test_some_points_are_weighted(case: Case) -> None:
    matrix = linearised(case)
    points = torch.arange(0, matrix.num_points, 2)
    weights = torch.linspace(0.5, 2.0, len(points), dtype=torch.float64)
    with torch.no_grad():
        factors = compute_factors(read(case), WORKSPACE)
    expected = FactoredMatrix(ChainRoot(factors, WORKSPACE), WORKSPACE).of_points(points, weights)
    some = matrix.of_points(points, weights)
    rhs = normal(matrix.shape[0], 3)
    assert_close(some @ rhs, expected @ rhs, 300)
    assert_close(some.root.point_norms(), expected.root.point_norms(), 300)
    assert_close(some.to_dense(), expected.to_dense(), 300)


def test_equal_weights_of_outputs_are_summed_over_points() -> None:
    """Where R_i M_i^L is one number, and only there, no product goes through all outputs."""
    with torch.no_grad():
        for output, wanted in ((nn.Identity(), True), (nn.Sigmoid(), False)):
            model = seeded(lambda o=output: nn.Sequential(deep(12, 4, 12), o)).double()
            problem = read_problem(model, nn.MSELoss(), normal(30, 12))
            assert compute_linearisation(problem, WORKSPACE).sums_are_cheaper == wanted


def deep(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def deep_operator(num_points: int = 30, dtype: torch.dtype = torch.float64) -> hcurv.GaussNewton:
    model = seeded(lambda: deep(20, 16, 8, 16, 20)).to(dtype)
    inputs = normal(num_points, 20).to(dtype)
    return hcurv.GaussNewton(model, nn.MSELoss(), (inputs, inputs))


@pytest.mark.parametrize(
    ("widths", "loss", "wanted"),
    [
        ((196, 64, 16, 64, 196), nn.MSELoss(), True),
        ((50, 50, 50, 50, 50), nn.MSELoss(), True),
        ((784, 20, 10), nn.CrossEntropyLoss(), False),
        ((784, 256, 64, 32, 10), nn.CrossEntropyLoss(), False),
        ((784, 256, 256, 10), nn.CrossEntropyLoss(), False),
        ((784, 10, 784), nn.MSELoss(), False),
        ((3072, 20, 3072), nn.MSELoss(), False),
        ((20, 100, 100, 1), nn.MSELoss(), False),
    ],
    ids=str,
)
def test_the_shape_of_the_network_decides(
    widths: tuple[int, ...], loss: nn.Module, wanted: bool
) -> None:
    network = hcurv.network.reading.read_network(deep(*widths))
    diagonal = isinstance(loss, nn.MSELoss)
    plan = precompute.plan_factors(network, 1000, widths[-1], diagonal)
    assert plan.linearised == wanted


def test_factors_are_made_when_entries_are_first_asked_for() -> None:
    matrix = deep_operator()
    plan, before = matrix.memory_plan(), matrix.nbytes
    assert isinstance(matrix.root.stored, Linearisation)
    assert plan.stored_bytes == before
    rhs = normal(matrix.shape[0], 3)
    products_before = matrix @ rhs
    matrix.root_transposed(matrix.root_product(rhs))
    matrix.gradient()
    matrix.diagonal()
    matrix.subsample(7)
    assert matrix.nbytes == before
    entries = matrix.to_dense()
    assert matrix.nbytes == plan.stored_bytes + plan.later_bytes > before
    factors = matrix.root.factors
    assert matrix.num_stored == matrix.root.stored.num_stored + sum(
        tensor.numel() for tensor in factors.jacobian.tensors
    )
    matrix.to_dense()
    assert matrix.root.factors is factors
    assert torch.equal(matrix @ rhs, products_before)
    assert_close(entries @ rhs, products_before, 300)
    assert "more when entries are first asked for" in str(plan)


def test_plans_of_stored_factors_have_nothing_for_later() -> None:
    matrix = CASES["classifier"].operator()
    matrix.to_dense()
    assert matrix.memory_plan().later_bytes == 0
    assert matrix.memory_plan().stored_bytes == matrix.nbytes


@both_dtypes
def test_a_deep_network_with_many_outputs_is_the_oracle(dtype: torch.dtype) -> None:
    matrix = deep_operator(dtype=dtype)
    model, inputs = seeded(lambda: deep(20, 16, 8, 16, 20)), normal(30, 20)
    expected = oracles.gauss_newton(
        model.to(dtype), lambda outputs: nn.functional.mse_loss(outputs, inputs), inputs.to(dtype)
    )
    check_operator(matrix, expected)
    rows, cols = labels(40, len(expected), seed=3), labels(23, len(expected), seed=4)
    assert_close(matrix[rows, cols], expected[rows][:, cols])
    gradient = oracles.gradient(
        model.to(dtype), lambda outputs: nn.functional.mse_loss(outputs, inputs), inputs.to(dtype)
    )
    assert_close(matrix.gradient(), gradient)
    values = matrix.kernel() @ normal(matrix.num_root_rows).to(dtype)
    root = matrix.root_columns(slice(None))
    assert_close(values, root @ (root.T @ normal(matrix.num_root_rows).to(dtype)), 300)


def test_higher_precision_converts_slopes_and_weights() -> None:
    single = deep_operator(dtype=torch.float32)
    double = single.in_precision(torch.float64)
    rhs = normal(single.shape[0], 2)
    assert_close(double @ rhs, double.to_dense() @ rhs)  # to the last digits of float64
    assert_close((double @ rhs).float(), single @ rhs.float(), 300)


def test_subsamples_estimate_the_matrix() -> None:
    matrix = deep_operator()
    some = matrix.subsample(10)
    rhs = normal(matrix.shape[0], 2)
    assert_close(some @ rhs, some.to_dense() @ rhs, 300)
    assert some.diagonal().sum() == pytest.approx(float(matrix.diagonal().sum()))


def test_derivatives_that_overflow_are_refused() -> None:
    model = deep(20, 16, 16, 16, 20)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.data.fill_(1e20)
            layer.bias.data.fill_(0.0)
    linear = nn.Sequential(*[layer for layer in model if isinstance(layer, nn.Linear)])
    with pytest.raises(ValueError, match="derivatives overflow at points 0 to 2"):
        hcurv.GaussNewton(linear, nn.MSELoss(), torch.zeros(3, 20))


def test_factors_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = deep_operator()
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    rhs = normal(matrix.shape[0])
    assert bool(torch.isfinite(matrix @ rhs).all())
    with pytest.raises(hcurv.InsufficientMemoryError, match="use products alone"):
        matrix.pairs([0], [0])
