"""hcurv.compare: one table, every method, the budget kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hcurv
from cases import normal, seeded


@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    model = seeded(lambda: nn.Sequential(nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 5)))
    return model, nn.CrossEntropyLoss(), normal(100, 30).float()


@pytest.fixture(scope="module")
def comparison(problem: tuple[nn.Module, nn.Module, torch.Tensor]) -> hcurv.Comparison:
    return hcurv.compare(*problem, storage=0.25)


def test_every_method_is_there(comparison: hcurv.Comparison) -> None:
    found = {method.name: method for method in comparison.methods}
    assert list(found) == [
        "matrix-free",
        "hierarchical",
        "low rank",
        "K-FAC block-diagonal",
        "K-FAC block-tridiagonal",
        "K-FAC full",
        "EKFAC",
        "diagonal",
        "blocks per unit",
    ]
    for name in ("hierarchical", "low rank"):
        assert found[name].storage <= 0.25
    assert found["K-FAC full"].num_iterations is None
    assert found["hierarchical"].error < 0.4
    assert found["low rank"].error < 0.4
    assert found["diagonal"].error > found["blocks per unit"].error > 0
    assert found["low rank"].num_iterations < found["matrix-free"].num_iterations
    assert found["matrix-free"].solve_residual <= 1.1e-4


def test_errors_are_those_of_the_operators(
    problem: tuple[nn.Module, nn.Module, torch.Tensor], comparison: hcurv.Comparison
) -> None:
    exact = hcurv.GaussNewton(*problem)
    dense = exact.to_dense()
    largest = float(torch.linalg.eigvalsh(dense.double())[-1])
    assert comparison.damping == pytest.approx(1e-3 * largest, rel=1e-2)
    off = dense - torch.diag(dense.diagonal())
    (diagonal,) = (m for m in comparison.methods if m.name == "diagonal")
    assert diagonal.error == pytest.approx(float(off.norm() / dense.norm()), rel=0.2)


def test_it_prints_and_plots(comparison: hcurv.Comparison) -> None:
    text = str(comparison)
    assert text.startswith("N = 437, n = 100, budget 25.000% of N²")
    assert len(text.splitlines()) == 2 + len(comparison.methods)
    plain = json.loads(json.dumps(comparison.to_dict()))
    assert plain["size"] == 437
    assert "details" not in plain
    assert "details" not in repr(comparison)
    labels = [text.get_text() for text in comparison.plot().axes[0].get_legend().get_texts()]
    assert "hierarchical" in labels
    assert "budget" in labels


def test_residuals_are_those_of_every_iteration(comparison: hcurv.Comparison) -> None:
    for method in comparison.methods:
        if method.num_iterations is None:
            assert method.residuals == ()
        else:
            assert len(method.residuals) == method.num_iterations + 1
            assert method.residuals[0] == pytest.approx(1.0)
            assert method.residuals[-1] <= comparison.tolerance


def test_no_method_is_measured_with_the_vectors_that_it_was_built_from(
    problem: tuple[nn.Module, nn.Module, torch.Tensor], comparison: hcurv.Comparison
) -> None:
    (low_rank,) = (m for m in comparison.methods if m.name == "low rank")
    rank = int(low_rank.settings.removeprefix("rank "))
    # With ten columns more, its sketch is as wide as the probes.
    other = hcurv.compare(*problem, storage=0.25, num_probes=rank + 10)
    (again,) = (m for m in other.methods if m.name == "low rank")
    assert again.error == pytest.approx(low_rank.error, rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": 0.0}, "storage must be a positive fraction"),
        ({"damping": -1.0}, "damping must be positive"),
        ({"max_iterations": 0}, "max_iterations must be"),
        ({"num_probes": 0}, "num_probes must be"),
    ],
)
def test_bad_input(
    problem: tuple[nn.Module, nn.Module, torch.Tensor], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hcurv.compare(*problem, **options)


def test_a_zero_matrix_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="H is zero for this network and data"):
        hcurv.compare(model, nn.CrossEntropyLoss(), torch.ones(5, 3))
