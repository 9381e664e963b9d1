"""EKFAC with eigenvalues that are calibrated against the exact inverse, on a few rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded


def problem(kind: str) -> tuple[hcurv.GaussNewton, hcurv.baselines.KFAC, Tensor, Tensor]:
    """H, EKFAC, and the output Jacobians at 20 inputs to fit and at 40 others to judge by.

    The Jacobians come from torch.func, which shares no code with the package.
    """
    loss: nn.Module | hcurv.losses.Loss
    if kind == "classifier":
        sizes, loss, targets = (12, 10, 4), nn.CrossEntropyLoss(reduction="sum"), labels(200, 4)
    else:  # fewer points than parameters
        sizes, loss = (6, 20, 20, 1), hcurv.losses.HalfSquaredError(reduction="sum")
        targets = normal(60, 1)
    model = seeded_sequential(sizes)
    data = (normal(len(targets), sizes[0]), targets)
    kfac = hcurv.baselines.KFAC(model, loss, data, num_samples=None, ekfac=True)
    jacobians = output_jacobians(model, normal(60, sizes[0], seed=7))
    first = 20 * sizes[-1]
    return hcurv.GaussNewton(model, loss, data), kfac, jacobians[:first], jacobians[first:]


def seeded_sequential(sizes: tuple[int, ...]) -> nn.Module:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return seeded(make).double()


def output_jacobians(model: nn.Module, inputs: Tensor) -> Tensor:
    """All rows of the Jacobians of the outputs, (points · outputs, N)."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    found = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (inputs,)))(parameters)
    rows = [found[name].flatten(2).flatten(0, 1) for name in parameters]
    return torch.cat(rows, 1)


def dense_inverse(matrix: hcurv.GaussNewton, ratio: float) -> tuple[float, Tensor, float]:
    """λ = ratio · λ₁, and the dense inverse and the log-determinant of H + λI."""
    dense = matrix.to_dense()
    damping = ratio * float(torch.linalg.matrix_norm(dense, 2))
    damped = dense + damping * torch.eye(len(dense), dtype=dense.dtype)
    return damping, torch.linalg.inv(damped), float(torch.logdet(damped))


def variances(inverse: Tensor, rows: Tensor) -> Tensor:
    return torch.linalg.vecdot(rows, rows @ inverse)


@pytest.mark.parametrize("kind", ["classifier", "regression"])
@pytest.mark.parametrize("ratio", [1e-3, 1e-4, 1e-6])
def test_variances_of_other_rows_improve_and_the_log_determinant_is_no_worse(
    kind: str, ratio: float
) -> None:
    matrix, kfac, fitted, others = problem(kind)
    damping, inverse, logdet = dense_inverse(matrix, ratio)
    plain = kfac.factorize(damping)
    calibrated = kfac.factorize(damping, reference=matrix.factorize(damping), rows=fitted)
    assert calibrated.num_stored == plain.num_stored
    truth = variances(inverse, others)
    wrong, better = (
        float((f.quadratic(others, diagonal=True) / truth).log().square().mean())
        for f in (plain, calibrated)
    )
    assert better < wrong
    # The search for c stops at a relative error of about 1e-12.
    bound = abs(float(plain.logdet()) - logdet) * (1 + 1e-6)
    assert abs(float(calibrated.logdet()) - logdet) <= bound


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_calibrated_eigenvalues_follow_the_formula_in_the_eigenbasis_of_ekfac(kind: str) -> None:
    matrix, kfac, fitted, _ = problem(kind)
    damping, _, _ = dense_inverse(matrix, 1e-3)
    calibrated = kfac.factorize(damping, reference=matrix.factorize(damping), rows=fitted)
    # The eigenvalues of EKFAC without multiples, so that their eigenvectors are those of K-FAC.
    values, basis = torch.linalg.eigh(kfac.to_dense())
    turned = basis.T @ calibrated.solve(basis)
    assert torch.allclose(turned, torch.diag(turned.diagonal()), atol=1e-6 / damping)
    found = 1 / turned.diagonal() / damping
    assert bool((found > 1 - 1e-9).all())
    # With t = log(d/λ), (e/λ)^p c^p = exp(pt) − 1: a straight line in log(e/λ) for the right p.
    large = values > 1e-2 * damping
    line = (values[large] / damping).log()
    misfits = []
    for sharpness in (1, 2, 4, 8, 16):
        seen = found[large] ** sharpness - 1
        keep = seen > 1e-6
        offsets = seen[keep].log() / sharpness - line[keep]
        misfits.append(float(offsets.std()))
    assert min(misfits) < 1e-3


def test_ekfac_that_is_exact_stays_as_it_is() -> None:
    # One layer with one output: H = xxᵀ summed over the points, whose eigenvectors K-FAC has.
    model = seeded(lambda: nn.Linear(5, 1)).double()
    loss, inputs = hcurv.losses.HalfSquaredError(reduction="sum"), normal(30, 5)
    matrix = hcurv.GaussNewton(model, loss, inputs)
    kfac = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None, ekfac=True)
    rows = output_jacobians(model, normal(8, 5, seed=3))
    calibrated = kfac.factorize(0.1, reference=matrix.factorize(0.1), rows=rows)
    expected = torch.linalg.inv(matrix.to_dense() + 0.1 * torch.eye(6, dtype=torch.float64))
    assert torch.allclose(calibrated.to_dense(), expected, rtol=1e-6)


def test_dampings_may_differ_between_layers() -> None:
    matrix, kfac, fitted, others = problem("classifier")
    damping = {"0": 0.02, "2": 0.005}
    reference = matrix.factorize(damping)
    calibrated = kfac.factorize(damping, reference=reference, rows=fitted)
    truth = reference.quadratic(others, diagonal=True)
    wrong, better = (
        float((f.quadratic(others, diagonal=True) / truth).log().square().mean())
        for f in (kfac.factorize(damping), calibrated)
    )
    assert better < wrong


def test_a_calibration_that_does_not_fit_is_refused() -> None:
    matrix, kfac, rows, _ = problem("classifier")
    size, reference = matrix.shape[0], matrix.factorize(1.0)
    with pytest.raises(TypeError, match="needs both reference= and rows="):
        kfac.factorize(1.0, rows=rows)
    with pytest.raises(TypeError, match="needs both reference= and rows="):
        kfac.factorize(1.0, reference=reference)
    with pytest.raises(ValueError, match="must have the damping that is asked for"):
        kfac.factorize(2.0, reference=reference, rows=rows)
    with pytest.raises(ValueError, match=rf"rows must be a tensor of shape \(m, {size}\); got"):
        kfac.factorize(1.0, reference=reference, rows=rows[:, 1:])
    with pytest.raises(ValueError, match="rows must be one or more, finite and not zero"):
        kfac.factorize(1.0, reference=reference, rows=0 * rows)
    damping = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(TypeError, match=r"pass damping\.detach\(\)"):
        kfac.factorize(damping, reference=reference, rows=rows)
    model = seeded(lambda: nn.Linear(3, 2)).double()
    plain = hcurv.baselines.KFAC(model, nn.CrossEntropyLoss(), normal(5, 3))
    with pytest.raises(ValueError, match="only EKFAC can be calibrated"):
        plain.factorize(1.0, reference=reference, rows=rows)
    with pytest.raises(ValueError, match=r"reference must have shape \(8, 8\)"):
        hcurv.baselines.KFAC(model, nn.CrossEntropyLoss(), normal(5, 3), ekfac=True).factorize(
            1.0, reference=reference, rows=rows
        )
