"""The structure "hcurv" of laplace-torch gives what its structure "full" gives, to 1e-6.

The full matrix is made by the BackPACK backend, because the usual one computes in single precision.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # of laplace-torch and its backends
laplace = pytest.importorskip(
    "laplace", reason="laplace-torch is not installed (make test-interop)", exc_type=ImportError
)

from laplace.curvature import BackPackGGN  # noqa: E402

import hcurv  # noqa: E402
from hcurv.interop.laplace import HCurvLaplace  # noqa: E402

TOLERANCE = 1e-6
SINGLE = 1e-4  # of what the usual backend of laplace-torch computes in single precision


def assert_near(own: Tensor, true: Tensor, tolerance: float = TOLERANCE) -> None:
    scale = max(1e-300, float(true.abs().max()))
    assert own.shape == true.shape
    assert float((own - true).abs().max()) <= tolerance * scale


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def train(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


@cache
def sinusoid() -> tuple[nn.Module, str, Tensor, Tensor, Tensor]:
    """The regression of laplace-torch's own example: a noisy sine, 1-50-1."""
    generator = torch.Generator().manual_seed(711)
    inputs = 8 * torch.rand(150, 1, generator=generator, dtype=torch.float64)
    targets = inputs.sin() + 0.3 * torch.randn(150, 1, generator=generator, dtype=torch.float64)
    model = network(1, 50, 1)
    train(model, nn.MSELoss(), inputs, targets)
    return model, "regression", inputs, targets, torch.linspace(-5, 13, 40).double()[:, None]


@cache
def wine() -> tuple[nn.Module, str, Tensor, Tensor, Tensor]:
    """A classification of the UCI repository, which scikit-learn ships."""
    load_wine = pytest.importorskip("sklearn.datasets").load_wine
    values, labels = load_wine(return_X_y=True)
    return classified(torch.from_numpy(values), torch.from_numpy(labels))


@cache
def vehicle() -> tuple[nn.Module, str, Tensor, Tensor, Tensor]:
    if not os.environ.get("HCURV_DATA"):
        pytest.skip("HCURV_DATA names no folder with uci/ in it")
    from hcurv.experiments.uci import uci

    return classified(*uci("vehicle"))


def classified(inputs: Tensor, labels: Tensor) -> tuple[nn.Module, str, Tensor, Tensor, Tensor]:
    inputs, targets = (inputs - inputs.mean(0)) / inputs.std(0), labels.long() - labels.min().long()
    model = network(inputs.shape[1], 12, int(targets.max()) + 1)
    train(model, nn.CrossEntropyLoss(), inputs, targets)
    generator = torch.Generator().manual_seed(0)
    return (
        model,
        "classification",
        inputs,
        targets,
        inputs[:20] + torch.randn(20, inputs.shape[1], generator=generator),
    )


Case = Callable[[], tuple[nn.Module, str, Tensor, Tensor, Tensor]]
CASES = pytest.mark.parametrize("case", [sinusoid, wine, vehicle])


@cache
def fitted(case: Case, structure: str) -> Any:
    model, likelihood, inputs, targets, _ = case()
    options: dict[str, Any] = {"sigma_noise": 0.4} if likelihood == "regression" else {}
    if structure == "full":
        options["backend"] = BackPackGGN
        model = copy.deepcopy(model)  # BackPACK changes it
    found = laplace.Laplace(
        model, likelihood, subset_of_weights="all", hessian_structure=structure, **options
    )
    found.fit(DataLoader(TensorDataset(inputs, targets), batch_size=37))
    return found


def pair(case: Case) -> tuple[Any, Any]:
    own, full = fitted(case, "hcurv"), fitted(case, "full")
    for each in (own, full):
        each.prior_precision = 1.3
    return own, full


def test_the_name_is_known_after_the_import() -> None:
    own = laplace.Laplace(
        network(2, 2),
        "classification",
        subset_of_weights="all",
        hessian_structure="hcurv",
    )
    assert isinstance(own, HCurvLaplace)


@CASES
def test_loss_and_precision_are_those_of_the_full_structure(case: Case) -> None:
    own, full = pair(case)
    assert_near(own.loss, torch.as_tensor(full.loss))
    assert_near(own.posterior_precision.to_dense(), full.posterior_precision)
    assert_near(own.posterior_variance, full.posterior_covariance.diagonal())
    assert own.n_data == full.n_data
    assert own.n_outputs == full.n_outputs
    value = own.mean + 0.1
    assert_near(own.log_prob(value), full.log_prob(value))


@CASES
def test_glm_predictions_are_those_of_the_full_structure(case: Case) -> None:
    own, full = pair(case)
    _, likelihood, _, _, points = case()
    if likelihood == "regression":
        for joint in (False, True):
            for left, right in zip(
                own(points, joint=joint), full(points, joint=joint), strict=True
            ):
                assert_near(left, right)
        return
    for link in ("probit", "bridge", "bridge_norm"):
        assert_near(own(points, link_approx=link), full(points, link_approx=link))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        left = own(points, link_approx="mc", n_samples=10)
        torch.manual_seed(0)
        assert_near(left, full(points, link_approx="mc", n_samples=10))


@CASES
def test_functional_variances_of_given_jacobians_are_the_same(case: Case) -> None:
    own, full = pair(case)
    jacobians, _ = full.backend.jacobians(case()[4])
    assert_near(own.functional_variance(jacobians), full.functional_variance(jacobians))
    assert_near(own.functional_covariance(jacobians), full.functional_covariance(jacobians))


@CASES
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diagonal"])
def test_evidence_and_gradients_are_those_of_the_full_structure(case: Case, structure: str) -> None:
    results = []
    for each in pair(case):
        size = {"scalar": 1, "layerwise": each.n_layers, "diagonal": each.n_params}[structure]
        prior = torch.linspace(0.5, 2.0, size, dtype=torch.float64).requires_grad_(True)
        noise = None
        if each.likelihood == "regression":
            noise = torch.tensor(0.37, dtype=torch.float64, requires_grad=True)
        evidence = each.log_marginal_likelihood(prior, noise)
        evidence.backward()
        results.append([evidence.detach(), prior.grad] + ([] if noise is None else [noise.grad]))
        each.sigma_noise = 0.4 if noise is not None else 1.0
    for own, true in zip(*results, strict=True):
        assert_near(own, true)


@pytest.mark.parametrize("structure", ["layerwise", "diag"])
def test_tuned_priors_are_those_of_the_full_structure(structure: str) -> None:
    found = []
    for each in pair(wine):
        each.optimize_prior_precision(
            method="marglik", n_steps=10, prior_structure=structure, pred_type="glm"
        )
        found.append(each.prior_precision.detach())
    assert_near(*found)


def test_samples_have_the_covariance_of_the_posterior() -> None:
    own, full = pair(sinusoid)
    samples = own.sample(20_000, generator=torch.Generator().manual_seed(0)) - own.mean
    rows = torch.randn(5, own.n_params, generator=torch.Generator().manual_seed(1)).double()
    expected = rows @ full.posterior_covariance @ rows.T
    scatter = torch.cov((samples @ rows.T).T)
    bound = 5 / 20_000**0.5 * float(expected.diagonal().max())  # five standard deviations
    assert float((scatter - expected).abs().max()) < bound * 2**0.5
    assert float(samples.mean(0).abs().max()) < 5 * float(own.posterior_variance.max()) ** 0.5 / 100


def test_nn_predictions_average_the_network_over_samples() -> None:
    own, _ = pair(wine)
    model, points = wine()[0], wine()[4]
    before = [parameter.clone() for parameter in model.parameters()]
    probabilities = own(points, pred_type="nn", link_approx="mc", n_samples=20)
    assert probabilities.shape == (20, 3)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(20).double())
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, earlier, rtol=0, atol=0)
    assert own.predictive_samples(points, pred_type="nn", n_samples=4).shape == (4, 20, 3)


def test_no_jacobian_of_the_whole_batch_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = pair(wine)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a full Jacobian was asked for")

    monkeypatch.setattr(type(own.backend), "jacobians", refuse)
    monkeypatch.setattr(hcurv.JacobianRows, "to_dense", refuse)
    assert own(wine()[4]).shape == (20, 3)


def test_shuffled_loaders_frozen_parameters_and_single_points_work() -> None:
    model, _, inputs, targets, points = wine()
    model[0].weight.requires_grad_(False)
    try:
        results = []
        for structure in ("hcurv", "full"):
            each = laplace.Laplace(model, "classification", "all", structure)
            data = TensorDataset(inputs[:1], targets[:1])
            each.fit(DataLoader(data, batch_size=1, shuffle=True))
            results.append(each(points))
        assert_near(*results, SINGLE)
    finally:
        model[0].weight.requires_grad_(True)


def test_inputs_in_a_dictionary_work() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(13, 5, 3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(batch["input_ids"])

    _, _, inputs, targets, points = wine()
    batches = [
        {"input_ids": x, "labels": y}
        for x, y in zip(inputs.split(50), targets.split(50), strict=True)
    ]
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=50)
    named = Named()
    own = laplace.Laplace(named, "classification", "all", "hcurv")
    own.fit(batches)
    plain = laplace.Laplace(named.inner, "classification", "all", "full")
    plain.fit(loader)
    assert_near(own({"input_ids": points}), plain(points), SINGLE)


def test_what_is_not_supported_is_refused() -> None:
    own, _ = pair(wine)
    with pytest.raises(ValueError, match="override=False"):
        own.fit(None, override=False)
    with pytest.raises(NotImplementedError, match="fit\\(\\) again"):
        own.state_dict()
    with pytest.raises(ValueError, match="enable_backprop=False"):
        HCurvLaplace(network(2, 2), "classification", enable_backprop=True)
    with pytest.raises(ValueError, match="reward_modeling"):
        HCurvLaplace(network(2, 2), "reward_modeling")
    with pytest.raises(AttributeError, match="not fitted"):
        HCurvLaplace(network(2, 2), "classification").sample(1)
