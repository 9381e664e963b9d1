"""The networks on which figures are compared, trained by a fixed recipe.

They are the paper's (section 5, "Networks and datasets"): plain SGD with batches of 128 taken in
the order of the training set, PyTorch's default initialisation from seed 0. For quick runs there
are two more, trained alike on scikit-learn's digits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hcurv.experiments import datasets
from hcurv.experiments.cache import cache_directory
from hcurv.experiments.weights import load_weights, save_weights
from hcurv.losses import HalfSquaredError, Loss

__all__ = [
    "REFERENCE_NETWORKS",
    "ReferenceNetwork",
    "TrainedNetwork",
    "build_mlp",
    "seeded_mlp",
    "train",
]

BATCH_SIZE = 128
_SEED = 0
_PROCEDURE = 1  # of `_fit`: to be raised when it changes, so that stored weights are no longer used


@dataclass(frozen=True)
class ReferenceNetwork:
    """A recipe.

    Attributes:
        name: the paper's name, if it is one of the paper's.
        sizes: layer sizes, input first.
        kind: classifiers have ReLU and cross-entropy, autoencoders softplus and a sigmoid output.
        data: which images.
    """

    name: str
    sizes: tuple[int, ...]
    kind: Literal["classifier", "autoencoder"]
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"]

    @property
    def num_steps(self) -> int:
        """Steps of SGD."""
        return 300 if self.kind == "classifier" else 100

    @property
    def rate(self) -> float:
        """Learning rate; an autoencoder's loss is a sum over pixels."""
        return 0.1 if self.kind == "classifier" else 0.02 * _MNIST / self.sizes[-1]


_DIGITS, _MNIST, _CIFAR = 64, 784, 3072
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
        ReferenceNetwork("classifier (digits)", (_DIGITS, 20, 10), "classifier", "digits"),
        ReferenceNetwork("AE (digits)", (_DIGITS, 10, _DIGITS), "autoencoder", "digits"),
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


def seeded_mlp(
    sizes: tuple[int, ...],
    seed: int = 0,
    activation: type[nn.Module] = nn.ReLU,
    output: nn.Module | None = None,
) -> nn.Sequential:
    """The same with PyTorch's default initialisation from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build_mlp(sizes, activation, output)


def train(
    recipe: ReferenceNetwork,
    data: str | Path | None = None,
    cache: bool = True,
    num_steps: int | None = None,
) -> TrainedNetwork:
    """Train a reference network, or take its weights from the cache.

    The result depends on nothing but the recipe, up to rounding, which also depends on the number
    of threads, the processor and the version of torch.

    Args:
        recipe: which.
        data: folder with the data sets, to be searched first (see `datasets`).
        cache: use and fill the cache folder (see `cache_directory`).
        num_steps: instead of the recipe's; 0 leaves the initial weights.
    """
    num_steps = recipe.num_steps if num_steps is None else num_steps
    inputs, labels = _read_data(recipe, data)
    is_classifier = recipe.kind == "classifier"
    targets = labels if is_classifier else inputs
    if is_classifier:
        model = seeded_mlp(recipe.sizes, _SEED)
    else:
        model = seeded_mlp(recipe.sizes, _SEED, nn.Softplus, nn.Sigmoid())
    if cache:
        description = _describe(recipe, num_steps, inputs, labels)
        name = hashlib.sha256(description.encode()).hexdigest()
        path = cache_directory() / "networks" / f"{name}.safetensors"
        if not load_weights(model, path):
            _fit(model, recipe, num_steps, inputs, targets)
            save_weights(model, path, description)
    else:
        _fit(model, recipe, num_steps, inputs, targets)
    loss = nn.CrossEntropyLoss() if is_classifier else HalfSquaredError()
    return TrainedNetwork(model, loss, inputs, targets)


def _read_data(recipe: ReferenceNetwork, directory: str | Path | None) -> tuple[Tensor, Tensor]:
    if recipe.data == "digits":
        return datasets.digits()
    readers = {
        "mnist": datasets.mnist,
        "fashion-mnist": datasets.fashion_mnist,
        "cifar10": datasets.cifar10,
    }
    return readers[recipe.data](directory)


def _describe(recipe: ReferenceNetwork, num_steps: int, inputs: Tensor, labels: Tensor) -> str:
    """All that the weights depend on, to the bit."""
    used = num_steps * BATCH_SIZE
    facts = {
        **asdict(recipe),
        "procedure": _PROCEDURE,
        "num_steps": num_steps,
        "rate": recipe.rate,
        "batch_size": BATCH_SIZE,
        "seed": _SEED,
        "inputs": hashlib.sha256(inputs[:used].numpy().data).hexdigest(),
        "labels": hashlib.sha256(labels[:used].numpy().data).hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    return json.dumps(facts, sort_keys=True)


def _fit(
    model: nn.Module, recipe: ReferenceNetwork, num_steps: int, inputs: Tensor, targets: Tensor
) -> None:
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate)
    num_batches = len(inputs) // BATCH_SIZE  # only whole ones, again and again
    for step in range(num_steps):
        start = step % num_batches * BATCH_SIZE
        batch = slice(start, start + BATCH_SIZE)
        outputs = model(inputs[batch])
        if recipe.kind == "classifier":
            objective = criterion(outputs, targets[batch])
        else:
            objective = (outputs - targets[batch]).square().sum() / (2 * BATCH_SIZE)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    optimizer.zero_grad()
