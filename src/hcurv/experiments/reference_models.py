"""Small networks of today's kinds, on which figures of general models are compared.

A convolutional network, a residual one, a vision transformer and a language model, in plain
PyTorch. They start from PyTorch's default initialisation with seed 0 and are trained by Adam on the
cross-entropy, with batches of 128 taken in the order of the training set. (`reference_networks` has
the paper's networks, which are chains of Linear layers.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hcurv.experiments import datasets
from hcurv.experiments.cache import cache_directory
from hcurv.experiments.weights import load_weights, save_weights

__all__ = [
    "REFERENCE_MODELS",
    "LanguageModel",
    "LeNet",
    "ReferenceModel",
    "ResNet",
    "TrainedModel",
    "VisionTransformer",
    "build",
    "classes_second",
    "fit",
    "text",
    "train",
]

# Raise this number when `fit` changes: weights that the old procedure trained are then no longer
# taken from the cache.
_PROCEDURE = 1
_NUM_STEPS, _BATCH_SIZE, _RATE = 300, 128, 2e-3

# What the language model knows: the printable characters of ASCII. All others are read as spaces.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
_CONTEXT = 64


class LeNet(nn.Module):
    """Two convolutions with average pooling, then 400-120-84-10; (b, 1, 28, 28) to (b, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of ten classes."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, which is a 1 × 1 convolution if shapes differ."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False),
                nn.BatchNorm2d(num_outputs),
            )

    def forward(self, images: Tensor) -> Tensor:
        """(b, inputs, h, w) to (b, outputs, h / stride, w / stride)."""
        inner = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


class ResNet(nn.Module):
    """ResNet-8: a stem, blocks of 16, 32 and 64 channels; (b, 3, 32, 32) to (b, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of ten classes."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Self-attention of several heads, written out: fused kernels have no forward derivatives.

    Args:
        width: the number of features of a token.
        num_heads: the number of heads.
        causal: whether a token sees only itself and those before it.
    """

    def __init__(self, width: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, T, width) to the same shape."""
        heads = self.project_in(tokens).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (b, heads, T, width / heads)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = scores.softmax(-1) @ value
        projected: Tensor = self.project_out(mixed.transpose(1, 2).flatten(2))
        return projected


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, T, width) to the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        changed: Tensor = tokens + self.perceptron(self.norm2(tokens))
        return changed


class VisionTransformer(nn.Module):
    """ViT-tiny: patches of 4 × 4 pixels, 4 blocks of width 64; (b, 3, 32, 32) to (b, 10)."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, num_heads, causal=False) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of ten classes."""
        tokens = self.patches(images).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class LanguageModel(nn.Module):
    """GPT-tiny: 2 blocks of width 64, the head tied to the embedding; (b, T) to (b, T, V)."""

    def __init__(
        self,
        num_characters: int = len(CHARACTERS),
        context: int = _CONTEXT,
        width: int = 64,
        num_heads: int = 4,
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # It is the head, too.
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, num_heads, causal=True) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, characters: Tensor) -> Tensor:
        """Compute the logits of the next character at every position."""
        tokens = self.embedding(characters) + self.positions[: characters.shape[1]]
        return functional.linear(self.norm(self.blocks(tokens)), self.embedding.weight)


@dataclass(frozen=True)
class ReferenceModel:
    """The recipe of a model: its class and its data.

    Attributes:
        name: its name.
        make: makes the model with random weights.
        data: what it is trained on.
    """

    name: str
    make: Callable[[], nn.Module]
    data: Literal["mnist", "cifar10", "text"]

    @property
    def forward_fn(self) -> Callable[[Callable[..., Tensor], Tensor], Tensor] | None:
        """How `GaussNewton` and the loss have to call it; None if they just call it."""
        return classes_second if self.data == "text" else None


def classes_second(model: Callable[..., Tensor], characters: Tensor) -> Tensor:
    """The logits in the order that torch's losses expect, (b, V, T)."""
    return model(characters).mT


REFERENCE_MODELS = {
    recipe.name: recipe
    for recipe in (
        ReferenceModel("LeNet", LeNet, "mnist"),
        ReferenceModel("ResNet-8", ResNet, "cifar10"),
        ReferenceModel("ViT-tiny", VisionTransformer, "cifar10"),
        ReferenceModel("GPT-tiny", LanguageModel, "text"),
    )
}


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, in eval mode, with its training data. The loss is the cross-entropy."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    forward_fn: Callable[[Callable[..., Tensor], Tensor], Tensor] | None


def build(recipe: ReferenceModel, seed: int = 0) -> nn.Module:
    """Make a model with random weights from a seed, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return recipe.make().eval()


def train(
    recipe: ReferenceModel, data: str | Path | None = None, cache: bool = True
) -> TrainedModel:
    """Train a reference model, or read its weights from the cache.

    Args:
        recipe: the model.
        data: the folder in which the data sets are searched first (see `datasets`).
        cache: whether to use and fill the cache folder (see `cache_directory`).
    """
    inputs, targets = _read_data(recipe, data)
    model = build(recipe)
    path = None
    if cache:
        description = _describe(recipe, model, inputs, targets)
        name = hashlib.sha256(description.encode()).hexdigest()
        path = cache_directory() / "networks" / f"{name}.safetensors"
    if path is None or not load_weights(model, path):
        fit(model, inputs, targets, recipe.forward_fn)
        if path is not None:
            save_weights(model, path, description)
    return TrainedModel(model, inputs, targets, recipe.forward_fn)


def fit(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    forward_fn: Callable[[Callable[..., Tensor], Tensor], Tensor] | None = None,
    num_steps: int | None = None,
) -> None:
    """Train a model by Adam on the cross-entropy, and leave it in eval mode."""
    num_steps = _NUM_STEPS if num_steps is None else num_steps
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    # The last points, too few for a batch, are not used, unless there are no others.
    num_batches = max(1, len(inputs) // _BATCH_SIZE)
    model.train()
    for step in range(num_steps):
        start = step % num_batches * _BATCH_SIZE
        batch = slice(start, start + _BATCH_SIZE)
        outputs = model(inputs[batch]) if forward_fn is None else forward_fn(model, inputs[batch])
        optimizer.zero_grad()
        criterion(outputs, targets[batch]).backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()


def text(source: str | None = None) -> tuple[Tensor, Tensor]:
    """Cut a text into pieces, and shift each by one: inputs and targets, both (pieces, 64).

    Args:
        source: the text. By default it is the source of Python's module argparse, which every
            installation has.
    """
    if source is None:
        source = Path(argparse.__file__).read_text(encoding="utf-8")
    number_of = {character: number for number, character in enumerate(CHARACTERS)}
    unknown = number_of[" "]
    numbers = torch.tensor([number_of.get(character, unknown) for character in source])
    num_pieces = (len(numbers) - 1) // _CONTEXT
    size = num_pieces * _CONTEXT
    return numbers[:size].view(num_pieces, -1), numbers[1 : size + 1].view(num_pieces, -1)


def _read_data(recipe: ReferenceModel, directory: str | Path | None) -> tuple[Tensor, Tensor]:
    if recipe.data == "text":
        return text()
    if recipe.data == "mnist":
        images, labels = datasets.mnist(directory)
        return images.view(-1, 1, 28, 28), labels
    images, labels = datasets.cifar10(directory)
    return images.view(-1, 3, 32, 32), labels


def _describe(recipe: ReferenceModel, model: nn.Module, inputs: Tensor, targets: Tensor) -> str:
    """Write down everything that the weights depend on, to the last bit."""
    used = _NUM_STEPS * _BATCH_SIZE
    facts = {
        "name": recipe.name,
        "model": str(model),
        "data": recipe.data,
        "procedure": _PROCEDURE,
        "num_steps": _NUM_STEPS,
        "batch_size": _BATCH_SIZE,
        "rate": _RATE,
        "inputs": hashlib.sha256(inputs[:used].numpy().data).hexdigest(),
        "targets": hashlib.sha256(targets[:used].contiguous().numpy().data).hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    return json.dumps(facts, sort_keys=True)
