"""Sampled targets and the empirical Fisher matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hcurv
from cases import CASES, assert_close
from models import LAYERS, ModelCase
from odd_models import ODD

EVERY = {**LAYERS, **ODD}
SAMPLED = (
    "conv 2d, groups",
    "transformer, norm last",  # sequences with ignored labels
    "image to image",  # squared errors
    "ignored labels of sequences",  # with class weights
    "binary",
    "lstm",
)
some_models = pytest.mark.parametrize("case", [EVERY[name] for name in SAMPLED], ids=SAMPLED)


def check_unbiased(draws: torch.Tensor, expected: torch.Tensor) -> None:
    """The mean of random matrices is within the standard error of what is expected."""
    error = (draws.mean(0) - expected).norm()
    assert error <= 4 * (draws.var(0).sum() / len(draws)).sqrt()


@some_models
def test_sampled_targets_are_unbiased(case: ModelCase) -> None:
    model = case.build()
    targets = case.targets_for(model)
    expected = case.dense(model, targets)
    draws = torch.stack(
        [case.operator(model, targets, num_samples=8, seed=seed).to_dense() for seed in range(8)]
    )
    check_unbiased(draws, expected)
    assert (draws.mean(0) - expected).norm() <= 0.5 * expected.norm()


def test_chains_are_sampled_without_bias() -> None:
    case = CASES["classifier"]
    model, expected = case.build(), case.dense
    draws = torch.stack(
        [
            hcurv.GaussNewton(model, case.loss, case.inputs, num_samples=2, seed=seed).to_dense()
            for seed in range(40)
        ]
    )
    check_unbiased(draws, expected)


@some_models
def test_samples_follow_from_the_seed(case: ModelCase) -> None:
    model = case.build()
    targets = case.targets_for(model)
    state = torch.get_rng_state()
    operator = case.operator(model, targets, num_samples=3, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert operator.num_root_rows == 3 * operator.num_points
    again = case.operator(model, targets, num_samples=3, seed=7)
    other = case.operator(model, targets, num_samples=3, seed=8)
    assert torch.equal(operator.to_dense(), again.to_dense())
    assert not torch.allclose(operator.to_dense(), other.to_dense())
    assert_close(operator.gradient(), case.gradient(model, targets), 1e4)
    assert operator.memory_plan().stored_bytes == operator.nbytes


def test_points_and_batches_have_samples_of_their_own() -> None:
    # Equal points would have equal rows, if they shared the samples.
    model = EVERY["conv 2d, groups"].build()
    images = EVERY["conv 2d, groups"].inputs[:1].repeat(8, 1, 1, 1)
    for data in (images, list(images.split(2))):
        operator = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), data, num_samples=6)
        rows = operator.root_columns(slice(None)).view(8, -1)
        assert len(rows.unique(dim=0)) == 8


@some_models
def test_empirical_fisher_is_made_of_gradients(case: ModelCase) -> None:
    model = case.build()
    targets = case.targets_for(model)
    operator = case.operator(model, targets, fisher="empirical")
    options = {
        name: getattr(case.loss, name)
        for name in ("weight", "ignore_index")
        if hasattr(case.loss, name)
    }
    sums = type(case.loss)(reduction="sum", **options)
    outputs = case.outputs(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for point in range(len(targets)):
        value = sums(outputs[point : point + 1], targets[point : point + 1])
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
        ]
        gradients.append(torch.cat([g.reshape(-1) for g in filled]))
    rows = torch.stack(gradients)
    divisor = sums(outputs, targets) / case.loss(outputs, targets)
    assert operator.num_root_rows == len(targets)
    assert_close(operator.to_dense(), rows.T @ rows / divisor.detach(), 1e4)
    assert_close(operator.gradient(), rows.sum(0) / divisor.detach(), 1e4)


def test_wrong_choices_are_refused() -> None:
    case = CASES["classifier"]
    data = (case.inputs, case.targets)
    with pytest.raises(ValueError, match='fisher must be "exact" or "empirical"; got'):
        hcurv.GaussNewton(case.build(), case.loss, data, fisher="mc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass one of them"):
        hcurv.GaussNewton(case.build(), case.loss, data, fisher="empirical", num_samples=2)
    with pytest.raises(ValueError, match="made of gradients at the targets"):
        hcurv.GaussNewton(case.build(), case.loss, case.inputs, fisher="empirical")
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="num_samples must be"):
            hcurv.GaussNewton(case.build(), case.loss, data, num_samples=wrong)
    with pytest.raises(ValueError, match="num_samples must be an integer"):
        hcurv.GaussNewton(case.build(), case.loss, data, num_samples=1.5)  # type: ignore[arg-type]
