"""Influence scores against dense float64 references, and against leaving points out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import hcurv
import oracles
from cases import labels, normal, seeded
from hcurv.applications.damping_choice import rank_correlations

Problem = tuple[nn.Module, nn.Module, Tensor, Tensor]


def classifier() -> Problem:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))).double()
    return model, nn.CrossEntropyLoss(), normal(30, 5), labels(30, 3)


def regression() -> Problem:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Softplus(), nn.Linear(5, 2))
    ).double()
    return model, nn.MSELoss(), normal(25, 4), normal(25, 2, seed=3)


def images() -> Problem:
    """No chain: convolutions, and a frozen parameter."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)
        )
    ).double()
    model[0].bias.requires_grad_(False)
    return model, nn.CrossEntropyLoss(), normal(16, 1, 4, 4), labels(16, 3)


PROBLEMS = {"classifier": classifier, "regression": regression, "convolutions": images}


def point_gradients(
    model: nn.Module, function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """Gradients of a function of single points, one backward pass each, (n, N)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        value = function(model(inputs[i : i + 1]), targets[i : i + 1])
        rows.append(parameters_to_vector(torch.autograd.grad(value, parameters)))
    return torch.stack(rows)


def total_loss(loss: nn.Module) -> nn.Module:
    result = copy.copy(loss)
    result.reduction = "sum"
    return result


def dense_scores(
    problem: Problem,
    damping: float | Tensor,
    queries: tuple[Tensor, Tensor],
    measure: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """w ∇m_qᵀ (H + D)⁻¹ ∇f_i from dense matrices; w H_sum is the matrix of the mean loss."""
    model, loss, inputs, targets = problem
    whole = total_loss(loss)
    matrix = oracles.gauss_newton(model, lambda outputs: whole(outputs, targets), inputs)
    scale = 1.0
    if loss.reduction == "mean":
        scale = 1 / (targets.numel() if isinstance(loss, nn.MSELoss) else len(targets))
    system = scale * matrix + torch.diag(
        torch.as_tensor(damping, dtype=torch.float64).expand(len(matrix))
    )
    training = point_gradients(model, whole, inputs, targets)
    asked = point_gradients(
        model, whole if measure is None else lambda o, t: measure(o, t).sum(), *queries
    )
    return scale * asked @ torch.linalg.solve(system, training.T)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_scores_are_those_of_dense_matrices(name: str, reduction: str) -> None:
    model, loss, inputs, targets = problem = PROBLEMS[name]()
    loss.reduction = reduction
    queries = (inputs[:7] + 0.1, targets[:7])
    damping = 0.02 if reduction == "mean" else 0.4
    infl = hcurv.influence(model, loss, (inputs, targets), damping, check_damping=False)
    expected = dense_scores(problem, damping, queries)
    assert close(infl.scores(queries), expected)
    batches = [(queries[0][:3], queries[1][:3]), (queries[0][3:], queries[1][3:])]
    assert close(infl.scores(batches), expected)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reduction_does_not_change_scores(name: str) -> None:
    model, loss, inputs, targets = PROBLEMS[name]()
    queries = (inputs[:4] + 0.1, targets[:4])
    found = []
    for reduction in ("mean", "sum"):
        loss.reduction = reduction
        infl = hcurv.influence(model, loss, (inputs, targets), check_damping=False)
        found.append((infl.scores(queries), infl.self_scores()))
    assert close(found[0][0], found[1][0])
    assert close(found[0][1], found[1][1])


def test_a_damping_for_each_layer() -> None:
    model, loss, inputs, targets = problem = classifier()
    values = {"0": 0.3, "2.weight": 0.05, "2.bias": 1.0}
    infl = hcurv.influence(model, loss, (inputs, targets), values, check_damping=False)
    flat = infl.matrix.layout.expand(values)
    assert flat.unique().numel() == 3
    queries = (inputs[:3] + 0.1, targets[:3])
    assert close(infl.scores(queries), dense_scores(problem, flat, queries))


@pytest.mark.parametrize("name", PROBLEMS)
def test_self_scores_are_the_diagonal_over_the_training_points(name: str) -> None:
    model, loss, inputs, targets = problem = PROBLEMS[name]()
    data = (inputs, targets)
    infl = hcurv.influence(model, loss, data, 0.05)
    expected = dense_scores(problem, 0.05, data).diagonal()
    assert close(infl.self_scores(), expected)
    rough = infl.self_scores(num_samples=4000, seed=1)
    assert float((rough / expected - 1).abs().max()) < 5 * (2 / 4000) ** 0.5


def test_measurements_other_than_the_loss() -> None:
    model, loss, inputs, targets = problem = classifier()
    queries = (inputs[:6] + 0.1, targets[:6])

    def margin(outputs: Tensor, answers: Tensor) -> Tensor:
        right = outputs.gather(1, answers[:, None]).squeeze(1)
        return right - torch.logsumexp(outputs, 1).square()

    def second(outputs: Tensor, answers: Tensor | None) -> Tensor:
        return outputs[:, 1]

    infl = hcurv.influence(model, loss, (inputs, targets), 0.1)
    assert close(infl.scores(queries, measure=margin), dense_scores(problem, 0.1, queries, margin))
    expected = dense_scores(problem, 0.1, queries, second)
    assert close(infl.scores(queries, measure=second), expected)
    assert close(infl.scores(queries[0], measure=second), expected)
    assert close(infl.scores([queries[0][:2], queries[0][2:]], measure=second), expected)
    asked = []
    infl.scores(queries[0], measure=lambda o, t: asked.append(t) or o[:, 0])  # type: ignore[func-returns-value]
    assert set(asked) == {None}


def test_measurements_of_outputs_and_targets_of_any_shape() -> None:
    """The measurement sees outputs and targets in the shapes that the model and the data have."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))).double()
    inputs, targets = normal(9, 4), normal(9, 2, 3, seed=5)
    loss = nn.MSELoss()
    infl = hcurv.influence(model, loss, (inputs, targets), 0.1, check_damping=False)

    def product(outputs: Tensor, answers: Tensor) -> Tensor:
        assert outputs.shape[1:] == answers.shape[1:] == (2, 3)
        return (outputs * answers)[:, 0, 2] ** 2

    expected = dense_scores((model, loss, inputs, targets), 0.1, (inputs, targets), product)
    assert close(infl.scores((inputs, targets), measure=product), expected)


def test_scores_of_groups_add_up() -> None:
    model, loss, inputs, targets = classifier()
    queries = (inputs[:4], targets[:4])
    infl = hcurv.influence(model, loss, (inputs, targets), 0.1)
    single = infl.scores(queries)
    members = torch.arange(30) % 4
    found = infl.scores(queries, groups=members.tolist())
    expected = torch.stack([single[:, members == g].sum(1) for g in range(4)], 1)
    assert close(found, expected)


def test_top_points_are_those_with_the_largest_scores() -> None:
    model, loss, inputs, targets = classifier()
    queries = (inputs[:4], targets[:4])
    infl = hcurv.influence(model, loss, (inputs, targets), 0.1)
    scores = infl.scores(queries)
    order = scores.argsort(1, descending=True)
    helpful, harmful = infl.top(queries, 3), infl.top(queries, 3, harmful=True)
    assert torch.equal(helpful.points, order[:, :3])
    assert torch.equal(harmful.points, order.flip(1)[:, :3])
    assert torch.equal(helpful.scores, scores.gather(1, helpful.points))
    assert bool((harmful.scores[:, 0] < 0).all() and (helpful.scores[:, 0] > 0).all())


def test_iterative_solves_and_single_precision_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, inputs, targets = problem = classifier()
    queries = (inputs[:5] + 0.1, targets[:5])
    expected = dense_scores(problem, 0.01, queries)
    data = (inputs.float(), targets)
    single = hcurv.influence(copy.deepcopy(model).float(), loss, data, 0.01, check_damping=False)
    found = single.scores((queries[0].float(), queries[1]))
    assert found.dtype == torch.float32
    assert close(found.double(), expected, 1e-4)
    original = hcurv.GaussNewton.factorize
    monkeypatch.setattr(
        hcurv.GaussNewton,
        "factorize",
        lambda *a, **k: original(*a, **k, method="iterations"),
    )
    infl = hcurv.influence(model, loss, (inputs, targets), 0.01, tolerance=1e-5)
    assert close(infl.scores(queries), expected, 1e-5)
    assert bool((rank_correlations(infl.scores(queries), expected) > 0.999).all())


def test_many_queries_are_scored_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, inputs, targets = classifier()
    infl = hcurv.influence(model, loss, (inputs, targets), 0.1)
    whole = infl.scores((inputs, targets))
    estimated = infl.self_scores(num_samples=10)
    monkeypatch.setattr("hcurv.applications.influence_scores._PANEL_QUERIES", 7)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    assert close(infl.scores(loader), whole)
    assert close(infl.top(loader, 5).scores, whole.topk(5).values)
    assert infl.self_scores(num_samples=10).shape == estimated.shape


def test_another_matrix_may_take_the_place_of_the_exact_one() -> None:
    model, loss, inputs, targets = classifier()
    data, queries = (inputs, targets), (inputs[:4], targets[:4])
    kfac = hcurv.baselines.KFAC(model, loss, data, num_samples=None, ekfac=True)
    infl = hcurv.influence(model, loss, data, 0.1, curvature=kfac)
    whole = total_loss(loss)
    training = point_gradients(model, whole, inputs, targets)
    asked = point_gradients(model, whole, *queries)
    system = kfac.to_dense() + 0.1 * torch.eye(training.shape[1]).double()
    assert close(infl.scores(queries), asked @ torch.linalg.solve(system, training.T) / 30)
    with pytest.raises(TypeError, match=r"curvature must be a matrix .* got Tensor"):
        hcurv.influence(model, loss, data, 0.1, curvature=torch.eye(3))
    other = hcurv.baselines.KFAC(nn.Linear(5, 3).double(), loss, data, num_samples=None)
    with pytest.raises(ValueError, match=r"\(18, 18\), but the model has 57"):
        hcurv.influence(model, loss, data, 0.1, curvature=other)


@pytest.mark.parametrize("num_points", [1, 12])
def test_leaving_one_point_out_of_a_ridge_regression(num_points: int) -> None:
    """There, the change without point i is the score, divided by 1 - h_i, with h_i its leverage."""
    inputs, targets = normal(num_points, 3), normal(num_points, 1, seed=7)
    query, ridge = normal(5, 3, seed=8), 0.3

    def fit(keep: Tensor) -> Tensor:
        x, y = inputs[keep], targets[keep]
        return torch.linalg.solve(x.T @ x + ridge * torch.eye(3).double(), x.T @ y)

    everything = torch.arange(num_points)
    weights = fit(everything)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(weights.T)
    loss = hcurv.losses.HalfSquaredError(reduction="sum")
    infl = hcurv.influence(model, loss, (inputs, targets), ridge)
    scores = infl.scores(query, measure=lambda outputs, _: outputs[:, 0])
    residuals = (inputs @ weights - targets).squeeze(1)
    leverages = infl.self_scores() / residuals.square()
    for i in range(num_points):
        without = fit(everything[everything != i])
        change = (query @ (without - weights)).squeeze(1)
        assert torch.allclose(scores[:, i] / (1 - leverages[i]), change, rtol=1e-9)


@pytest.mark.parametrize("removed", [[0], [3, 5, 6, 11], list(range(11)), []])
def test_leaving_points_out_of_a_ridge_regression_is_exact(removed: list[int]) -> None:
    inputs, targets, ridge = normal(12, 3), normal(12, 2, seed=7), 0.3

    def fit(keep: Tensor) -> Tensor:
        x, y = inputs[keep], targets[keep]
        return torch.linalg.solve(x.T @ x + ridge * torch.eye(3).double(), x.T @ y)

    everything = torch.arange(12)
    weights = fit(everything)
    model = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(weights.T)
    loss = hcurv.losses.HalfSquaredError(reduction="sum")
    infl = hcurv.influence(model, loss, (inputs, targets), ridge, tolerance=1e-9)
    query = normal(5, 3, seed=8)
    found = infl.leave_out(removed, query, measure=lambda outputs, _: outputs[:, 1])
    stays = torch.tensor([i for i in range(12) if i not in removed])
    change = (query @ (fit(stays) - weights))[:, 1]
    assert torch.allclose(found, change, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", ["auto", "iterations"])
def test_leaving_points_out_is_a_step_with_the_curvature_of_the_others(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss, inputs, targets = PROBLEMS[name]()
    original = hcurv.GaussNewton.factorize
    monkeypatch.setattr(
        hcurv.GaussNewton, "factorize", lambda *a, **k: original(*a, **k, method=method)
    )
    queries, damping = (inputs[:4] + 0.1, targets[:4]), 0.05
    infl = hcurv.influence(model, loss, (inputs, targets), damping, tolerance=1e-8)
    mask = torch.zeros(len(inputs), dtype=torch.bool)
    mask[[1, 4, 7]] = True
    whole = total_loss(loss)
    scale = 1 / (targets.numel() if isinstance(loss, nn.MSELoss) else len(targets))
    kept = targets[~mask]
    matrix = oracles.gauss_newton(model, lambda outputs: whole(outputs, kept), inputs[~mask])
    system = scale * matrix + damping * torch.eye(len(matrix)).double()
    removed = scale * point_gradients(model, whole, inputs[mask], targets[mask]).sum(0)
    expected = point_gradients(model, whole, *queries) @ torch.linalg.solve(system, removed)
    assert close(infl.leave_out(mask, queries), expected, 1e-6)
    assert close(infl.leave_out([1, 4, 7, 7], queries), expected, 1e-6)


def test_default_damping_is_a_multiple_of_the_mean_diagonal() -> None:
    model, loss, inputs, targets = problem = classifier()
    matrix = oracles.gauss_newton(model, lambda outputs: loss(outputs, targets), inputs)
    mean = float(matrix.diagonal().mean())
    kfac = hcurv.baselines.KFAC(model, loss, inputs)
    rough = hcurv.influence(model, loss, (inputs, targets), curvature=kfac, check_damping=False)
    assert rough.damping == pytest.approx(0.1 * mean, rel=1e-9)
    infl = hcurv.influence(model, loss, (inputs, targets), check_damping=False)
    expected = 10 * mean
    assert infl.damping == pytest.approx(expected, rel=1e-9)
    queries = (inputs[:3], targets[:3])
    assert close(infl.scores(queries), dense_scores(problem, expected, queries))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model[0].weight.requires_grad_(False)
        model[2].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="is zero, so that no damping can be chosen"):
        hcurv.influence(model, loss, (inputs, targets))


def test_sensitivity_is_the_rank_correlation_with_other_dampings() -> None:
    model, loss, inputs, targets = problem = classifier()
    queries = (inputs[:5] + 0.2, targets[:5])
    infl = hcurv.influence(model, loss, (inputs, targets), 0.01, tolerance=1e-6)
    found = infl.damping_sensitivity(queries, factors=(0.3, 10))
    base = dense_scores(problem, 0.01, queries)
    for factor in (0.3, 10):
        other = dense_scores(problem, 0.01 * factor, queries)
        expected = float(rank_correlations(base, other).mean())
        assert found[factor] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(ValueError, match="factors must be positive and finite; got -1"):
        infl.damping_sensitivity(queries, factors=(-1,))


def cancelling() -> tuple[nn.Module, nn.Module | hcurv.losses.Loss, Tensor, Tensor, Tensor]:
    """A linear model whose scores are differences of two terms, one of them in proportion to 1/λ.

    The first feature has an eigenvalue far below 0.01, the second one far above. Points have large
    residuals only where the features have different signs.
    """
    features = normal(60, 2)
    residuals = torch.where(features.prod(1) < 0, 1.0, 0.01).double()
    inputs = features * torch.tensor([1e-3, 1.0]).double()
    model = nn.Linear(2, 1, bias=False).double()
    targets = model(inputs).detach() - residuals[:, None]
    queries = torch.tensor([[10.0, 1.0], [20.0, 2.0]]).double()
    return model, hcurv.losses.HalfSquaredError(), inputs, targets, queries


def test_scores_that_depend_on_the_damping_are_warned_about_once() -> None:
    model, loss, inputs, targets, queries = cancelling()
    data = (inputs, targets)

    def output(outputs: Tensor, _: Tensor | None) -> Tensor:
        return outputs[:, 0]

    infl = hcurv.influence(model, loss, data, 0.01)
    with pytest.warns(hcurv.InfluenceWarning, match=r"which is 0\.01: .* pass that as damping="):
        infl.scores(queries, measure=output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infl.scores(queries, measure=output)
        infl.top(queries, 3, measure=output)
        for damping, check in ((0.01, False), (1e3, True), (1e-9, True)):
            hcurv.influence(model, loss, data, damping, check_damping=check).scores(
                queries, measure=output
            )


def test_rank_correlations_are_spearmans() -> None:
    from scipy.stats import spearmanr

    first, second = normal(3, 40), normal(3, 40, seed=9).round()
    found = rank_correlations(first, second)
    for row in range(3):
        expected = spearmanr(first[row].numpy(), second[row].numpy()).statistic
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    constant = torch.ones(1, 5)
    assert float(rank_correlations(constant, constant)) == 1
    assert float(rank_correlations(constant, normal(1, 5))) == 0


def test_the_model_and_later_training_do_not_matter() -> None:
    model, loss, inputs, targets = classifier()
    before = parameters_to_vector(model.parameters()).clone()
    queries = (inputs[:3], targets[:3])
    infl = hcurv.influence(model, loss, (inputs, targets), 0.1)
    first = infl.scores(queries)
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(infl.scores(queries), first)
    assert repr(infl) == "Influence(num_points=30, N=57, damping=0.1)"


def test_bad_arguments_are_refused_in_words() -> None:
    model, loss, inputs, targets = classifier()
    data = (inputs, targets)
    with pytest.raises(ValueError, match="made of gradients at the targets"):
        hcurv.influence(model, loss, inputs, 0.1)
    with pytest.raises(ValueError, match="damping"):
        hcurv.influence(model, loss, data, -1.0)
    with pytest.raises(ValueError, match="tolerance must be"):
        hcurv.influence(model, loss, data, 0.1, tolerance=2)
    infl = hcurv.influence(model, loss, data, 0.1, check_damping=False)
    with pytest.raises(ValueError, match="made of gradients at the targets"):
        infl.scores(inputs)
    with pytest.raises(ValueError, match="cannot read these inputs"):
        infl.scores((normal(3, 4), targets[:3]))
    with pytest.raises(TypeError, match="measure must be a function"):
        infl.scores(data, measure="margin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one number for each .* got \(1, 3\)"):
        infl.scores((inputs[:3], targets[:3]), measure=lambda outputs, _: outputs)
    with pytest.raises(ValueError, match="got float"):
        infl.scores((inputs[:3], targets[:3]), measure=lambda outputs, _: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="does not depend on them"):
        infl.scores(data, measure=lambda outputs, _: outputs.detach()[:, 0])
    for groups, message in (
        (targets[:5], r"each of 30 training points; got shape \(5,\)"),
        (targets - 1, "not be negative; got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            infl.scores(data, groups=groups)
    with pytest.raises(TypeError, match=r"whole numbers; got torch\.float32"):
        infl.scores(data, groups=targets.float())
    with pytest.raises(IndexError, match="30"):
        infl.leave_out([30], data)
    with pytest.raises(ValueError, match="at least one training point must stay"):
        infl.leave_out(range(30), data)
    with pytest.raises(ValueError, match="k must be"):
        infl.top(data, 31)
    with pytest.raises(ValueError, match="num_samples must be"):
        infl.self_scores(num_samples=0)
