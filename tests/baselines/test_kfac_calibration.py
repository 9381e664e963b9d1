"""EKFAC with eigenvalues that are calibrated by samples of the posterior."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hcurv
from cases import labels, normal, seeded


def problem() -> tuple[hcurv.GaussNewton, hcurv.baselines.KFAC]:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))).double()
    loss, data = nn.CrossEntropyLoss(reduction="sum"), (normal(200, 12), labels(200, 4))
    kfac = hcurv.baselines.KFAC(model, loss, data, num_samples=None, ekfac=True)
    return hcurv.GaussNewton(model, loss, data), kfac


@pytest.mark.parametrize("ratio", [1e-2, 1e-4])
def test_calibrated_eigenvalues_are_the_geometric_mean_of_both_bounds(ratio: float) -> None:
    matrix, kfac = problem()
    dense = matrix.to_dense()
    damping = ratio * float(torch.linalg.matrix_norm(dense, 2))
    damped = dense + damping * torch.eye(len(dense), dtype=dense.dtype)
    truth = float(torch.logdet(damped))
    count = 4000
    samples = matrix.factorize(damping).sample(count, torch.Generator().manual_seed(0))
    plain, calibrated = kfac.factorize(damping), kfac.factorize(damping, samples=samples)
    # The eigenbasis, from EKFAC's own matrix, whose eigenvalues are distinct.
    basis = torch.linalg.eigh(kfac.to_dense()).eigenvectors
    upper = torch.linalg.vecdot(basis, damped @ basis, dim=0)
    lower = 1 / torch.linalg.vecdot(basis, torch.linalg.inv(damped) @ basis, dim=0)
    expected = float((upper * lower).log().sum()) / 2
    assert float(plain.logdet()) > truth > float(lower.log().sum())
    # A logarithm of a variance of m samples has the variance 2/m.
    spread = 0.5 * (2 * len(dense) / count) ** 0.5
    assert float(calibrated.logdet()) == pytest.approx(expected, abs=5 * spread)
    wrong, better = (abs(float(f.logdet()) - truth) for f in (plain, calibrated))
    assert better < wrong / 2


def test_few_samples_leave_the_log_determinant_unbiased() -> None:
    matrix, kfac = problem()
    damping = 1e-3 * matrix.trace()
    factorized = matrix.factorize(damping)
    generator = torch.Generator().manual_seed(0)
    many = float(kfac.factorize(damping, samples=factorized.sample(5000, generator)).logdet())
    few = torch.tensor(
        [
            float(kfac.factorize(damping, samples=factorized.sample(5, generator)).logdet())
            for _ in range(50)
        ]
    )
    assert abs(float(few.mean()) - many) < 4 * float(few.std()) / len(few) ** 0.5


def test_bad_samples_are_refused() -> None:
    matrix, kfac = problem()
    size = matrix.shape[0]
    with pytest.raises(ValueError, match=rf"samples must have shape \(m, {size}\); got"):
        kfac.factorize(1.0, samples=torch.zeros(3, size - 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="samples must be two or more, and finite"):
        kfac.factorize(1.0, samples=torch.full((3, size), torch.nan, dtype=torch.float64))
    model = seeded(lambda: nn.Linear(3, 2)).double()
    plain = hcurv.baselines.KFAC(model, nn.CrossEntropyLoss(), normal(5, 3))
    with pytest.raises(ValueError, match="samples calibrate the eigenvalues of EKFAC"):
        plain.factorize(1.0, samples=torch.zeros(3, 8, dtype=torch.float64))
