"""EKFAC as a preconditioner: when it is made, what a trial says, and what it stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded
from hcurv.damping import as_damping
from hcurv.factorized import Factorized
from hcurv.inversion.iterative import StandIn
from hcurv.inversion.kronecker import try_out

RATIO = 1e-4


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrices of any size try EKFAC, and no exact way come first."""
    for name in ("_LOOK", "_MEASURE"):
        monkeypatch.setattr(f"hcurv.inversion.kronecker.{name}", math.inf)
    monkeypatch.setattr("hcurv.inversion.factorize._QUICK", 0.0)


def autoencoder(num_points: int = 200) -> hcurv.GaussNewton:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(30, 8), nn.Softplus(), nn.Linear(8, 30)).double()
    )
    return hcurv.GaussNewton(model, nn.MSELoss(), normal(num_points, 30))


def certain_classifier() -> hcurv.GaussNewton:
    """Softmax has switched most of its points off, as after training."""
    model = seeded(lambda: nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 5)).double())
    with torch.no_grad():
        model[2].weight.mul_(20)
    return hcurv.GaussNewton(model, nn.CrossEntropyLoss(), (normal(200, 30), labels(200, 5)))


def damping_of(matrix: hcurv.GaussNewton, ratio: float = RATIO) -> float:
    return ratio * float(torch.linalg.eigvalsh(matrix.to_dense())[-1])


def ways_of(factorized: Any) -> set[str]:
    return {way.name for way in factorized.plan.ways}


@pytest.mark.usefixtures("patient")
def test_an_autoencoder_tries_it_and_a_certain_classifier_gives_it_up() -> None:
    matrix = autoencoder()
    found: Any = matrix.factorize(damping_of(matrix))
    assert "kronecker" in ways_of(found)
    other = certain_classifier()
    assert "kronecker" not in ways_of(other.factorize(damping_of(other)))


@pytest.mark.usefixtures("patient")
def test_sampled_rows_are_not_tried() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(30, 8), nn.Softplus(), nn.Linear(8, 30)).double()
    )
    matrix = hcurv.GaussNewton(model, nn.MSELoss(), normal(200, 30), num_samples=2)
    assert "kronecker" not in ways_of(matrix.factorize(damping_of(matrix)))


def test_a_quick_problem_does_not_try_it() -> None:
    matrix = autoencoder()
    assert "kronecker" not in ways_of(matrix.factorize(damping_of(matrix)))


def test_an_autoencoder_needs_few_iterations_with_it() -> None:
    matrix = autoencoder(2000)
    damping, rhs = damping_of(matrix), normal(matrix.shape[0], 4)
    counts = {}
    for method in ("kronecker", "iterations"):
        factorized: Any = matrix.factorize(damping, method=method)
        counts[method] = factorized.iterate(rhs).num_iterations
        truth = torch.linalg.solve(
            matrix.to_dense() + damping * torch.eye(matrix.shape[0]).double(), rhs
        )
        energy = (truth * rhs).sum(0)
        wrong = ((factorized.solve(rhs) - truth) * rhs).sum(0).abs()
        assert bool((wrong < 1e-2 * energy).all())
    assert counts["kronecker"] < 0.7 * counts["iterations"]


def test_a_damping_by_rows_is_evened_out_within_layers_alone() -> None:
    matrix = autoencoder(50)
    size = matrix.shape[0]
    damping = 10 ** (-2 - 2 * torch.rand(size, generator=torch.Generator().manual_seed(0)).double())
    factorized: Any = matrix.factorize(damping, 1e-8, method="kronecker")
    rhs = normal(size, 3)
    assert torch.allclose(
        factorized.solve(rhs), torch.linalg.solve(matrix.to_dense() + damping.diag(), rhs)
    )
    # What preconditions inverts what it says that it is, with one number for each layer.
    stand_in = factorized.stand_in
    assert torch.allclose(stand_in.factorized @ stand_in.product(rhs), rhs)
    added = (stand_in.product(torch.eye(size).double())).diagonal()
    kfac = hcurv.baselines.KFAC(
        seeded(lambda: nn.Sequential(nn.Linear(30, 8), nn.Softplus(), nn.Linear(8, 30)).double()),
        nn.MSELoss(),
        normal(50, 30),
        num_samples=None,
        ekfac=True,
    )
    numbers = added - kfac.diagonal()
    for name in ("0.*", "2.*"):
        rows = matrix.layout.select(name)
        mean = damping[rows].log().mean().exp()
        assert torch.allclose(numbers[rows], mean.expand(len(rows)), rtol=1e-6)


class _Inverse(Factorized):
    """The inverse of a dense matrix."""

    def __init__(self, dense: Tensor, damping: float) -> None:
        super().__init__(as_damping(damping, len(dense)))
        self._inverse = torch.linalg.inv(dense + damping * torch.eye(len(dense)).double())

    shape = property(lambda self: tuple(self._inverse.shape))
    dtype = property(lambda self: self._inverse.dtype)
    device = property(lambda self: self._inverse.device)
    num_stored = property(lambda self: self._inverse.numel())

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._inverse @ rhs

    _half_solve = _logdet = _inverse_diagonal = to = None


def test_a_trial_foretells_the_iterations() -> None:
    matrix = autoencoder()
    dense, damping = matrix.to_dense(), damping_of(matrix)
    resolved = as_damping(damping, matrix.shape[0])

    def count(approximation: Tensor, tolerance: float = 3e-3) -> float:
        inverse: Any = _Inverse(approximation, damping)
        stand_in = StandIn("", lambda columns: columns, inverse)
        return try_out(matrix, resolved, stand_in, tolerance, 0).num_iterations

    assert count(dense) <= 2
    assert count(0 * dense) > 2 * count(0.5 * dense)
    assert count(0 * dense, 1e-6) > 1.5 * count(0 * dense, 1e-3)
