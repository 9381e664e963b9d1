"""hcurv.compare: one table, every method, the budget kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hcurv
from cases import normal, seeded
from hcurv.report import inverse_errors
from hcurv.report.inverse_errors import ExactInverses, InverseMeasurement


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
        "H.factorize",
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
    assert all(text.count(method.name) >= 3 for method in comparison.methods[1:])
    assert max(len(line) for line in text.splitlines()) <= 100
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
            assert method.name in ("K-FAC full", "H.factorize")
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
        ({"storage": 0.0}, "storage must be positive and finite"),
        ({"damping": -1.0}, "damping must be positive"),
        ({"max_iterations": 0}, "max_iterations must be"),
        ({"num_probes": 0}, "num_probes must be"),
        ({"damping_ratios": (1e-2, 0.0)}, "damping_ratios must be positive"),
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


def test_errors_of_inverses_are_those_of_dense_linear_algebra(
    problem: tuple[nn.Module, nn.Module, torch.Tensor], comparison: hcurv.Comparison
) -> None:
    exact = hcurv.GaussNewton(*problem)
    diagonal = exact.diagonal().double()
    dense = exact.to_dense().double()
    root = torch.linalg.qr(exact.in_precision(torch.float64).root_columns(range(437))).R
    (found,) = (m for m in comparison.methods if m.name == "diagonal")
    for error in (found.inverse, *found.inverse_range):
        damped = dense + error.damping * torch.eye(437, dtype=torch.float64)
        logdet = float((diagonal + error.damping).log().sum() - torch.logdet(damped))
        assert error.logdet == pytest.approx(logdet, abs=1e-2 + 1e-4 * abs(logdet))
        # All rows of a root, where the comparison takes some of another one.
        inverse = torch.linalg.inv(damped)
        true = torch.einsum("ij,jk,ik->i", root, inverse, root)
        wrong = (root.square() / (diagonal + error.damping)).sum(1) / true - 1
        assert wrong.abs().min() <= error.variance <= wrong.abs().max()


def test_inverses_are_measured_at_the_damping_and_over_a_range(
    comparison: hcurv.Comparison,
) -> None:
    found = {method.name: method for method in comparison.methods}
    ratios = [e.damping / comparison.largest_eigenvalue for e in found["low rank"].inverse_range]
    # Single precision does not reach 1e-6.
    assert ratios == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    errors = [error.variance for error in found["low rank"].inverse_range]
    assert errors == sorted(errors)
    assert found["low rank"].inverse == found["low rank"].inverse_range[2]
    assert found["matrix-free"].inverse is None
    for error in found["H.factorize"].inverse_range:
        assert error.variance < 1e-4
        assert error.solve < 1e-2
        assert abs(error.logdet) < 0.1


def test_what_a_method_cannot_do_is_said(comparison: hcurv.Comparison) -> None:
    (full,) = (m for m in comparison.methods if m.name == "K-FAC full")
    assert {error.failure for error in full.inverse_range} == {"no cheap inverse"}
    assert "no cheap inverse" in str(comparison)


def test_truths_agree_in_both_spaces_and_without_a_dense_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 1)))
    matrix = hcurv.GaussNewton(model.double(), nn.MSELoss(), normal(60, 12))
    largest = float(hcurv.eigsh(matrix, 1).values[0])
    columns = ExactInverses(matrix).rows_of_root(5, seed=0)
    few = ExactInverses(matrix)
    assert few.is_dense
    monkeypatch.setattr(inverse_errors, "_DENSE", 0)
    large = ExactInverses(matrix)
    assert not large.is_dense
    dense = matrix.to_dense() + 1e-3 * largest * torch.eye(matrix.shape[0], dtype=torch.float64)
    expected = torch.linalg.solve(dense, columns)
    for exact in (few, large):
        truth = exact.truth(columns, 1e-3 * largest, largest)
        assert truth is not None
        assert (truth.solutions - expected).norm() < 1e-3 * expected.norm()
        assert truth.logdet == pytest.approx(float(torch.logdet(dense)), abs=1e-3)
        norms = (columns * (dense @ columns)).sum(0).sqrt()
        torch.testing.assert_close(exact.norms(columns, 1e-3 * largest), norms)
    assert large.truth(columns, 1e-30 * largest, largest) is None


def test_an_indefinite_matrix_has_no_errors_but_a_reason(
    problem: tuple[nn.Module, nn.Module, torch.Tensor],
) -> None:
    matrix = hcurv.GaussNewton(*problem)
    rough = hcurv.compress(matrix, tolerance=0.3, global_rank=0, leaf_size=32)
    measured = InverseMeasurement(matrix, 1.0, 1e-2, (1e-5,), 0).measure(rough.factorize)
    (error,) = measured[1]
    assert error.failure == "not positive definite"
    assert error.variance is None
