"""The problems on which optimizers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from hcurv.experiments.datasets import digits, find_file, mnist
from hcurv.losses import HalfSquaredError, Loss

__all__ = ["PROBLEMS", "TrainingProblem", "make_problem"]


@dataclass(frozen=True)
class TrainingProblem:
    """A model to be trained, its loss, and all of its training data.

    Attributes:
        model: the model, with its initial weights.
        loss: the loss, a torch module or an `hcurv.losses.Loss`.
        inputs: the inputs of all n points.
        targets: their targets.
    """

    model: nn.Module
    loss: nn.Module | Loss
    inputs: Tensor
    targets: Tensor


def _chain(
    widths: Sequence[int], activation: Callable[[], nn.Module], last: nn.Module | None = None
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1], *([] if last is None else [last]))


def _small_autoencoder(data: str | None, num_points: int) -> TrainingProblem:
    images = mnist(data)[0][:num_points].reshape(-1, 1, 28, 28)
    inputs = nn.functional.avg_pool2d(images, 2).flatten(1)
    model = _chain((196, 64, 16, 64, 196), nn.Softplus, nn.Sigmoid())
    return TrainingProblem(model, HalfSquaredError(), inputs, inputs)


def _middle_autoencoder(data: str | None, num_points: int) -> TrainingProblem:
    inputs = mnist(data)[0][:num_points].clone()
    model = _chain((784, 250, 30, 250, 784), nn.Tanh, nn.Sigmoid())
    return TrainingProblem(model, HalfSquaredError(), inputs, inputs)


def _deep_autoencoder(data: str | None, num_points: int) -> TrainingProblem:
    inputs = mnist(data)[0][:num_points].clone()
    model = _chain((784, 1000, 500, 250, 30, 250, 500, 1000, 784), nn.Tanh)
    return TrainingProblem(model, nn.BCEWithLogitsLoss(), inputs, inputs)


def _digits_autoencoder(data: str | None, num_points: int) -> TrainingProblem:
    inputs = digits()[0][:num_points]
    model = _chain((64, 16, 64), nn.Softplus, nn.Sigmoid())
    return TrainingProblem(model, HalfSquaredError(), inputs, inputs)


def _concrete(data: str | None, num_points: int) -> TrainingProblem:
    """The strength of concrete from its ingredients; all columns are standardised."""
    table = torch.from_numpy(np.loadtxt(find_file(data, "uci/concrete.data")))[:num_points]
    table = (table - table.mean(0)) / table.std(0)
    model = _chain((8, 50, 50, 1), nn.Tanh).double()
    return TrainingProblem(model, nn.MSELoss(), table[:, :-1].clone(), table[:, -1:].clone())


class PoissonResidual(nn.Module):
    """The residual of Δu = f in the unit square, u = 0 on its boundary, at points (x, y, where).

    The exact solution is sin(πx) sin(πy). Inside (where = 0) the output is Δu − f, on the boundary
    (where = 1) it is 10 u. Value, gradient and Laplacian of u go through the layers together:

        z = Wh + b,  ∇z = W∇h,  Δz = WΔh,      t = tanh z,  ∇t = t'∇z,  Δt = t'Δz + t''|∇z|²

    Args:
        width: the units of each of the two hidden layers.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 1)]
        )

    def forward(self, points: Tensor) -> Tensor:
        """The residuals, (n, 1)."""
        x, y, where = points[:, :1], points[:, 1:2], points[:, 2:]
        value = points[:, :2]
        slopes = [torch.eye(2, dtype=value.dtype)[axis].expand_as(value) for axis in (0, 1)]
        bend = torch.zeros_like(value)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            value = layer(value)
            slopes = [nn.functional.linear(slope, layer.weight) for slope in slopes]
            bend = nn.functional.linear(bend, layer.weight)
            if number < 2:
                value = torch.tanh(value)
                first = 1 - value * value
                bend = first * bend - 2 * value * first * (slopes[0] ** 2 + slopes[1] ** 2)
                slopes = [first * slope for slope in slopes]
        source = -2 * math.pi**2 * torch.sin(math.pi * x) * torch.sin(math.pi * y)
        return (1 - where) * (bend - source) + where * 10 * value


def _physics(data: str | None, num_points: int) -> TrainingProblem:
    """Four fifths of the points lie inside of the square, one fifth on its boundary."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(num_points, 3, generator=generator, dtype=torch.float64)
    points[:, 2] = 0
    edge = num_points - num_points // 5
    points[edge:, 2] = 1
    sides = torch.arange(num_points - edge) % 4
    rows = torch.arange(edge, num_points)
    points[rows, sides % 2] = (sides // 2).double()
    targets = torch.zeros(num_points, 1, dtype=torch.float64)
    return TrainingProblem(PoissonResidual().double(), nn.MSELoss(), points, targets)


PROBLEMS: dict[str, Callable[[str | None, int], TrainingProblem]] = {
    "196-64-16-64-196 autoencoder": _small_autoencoder,
    "784-250-30-250-784 autoencoder": _middle_autoencoder,
    "784-1000-500-250-30 autoencoder": _deep_autoencoder,
    "concrete": _concrete,
    "physics-informed": _physics,
    "digits autoencoder": _digits_autoencoder,
    "physics-informed (quick)": _physics,
}


def make_problem(name: str, num_points: int, data: str | None, seed: int) -> TrainingProblem:
    """Make a problem with initial weights that depend on the seed alone.

    Args:
        name: one of `PROBLEMS`.
        num_points: the number of training points, the first ones of the data.
        data: the folder with the data sets.
        seed: the seed of torch's default initialisation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PROBLEMS[name](data, num_points)
