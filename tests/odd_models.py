"""Models that use their parameters in unusual ways, or return or take unusual things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from models import (
    CROSS_ENTROPY,
    IMAGES,
    SEQUENCE,
    SERIES,
    VECTORS,
    Call,
    ModelCase,
    parameter,
    tokens,
)

IGNORING = nn.CrossEntropyLoss(ignore_index=2, weight=torch.tensor([1.0, 0.5, 1.0, 2.0]).double())


def _mlp(width: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, outputs))


def _of_vectors(
    forward: Callable[..., Tensor], loss: nn.Module = CROSS_ENTROPY, **parts: Callable[[], Any]
) -> ModelCase:
    """A forward pass for the vectors, with parts that are made anew each time."""
    build = lambda: Call(forward, **{name: part() for name, part in parts.items()})  # noqa: E731
    return ModelCase(build, VECTORS, loss)


class StraightThrough(torch.autograd.Function):
    """Signs, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnLinear(torch.autograd.Function):
    """x Wᵀ whose derivative with respect to W is three times the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, 3 * gradient.T @ x


def _twice(self: Any, x: Tensor) -> Tensor:
    return self.head(self.body(self.body(x).tanh()).tanh())


def _in_place(self: Any, x: Tensor) -> Tensor:
    z = self.first(x)
    z.mul_(0.5).add_(self.shift)
    z[:, :2] = z[:, :2].clone() * self.scale
    z[:, 3] += x[:, 0]
    return self.last(z.tanh_())


def _copied_into(self: Any, x: Tensor) -> Tensor:
    z = x.new_zeros(len(x), 8)
    z[:, :6] = x
    z[:, 6:] = self.rest
    return self.last(z)


def _frozen_block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = self.first(x).tanh()
    return self.last(z * self.first(x))


def _per_batch(self: Any, x: Tensor) -> Tensor:
    # Points are independent, but the graph depends on the batch.
    if len(x) % 2:
        return self.last(self.first(x).tanh())
    return self.last(torch.stack([self.first(point).tanh() for point in x]))


def _routed(self: Any, x: Tensor) -> Tensor:
    # Each point goes through one of two experts.
    result = x.new_zeros(len(x), 3)
    for expert, chosen in ((self.first, x[:, 0] > 0), (self.second, x[:, 0] <= 0)):
        result[chosen] = expert(x[chosen])
    return result


def _shared_table(self: Any, words: Tensor) -> Tensor:
    # The layer is applied to a table, and its results are looked up.
    return self.layer(self.table)[words].sum(1)


def _queries(self: Any, x: Tensor) -> Tensor:
    # Learned queries look at the sequence of each point.
    keys, queries = self.keys(x), self.put(self.queries)
    return (torch.softmax(queries @ keys.mT, 2) @ keys).flatten(1)


def _slices(self: Any, x: Tensor) -> Tensor:
    first, second = functional.linear(x, self.weight).chunk(2, 1)
    third = functional.linear(x[:, :4], self.weight[1:3, 2:])
    return torch.cat([first * second, third], 1)


def _transposed_too(self: Any, x: Tensor) -> Tensor:
    return functional.linear(torch.tanh(x @ self.weight), self.weight)


def _low_rank(self: Any, x: Tensor) -> Tensor:
    return self.base(x) + 0.5 * (x @ self.lora_a) @ self.lora_b


def _merged(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, self.base.weight + (self.lora_a @ self.lora_b).T)


def _heads(self: Any, x: Tensor) -> Tensor:
    found = torch.einsum("btd,hdk->bhtk", x, self.weights)
    return torch.einsum("bhtk,hk->bt", found.tanh(), self.out)


def _last_real_token(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    z = self.first(x.transpose(0, 1)).tanh()  # time first
    return self.last(z[lengths - 1, torch.arange(len(lengths))])


def _pruned() -> nn.Module:
    model = _mlp()
    prune.random_unstructured(model[0], "weight", 0.5)
    prune.l1_unstructured(model[2], "weight", 3)
    model(torch.zeros(1, 6))  # leaves tensors with a history on the modules
    return model


def _hooked() -> nn.Module:
    model = _mlp()
    model[0].register_forward_hook(lambda module, args, output: 2 * output + 1)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    model[1].register_full_backward_hook(lambda module, grads, _: (3 * grads[0],))
    return model


def _spectral() -> nn.Module:
    model = _mlp()
    parametrizations.spectral_norm(model[0])
    parametrizations.weight_norm(model[2])
    return model


def _orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 3)), nn.Tanh(), nn.Linear(3, 2))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 7, False))
    model[3].weight = model[0].weight
    return model


class Segmenter(nn.Module):
    """An image to image network with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.out = nn.Conv2d(6, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = functional.elu(self.up(functional.gelu(self.norm(self.down(x)))))
        return self.out(torch.cat([z[:, :, :6, :5], x], 1))


class Residual(nn.Module):
    """Two residual blocks and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.silu(self.norm(self.first(x)))
        x = x + functional.max_pool2d(functional.relu(self.second(x)), 3, 1, 1)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def _linear(*sizes: int, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(*sizes, bias=bias)


def _weight(*sizes: int) -> Callable[[], nn.Parameter]:
    return lambda: parameter(*sizes)


_LENGTHS = torch.tensor([1, 2, 3, 4, 5])

ODD: dict[str, ModelCase] = {
    "residual blocks": ModelCase(Residual, IMAGES, CROSS_ENTROPY),
    "module used twice": _of_vectors(_twice, body=_linear(6, 6), head=_linear(6, 3)),
    "tied embedding": ModelCase(
        lambda: Call(lambda self, x: self.f(x).mT, f=_tied()), tokens(5, 5), CROSS_ENTROPY
    ),
    "weight and its transpose": _of_vectors(_transposed_too, nn.MSELoss(), weight=_weight(6, 4)),
    "adapters, all else frozen": ModelCase(
        lambda: Call(
            _low_rank, base=nn.Linear(6, 3), lora_a=parameter(6, 2), lora_b=parameter(2, 3)
        ),
        VECTORS,
        CROSS_ENTROPY,
        trainable=("lora",),
    ),
    "merged adapters": _of_vectors(
        _merged, base=_linear(6, 3), lora_a=_weight(6, 2), lora_b=_weight(2, 3)
    ),
    "frozen in the middle": ModelCase(
        lambda: nn.Sequential(
            nn.Conv1d(4, 3, 3), nn.ReLU(), nn.Conv1d(3, 3, 2), nn.Flatten(), nn.Linear(15, 2)
        ),
        SERIES,
        trainable=("0.", "4.bias"),
    ),
    "only a norm": ModelCase(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        VECTORS,
        CROSS_ENTROPY,
        trainable=("1.",),
    ),
    "scalar scales": _of_vectors(
        lambda self, x: self.f(self.a * x) * self.b.exp() - self.c / 2,
        f=_linear(6, 3),
        a=_weight(),
        b=_weight(1),
        c=_weight(1, 1),
    ),
    "rotated scales": _of_vectors(
        lambda self, x: (self.f(x) - self.a * x[:, :3]) / (1 + self.a**2),
        f=_linear(6, 3),
        a=_weight(3),
    ),
    "heads of their own": ModelCase(
        lambda: Call(_heads, weights=parameter(2, 3, 4), out=parameter(2, 4)), SEQUENCE
    ),
    "slices of a weight": _of_vectors(_slices, nn.MSELoss(), weight=_weight(4, 6)),
    "vector product": _of_vectors(lambda self, x: x.tanh() @ self.w, nn.MSELoss(), w=_weight(6)),
    "weight on the left": ModelCase(
        lambda: Call(lambda self, x: (self.w @ x).tanh().sum(2), w=parameter(3, 4)), SERIES
    ),
    "time mixing": ModelCase(
        lambda: Call(
            lambda self, x: torch.einsum("st,btd->bsd", self.w, x).tanh() @ self.v,
            w=parameter(5, 5),
            v=parameter(3),
        ),
        SEQUENCE,
    ),
    "positions, time first": ModelCase(
        lambda: Call(
            lambda self, x: self.f((x.transpose(0, 1) * self.p).tanh() + self.p).sum(0),
            p=parameter(5, 1, 3),
            f=nn.Linear(3, 2),
        ),
        SEQUENCE,
    ),
    "learned queries": ModelCase(
        lambda: Call(_queries, keys=nn.Linear(3, 4), put=nn.Linear(2, 4), queries=parameter(5, 2)),
        SEQUENCE,
    ),
    "layer of a table": ModelCase(
        lambda: Call(_shared_table, layer=nn.Linear(2, 3), table=parameter(5, 2)),
        tokens(5, 2, num=5),
        CROSS_ENTROPY,
    ),
    "spectral and weight norm": ModelCase(_spectral, VECTORS, CROSS_ENTROPY),
    "orthogonal weight": ModelCase(_orthogonal, VECTORS, CROSS_ENTROPY),
    "pruned": ModelCase(_pruned, VECTORS, CROSS_ENTROPY),
    "unused parameters": _of_vectors(
        lambda self, x: self.f(x), f=_mlp, idle=_linear(3, 2), last=_weight(1)
    ),
    "empty parameter": _of_vectors(
        lambda self, x: self.f(x) + self.none.sum(), f=_linear(6, 3), none=_weight(0, 2)
    ),
    "graph by batch": _of_vectors(_per_batch, first=_linear(6, 4), last=_linear(4, 3)),
    "experts": _of_vectors(_routed, first=_mlp, second=_linear(6, 3)),
    "last real token, time first": ModelCase(
        lambda: Call(_last_real_token, first=nn.Linear(3, 4), last=nn.Linear(4, 3)),
        (SEQUENCE, _LENGTHS),
        CROSS_ENTROPY,
    ),
    "one output without an axis": _of_vectors(
        lambda self, x: self.f(x).squeeze(1), nn.MSELoss(), f=lambda: _mlp(outputs=1)
    ),
    "binary": _of_vectors(
        lambda self, x: self.f(x).sum(1), nn.BCEWithLogitsLoss(), f=lambda: _mlp(outputs=2)
    ),
    "ignored labels of sequences": ModelCase(
        lambda: Call(lambda self, x: self.f(x).mT, f=nn.Linear(3, 4)),
        SEQUENCE,
        IGNORING,
        torch.where(tokens(5, 5, num=3) == 0, 2, tokens(5, 5, num=4)),
    ),
    "segmentation": ModelCase(lambda: Segmenter(3), IMAGES, CROSS_ENTROPY),
    "image to image": ModelCase(lambda: Segmenter(1), IMAGES),
    "checkpoint": _of_vectors(
        lambda self, x: self.g(checkpoint(self.f, x, use_reentrant=False)),
        f=lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        g=_linear(4, 3),
    ),
    "straight through": _of_vectors(
        lambda self, x: self.g(StraightThrough.apply(self.f(x))), f=_linear(6, 4), g=_linear(4, 3)
    ),
    "function with a derivative of its own": _of_vectors(
        lambda self, x: self.g(OwnLinear.apply(x, self.w).tanh()), w=_weight(4, 6), g=_linear(4, 3)
    ),
    "no_grad inside": _of_vectors(_frozen_block, first=_linear(6, 4), last=_linear(4, 3)),
    "detached": _of_vectors(
        lambda self, x: self.f(x) * self.f(x).detach().sigmoid(), f=_linear(6, 3)
    ),
    "in place": _of_vectors(
        _in_place, first=_linear(6, 4), last=_linear(4, 3), shift=_weight(4), scale=_weight(2)
    ),
    "copied into": _of_vectors(_copied_into, rest=_weight(2), last=_linear(8, 3)),
    "hooks": ModelCase(_hooked, VECTORS, CROSS_ENTROPY),
    "data parallel": ModelCase(lambda: nn.DataParallel(Residual()), IMAGES, CROSS_ENTROPY),
    "complex inside": ModelCase(
        lambda: Call(
            lambda self, x: self.f(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=8)).mean(1),
            w=parameter(4, 5),
            f=nn.Linear(8, 3),
        ),
        SERIES,
        CROSS_ENTROPY,
    ),
    "two inputs": ModelCase(
        lambda: Call(
            lambda self, x, words: self.f(x) + self.e(words).sum(1),
            f=nn.Linear(6, 3),
            e=nn.Embedding(7, 3),
        ),
        (VECTORS, tokens(5, 2)),
        CROSS_ENTROPY,
    ),
    "named inputs": ModelCase(
        lambda: Call(lambda self, x, mask: (self.f(x) * mask[..., None]).sum(1), f=nn.Linear(3, 4)),
        {"mask": tokens(5, 5, num=2).bool(), "x": SEQUENCE},
        CROSS_ENTROPY,
    ),
    "own forward pass": ModelCase(
        lambda: nn.LSTM(3, 4),
        SEQUENCE,
        CROSS_ENTROPY,
        forward_fn=lambda model, x: model(x.transpose(0, 1))[0].sum(0),
    ),
    "own forward pass of named inputs": ModelCase(
        _mlp, {"a": VECTORS, "b": VECTORS**2}, forward_fn=lambda f, x: f(x["a"]) * f(x["b"])
    ),
}

all_odd = pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
