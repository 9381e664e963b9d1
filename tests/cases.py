"""Networks, losses and data over which everything is tested, odd ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hcurv
import oracles


def seeded(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a module without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Draw normally distributed float64 numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(num_points: int, num_classes: int, seed: int = 2) -> Tensor:
    """Draw labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_classes, (num_points,), generator=generator)


class HandWritten(nn.Module):
    """Registered in another order than called; activations as functions, one of them composed."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.first = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 4, bias=False)
        self.register_buffer("slope", torch.tensor(0.3))
        self.drop = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.view(images.size(0), -1))
        x = self.drop(x * torch.sigmoid(1.7 * x))
        x = functional.leaky_relu(self.middle(x), 0.1)
        x = torch.where(x > 0, x, self.slope * x)
        return self.last(x).tanh() + 0.5


class QuarticLoss(hcurv.losses.Loss):
    """A loss of a user's own: Σ_j (x_j − y_j)⁴ with a dense (here redundant) square root."""

    needs_targets = True

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        root = torch.diag_embed((outputs - targets).abs() * 6**0.5)
        return torch.cat([root, root], dim=1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 4 * (outputs - targets) ** 3


@dataclass(frozen=True, eq=False)
class Case:
    """One network with its loss and data, all in float64.

    Attributes:
        model: factory.
        loss: as passed to hcurv; a torch loss is its own oracle.
        inputs: data.
        targets: data.
        frozen: names of parameters without gradient.
        oracle: scalar loss of the outputs, where ``loss`` is no torch module.
    """

    model: Callable[[], nn.Module]
    loss: nn.Module | hcurv.losses.Loss
    inputs: Tensor
    targets: Tensor
    frozen: tuple[str, ...] = ()
    oracle: Callable[[Tensor, Tensor], Tensor] | None = None
    needs_targets: bool = False
    seed: int = field(default=0)

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        model = seeded(self.model, self.seed).to(dtype).eval()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model

    def loss_of_outputs(self, outputs: Tensor) -> Tensor:
        if self.oracle is not None:
            return self.oracle(outputs, self.targets)
        return self.loss(outputs, self.targets)

    @cached_property
    def dense(self) -> Tensor:
        """The matrix, by the oracle."""
        return oracles.gauss_newton(self.build(), self.loss_of_outputs, self.inputs)

    def operator(self, dtype: torch.dtype = torch.float64, **options: int) -> hcurv.GaussNewton:
        inputs = self.inputs.to(dtype)
        targets = self.targets.to(dtype) if self.targets.is_floating_point() else self.targets
        data = (inputs, targets) if self.needs_targets else inputs
        return hcurv.GaussNewton(self.build(dtype), self.loss, data, **options)


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 3), nn.Softplus(), nn.Linear(3, 12), nn.Sigmoid())


def _deep_autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(20, 4), nn.GELU(), nn.Linear(4, 2), nn.Tanh()),
        nn.Sequential(nn.Linear(2, 4, bias=False), nn.SiLU(), nn.Linear(4, 20)),
    )


def _dead_units() -> nn.Module:
    model = _classifier()
    with torch.no_grad():
        model[0].bias[:2] = -1e3  # never active
        model[2].weight[1] = 0.0
    return model


def _half_squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() / (2 * outputs.shape[0])


_X7, _X12, _X20, _X6 = normal(11, 7), normal(9, 12), normal(8, 20), normal(10, 2, 3)
_Y3 = labels(11, 3)
_WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
_BLANK = _X7 * torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])

CASES: dict[str, Case] = {
    "classifier": Case(_classifier, nn.CrossEntropyLoss(), _X7, _Y3),
    "sum reduction": Case(_classifier, nn.CrossEntropyLoss(reduction="sum"), _X7, _Y3),
    "one point": Case(_classifier, nn.CrossEntropyLoss(), _X7[:1], _Y3[:1]),
    "dead units": Case(_dead_units, nn.CrossEntropyLoss(), _X7, _Y3),
    "blank inputs": Case(_classifier, nn.CrossEntropyLoss(), _BLANK, _Y3),
    "zero inputs": Case(_classifier, nn.CrossEntropyLoss(), 0 * _X7, _Y3),
    "one layer": Case(lambda: nn.Linear(7, 3), nn.CrossEntropyLoss(), _X7, _Y3),
    "one layer, no bias, squares": Case(
        lambda: nn.Linear(7, 3, bias=False), nn.MSELoss(), _X7, normal(11, 3)
    ),
    "single class": Case(
        lambda: nn.Sequential(nn.Linear(7, 2), nn.ReLU(), nn.Linear(2, 1)),
        nn.CrossEntropyLoss(),
        _X7,
        labels(11, 1),
    ),
    "no biases": Case(
        lambda: nn.Sequential(nn.Linear(7, 5, False), nn.ELU(), nn.Linear(5, 3, False)),
        nn.CrossEntropyLoss(),
        _X7,
        _Y3,
    ),
    "linear network": Case(
        lambda: nn.Sequential(nn.Linear(7, 4), nn.Identity(), nn.Linear(4, 3)),
        nn.MSELoss(),
        _X7,
        normal(11, 3),
    ),
    "width one": Case(
        lambda: nn.Sequential(nn.Linear(7, 1), nn.Tanh(), nn.Linear(1, 3)),
        nn.CrossEntropyLoss(),
        _X7,
        _Y3,
    ),
    "class weights": Case(
        _classifier, nn.CrossEntropyLoss(weight=_WEIGHTS), _X7, _Y3, needs_targets=True
    ),
    "class weights, smoothing, ignored class": Case(
        _classifier,
        nn.CrossEntropyLoss(weight=_WEIGHTS, label_smoothing=0.2, ignore_index=1),
        _X7,
        _Y3,
        needs_targets=True,
    ),
    "label smoothing": Case(_classifier, nn.CrossEntropyLoss(label_smoothing=0.3), _X7, _Y3),
    "class probabilities": Case(
        _classifier,
        nn.CrossEntropyLoss(weight=_WEIGHTS, label_smoothing=0.1),
        _X7,
        torch.softmax(normal(11, 3), 1),
        needs_targets=True,
    ),
    "first layer frozen": Case(
        _classifier, nn.CrossEntropyLoss(), _X7, _Y3, ("0.weight", "0.bias")
    ),
    "middle layer frozen": Case(
        _classifier, nn.CrossEntropyLoss(), _X7, _Y3, ("2.weight", "2.bias")
    ),
    "only biases": Case(
        _classifier, nn.CrossEntropyLoss(), _X7, _Y3, ("0.weight", "2.weight", "4.weight")
    ),
    "some biases frozen": Case(
        _classifier, nn.CrossEntropyLoss(), _X7, _Y3, ("0.bias", "2.weight")
    ),
    "last layer frozen, squares": Case(
        lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.MSELoss(),
        _X7,
        normal(11, 3),
        ("2.weight", "2.bias"),
    ),
    "regression": Case(_classifier, nn.MSELoss(), _X7, normal(11, 3)),
    "regression, sum": Case(_classifier, nn.MSELoss(reduction="sum"), _X7, normal(11, 3)),
    "logistic": Case(
        _classifier,
        nn.BCEWithLogitsLoss(weight=_WEIGHTS, pos_weight=1 + _WEIGHTS),
        _X7,
        torch.sigmoid(normal(11, 3)),
        needs_targets=True,
    ),
    "own loss": Case(
        _classifier,
        QuarticLoss(),
        _X7,
        normal(11, 3),
        needs_targets=True,
        oracle=lambda outputs, targets: (outputs - targets).pow(4).sum() / 11,
    ),
    "hand-written": Case(HandWritten, nn.CrossEntropyLoss(), _X6, labels(10, 3)),
    "autoencoder": Case(
        _autoencoder, hcurv.losses.HalfSquaredError(), _X12, _X12, oracle=_half_squared
    ),
    "autoencoder, encoder frozen": Case(
        _autoencoder, nn.MSELoss(), _X12, _X12, ("0.weight", "0.bias")
    ),
    "autoencoder, decoder frozen": Case(
        _autoencoder, nn.MSELoss(), _X12, _X12, ("2.weight", "2.bias")
    ),
    "autoencoder, only biases": Case(
        _autoencoder, nn.MSELoss(), _X12, _X12, ("0.weight", "2.weight")
    ),
    "deep autoencoder": Case(_deep_autoencoder, nn.BCEWithLogitsLoss(), _X20, torch.sigmoid(_X20)),
    "deep autoencoder, middle frozen": Case(
        _deep_autoencoder, nn.MSELoss(), _X20, _X20, ("0.2.weight", "0.2.bias", "1.2.bias")
    ),
}

# Where nothing but the matrix matters, one loss is as good as another. These cases differ from
# others in their loss alone.
_SAME_NETWORK = {
    "sum reduction",
    "class weights",
    "class weights, smoothing, ignored class",
    "label smoothing",
    "class probabilities",
    "regression",
    "regression, sum",
    "logistic",
    "own loss",
}
NETWORKS = tuple(name for name in CASES if name not in _SAME_NETWORK)
# One case for each form in which a chain of layers is kept: narrow and wide outputs, full, diagonal
# and redundant roots of the loss, one point, one layer, and frozen parameters at either end.
_FORMS = (
    "classifier",
    "one point",
    "one layer, no bias, squares",
    "regression",
    "own loss",
    "first layer frozen",
    "some biases frozen",
    "last layer frozen, squares",
    "hand-written",
    "autoencoder",
    "autoencoder, only biases",
    "deep autoencoder, middle frozen",
)

all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
all_forms = pytest.mark.parametrize("case", [CASES[name] for name in _FORMS], ids=_FORMS)
DTYPES = (torch.float64, torch.float32)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pairwise(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize with few combinations, chosen so that every two values of two names meet.

    A fault comes from one value or from two that meet, and hardly ever from three. Where a test is
    not cheap, this finds the same faults as all combinations do.
    """
    choices = [list(options) for options in values.values()]

    def pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(combination), 2))

    candidates = {found: pairs(found) for found in product(*(range(len(c)) for c in choices))}
    missing = set().union(*candidates.values())
    parameters = []
    while missing:
        best = max(candidates, key=lambda found: len(candidates[found] & missing))
        missing -= candidates[best]
        row = [choice[index] for choice, index in zip(choices, best, strict=True)]
        parameters.append(
            pytest.param(*row, id="-".join(getattr(value, "__name__", str(value)) for value in row))
        )
    return pytest.mark.parametrize(tuple(values), parameters)


def assert_close(actual: Tensor, expected: Tensor, factor: float = 100.0) -> None:
    """Require that no error exceeds ``factor`` rounding units of the largest expected entry."""
    assert actual.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((actual.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    bound = factor * torch.finfo(actual.dtype).eps * scale
    assert error <= bound, f"error {error:.2e} exceeds {bound:.2e} at scale {scale:.2e}"
