"""hcurv.laplace against dense float64 oracles that share no code with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hcurv
from cases import labels, normal, seeded
from oracles import gauss_newton, jacobian_of_model

CROSS_ENTROPY = nn.CrossEntropyLoss()


def small_model(num_outputs: int = 3, bias: bool = True) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, num_outputs, bias=bias)
        ).double()
    )


def convolutional_model() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3)
        ).double()
    )


class Oracle:
    """The dense posterior, its covariance of outputs and its evidence."""

    def __init__(
        self, model: nn.Module, nll: Callable[[Tensor], Tensor], inputs: Tensor, prior: Tensor
    ) -> None:
        self.model = copy.deepcopy(model).double()
        self.prior = prior
        curvature = gauss_newton(self.model, nll, inputs)
        self.precision = curvature + torch.diag(prior.expand(curvature.shape[0]))
        self.covariance = torch.linalg.inv(self.precision)
        trainable = [p.detach().reshape(-1) for p in self.model.parameters() if p.requires_grad]
        weights = torch.cat(trainable)
        self.evidence = (
            -nll(self.model(inputs)).detach()
            - 0.5 * (prior * weights.square()).sum()
            + 0.5 * prior.expand_as(weights).log().sum()
            - 0.5 * torch.logdet(self.precision)
        )

    def covariances(self, inputs: Tensor) -> Tensor:
        outputs, jacobian = jacobian_of_model(self.model, inputs)
        rows = jacobian.view(*outputs.shape, -1)
        return torch.einsum("nik,kl,njl->nij", rows, self.covariance, rows)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def summed_cross_entropy(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda outputs: functional.cross_entropy(outputs, targets, reduction="sum")


def classifier() -> tuple[nn.Module, Tensor, Tensor]:
    return small_model(), normal(30, 4), labels(30, 3)


@pytest.mark.parametrize(
    "make", [small_model, lambda: small_model(bias=False), convolutional_model]
)
def test_output_covariances_probit_and_evidence_equal_the_dense_truth(
    make: Callable[[], nn.Module],
) -> None:
    model, inputs, targets = make(), normal(30, 4), labels(30, 3)
    others = normal(7, 4, seed=5)
    truth = Oracle(model, summed_cross_entropy(targets), inputs, number(0.7))
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), 0.7)
    found = post.predict(others, covariances=True)
    expected = truth.covariances(others)
    torch.testing.assert_close(found.covariances, expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found.variances, expected.diagonal(dim1=1, dim2=2))
    moderated = model(others).detach() / (1 + math.pi / 8 * found.variances).sqrt()
    torch.testing.assert_close(found.probabilities, moderated.softmax(1))
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence)


def test_the_posterior_does_not_depend_on_the_reduction_or_the_batches() -> None:
    model, inputs, targets = classifier()
    whole = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets))
    summed = hcurv.laplace(model, nn.CrossEntropyLoss(reduction="sum"), (inputs, targets))
    batches = list(zip(inputs.split(11), targets.split(11), strict=True))
    batched = hcurv.laplace(model, CROSS_ENTROPY, batches)
    for other in (summed, batched):
        torch.testing.assert_close(other.log_marginal_likelihood(), whole.log_marginal_likelihood())
    expected = whole.predict(inputs).probabilities
    torch.testing.assert_close(batched.predict([(x,) for x in inputs.split(7)]).mean, expected)


def test_evidence_of_linear_regression_is_that_of_the_closed_form() -> None:
    design, targets = normal(25, 3), normal(25, 1, seed=4)
    prior, noise = 0.6, 0.4
    precision = design.T @ design / noise**2 + prior * torch.eye(3, dtype=torch.float64)
    optimum = torch.linalg.solve(precision, design.T @ targets / noise**2)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(optimum.T)
    post = hcurv.laplace(model, nn.MSELoss(), (design, targets), prior, noise=noise)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(25, dtype=torch.float64),
        design @ design.T / prior + noise**2 * torch.eye(25, dtype=torch.float64),
    )
    expected = marginal.log_prob(targets.squeeze(1))
    torch.testing.assert_close(post.log_marginal_likelihood(), expected)
    points = normal(6, 3, seed=9)
    found = post.predict(points)
    variances = torch.einsum("ni,ij,nj->n", points, torch.linalg.inv(precision), points)
    torch.testing.assert_close(found.variances.squeeze(1), variances)
    torch.testing.assert_close(found.target_variances.squeeze(1), variances + noise**2)
    torch.testing.assert_close(found.mean, points @ optimum)


@pytest.mark.parametrize("parameters", ["model", "layer", "parameter"])
@pytest.mark.parametrize("num_points", [4, 30])  # fewer, and more, root rows than parameters
def test_evidence_and_its_gradients_equal_dense_ones_and_finite_differences(
    parameters: str, num_points: int
) -> None:
    model, inputs, targets = small_model(2), normal(num_points, 4), normal(num_points, 2, seed=3)
    post = hcurv.laplace(model, hcurv.losses.HalfSquaredError(), (inputs, targets))
    size = post.layout.size
    count = {"model": 1, "layer": 2, "parameter": size}[parameters]
    logs = normal(count + 1, seed=8) * 0.3

    def split(values: Tensor) -> tuple[object, Tensor]:
        if parameters == "model":
            return values[0].exp(), values[-1].exp()
        if parameters == "layer":
            return {"0": values[0].exp(), "2": values[1].exp()}, values[-1].exp()
        return values[:-1].exp(), values[-1].exp()

    def oracle(values: Tensor) -> Tensor:
        prior, noise = split(values)
        if isinstance(prior, dict):
            prior = post.layout.expand(prior)

        def nll(outputs: Tensor) -> Tensor:
            normals = torch.distributions.Normal(outputs, noise)
            return -normals.log_prob(targets).sum()

        return Oracle(model, nll, inputs, prior).evidence

    values = logs.clone().requires_grad_()
    found = post.log_marginal_likelihood(*split(values))
    torch.testing.assert_close(found.detach(), oracle(logs))
    (slope,) = torch.autograd.grad(found, values)
    step = 1e-5
    for index in {0, count // 2, count}:
        change = torch.zeros_like(logs)
        change[index] = step
        difference = (oracle(logs + change) - oracle(logs - change)) / (2 * step)
        torch.testing.assert_close(slope[index], difference, rtol=1e-5, atol=1e-6)


def test_the_tuned_prior_and_noise_are_the_best_of_a_grid() -> None:
    model, inputs, targets = small_model(1), normal(40, 4), normal(40, 1, seed=3)
    post = hcurv.laplace(model, nn.MSELoss(), (inputs, targets))
    evidence = post.tune().log_marginal_likelihood()
    assert post.tuning.converged
    assert list(post.tuning.evidence) == sorted(post.tuning.evidence)
    assert math.isclose(post.tuning.evidence[-1], float(evidence), rel_tol=1e-9)
    for factor in (0.9, 1.0, 1.1):
        for other in (0.95, 1.0, 1.05):
            nearby = post.log_marginal_likelihood(post.prior_precision * factor, post.noise * other)
            assert float(nearby) <= float(evidence) + 1e-6


def test_finer_priors_have_more_evidence_and_the_last_is_stationary() -> None:
    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets))
    found = [float(post.tune(by).log_marginal_likelihood()) for by in ("model", "layer")]
    layers = post.prior_precision
    assert layers["0.weight"] == layers["0.bias"] != layers["2.weight"]
    found.append(float(post.tune("parameter").log_marginal_likelihood()))
    assert found == sorted(found)
    logs = post.prior_precision.log().requires_grad_()
    post.log_marginal_likelihood(logs.exp()).backward()
    assert float(logs.grad.abs().max()) < 0.05


def test_fewer_root_rows_than_parameters_have_the_spectrum_of_the_kernel() -> None:
    model, inputs, targets = small_model(), normal(3, 4), labels(3, 3)
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), 0.3)
    assert post._curvature.spectrum.numel() == 9 < post.layout.size
    truth = Oracle(model, summed_cross_entropy(targets), inputs, number(0.3))
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence)


def test_tuning_without_a_spectrum_finds_the_same_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, targets = small_model(1), normal(40, 4), normal(40, 1, seed=3)
    data = (inputs, targets)
    known = hcurv.laplace(model, nn.MSELoss(), data).tune()
    for limit in ("_SMALL_SPECTRUM", "_LARGE_SPECTRUM"):
        monkeypatch.setattr(f"hcurv.applications.laplace.curvature.{limit}", 0)
    found = hcurv.laplace(model, nn.MSELoss(), data).tune()
    assert math.isclose(found.noise, known.noise, rel_tol=1e-4)
    assert math.isclose(found.prior_precision, known.prior_precision, rel_tol=1e-3)


def test_noise_is_the_root_mean_square_of_residuals_unless_given() -> None:
    model, inputs, targets = small_model(2), normal(20, 4), normal(20, 2, seed=3)
    data = (inputs, targets)
    scatter = float((model(inputs) - targets).detach().square().mean().sqrt())
    post = hcurv.laplace(model, nn.MSELoss(), data)
    assert math.isclose(post.noise, scatter)
    assert hcurv.laplace(model, nn.MSELoss(), data, noise=0.3).noise == 0.3
    same = hcurv.laplace(model, hcurv.losses.GaussianNLL(scatter**2), data)
    assert same.noise == 1.0
    torch.testing.assert_close(same.log_marginal_likelihood(), post.log_marginal_likelihood())
    expected = post.predict(inputs).target_variances
    torch.testing.assert_close(same.predict(inputs).target_variances, expected)
    assert same.tune().noise == 1.0  # its variances were given
    perfect = (inputs, model(inputs).detach())
    with pytest.raises(ValueError, match="give it with noise="):
        hcurv.laplace(model, nn.MSELoss(), perfect)


def test_labels_and_counts_have_their_own_likelihoods() -> None:
    model, inputs = small_model(2), normal(20, 4)
    marks = (normal(20, 2, seed=3) > 0).double()
    post = hcurv.laplace(model, nn.BCEWithLogitsLoss(), (inputs, marks))

    def nll(outputs: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, marks, reduction="sum")

    truth = Oracle(model, nll, inputs, number(1.0))
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence)
    variances = truth.covariances(inputs).diagonal(dim1=1, dim2=2)
    expected = (model(inputs).detach() / (1 + math.pi / 8 * variances).sqrt()).sigmoid()
    torch.testing.assert_close(post.predict(inputs).probabilities, expected)
    assert post.score((inputs, marks)).accuracy is not None
    counts = torch.poisson(model(inputs).detach().exp(), torch.Generator().manual_seed(0))
    poisson = hcurv.laplace(model, nn.PoissonNLLLoss(), (inputs, counts))

    def surprise(outputs: Tensor) -> Tensor:
        return -torch.distributions.Poisson(outputs.exp()).log_prob(counts).sum()

    truth = Oracle(model, surprise, inputs, number(1.0))
    torch.testing.assert_close(poisson.log_marginal_likelihood(), truth.evidence)
    found = poisson.predict(inputs)
    rates = torch.exp(model(inputs).detach() + found.variances / 2)
    torch.testing.assert_close(found.mean, rates)
    assert bool((found.target_variances > found.mean).all())


def test_samples_have_the_covariance_of_the_posterior_and_follow_the_seed() -> None:
    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), 2.0)
    truth = Oracle(model, summed_cross_entropy(targets), inputs, number(2.0))
    samples = post.sample(20_000, seed=1)
    error = torch.cov(samples.T) - truth.covariance
    assert float(error.norm() / truth.covariance.norm()) < 0.06
    assert torch.equal(samples[:0], post.sample(0))
    assert torch.equal(post.sample(3, seed=1), post.sample(3, seed=1))
    assert not torch.equal(post.sample(3, seed=1), post.sample(3, seed=2))
    outputs = post.predictive_samples(inputs[:2], 4000, seed=3)
    found = torch.cov(outputs[:, 0].T)
    expected = truth.covariances(inputs[:2])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.12


def test_samples_of_the_network_itself_run_it_with_other_weights() -> None:
    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), 1e8)  # almost no uncertainty
    outputs = post.predictive_samples(inputs, 2, linearised=False)
    linearised = post.predictive_samples(inputs, 2)
    torch.testing.assert_close(outputs, linearised, rtol=1e-5, atol=1e-5)
    assert not torch.equal(outputs[0], outputs[1])


def test_three_ways_to_probabilities_agree_where_variances_are_moderate() -> None:
    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), 3.0)
    sampled = post.predict(inputs, "samples", num_samples=20_000).probabilities
    again = post.predict(inputs, "samples", num_samples=20_000).probabilities
    assert torch.equal(sampled, again)
    # An independent Monte Carlo estimate, from weights instead of logits.
    weights = post.predictive_samples(inputs, 20_000, seed=5).softmax(2).mean(0)
    torch.testing.assert_close(sampled, weights, atol=0.015, rtol=0)
    torch.testing.assert_close(post.predict(inputs).probabilities, sampled, atol=0.05, rtol=0)
    bridge = post.predict(inputs, "bridge").probabilities
    torch.testing.assert_close(bridge.sum(1), torch.ones(30).double())
    torch.testing.assert_close(bridge, sampled, atol=0.2, rtol=0)


def test_the_bridge_is_that_of_its_definition() -> None:
    from hcurv.applications.laplace.predictive import _bridge

    means, root = normal(5, 4), normal(5, 4, 4, seed=2)
    covariances = root @ root.mT
    # Restrict to logits that add up to zero, by a matrix that does so.
    for mean, covariance, found in zip(
        means, covariances, _bridge(means, covariances), strict=True
    ):
        ones = torch.ones(4, dtype=torch.float64)
        gain = covariance @ ones / (ones @ covariance @ ones)
        mean = mean - gain * mean.sum()
        covariance = covariance - torch.outer(gain, ones @ covariance)
        alpha = (1 - 2 / 4 + mean.exp() / 16 * (-mean).exp().sum()) / covariance.diagonal()
        torch.testing.assert_close(found, alpha / alpha.sum())


@pytest.mark.parametrize("chosen", ["last", ["2.*"], ["2.weight", "2.bias"]])
def test_subsets_of_parameters_equal_a_model_whose_others_are_frozen(
    chosen: str | list[str],
) -> None:
    model, inputs, targets = classifier()
    frozen = copy.deepcopy(model)
    frozen[0].requires_grad_(False)
    truth = Oracle(frozen, summed_cross_entropy(targets), inputs, number(1.0))
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), parameters=chosen)
    assert post.layout.names == ("2.weight", "2.bias")
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence)
    found = post.predict(inputs, covariances=True).covariances
    torch.testing.assert_close(found, truth.covariances(inputs))
    direct = hcurv.laplace(frozen, CROSS_ENTROPY, (inputs, targets))
    assert direct.layout == post.layout


def test_the_last_layer_is_the_one_that_is_called_last() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.body = nn.Linear(4, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(inputs)))

    model = seeded(lambda: Backwards().double())
    data = (normal(10, 4), labels(10, 3))
    post = hcurv.laplace(model, CROSS_ENTROPY, data, parameters="last")
    assert post.layout.names == ("head.weight", "head.bias")


def test_one_point_is_enough() -> None:
    model, inputs, targets = small_model(), normal(1, 4), labels(1, 3)
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets))
    truth = Oracle(model, summed_cross_entropy(targets), inputs, number(1.0))
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence)
    found = post.predict(inputs, covariances=True).covariances
    torch.testing.assert_close(found, truth.covariances(inputs))


def test_single_precision_is_as_accurate_as_it_can_be() -> None:
    model, inputs, targets = classifier()
    truth = Oracle(model, summed_cross_entropy(targets), inputs, number(1e-2))
    single = copy.deepcopy(model).float()
    post = hcurv.laplace(single, CROSS_ENTROPY, (inputs.float(), targets), 1e-2)
    found = post.predict(inputs.float(), covariances=True)
    assert found.covariances.dtype == torch.float32
    expected = truth.covariances(inputs).float()
    torch.testing.assert_close(found.covariances, expected, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(post.log_marginal_likelihood(), truth.evidence, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diagonal"])
def test_other_structures_add_the_prior_to_their_matrix(structure: str) -> None:
    model, inputs, targets = classifier()
    loss = nn.CrossEntropyLoss(reduction="sum")
    exact = hcurv.GaussNewton(model, loss, inputs)
    if structure == "diagonal":
        dense = torch.diag(exact.diagonal())
    else:
        ekfac = structure == "ekfac"
        kfac = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None, ekfac=ekfac)
        dense = kfac @ torch.eye(exact.shape[0], dtype=torch.float64)
    prior = {"0": 0.5, "2": 2.0}
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), prior, structure=structure)
    precision = dense + torch.diag(exact.layout.expand(prior))
    rows = exact.jacobian(inputs[:3]).to_dense()
    expected = (rows @ torch.linalg.inv(precision) @ rows.T)[:3, :3]
    found = post.predict(inputs[:3], covariances=True).covariances[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        post.factorized.logdet(), torch.logdet(precision), rtol=1e-9, atol=1e-9
    )
    before = float(post.log_marginal_likelihood())
    assert float(post.tune("layer").log_marginal_likelihood()) > before


def test_scores_measure_likelihood_and_calibration() -> None:
    from hcurv.applications.laplace.scores import auroc, calibration_error

    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets))
    chances = post.predict(inputs).probabilities
    found = post.score((inputs, targets))
    expected = -functional.nll_loss(chances.log(), targets)
    assert math.isclose(found.log_likelihood, float(expected))
    assert math.isclose(found.accuracy, float((chances.argmax(1) == targets).double().mean()))
    certain = torch.tensor([[0.75, 0.25]]).expand(8, 2)
    assert calibration_error(certain, torch.tensor([0] * 6 + [1] * 2)) == 0.0
    assert calibration_error(certain, torch.tensor([1] * 8)) == 0.75
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])) == 1.0
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])) == 0.5
    regression = hcurv.laplace(small_model(1), nn.MSELoss(), (inputs, normal(30, 1, seed=3)))
    value = regression.predict(inputs)
    density = torch.distributions.Normal(value.mean, value.standard_deviations)
    expected = density.log_prob(normal(30, 1, seed=3)).mean()
    found = regression.score((inputs, normal(30, 1, seed=3)))
    assert math.isclose(found.log_likelihood, float(expected))
    assert 0.8 < found.coverage <= 1


def test_large_problems_are_solved_by_iterations_to_the_tolerance() -> None:
    model, inputs, targets = classifier()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), tolerance=1e-6)
    curvature = post._curvature
    iterative = curvature.matrix.factorize(1.0, 1e-6, method="iterations")
    expected = post.predict(inputs).variances
    post._factorized = iterative
    torch.testing.assert_close(post.predict(inputs).variances, expected, rtol=1e-4, atol=1e-8)


BAD = {
    "no targets": (lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, x), "needs targets"),
    "unknown loss": (lambda m, x, y: hcurv.laplace(m, nn.HuberLoss(), (x, y)), "no likelihood"),
    "negative prior": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), -1.0),
        "prior_precision must be positive",
    ),
    "prior of another size": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), torch.ones(5)),
        "prior_precision must be one finite number or have shape",
    ),
    "noise of a classifier": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), noise=1.0),
        "classes have none",
    ),
    "unknown structure": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), structure="full"),
        "structure must be one of",
    ),
    "unknown parameter": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), parameters=["head"]),
        "no trainable parameter or layer is called 'head'",
    ),
    "no parameters": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y), parameters=[]),
        'parameters must be "all", "last"',
    ),
    "unknown method": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).predict(x, "mean"),
        "method must be one of",
    ),
    "unknown grouping": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).tune("unit"),
        'by "model", "layer" or "parameter"',
    ),
    "noise of a classifier, tuned": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).tune(noise=True),
        "regressions only",
    ),
    "inputs of another width": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).predict(x[:, :2]),
        "cannot read these inputs",
    ),
    "no points": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).predict(x[:0]),
        "inputs are empty",
    ),
    "score without targets": (
        lambda m, x, y: hcurv.laplace(m, CROSS_ENTROPY, (x, y)).score(x),
        "scores need targets",
    ),
    "bridge of labels": (
        lambda m, x, y: hcurv.laplace(
            m, nn.BCEWithLogitsLoss(), (x, torch.zeros(30, 3).double())
        ).predict(x, "bridge"),
        "one class out of several",
    ),
    "outputs with more axes": (
        lambda m, x, y: hcurv.laplace(
            nn.Sequential(m, nn.Unflatten(1, (3, 1))), CROSS_ENTROPY, (x, y[:, None])
        ),
        "outputs must have the shape",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_clear_message(case: str) -> None:
    act, message = BAD[case]
    with pytest.raises((ValueError, TypeError, KeyError), match=message):
        act(*classifier())


def test_the_model_and_the_random_numbers_are_left_alone() -> None:
    model, inputs, targets = classifier()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    post = hcurv.laplace(model, CROSS_ENTROPY, (inputs, targets), parameters="last").tune()
    post.predict(inputs, "samples")
    post.sample(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
