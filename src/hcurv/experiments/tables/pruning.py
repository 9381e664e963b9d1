"""Pruning: test accuracy against sparsity, beside published methods."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hcurv.applications.pruning import Pruning, prune
from hcurv.experiments import datasets, reference_models
from hcurv.experiments.reference_models import REFERENCE_MODELS
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
    reference_problem,
)
from hcurv.experiments.weights import load_published
from hcurv.losses import HalfSquaredError, Loss
from hcurv.report.looks import BLACK, BLUE, GRAY, GREEN, PURPLE, RED, SKY, WINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

_PUBLISHED_NETWORK = "784-40-20-10"
_FILE = "pruning/mnist-mlpnet-93.97.safetensors"
_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
# Test accuracies of other methods on the published network, in per cent, at these sparsities.
_PUBLISHED: dict[str, dict[float, float]] = {
    "magnitude, published": dict(
        zip(_SPARSITIES, (93.93, 93.78, 93.62, 92.89, 90.30, 83.64, 32.25), strict=True)
    ),
    "WoodFisher, published": dict(
        zip(_SPARSITIES, (94.02, 93.82, 93.77, 93.57, 91.69, 85.54, 38.26), strict=True)
    ),
    "CBS, published": dict(
        zip(_SPARSITIES, (93.96, 93.96, 93.98, 93.90, 93.14, 88.92, 55.45), strict=True)
    ),
    "CHITA++, several stages, published": {0.98: 90.73},
    "diagonal Fisher, one step, 100 points, published": {0.95: 19.9},
    "K-FAC, one step, 100 points, published": {0.95: 81.3},
    "WoodFisher, one step, 100 points, published": {0.95: 84.2},
}
# Sparsities of the steps of a schedule. Those in which few weights are left are the closest.
_STEPS = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.965, 0.975, 0.98]


# The ways to prune the published network. Dampings were chosen on the last 10,000 images of the
# training set, with runs on the others; where there is none, it is the default.
_MAGNITUDE: Settings = {
    "targets": "labels",
    "one_step": True,
    "options": {"saliency": "magnitude", "corrections": 0},
}
_METHODS: dict[str, Settings] = {
    "magnitude": {**_MAGNITUDE, "num_train": 1000},
    "one step, 1,000 points, outputs kept": {
        "targets": "none",
        "one_step": True,
        "num_train": 1000,
        "options": {"saliency": "magnitude", "damping": 1e-3},
    },
    "one step, 100 points, outputs kept": {
        "targets": "none",
        "one_step": True,
        "num_train": 100,
        "options": {"saliency": "magnitude", "damping": 3e-4},
    },
    "one step, 100 points, 8 corrections": {
        "targets": "own outputs",
        "one_step": True,
        "num_train": 100,
        "options": {"saliency": "magnitude", "damping": 3.0, "stages": 8, "corrections": 8},
    },
    "steps, outputs kept": {
        "targets": "labels",
        "num_train": 60_000,
        "options": {"schedule": _STEPS, "num_points": 3000, "damping": 1e-3},
    },
    "steps, 4 corrections, imitation": {
        "targets": "own probabilities",
        "num_train": 60_000,
        "options": {"schedule": _STEPS, "num_points": 3000, "corrections": 4},
    },
    "steps, 4 corrections, labels": {
        "targets": "labels",
        "num_train": 60_000,
        "options": {"schedule": _STEPS, "num_points": 3000, "damping": 1e-3, "corrections": 4},
    },
}
_LENET_STEPS = [0.5, 0.7, 0.8, 0.9, 0.95]
_MODELS: dict[str, dict[str, Settings]] = {
    "LeNet": {
        "magnitude": {**_MAGNITUDE, "num_train": 1000, "sparsities": [0.5, 0.8, 0.9, 0.95]},
        "steps, outputs kept": {
            "targets": "labels",
            "num_train": 5000,
            "sparsities": [0.5, 0.8, 0.9, 0.95],
            "options": {"schedule": _LENET_STEPS, "num_points": 500},
        },
        "steps, 3 corrections, labels": {
            "targets": "labels",
            "num_train": 20_000,
            "sparsities": [0.5, 0.8, 0.9, 0.95],
            "options": {"schedule": _LENET_STEPS, "num_points": 500, "corrections": 3},
        },
        "half of the units and channels, magnitude": {
            "targets": "labels",
            "one_step": True,
            "num_train": 1000,
            "sparsities": [0.5],
            "options": {
                "structure": "units+channels",
                "saliency": "magnitude",
                "corrections": 0,
            },
        },
        "half of the units and channels, 3 corrections, labels": {
            "targets": "labels",
            "num_train": 20_000,
            "sparsities": [0.5],
            "options": {
                "structure": "units+channels",
                "schedule": 3,
                "num_points": 500,
                "corrections": 3,
            },
        },
    },
    "ResNet-8": {
        "magnitude": {**_MAGNITUDE, "num_train": 100, "sparsities": [0.5, 0.8, 0.9]},
        "steps, outputs kept": {
            "targets": "labels",
            "num_train": 1000,
            "sparsities": [0.5, 0.8, 0.9],
            "options": {"schedule": [0.5, 0.8, 0.9], "num_points": 200},
        },
    },
}


@dataclass(frozen=True)
class _Problem:
    """A trained model with its data."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def rows(quick: bool) -> dict[str, Settings]:
    """List the ways to prune each of the networks."""
    if quick:
        common = {"network": "classifier (digits)", "num_train": 1000, "sparsities": [0.8, 0.95]}
        return {
            "magnitude": {**common, **_MAGNITUDE},
            "steps": {**common, "targets": "labels", "options": {"schedule": [0.8, 0.95]}},
        }
    found: dict[str, Settings] = {}
    for method, settings in _METHODS.items():
        common = {"network": _PUBLISHED_NETWORK, "sparsities": list(_SPARSITIES)}
        found[f"{_PUBLISHED_NETWORK}, {method}"] = {**common, "method": method, **settings}
    for network, methods in _MODELS.items():
        for method, settings in methods.items():
            found[f"{network}, {method}"] = {"network": network, "method": method, **settings}
    return found


def measure(settings: Settings, data: str | None) -> Values:
    """Prune, and measure accuracies on the test set, in per cent."""
    problem = _problem(settings, data)

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in problem.test_inputs.split(1000)])
        return 100 * float((outputs.argmax(1) == problem.test_labels).double().mean())

    start = time.perf_counter()
    found: dict[str, float] = {}
    for thin in _prune_all(problem, settings, accuracy):
        for step in thin.record[1:]:
            # Shares are rounded to a whole number of weights.
            near = min(settings["sparsities"], key=lambda share: abs(share - step.sparsity))
            if abs(near - step.sparsity) < 1e-3 and step.evaluation is not None:
                found[str(near)] = step.evaluation
    return {
        "dense": accuracy(problem.model),
        "accuracies": found,
        "prune_seconds": time.perf_counter() - start,
    }


def _prune_all(problem: _Problem, settings: Settings, accuracy: Any) -> list[Pruning]:
    """One run for every sparsity, or one through all of them."""
    count = settings["num_train"]
    inputs, labels = problem.inputs[:count], problem.labels[:count]
    loss: nn.Module | Loss = nn.CrossEntropyLoss()
    pruning_data: Any = (inputs, labels)
    if settings["targets"] == "none":
        pruning_data = inputs
    elif settings["targets"] != "labels":
        with torch.no_grad():
            outputs = torch.cat([problem.model(part) for part in inputs.split(1000)])
        pruning_data = (inputs, outputs.softmax(1))
        if settings["targets"] == "own outputs":
            loss, pruning_data = HalfSquaredError(), (inputs, outputs)
    options = {"evaluate": accuracy, **settings["options"]}
    if settings.get("one_step"):
        shares = [None] if ":" in options.get("structure", "") else settings["sparsities"]
        return [
            prune(problem.model, loss, pruning_data, share, **{"schedule": 1, **options})
            for share in shares
        ]
    return [prune(problem.model, loss, pruning_data, settings["sparsities"][-1], **options)]


def _problem(settings: Settings, data: str | None) -> _Problem:
    name = settings["network"]
    if name == _PUBLISHED_NETWORK:
        inputs, labels = datasets.mnist(data)
        test_inputs, test_labels = datasets.mnist(data, train=False)
        model = _published_network(data)
        return _Problem(model, _normalised(inputs), labels, _normalised(test_inputs), test_labels)
    if name in REFERENCE_MODELS:
        trained = reference_models.train(REFERENCE_MODELS[name], data)
        read = datasets.mnist if REFERENCE_MODELS[name].data == "mnist" else datasets.cifar10
        test_inputs, test_labels = read(data, train=False)
        test_inputs = test_inputs.view(-1, *trained.inputs.shape[1:])
        return _Problem(trained.model, trained.inputs, trained.targets, test_inputs, test_labels)
    digits = reference_problem({**settings, "num_points": 1797}, data)
    last = slice(settings["num_train"], None)
    return _Problem(
        digits.model, digits.inputs, digits.targets, digits.inputs[last], digits.targets[last]
    )


def _normalised(inputs: Tensor) -> Tensor:
    return (inputs - 0.1307) / 0.3081


def _published_network(data: str | None) -> nn.Module:
    """The network of the published comparisons, without biases."""
    model = nn.Sequential()
    for number, (num_inputs, num_units) in enumerate(((784, 40), (40, 20), (20, 10)), 1):
        model.add_module(f"fc{number}", nn.Linear(num_inputs, num_units, bias=False))
        if number < 3:
            model.add_module(f"relu{number}", nn.ReLU())
    load_published(model, datasets.find_file(data, _FILE))
    return model.eval()


def render(measured: Measured) -> Rendered:
    """One line for each way to prune; the published ones come first."""
    shares = sorted({float(s) for _, values in measured for s in values["accuracies"]})
    header = ["network", "method", "dense", *(f"{share:g}" for share in shares), "seconds"]
    lines: list[list[str]] = []
    shown: set[str] = set()
    for settings, values in measured:
        network = settings["network"]
        if network not in shown and network == _PUBLISHED_NETWORK:
            for method, known in _PUBLISHED.items():
                cells = [_percent(known.get(share)) for share in shares]
                lines.append([network, method, "93.97", *cells, "–"])
        shown.add(network)
        cells = [_percent(values["accuracies"].get(str(share))) for share in shares]
        method = settings.get("method", "magnitude" if "one_step" in settings else "steps")
        lines.append(
            [network, method, _percent(values["dense"]), *cells, f"{values['prune_seconds']:.0f}"]
        )
    return Rendered(header, lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


_LOOKS = ((BLACK, "x"), (SKY, "s"), (GREEN, "D"), (RED, "^"), (PURPLE, "v"), (BLUE, "o"))
_LAST = (WINE, "P")


def draw(figure: Figure, measured: Measured) -> None:
    """Accuracy against the share of weights that are kept."""
    axes = figure.subplots()
    first = measured[0][0]["network"]
    if first == _PUBLISHED_NETWORK:
        for (name, known), dashes in zip(_PUBLISHED.items(), (":", "--", "-.", "*"), strict=False):
            kept = [1 - share for share in known]
            axes.plot(kept, list(known.values()), dashes, color=GRAY, label=name)
    chosen = [pair for pair in measured if pair[0]["network"] == first]
    for (settings, values), (colour, marker) in zip(chosen, (*_LOOKS, _LAST), strict=False):
        kept = [1 - float(share) for share in values["accuracies"]]
        label = settings.get("method", "magnitude" if "one_step" in settings else "steps")
        axes.plot(
            kept,
            list(values["accuracies"].values()),
            color=colour,
            marker=marker,
            label=label,
        )
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.minorticks_off()
    axes.set_xticks([0.5, 0.2, 0.1, 0.05, 0.02], ["50 %", "20 %", "10 %", "5 %", "2 %"])
    axes.set(xlabel="share of weights kept", ylabel="test accuracy, %", ylim=(80, None))
    axes.set_title(first, fontsize=10)
    axes.grid(color="#e4e4e4")
    add_legend(figure, 1)


TABLE = Table(
    name="pruning",
    number=None,
    title="Pruning: test accuracy against sparsity",
    notes=(
        "784-40-20-10 is the network, without biases, on which others have published test"
        " accuracies at these sparsities; theirs are shown as published. `Outputs kept`: one"
        " correction after each selection, which looks at no labels beyond checking that the loss"
        " does not grow (in one step, at no labels at all). `Imitation`: later corrections train on"
        " the probabilities of the dense network instead of labels. `8 corrections`: on its own"
        " outputs, by squared error. `Labels`: later corrections train on the labels of the"
        " training set, as fine-tuning does, so that the result may be better than the dense"
        " network and does not compare like with like. Settings for 784-40-20-10 were chosen on"
        " a held-out part of the training set. Points: one step uses as many images as it"
        " says. Steps use 60,000 images of MNIST (LeNet 5,000 for `outputs kept`, else 20,000;"
        " ResNet-8 1,000), and 3,000 (500, 200) of them for each matrix. LeNet and ResNet-8 are the"
        " reference models; biases and normalisations stay."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
