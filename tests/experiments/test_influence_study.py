"""Training side by side, scores of scores, and LiSSA, each against a plain version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import hcurv
from cases import normal
from hcurv.experiments.influence_study import (
    RECIPES,
    Split,
    datamodelling_scores,
    flip_labels,
    lissa,
    random_halves,
    read_split,
    train,
)

RECIPE = replace(RECIPES["digits 64-20-10"], num_epochs=2)


def test_networks_that_are_trained_side_by_side_are_those_of_plain_training() -> None:
    split = read_split(RECIPE, None)
    halves = random_halves(300, 3)
    assert halves.sum(1).tolist() == [150] * 3
    points = torch.stack([mask.nonzero().squeeze(1) for mask in halves])
    models = train(RECIPE, split, points, [5, 6, 6])
    for number, seed in enumerate((5, 6, 6)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=RECIPE.weight_decay
        )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            for batch in torch.randperm(150, generator=generator).split(64):
                own = points[number][batch]
                optimizer.zero_grad()
                split.loss(model(split.inputs[own]), split.targets[own]).backward()
                optimizer.step()
        for ours, plain in zip(models[number].parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, plain, atol=1e-5)


def test_losses_of_points_add_up_to_the_loss() -> None:
    split = read_split(RECIPE, None)
    outputs = normal(20, 10).float()
    losses = split.losses(outputs, split.answers)
    assert float(losses.mean()) == pytest.approx(float(split.loss(outputs, split.answers)))
    numbers = Split(outputs, normal(20, 1), outputs, normal(20, 1))
    values = normal(20, 1, seed=3)
    found = numbers.losses(values, numbers.answers)
    assert float(found.mean()) == pytest.approx(float(numbers.loss(values, numbers.answers)))


def test_datamodelling_scores_are_rank_correlations_over_the_halves() -> None:
    scores, halves = normal(3, 30), random_halves(30, 8)
    measured = normal(8, 3, seed=4)
    found = datamodelling_scores(scores, halves, measured)
    for query in range(3):
        left_out = [float(scores[query, ~half].sum()) for half in halves]
        expected = spearmanr(left_out, measured[:, query].numpy()).statistic
        assert float(found[query]) == pytest.approx(expected)
    perfect = scores @ (~halves).double().T
    assert torch.allclose(datamodelling_scores(scores, halves, perfect.T), torch.ones(3).double())


def test_flipped_labels_are_other_classes() -> None:
    labels = torch.arange(200) % 10
    flipped = flip_labels(labels, 0.1, 10)
    assert int((flipped != labels).sum()) == 20
    assert int(flipped.min()) >= 0
    assert int(flipped.max()) < 10


def test_lissa_converges_to_the_solution() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = (normal(16, 3), normal(16, 2, seed=2))
    matrix = hcurv.GaussNewton(model, nn.MSELoss(), data)
    columns = normal(matrix.shape[0], 2, seed=6)
    found = lissa(model, nn.MSELoss(), data, 0.5, columns, num_steps=300, batch_size=16)
    expected = matrix.factorize(0.5).solve(columns)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
