"""The networks on which figures are compared, trained by a fixed recipe.

They are the paper's networks (section 5, "Networks and datasets"). They start from PyTorch's
default initialisation with seed 0 and are trained by plain SGD, with batches of 128 taken in the
order of the training set. Two small networks on scikit-learn's digits, trained in the same way,
serve quick runs.
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

# Raise this number when `_fit` changes: weights that the old procedure trained are then no longer
# taken from the cache.
_PROCEDURE = 1


@dataclass(frozen=True)
class ReferenceNetwork:
    """The recipe of a network: its layers, its data and how it is trained.

    Attributes:
        name: the name that the paper gives it, if the network is in the paper.
        sizes: the layer sizes, starting with the input.
        kind: a classifier has ReLU between its layers and the cross-entropy loss; an autoencoder
            has softplus between its layers, a sigmoid at its output and the loss ½‖·‖².
        data: the images that it is trained on.
        batch_size: the number of images in each step of SGD.
        seed: the seed of the initial weights.
    """

    name: str
    sizes: tuple[int, ...]
    kind: Literal["classifier", "autoencoder"]
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"]
    batch_size: int = 128
    seed: int = 0

    @property
    def num_steps(self) -> int:
        """The number of steps of SGD."""
        return 300 if self.kind == "classifier" else 100

    @property
    def rate(self) -> float:
        """The learning rate.

        That of an autoencoder falls with the number of pixels, because its loss is a sum over them.
        """
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
    """Build an MLP with biases, ``activation`` between its layers and ``output`` after the last."""
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
    """Build the same MLP with PyTorch's default initialisation from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build_mlp(sizes, activation, output)


def train(
    recipe: ReferenceNetwork,
    data: str | Path | None = None,
    cache: bool = True,
    num_steps: int | None = None,
) -> TrainedNetwork:
    """Train a reference network, or read its weights from the cache.

    The result depends only on the recipe, up to rounding. Rounding depends on the number of
    threads, the processor and the version of torch.

    Args:
        recipe: the network.
        data: the folder in which the data sets are searched first (see `datasets`).
        cache: whether to use and fill the cache folder (see `cache_directory`).
        num_steps: the number of steps, if it is not the recipe's. With 0 the network keeps its
            initial weights.
    """
    num_steps = recipe.num_steps if num_steps is None else num_steps
    inputs, labels = _read_data(recipe, data)
    is_classifier = recipe.kind == "classifier"
    targets = labels if is_classifier else inputs
    if is_classifier:
        model = seeded_mlp(recipe.sizes, recipe.seed)
    else:
        model = seeded_mlp(recipe.sizes, recipe.seed, nn.Softplus, nn.Sigmoid())
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
    """Write down everything that the weights depend on, to the last bit."""
    used = num_steps * recipe.batch_size
    facts = {
        **asdict(recipe),
        "procedure": _PROCEDURE,
        "num_steps": num_steps,
        "rate": recipe.rate,
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
    size = recipe.batch_size
    num_batches = len(inputs) // size  # the last images, too few for a batch, are not used
    for step in range(num_steps):
        start = step % num_batches * size
        batch = slice(start, start + size)
        outputs = model(inputs[batch])
        if recipe.kind == "classifier":
            objective = criterion(outputs, targets[batch])
        else:
            objective = (outputs - targets[batch]).square().sum() / (2 * size)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    optimizer.zero_grad()
