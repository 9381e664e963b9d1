"""The networks and data on which `trusted.py` measures solves, from small to large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.datasets import mnist
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, seeded_mlp, train
from hcurv.losses import HalfSquaredError, Loss

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """A trained network, its training points, and other points at which it is asked.

    Attributes:
        model: the network, in float32.
        loss: its loss, summed over the points.
        inputs: training points.
        targets: their targets.
        tests: other inputs.
        test_targets: their targets.
    """

    model: nn.Module
    loss: nn.Module | Loss
    inputs: Tensor
    targets: Tensor
    tests: Tensor
    test_targets: Tensor

    def matrix(self, dtype: torch.dtype) -> hcurv.GaussNewton:
        """H over the training points."""
        return hcurv.GaussNewton(self.model.to(dtype), self.loss, self.data(dtype))

    def data(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Training points and targets in a precision."""
        return self.inputs.to(dtype), _converted(self.targets, dtype)

    def output_rows(self, inputs: Tensor, dtype: torch.dtype) -> hcurv.GaussNewton:
        """A matrix JᵀJ whose root is the Jacobian J of the outputs at some inputs."""
        loss = HalfSquaredError(reduction="sum")
        return hcurv.GaussNewton(self.model.to(dtype), loss, inputs.to(dtype))


def _converted(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.to(dtype) if targets.is_floating_point() else targets


def _fit(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float) -> None:
    """Adam with batches of 128, from a fixed seed."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (128,), generator=generator)
        optimizer.zero_grad()
        loss(model(x[chosen]), y[chosen]).backward()
        optimizer.step()


def _regression(values: Tensor, sizes: tuple[int, ...], num_training: int, steps: int) -> Task:
    """A tanh network on standardised columns, the last of which is the target."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    values = values[order]
    values = (values - values.mean(0)) / values.std(0)
    x, y = values[:, :-1].contiguous(), values[:, -1:].contiguous()
    model = seeded_mlp(sizes, activation=nn.Tanh)
    _fit(model, nn.MSELoss(), x[:num_training], y[:num_training], steps, 2e-3)
    loss = HalfSquaredError(reduction="sum")
    return Task(model, loss, x[:num_training], y[:num_training], x[num_training:], y[num_training:])


def _diabetes(data: str | None) -> Task:
    from sklearn.datasets import load_diabetes

    found = load_diabetes()
    values = np.concatenate([found.data, found.target[:, None]], 1)
    return _regression(torch.from_numpy(values).float(), (10, 50, 50, 1), 331, 500)


def _concrete(data: str | None) -> Task:
    if data is None:
        raise FileNotFoundError("concrete needs --data, a folder with uci/concrete.data")
    text = (Path(data) / "uci" / "concrete.data").read_text().replace(",", " ")
    values = torch.tensor([[float(x) for x in line.split()] for line in text.splitlines() if line])
    return _regression(values, (8, 128, 128, 128, 1), 900, 1000)


def _classifier(sizes: tuple[int, ...], num_points: int, pool: int) -> Callable[[str | None], Task]:
    def make(data: str | None) -> Task:
        images, labels = mnist(data)
        x = nn.functional.avg_pool2d(images.view(-1, 1, 28, 28), pool).flatten(1)
        others, other_labels = mnist(data, train=False)
        tests = nn.functional.avg_pool2d(others.view(-1, 1, 28, 28), pool).flatten(1)
        model = seeded_mlp(sizes)
        x, y = x[:num_points], labels[:num_points]
        _fit(model, nn.CrossEntropyLoss(), x, y, 1000, 2e-3)
        loss = nn.CrossEntropyLoss(reduction="sum")
        return Task(model, loss, x, y, tests[:200], other_labels[:200])

    return make


def _reference(name: str, num_points: int) -> Callable[[str | None], Task]:
    def make(data: str | None) -> Task:
        found = train(REFERENCE_NETWORKS[name], data)
        is_classifier = REFERENCE_NETWORKS[name].kind == "classifier"
        loss = (
            nn.CrossEntropyLoss(reduction="sum")
            if is_classifier
            else HalfSquaredError(reduction="sum")
        )
        first, rest = slice(0, num_points), slice(-200, None)
        return Task(
            found.model,
            loss,
            found.inputs[first],
            found.targets[first],
            found.inputs[rest],
            found.targets[rest],
        )

    return make


TASKS: dict[str, Callable[[str | None], Task]] = {
    "diabetes 10-50-50-1": _diabetes,
    "concrete 8-128-128-128-1": _concrete,
    "MNIST 14x14 196-24-10, n = 5,000": _classifier((196, 24, 10), 5000, 2),
    "classifier (a), n = 1,000": _reference("classifier (a)", 1000),
    "classifier (a), n = 10,000": _reference("classifier (a)", 10_000),
    "AE (a), n = 1,000": _reference("AE (a)", 1000),
    "784-64-32-10, n = 60,000": _classifier((784, 64, 32, 10), 60_000, 1),
    "classifier (d), n = 10,000": _reference("classifier (d)", 10_000),
}
