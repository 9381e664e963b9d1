"""Functions that stand between the layers of a network: plain, odd, and hard to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Gradient(torch.autograd.Function):
    """Some function, with a derivative of its own: a number times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.factor = {"sign": 1.0, "reversed": -0.7, "scaled": 2.0}[kind]
        return x.sign() if kind == "sign" else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def _clamp_statement(x: Tensor) -> Tensor:
    h = x * 1.0
    h.clamp_(-0.6, 0.9)
    return h


def _relu_statement(x: Tensor) -> Tensor:
    h = x + 0.1
    functional.relu(h, inplace=True)
    return h


def _masked_in_place(x: Tensor) -> Tensor:
    h = x.clone()
    h[h < -0.3] *= 0.2
    return h


def _no_grad_factor(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.tanh()
    return x * factor


@torch.no_grad()
def _constant(x: Tensor) -> Tensor:
    return x.abs() + 1


def _norm_clipped(x: Tensor) -> Tensor:
    # Most rows are shorter than this and pass as they are.
    norms = x.flatten(1).norm(dim=1).clamp(min=2.5)
    return x * (2.5 / norms).view(-1, *[1] * (x.ndim - 1))


def _checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda h: (2 * h).tanh() * h, x, use_reentrant=False)  # type: ignore[no-any-return]


def _branch(x: Tensor) -> Tensor:
    return x.sin() if bool(x.detach().abs().max() < 100) else x


# Elementwise and well known.
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "selu": functional.selu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "mish": functional.mish,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "hardtanh": lambda x: functional.hardtanh(x, -0.5, 0.7),
    "hardswish": functional.hardswish,
    "softsign": functional.softsign,
    "tanhshrink": functional.tanhshrink,
    "logsigmoid": functional.logsigmoid,
    "sine": torch.sin,
    "square": torch.square,
    "identity": lambda x: x,
    "affine": lambda x: 2 * x - 0.5,
    "where": lambda x: torch.where(x > 0, x, 0.3 * x),
}
# Elementwise, or functions of one point, in ways that are easily misread.
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp_ statement": _clamp_statement,
    "relu statement": _relu_statement,
    "masked in place": _masked_in_place,
    "no_grad factor": _no_grad_factor,
    "no_grad function": lambda x: x * _constant(x),
    "detached": lambda x: x * x.detach().sigmoid(),
    "straight through": lambda x: Gradient.apply(x, "sign"),
    "reversed gradient": lambda x: Gradient.apply(x.tanh(), "reversed"),
    "scaled gradient": lambda x: Gradient.apply(x, "scaled"),
    "norm clipped": _norm_clipped,
    "checkpoint": _checkpointed,
    "control flow": _branch,
    "softmax": lambda x: functional.softmax(x, -1),
    "normalised": lambda x: functional.normalize(x, dim=-1, eps=1e-3),
    "flipped": lambda x: x.flip(-1),
    "cumulative": lambda x: x.cumsum(-1),
    "sorted": lambda x: x.sort(-1).values,
    "rounded": lambda x: x + (x.round() - x).detach(),
    "in-place chain": lambda x: x.clone().mul_(0.5).add_(0.1).tanh_(),
    "where rare": lambda x: torch.where(x > 2.5, torch.zeros_like(x), x),
}
# Points influence each other, or the pass is random: to be refused.
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "batch mean": lambda x: x - x.mean(0),
    "batch softmax": lambda x: x.softmax(0),
    "shifted points": lambda x: x.roll(1, 0),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
}


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
