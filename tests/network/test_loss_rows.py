"""The rows of R_i."""

from __future__ import annotations

import torch
from torch import nn

from cases import normal
from hcurv.losses import as_loss
from hcurv.network.loss_rows import LossRows, RowChoice


def sampled(num_samples: int, seed: int = 0, start: int = 0) -> torch.Tensor:
    choice = RowChoice(num_samples=num_samples, seed=seed)
    rows = LossRows(as_loss(nn.MSELoss()), normal(3, 1, 2), None, 1.0, choice, start)
    return torch.stack([rows.row(number) for number in range(rows.num_rows)])


def test_samples_differ_from_each_other_and_with_seed_and_batch() -> None:
    first, second = sampled(2)
    assert not torch.equal(first, second)
    assert torch.equal(sampled(2), sampled(2))
    assert not torch.equal(sampled(2), sampled(2, seed=1))
    assert not torch.equal(sampled(2), sampled(2, start=3))


def test_the_mean_square_of_samples_is_the_hessian() -> None:
    # The Hessian of (x − y)² is 2; the mean of 4000 squares has a standard error of 2 %.
    squares = sampled(4000).square().sum(0)
    assert float((squares.mean() / 2 - 1).abs()) < 0.05
