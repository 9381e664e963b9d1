"""What influence scores are worth: networks, retraining on subsets, rivals, and scores of scores.

The linear datamodelling score (Park et al., TRAK, 2023): networks are trained on random halves of
the training points. For a query, the sum of the scores of the points that were left out predicts
its loss there; the score is the rank correlation over the halves between prediction and
measurement, averaged over the queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hcurv.applications.damping_choice import rank_correlations
from hcurv.experiments.datasets import digits, mnist
from hcurv.experiments.uci import uci
from hcurv.network.gauss_newton import GaussNewton

__all__ = [
    "RECIPES",
    "Recipe",
    "Split",
    "datamodelling_scores",
    "flip_labels",
    "lissa",
    "random_halves",
    "read_split",
    "retrained",
    "train",
]

_MOMENTUM = 0.9
# Networks are trained this many at a time.
_SIDE_BY_SIDE = 25


@dataclass(frozen=True)
class Recipe:
    """A network, and how it is trained: stochastic gradients with momentum 0.9.

    Attributes:
        data: "mnist", "digits", "concrete" or a classification of `hcurv.experiments.uci`.
        widths: the numbers of units of all layers.
        learning_rate: it is constant.
        weight_decay: λ; λ/2‖θ‖² is added to the mean loss.
        batch_size: number of points of a step.
        num_epochs: passes over the training points.
        num_train: the number of training points, the first ones of the data.
        num_test: the number of test points.
    """

    data: str
    widths: tuple[int, ...]
    learning_rate: float
    weight_decay: float
    batch_size: int
    num_epochs: int
    num_train: int
    num_test: int

    @property
    def damping(self) -> float:
        """The weight decay, plus what stopping early amounts to: 1/(learning rate · steps).

        Gradient descent for a time t = learning rate · steps has fitted a direction with the
        eigenvalue μ to the share 1 - exp(-μt), a minimum with damping λ to the share μ/(μ + λ);
        both grow alike for λ = 1/t. Momentum 0.9 makes the learning rate ten times as large.
        """
        num_steps = self.num_epochs * math.ceil(self.num_train / self.batch_size)
        return self.weight_decay + (1 - _MOMENTUM) / (self.learning_rate * num_steps)


RECIPES = {
    # The network of the published figures, trained as there, but without dropout.
    "MNIST 784-128-64-10": Recipe("mnist", (784, 128, 64, 10), 0.01, 0.0, 64, 50, 5000, 100),
    # The same, trained to a minimum that weight decay defines.
    "MNIST 784-128-64-10, weight decay": Recipe(
        "mnist", (784, 128, 64, 10), 0.05, 3e-3, 64, 30, 5000, 100
    ),
    "concrete 8-128-128-128-1": Recipe(
        "concrete", (8, 128, 128, 128, 1), 0.03, 1e-3, 32, 60, 926, 103
    ),
    "vehicle 18-64-32-4": Recipe("vehicle", (18, 64, 32, 4), 0.02, 0.0, 32, 40, 746, 100),
    "waveform 21-64-32-3": Recipe("waveform", (21, 64, 32, 3), 0.02, 0.0, 32, 20, 900, 100),
    "satellite 36-64-32-6": Recipe("satellite", (36, 64, 32, 6), 0.02, 0.0, 32, 20, 1500, 100),
    "digits 64-20-10": Recipe("digits", (64, 20, 10), 0.05, 1e-3, 64, 10, 300, 20),
}


@dataclass(frozen=True)
class Split:
    """Training points and queries.

    Attributes:
        inputs: of the training points.
        targets: of the training points.
        queries: inputs of the test points.
        answers: targets of the test points.
    """

    inputs: Tensor
    targets: Tensor
    queries: Tensor
    answers: Tensor

    @property
    def loss(self) -> nn.Module:
        """The mean cross-entropy for labels, and the mean squared error for numbers."""
        return nn.MSELoss() if self.targets.is_floating_point() else nn.CrossEntropyLoss()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each point."""
        if targets.is_floating_point():
            return (outputs - targets).square().sum(1)
        return cross_entropy(outputs, targets, reduction="none")


def read_split(recipe: Recipe, data: str | None) -> Split:
    """Read the data of a recipe; features of tables are standardised."""
    if recipe.data == "mnist":
        inputs, targets = mnist(data)
        queries, answers = mnist(data, train=False)
    else:
        inputs, targets = _table(recipe.data, data)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        inputs, targets = inputs[order], targets[order]
        if recipe.data != "digits":
            inputs = _standardised(inputs, recipe.num_train)
        if targets.is_floating_point():
            targets = _standardised(targets, recipe.num_train)
        queries, answers = inputs[recipe.num_train :], targets[recipe.num_train :]
    count, asked = recipe.num_train, recipe.num_test
    return Split(
        inputs[:count].clone(),
        targets[:count].clone(),
        queries[:asked].clone(),
        answers[:asked].clone(),
    )


def _table(name: str, data: str | None) -> tuple[Tensor, Tensor]:
    """Features, and labels or values, in single precision."""
    if name == "digits":
        return digits()
    inputs, targets = uci(name, data)
    return inputs.float(), targets.float() if targets.is_floating_point() else targets


def _standardised(values: Tensor, count: int) -> Tensor:
    """Values with mean 0 and variance 1 over the first points."""
    return (values - values[:count].mean(0)) / values[:count].std(0)


def train(
    recipe: Recipe, split: Split, points: Tensor, seeds: Sequence[int]
) -> list[nn.Sequential]:
    """Train several networks of one recipe side by side, each on points of its own.

    Args:
        recipe: the network and how it is trained.
        split: the data.
        points: the positions of the training points of each network, (networks, count).
        seeds: for each network, the seed of its initial weights and of the order of its points.
    """
    models = [_initial(recipe.widths, seed) for seed in seeds]
    depths = list(zip(*map(_linear_layers, models), strict=True))  # the same layer of all networks
    weights = [_stacked([layer.weight.T for layer in layers]) for layers in depths]
    biases = [_stacked([layer.bias[None] for layer in layers]) for layers in depths]
    optimizer = torch.optim.SGD(
        [*weights, *biases],
        lr=recipe.learning_rate,
        momentum=_MOMENTUM,
        weight_decay=recipe.weight_decay,
    )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(recipe.num_epochs):
        orders = [torch.randperm(points.shape[1], generator=own) for own in generators]
        shuffled = points.gather(1, torch.stack(orders))
        for batch in shuffled.split(recipe.batch_size, dim=1):
            optimizer.zero_grad()
            current = split.inputs[batch]
            for depth, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                current = torch.baddbmm(bias, current.relu() if depth else current, weight)
            # Every network sees the mean over its own points.
            loss = split.loss(current.flatten(0, 1), split.targets[batch].flatten(0, 1))
            (len(models) * loss).backward()
            optimizer.step()
    with torch.no_grad():
        for layers, weight, bias in zip(depths, weights, biases, strict=True):
            for number, layer in enumerate(layers):
                layer.weight.copy_(weight[number].T)
                layer.bias.copy_(bias[number, 0])
    return models


def _initial(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """A network with PyTorch's initial weights."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _linear_layers(model: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).contiguous().requires_grad_()


def retrained(recipe: Recipe, split: Split, halves: Tensor, base: int) -> Tensor:
    """The losses of all queries with networks that were trained on halves, (count, queries)."""
    rows = []
    for first in range(0, len(halves), _SIDE_BY_SIDE):
        some = halves[first : first + _SIDE_BY_SIDE]
        points = torch.stack([mask.nonzero().squeeze(1) for mask in some])
        seeds = [base + first + i if base else 0 for i in range(len(some))]
        for model in train(recipe, split, points, seeds):
            with torch.no_grad():
                rows.append(split.losses(model(split.queries), split.answers).double())
    return torch.stack(rows)


def random_halves(num_points: int, count: int, seed: int = 0) -> Tensor:
    """Which points belong to each of some random halves, a mask (count, n)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(count, num_points, dtype=torch.bool)
    for row in chosen:
        row[torch.randperm(num_points, generator=generator)[: num_points // 2]] = True
    return chosen


def datamodelling_scores(scores: Tensor, halves: Tensor, measured: Tensor) -> Tensor:
    """Rank correlations over the halves between predictions and measurements, one for each query.

    Args:
        scores: the predicted increase without each point, (queries, n).
        halves: which points a network was trained on, a mask (count, n).
        measured: the measurements with each of these networks, (count, queries).
    """
    predicted = scores.double() @ (~halves).double().T
    return rank_correlations(predicted, measured.T)


def flip_labels(labels: Tensor, share: float, num_classes: int, seed: int = 0) -> Tensor:
    """Labels of which a share is replaced by another class, at random."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    result = labels.clone()
    shift = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    result[chosen] = (labels[chosen] + shift) % num_classes
    return result


def lissa(
    model: nn.Module,
    loss: nn.Module,
    data: tuple[Tensor, Tensor],
    damping: float,
    columns: Tensor,
    **options: Any,
) -> Tensor:
    """Solve (H + λI) x = b by the recursion of Agarwal et al. (2017), over random batches.

    x ← b/s + x − (H_batch x + λ x)/s, where s is above the largest eigenvalue of every batch.

    Args:
        model: the network.
        loss: the mean loss.
        data: the training points.
        damping: λ.
        columns: b, (N, k).
        options: ``num_steps``, ``batch_size`` and ``seed``.
    """
    size, seed = options.get("batch_size", 64), options.get("seed", 0)
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    batches = [
        GaussNewton(model, loss, (data[0][some], data[1][some])) for some in order.split(size)
    ]
    largest = max(_largest_eigenvalue(matrix) for matrix in batches)
    scale = 1.1 * largest + damping
    solution = columns / scale
    for step in range(options.get("num_steps", 1000)):
        matrix = batches[step % len(batches)]
        product = matrix @ solution + damping * solution
        solution = columns / scale + solution - product / scale
    return solution


def _largest_eigenvalue(matrix: GaussNewton, num_steps: int = 15) -> float:
    """The norm of H v after a few steps of the power iteration."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(matrix.shape[0], generator=generator, dtype=matrix.dtype)
    norm = 1.0
    for _ in range(num_steps):
        vector = matrix @ (vector / vector.norm())
        norm = float(vector.norm())
    return norm
