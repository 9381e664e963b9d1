"""Models over which reading any model is tested: every kind of layer, in a small network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hcurv
import oracles
from cases import labels, normal, seeded
from oracles import Inputs


@dataclass(frozen=True)
class ModelCase:
    """A model with its inputs, in float64.

    Attributes:
        model: factory.
        inputs: of five points.
        loss: a torch loss, its own oracle. It is also that of the torch module that hcurv is given.
        targets: made up to fit the loss, if None.
        trainable: parts of the names of the parameters that are trained; all if empty.
        forward_fn: as for `GaussNewton`.
    """

    model: Callable[[], nn.Module]
    inputs: Inputs
    loss: nn.Module = nn.MSELoss()  # noqa: RUF009
    targets: Tensor | None = None
    trainable: tuple[str, ...] = ()
    forward_fn: Callable[[Any, Any], Tensor] | None = None

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        model = seeded(self.model).to(dtype).eval()
        for name, parameter in model.named_parameters():
            chosen = not self.trainable or any(part in name for part in self.trainable)
            parameter.requires_grad_(chosen and parameter.requires_grad)
        return model

    def outputs(self, model: nn.Module) -> Tensor:
        return oracles.call(model, self.inputs, self.forward_fn)

    def targets_for(self, model: nn.Module) -> Tensor:
        if self.targets is not None:
            return self.targets
        shape = self.outputs(model).shape
        if isinstance(self.loss, nn.CrossEntropyLoss):
            count = torch.Size([shape[0], *shape[2:]])
            return labels(count.numel(), shape[1]).view(count)
        targets = normal(*shape, seed=9)
        return targets.sigmoid() if isinstance(self.loss, nn.BCEWithLogitsLoss) else targets

    def operator(
        self, model: nn.Module, targets: Tensor, dtype: torch.dtype = torch.float64, **options: Any
    ) -> hcurv.GaussNewton:
        inputs = converted(self.inputs, dtype)
        targets = targets.to(dtype) if targets.is_floating_point() else targets
        data = (inputs, targets)
        return hcurv.GaussNewton(model, self.loss, data, forward_fn=self.forward_fn, **options)

    def dense(self, model: nn.Module, targets: Tensor) -> Tensor:
        return oracles.gauss_newton_of_model(
            model, lambda outputs: self.loss(outputs, targets), self.inputs, self.forward_fn
        )

    def gradient(self, model: nn.Module, targets: Tensor) -> Tensor:
        return oracles.gradient_of_model(
            model, lambda outputs: self.loss(outputs, targets), self.inputs, self.forward_fn
        )


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs with floating-point numbers of another type."""
    if isinstance(inputs, dict):
        return {name: converted(value, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(converted(value, dtype) for value in inputs)
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


class Call(nn.Module):
    """A module of parts, with a forward pass given as a function of itself and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def tokens(*shape: int, num: int = 7, seed: int = 5) -> Tensor:
    return torch.randint(0, num, shape, generator=torch.Generator().manual_seed(seed))


def then(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*modules)


# Five points. The length of sequences is five, too, so that points and positions can be mixed up.
SEQUENCE = normal(5, 5, 3)
SERIES, IMAGES, VOLUMES = normal(5, 4, 8), normal(5, 4, 6, 5), normal(5, 2, 4, 3, 5)
VECTORS = normal(5, 6)
CROSS_ENTROPY = nn.CrossEntropyLoss()


def _weighted_mean(self: nn.Module, x: Tensor) -> Tensor:
    x = x.flatten(1)[:, :, None] if x.ndim == 2 else x.flatten(2)
    return (x * torch.linspace(0.5, 2, x.shape[2], dtype=x.dtype)).mean(2)


def _vision(*layers: Callable[[], nn.Module], inputs: Tensor = IMAGES) -> ModelCase:
    """Layers, a weighted average over all positions, and a classifier."""

    def build() -> nn.Module:
        body = nn.Sequential(*(layer() for layer in layers)).double().eval()
        with torch.random.fork_rng(devices=[]):
            width = body(inputs).shape[1]
        return nn.Sequential(
            body,
            nn.Tanh(),
            Call(_weighted_mean),
            nn.Linear(width, 3),
        )

    return ModelCase(build, inputs, CROSS_ENTROPY)


def _conv(dim: int, *args: Any, **options: Any) -> ModelCase:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
    return _vision(lambda: kind(*args, **options), inputs=(SERIES, IMAGES, VOLUMES)[dim - 1])


def _up(dim: int, *args: Any, **options: Any) -> ModelCase:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dim - 1]
    return _vision(lambda: kind(*args, **options), inputs=(SERIES, IMAGES, VOLUMES)[dim - 1])


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> ModelCase:
    """A recurrent layer with a classifier on the last step."""
    inputs = SEQUENCE if options.get("batch_first") else SEQUENCE.clone()

    def forward(self: Any, x: Tensor) -> Tensor:
        first = options.get("batch_first", False)
        found, _ = self.body(x if first else x.transpose(0, 1))
        return self.head(found[:, -1] if first else found[-1])

    def build() -> nn.Module:
        body = kind(3, 4, **options)
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        return Call(forward, body=body, head=nn.Linear(width, 3))

    return ModelCase(build, inputs, CROSS_ENTROPY)


def _cells(kind: type[nn.RNNCellBase]) -> ModelCase:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)

    return ModelCase(
        lambda: Call(forward, cell=kind(3, 4), head=nn.Linear(4, 3)), SEQUENCE, CROSS_ENTROPY
    )


def _attention(forward: Callable[..., Tensor], **options: Any) -> ModelCase:
    return ModelCase(
        lambda: Call(
            forward, attention=nn.MultiheadAttention(4, 2, **options), put=nn.Linear(3, 4)
        ),
        SEQUENCE,
    )


def _self_attention(self: Any, x: Tensor) -> Tensor:
    z = self.put(x)
    return self.attention(z, z, z, need_weights=False)[0].mean(1)


def _time_major_attention(self: Any, x: Tensor) -> Tensor:
    z = self.put(x).transpose(0, 1)
    return self.attention(z, z, z)[0][0]


def _cross_attention(self: Any, x: Tensor) -> Tensor:
    return self.attention(self.put(x[:, :2]), x, x[..., :2])[0].flatten(1)


def _causal_attention(self: Any, x: Tensor) -> Tensor:
    z, mask = self.put(x), torch.ones(5, 5, dtype=torch.bool).triu(1)
    return self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]


class GroupedQueries(nn.Module):
    """Four heads of queries that share two heads of keys and values; rotations; a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(3, 8, False), nn.Linear(3, 4), nn.Linear(3, 4)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        q = torch.stack([q[..., 0] * angle.cos().T, q[..., 1] * angle.sin().T], -1)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).transpose(1, 2)


class Transformer(nn.Module):
    """Embedding with learned positions and a first token, an encoder layer, a tied head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.start, self.positions = parameter(1, 1, 4), parameter(6, 4)
        self.block = nn.TransformerEncoderLayer(
            4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=norm_first
        )

    def forward(self, words: Tensor) -> Tensor:
        start = self.start.expand(len(words), -1, -1)
        x = torch.cat([start, self.embedding(words)], 1) + self.positions
        return functional.linear(self.block(x)[:, 1:], self.embedding.weight).transpose(1, 2)


def _convolutions() -> dict[str, ModelCase]:
    cases = {
        "conv 1d": _conv(1, 4, 3, 3),
        "conv 1d, strided, dilated": _conv(1, 4, 3, 3, stride=2, dilation=2, padding=1),
        "conv 2d, no bias": _conv(2, 4, 3, (3, 2), bias=False),
        "conv 2d, groups": _conv(2, 4, 6, 2, groups=2, stride=(2, 1), padding=(0, 1)),
        "conv 2d, depthwise": _conv(2, 4, 8, 3, groups=4, padding=1),
        "conv 2d, one by one": _conv(2, 4, 5, 1),
        "conv 2d, input left over": _conv(2, 4, 3, 2, stride=4),
        "conv 2d, as wide as the image": _conv(2, 4, 3, (6, 5)),
        "conv 3d": _conv(3, 2, 3, 2, stride=(1, 2, 1), dilation=(2, 1, 3), padding=1),
        "conv 3d, groups": _conv(3, 2, 4, (2, 1, 3), groups=2),
        "conv 2d, same": _conv(2, 4, 3, (2, 3), padding="same", dilation=2),
        "up 1d": _up(1, 4, 3, 3, stride=2, padding=1, output_padding=1),
        "up 1d, crop": _up(1, 4, 3, 3, padding=4),
        "up 2d, groups": _up(2, 4, 6, 2, groups=2, stride=(2, 1), dilation=(2, 1)),
        "up 2d, no bias": _up(2, 4, 2, 3, bias=False, padding=2, stride=2, output_padding=(1, 0)),
        "up 3d": _up(3, 2, 3, 2, stride=2, dilation=2, output_padding=1, groups=1),
    }
    for mode in ("zeros", "reflect", "replicate", "circular"):
        cases[f"conv 2d, {mode}"] = _conv(2, 4, 3, 3, padding=(1, 2), padding_mode=mode)
        cases[f"conv 1d, {mode}"] = _conv(1, 4, 2, 3, padding=2, padding_mode=mode)
    return cases


def _shaken(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Scales, shifts and running statistics that are not those of the beginning."""

    def build() -> nn.Module:
        module = factory()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(tensor + 0.3 * torch.rand_like(tensor))
        return module

    return build


def _norm(*layers: Callable[[], nn.Module], inputs: Tensor = IMAGES) -> ModelCase:
    return _vision(*(_shaken(layer) for layer in layers), inputs=inputs)


LAYERS: dict[str, ModelCase] = {
    **_convolutions(),
    "linear over sequence": ModelCase(lambda: nn.Linear(3, 2), SEQUENCE),
    "linear over sequence, no bias": ModelCase(lambda: nn.Linear(3, 2, False), SEQUENCE),
    "linear over four axes": ModelCase(lambda: nn.Linear(5, 2), IMAGES[:, :2, :2]),
    "linear, inputs not contiguous": ModelCase(
        then(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 2)), SERIES.mT.contiguous().mT
    ),
    "linear over columns": ModelCase(
        lambda: Call(lambda self, x: self.f(x.mT).mT.relu().sum(1), f=nn.Linear(4, 3)), SERIES
    ),
    "linear, time first": ModelCase(
        lambda: Call(
            lambda self, x: self.g(self.f(x.transpose(0, 1)).tanh()).sum(0),
            f=nn.Linear(3, 4),
            g=nn.Linear(4, 2),
        ),
        SEQUENCE,
    ),
    "bilinear": ModelCase(
        lambda: Call(lambda self, x: self.f(x[:, :2], x[:, 2:]), f=nn.Bilinear(2, 4, 3)), VECTORS
    ),
    "embedding": ModelCase(then(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(15, 2)), tokens(5, 5)),
    "embedding, few positions": ModelCase(
        then(nn.Embedding(7, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)), tokens(5, 2)
    ),
    "embedding, padding": ModelCase(
        then(nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)),
        tokens(5, 2, num=4),
    ),
    "embedding, repeated tokens": ModelCase(
        then(nn.Embedding(9, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), tokens(5, 4, num=2)
    ),
    "embedding, sparse": ModelCase(
        then(nn.Embedding(7, 3, sparse=True), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)),
        tokens(5, 2),
    ),
    "embedding bag": ModelCase(
        lambda: Call(
            lambda self, x: self.f(self.bag(x)), bag=nn.EmbeddingBag(7, 3), f=nn.Linear(3, 2)
        ),
        tokens(5, 4),
    ),
    "layer norm": _norm(lambda: nn.LayerNorm(5)),
    "layer norm, two axes": _norm(lambda: nn.LayerNorm([6, 5])),
    "layer norm, all axes, no bias": _norm(lambda: nn.LayerNorm([4, 6, 5], bias=False)),
    "rms norm": _norm(lambda: nn.RMSNorm(5)),
    "group norm": _norm(lambda: nn.GroupNorm(2, 4)),
    "group norm, one group": _norm(lambda: nn.GroupNorm(1, 4), inputs=SERIES),
    "instance norm 1d": _norm(lambda: nn.InstanceNorm1d(4, affine=True), inputs=SERIES),
    "instance norm 2d": _norm(lambda: nn.InstanceNorm2d(4, affine=True)),
    "instance norm, running": _norm(
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ),
    "batch norm 1d": _norm(lambda: nn.BatchNorm1d(6), inputs=VECTORS),
    "batch norm 1d, series": _norm(lambda: nn.BatchNorm1d(4), inputs=SERIES),
    "batch norm 2d": _norm(lambda: nn.Conv2d(4, 3, 2), lambda: nn.BatchNorm2d(3)),
    "batch norm 3d": _norm(lambda: nn.BatchNorm3d(2), inputs=VOLUMES),
    "prelu": _vision(lambda: nn.Conv2d(4, 3, 2), lambda: nn.PReLU(3)),
    "prelu, one slope": _vision(lambda: nn.Conv2d(4, 3, 2), nn.PReLU),
    "attention": _attention(_self_attention, batch_first=True),
    "attention, time first": _attention(_time_major_attention, bias=False),
    "attention, cross": _attention(_cross_attention, batch_first=True, kdim=3, vdim=2),
    "attention, causal": _attention(_causal_attention, batch_first=True),
    "attention, bias of keys": _attention(
        _self_attention, batch_first=True, add_bias_kv=True, add_zero_attn=True
    ),
    "attention, grouped queries": ModelCase(GroupedQueries, SEQUENCE, CROSS_ENTROPY),
    "transformer, norm first": ModelCase(lambda: Transformer(True), tokens(5, 5), CROSS_ENTROPY),
    "transformer, norm last": ModelCase(
        lambda: Transformer(False), tokens(5, 5), nn.CrossEntropyLoss(ignore_index=2)
    ),
    "lstm": _recurrent(nn.LSTM),
    "lstm, batch first": _recurrent(nn.LSTM, batch_first=True),
    "lstm, two layers, both ways": _recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, projected": _recurrent(nn.LSTM, proj_size=2, bias=False),
    "gru": _recurrent(nn.GRU, batch_first=True),
    "gru, two layers, both ways": _recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "rnn": _recurrent(nn.RNN),
    "rnn, relu, two layers": _recurrent(
        nn.RNN, nonlinearity="relu", num_layers=2, batch_first=True
    ),
    "lstm cells": _cells(nn.LSTMCell),
    "gru cells": _cells(nn.GRUCell),
    "rnn cells": _cells(nn.RNNCell),
}

all_layers = pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
