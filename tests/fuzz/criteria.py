"""Random losses with targets, and what the oracle needs of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import hcurv
from fuzz.functions import Apply
from fuzz.randomness import integers, normal, positive


@dataclass
class DrawnLoss:
    """A loss, its targets, and its dense truth.

    Attributes:
        loss: what is passed to the package.
        value: the scalar loss of outputs and targets, for automatic differentiation.
        targets: the targets; floating-point ones in double precision.
        before: what the model's outputs pass through first.
        root_hessian: diagonal of the Hessian with respect to all outputs, where it is not that of
            ``value``: the Fisher information of outputs that are probabilities.
        divisor: what "mean" divides by.
        point_losses: unreduced loss of each point, (n,), for empirical Fisher matrices.
        tags: what is special about it.
        must_refuse: whether it has no Hessian.
    """

    loss: object
    value: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    before: Callable[[], nn.Module] | None = None
    root_hessian: Callable[[Tensor, Tensor], Tensor] | None = None
    tags: set[str] = field(default_factory=set)
    must_refuse: bool = False


class Quartic(hcurv.losses.Loss):
    """Σ (x − y)⁴, a loss of the user's own."""

    needs_targets = True

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        assert targets is not None
        return 12**0.5 * (outputs - targets).abs()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 4 * (outputs - targets) ** 3


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def draw_loss(rng: random.Random, shape: tuple[int, ...]) -> DrawnLoss:
    """A loss for outputs of a shape (n, …)."""
    reduction = rng.choice(["mean", "mean", "sum"])
    kinds = ["mse", "huber", "smooth", "half", "gaussian", "poisson", "bce", "probabilities", "own"]
    if len(shape) >= 2 and shape[1] >= 2:
        kinds += ["ce"] * 6 + ["nll"] * 2
    if rng.random() < 0.03:
        return _unsupported(rng, shape)
    kind = rng.choice(kinds)
    drawn = _KINDS[kind](rng, shape, reduction)
    drawn.tags |= {kind, reduction}
    return drawn


def _labels(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    return integers(rng, shape[1], shape[0], *shape[2:])


def _ce(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    weight = positive(rng, shape[1]) if rng.random() < 0.3 else None
    smoothing = rng.choice([0.0, 0.0, 0.0, 0.1, 0.7])
    targets, tags, ignored = _labels(rng, shape), set(), -100
    if rng.random() < 0.2:
        # Multiples of 1/64, which add up to 1 exactly.
        targets = (functional.softmax(normal(rng, *shape), 1) * 64).floor() / 64
        targets[:, 0] += 1 - targets.sum(1)
        tags.add("probability targets")
    elif rng.random() < 0.25:
        ignored = rng.choice([-100, 0, 1, -1])
        targets = torch.where(integers(rng, 3, *targets.shape) == 0, ignored, targets)
        tags.add("ignored labels")
    if weight is not None:
        tags.add("class weights")
    if smoothing:
        tags.add("smoothing")
    made = lambda w: nn.CrossEntropyLoss(  # noqa: E731
        weight=w, ignore_index=ignored, label_smoothing=smoothing, reduction=reduction
    )
    truth = made(weight)
    return DrawnLoss(made(weight), truth, targets, tags=tags)


def _nll(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    weight = positive(rng, shape[1]) if rng.random() < 0.3 else None
    targets = _labels(rng, shape)

    def fisher(outputs: Tensor, targets: Tensor) -> Tensor:
        # E[g gᵀ] over labels of the model, times the weight of the label of the data.
        own = torch.ones_like(targets, dtype=outputs.dtype) if weight is None else weight[targets]
        divisor = own.sum() if reduction == "mean" else 1.0
        return outputs.exp() * own.unsqueeze(1) / divisor

    loss = nn.NLLLoss(weight=weight, reduction=reduction)
    return DrawnLoss(loss, loss, targets, lambda: nn.LogSoftmax(1), fisher)


def _bce(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    last = shape[-1:] if len(shape) > 1 else ()
    weight = positive(rng, *last) if rng.random() < 0.3 and last else None
    positives = positive(rng, *last) if rng.random() < 0.3 and last else None
    loss = nn.BCEWithLogitsLoss(weight=weight, pos_weight=positives, reduction=reduction)
    tags = {"weights"} if weight is not None or positives is not None else set()
    return DrawnLoss(loss, loss, normal(rng, *shape).sigmoid().round(decimals=1), tags=tags)


def _probabilities(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    loss = nn.BCELoss(reduction=reduction)

    def fisher(outputs: Tensor, targets: Tensor) -> Tensor:
        divisor = outputs.numel() if reduction == "mean" else 1.0
        # Where a probability is 0 or 1, the sigmoid is flat.
        found = 1 / (outputs * (1 - outputs)) / divisor
        return torch.where(found.isinf(), 0.0, found)

    targets = normal(rng, *shape).sigmoid().round()
    return DrawnLoss(loss, loss, targets, nn.Sigmoid, fisher)


def _poisson(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    log_input, full = rng.random() < 0.6, rng.random() < 0.3
    loss = nn.PoissonNLLLoss(log_input=log_input, full=full, reduction=reduction)
    before = None if log_input else nn.Softplus
    return DrawnLoss(loss, loss, integers(rng, 4, *shape).double(), before)


def _simple(make: Callable[..., nn.Module]) -> Callable[..., DrawnLoss]:
    def draw(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
        loss = make(rng)(reduction=reduction)
        return DrawnLoss(loss, loss, normal(rng, *shape))

    return draw


def _half(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    divisor = shape[0] if reduction == "mean" else 1
    return DrawnLoss(
        hcurv.losses.HalfSquaredError(reduction=reduction),
        lambda x, y: ((x - y) ** 2).sum() / 2 / divisor,
        normal(rng, *shape),
    )


def _gaussian(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    variance = rng.choice([0.3, 2.0])
    divisor = math.prod(shape) if reduction == "mean" else 1
    return DrawnLoss(
        hcurv.losses.GaussianNLL(variance, reduction=reduction),
        lambda x, y: ((x - y) ** 2).sum() / 2 / variance / divisor,
        normal(rng, *shape),
    )


def _own(rng: random.Random, shape: tuple[int, ...], reduction: str) -> DrawnLoss:
    divisor = shape[0] if reduction == "mean" else 1
    return DrawnLoss(
        Quartic(reduction=reduction),
        lambda x, y: ((x - y) ** 4).sum() / divisor,
        normal(rng, *shape),
    )


def _unsupported(rng: random.Random, shape: tuple[int, ...]) -> DrawnLoss:
    loss = rng.choice(
        [
            nn.L1Loss(),
            nn.MSELoss(reduction="none"),
            nn.KLDivLoss(reduction="batchmean"),
            nn.MSELoss,
            functional.mse_loss,
            None,
            "mse",
            nn.SmoothL1Loss(beta=0.0),
            nn.GaussianNLLLoss(),
            nn.SoftMarginLoss(),
        ]
    )
    value = lambda x, y: ((x - y) ** 2).sum()  # noqa: E731
    return DrawnLoss(loss, value, normal(rng, *shape), tags={"unsupported loss"}, must_refuse=True)


_KINDS: dict[str, Callable[..., DrawnLoss]] = {
    "mse": _simple(lambda rng: nn.MSELoss),
    "huber": _simple(lambda rng: partial(nn.HuberLoss, delta=rng.choice([0.3, 1.0]))),
    "smooth": _simple(lambda rng: partial(nn.SmoothL1Loss, beta=rng.choice([0.3, 1.0]))),
    "half": _half,
    "gaussian": _gaussian,
    "poisson": _poisson,
    "bce": _bce,
    "probabilities": _probabilities,
    "own": _own,
    "ce": _ce,
    "nll": _nll,
}


def with_end(build: Callable[[], nn.Module], before: Callable[[], nn.Module] | None) -> nn.Module:
    """The model, and after it what the loss expects to come before it."""
    model = build()
    return model if before is None else nn.Sequential(model, before()).eval()


__all__ = ["Apply", "DrawnLoss", "draw_loss", "with_end"]
