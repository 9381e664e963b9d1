"""Factorizations say when their solves cannot be trusted, and say nothing otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded
from matrices import kernel_matrix

DENSE = kernel_matrix("gaussian", 120, 2).float()


def _problem() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    return model, nn.CrossEntropyLoss(), (10 * normal(40, 6).float(), labels(40, 4))


BUILT: dict[str, Callable[[], Any]] = {
    "tree": lambda: hcurv.compress(DENSE, leaf_size=16, tolerance=1e-5, global_rank=0),
    "global part": lambda: hcurv.compress(DENSE, tolerance=1e-5),
    "low rank": lambda: hcurv.baselines.LowRank(hcurv.GaussNewton(*_problem()), rank=20),
    "EKFAC": lambda: hcurv.baselines.KFAC(*_problem(), ekfac=True),
}


def _residual(matrix: Any, factorized: Any) -> float:
    """The relative residual of a random system, in double precision."""
    rhs = normal(matrix.shape[0], 3, seed=5).float()
    dense = matrix.to_dense().double()
    dense.diagonal().add_(factorized.damping)
    return float((dense @ factorized.solve(rhs).double() - rhs).norm() / rhs.norm())


@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT.keys())
def test_solves_that_are_wrong_by_per_cents_are_warned_of(build: Callable[[], Any]) -> None:
    """At every damping, a residual above 2 % is warned of, and one below 0.1 % is not."""
    matrix, num_large, num_small = build(), 0, 0
    largest = float(torch.linalg.eigvalsh(matrix.to_dense().double())[-1])
    for share in (1e-1, 1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                factorized = matrix.factorize(share * largest)
            except hcurv.NotPositiveDefiniteError:
                continue
        told = [w for w in caught if "relative residual of about" in str(w.message)]
        assert all(issubclass(w.category, hcurv.AccuracyWarning) for w in told)
        residual = _residual(matrix, factorized)
        assert told or residual < 2e-2
        assert not told or residual > 1e-3
        num_large, num_small = num_large + bool(told), num_small + (not told)
    assert num_small > 0
    assert num_large > 0 or isinstance(matrix, hcurv.HMatrix)


def test_a_warning_points_to_the_line_of_the_user_and_can_be_left_out() -> None:
    matrix = BUILT["low rank"]()
    with pytest.warns(hcurv.AccuracyWarning, match="too small for torch.float32") as caught:
        matrix.factorize(1e-12)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix.factorize(1e-12, warn=False)


def test_refinement_against_an_unrelated_matrix_is_warned_of() -> None:
    factorized = hcurv.compress(DENSE, leaf_size=16).factorize(0.5, warn=False)
    other = normal(120, 120, seed=3).float()
    other = other @ other.T * 1e3
    with pytest.warns(hcurv.ConvergenceWarning, match="residual"):
        factorized.solve(torch.ones(120), operator=other, num_refinements=3)


def test_factors_that_cannot_be_inverted_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.linalg.LinAlgError("the input is not positive-definite")

    matrix = hcurv.baselines.KFAC(*_problem())
    monkeypatch.setattr(torch.linalg, "cholesky", fail)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(hcurv.NotFactorizableError, match="Choose a larger damping"):
        matrix.factorize(1e-30, factored=False)
