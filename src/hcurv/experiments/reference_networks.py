"""The networks on which figures are compared, trained by a fixed recipe.

They are the paper's (section 5, "Networks and datasets"): plain SGD with batches of 128 taken in
the order of the training set, PyTorch's default initialisation from seed 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hcurv.experiments import datasets
from hcurv.losses import HalfSquaredError, Loss

__all__ = ["REFERENCE_NETWORKS", "ReferenceNetwork", "TrainedNetwork", "build_mlp", "train"]

BATCH_SIZE = 128


@dataclass(frozen=True)
class ReferenceNetwork:
    """A recipe.

    Attributes:
        name: the paper's name.
        sizes: layer sizes, input first.
        kind: classifiers have ReLU and cross-entropy, autoencoders softplus and a sigmoid output.
        data: which images.
    """

    name: str
    sizes: tuple[int, ...]
    kind: Literal["classifier", "autoencoder"]
    data: Literal["mnist", "cifar10"]


_MNIST, _CIFAR = 784, 3072
REFERENCE_NETWORKS = {
    network.name: network
    for network in (
        ReferenceNetwork("classifier (a)", (_MNIST, 20, 10), "classifier", "mnist"),
        ReferenceNetwork("classifier (b)", (_CIFAR, 20, 10), "classifier", "cifar10"),
        ReferenceNetwork("classifier (c)", (_MNIST, 256, 64, 32, 10), "classifier", "mnist"),
        ReferenceNetwork("classifier (d)", (_CIFAR, 512, 128, 32, 10), "classifier", "cifar10"),
        ReferenceNetwork("AE (a)", (_MNIST, 10, _MNIST), "autoencoder", "mnist"),
        ReferenceNetwork("AE (b)", (_CIFAR, 10, _CIFAR), "autoencoder", "cifar10"),
        ReferenceNetwork("AE (c)", (_CIFAR, 20, _CIFAR), "autoencoder", "cifar10"),
    )
}


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained model with the loss and the training images that belong to it."""

    model: nn.Module
    loss: nn.Module | Loss
    inputs: Tensor
    targets: Tensor


def build_mlp(
    sizes: tuple[int, ...], activation: type[nn.Module], output: nn.Module | None = None
) -> nn.Sequential:
    """An MLP with biases: ``activation`` between layers, ``output`` after the last."""
    modules: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(sizes):
        modules += [nn.Linear(width_in, width_out), activation()]
    modules.pop()
    return nn.Sequential(*modules, *([] if output is None else [output]))


def train(recipe: ReferenceNetwork, data: str | Path | None = None) -> TrainedNetwork:
    """Train a reference network; the result depends on nothing but the recipe.

    Args:
        recipe: which.
        data: folder with the data sets (see `datasets.data_directory`).
    """
    inputs, labels = (datasets.mnist if recipe.data == "mnist" else datasets.cifar10)(data)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if recipe.kind == "classifier":
            model = build_mlp(recipe.sizes, nn.ReLU)
        else:
            model = build_mlp(recipe.sizes, nn.Softplus, nn.Sigmoid())
    if recipe.kind == "classifier":
        steps, rate, targets = 300, 0.1, labels
    else:
        steps, rate, targets = 100, 0.02 * _MNIST / recipe.sizes[-1], inputs
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        batch = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        outputs = model(inputs[batch])
        if recipe.kind == "classifier":
            objective = criterion(outputs, targets[batch])
        else:
            objective = (outputs - targets[batch]).square().sum() / (2 * BATCH_SIZE)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    loss = criterion if recipe.kind == "classifier" else HalfSquaredError()
    return TrainedNetwork(model, loss, inputs, targets)
