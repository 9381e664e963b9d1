"""gauss_newton_step against a dense solve."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import hcurv
from cases import CASES, labels, normal, seeded


def problem() -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))).double()
    return model, nn.CrossEntropyLoss(), (normal(60, 12), labels(60, 4))


def gradient_of(model: nn.Module, loss: nn.Module, data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    value = loss(model(data[0]), data[1])
    gradients = torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad])
    return parameters_to_vector(gradients)


@pytest.mark.parametrize("kind", [None, "diagonal", "hierarchical"])
def test_step_solves_the_damped_system(kind: str | None) -> None:
    model, loss, data = problem()
    before = parameters_to_vector(model.parameters()).clone()
    step = hcurv.gauss_newton_step(
        model, loss, data, damping=1e-2, preconditioner=kind, tolerance=1e-9
    )
    dense = hcurv.GaussNewton(model, loss, data).to_dense()
    gradient = gradient_of(model, loss, data)
    system = dense + 1e-2 * torch.eye(dense.shape[0], dtype=torch.float64)
    expected = -torch.linalg.solve(system, gradient)
    assert float((step.flat - expected).norm() / expected.norm()) < 1e-7
    assert step.cg.converged
    decrease = -(gradient @ expected + expected @ dense @ expected / 2)
    assert step.predicted_decrease == pytest.approx(float(decrease), rel=1e-6)
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    phases = {"precomputation", "gradient", "preconditioner", "conjugate gradients"}
    assert step.seconds.keys() == phases


def test_step_by_parameters_lowers_the_loss() -> None:
    model, loss, data = problem()
    model[0].bias.requires_grad_(False)
    step = hcurv.gauss_newton_step(model, loss, data, damping=1.0)
    assert list(step.parameters) == ["0.weight", "2.weight", "2.bias"]
    assert torch.equal(parameters_to_vector(step.parameters.values()), step.flat)
    first = float(loss(model(data[0]), data[1]).detach())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in step.parameters:
                assert step.parameters[name].shape == parameter.shape
                parameter += step.parameters[name]
    last = float(loss(model(data[0]), data[1]).detach())
    assert last < first
    assert first - last == pytest.approx(step.predicted_decrease, rel=0.3)


def test_loaders_and_earlier_factorizations() -> None:
    model, loss, data = problem()
    loader = DataLoader(TensorDataset(*data), batch_size=13)
    matrix = hcurv.compress(hcurv.GaussNewton(model, loss, loader), tolerance=1e-6)
    step = hcurv.gauss_newton_step(
        model, loss, loader, damping=1e-2, preconditioner=matrix.factorize(1e-2)
    )
    assert int(step.cg.num_iterations) <= 4
    assert step.cg.converged


def test_a_step_that_did_not_converge_is_warned_about() -> None:
    model, loss, data = problem()
    message = (
        r"relative residual of \d\.\de-\d+, above the tolerance of 1\.0e-06, after 2"
        r" iterations\. Use a larger damping"
    )
    with pytest.warns(hcurv.ConvergenceWarning, match=message) as caught:
        step = hcurv.gauss_newton_step(
            model, loss, data, damping=1e-4, tolerance=1e-6, max_iterations=2
        )
    assert caught[0].filename == __file__
    assert not step.cg.converged
    assert float(step.cg.residuals) > 1e-6


@pytest.mark.parametrize("name", ["deep autoencoder"])
def test_other_losses(name: str) -> None:
    case = CASES[name]
    step = hcurv.gauss_newton_step(
        case.build(), case.loss, (case.inputs, case.targets), damping=1e-1, tolerance=1e-8
    )
    dense = case.dense
    system = dense + 1e-1 * torch.eye(dense.shape[0], dtype=torch.float64)
    assert float((system @ step.flat + step.gradient).norm() / step.gradient.norm()) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": normal(3, 12)}, "the step needs targets"),
        ({"damping": 0.0}, "damping must be positive and finite; got 0"),
        ({"preconditioner": "ilu"}, 'must be "diagonal", "hierarchical", None'),
        ({"compression": {"tolerance": 1e-3}}, "compression is for"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    model, loss, data = problem()
    with pytest.raises(ValueError, match=message):
        hcurv.gauss_newton_step(model, loss, **{"data": data, "damping": 1.0, **options})
