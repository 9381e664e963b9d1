"""Random networks of 3 to 80 parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from fuzz import functions
from fuzz.functions import Apply
from fuzz.randomness import integers, normal

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass
class DrawnNetwork:
    """A network and inputs.

    Attributes:
        build: makes the model anew, in single precision; always the same one.
        inputs: those of n points; floating-point ones in double precision.
        tags: what is special about it.
        forward_fn: how it is called, if not in the usual way.
        must_refuse: whether a matrix of it would be wrong, whatever it is.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs
    tags: set[str] = field(default_factory=set)
    forward_fn: Callable[[Any, Any], Tensor] | None = None
    must_refuse: bool = False


class Part(nn.Module):
    """A function of a tensor and of parameters or modules."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        return self.function(self, *args, **named)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


class _Soft(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + 0.5 * x


def _pruned(layer: nn.Module, name: str) -> nn.Module:
    prune.random_unstructured(layer, name, 0.4)
    return layer


def _triple(module: nn.Module, grads: Any, _: Any) -> Any:
    return (None if grads[0] is None else 3 * grads[0],)


def _hooked(layer: nn.Module, kind: str) -> nn.Module:
    if kind == "clamp":
        layer.register_forward_hook(lambda module, args, output: output.clamp(-0.5, 0.8))
    elif kind == "scale":
        layer.register_forward_hook(lambda module, args, output: 2 * output + 1)
    elif kind == "before":
        layer.register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    elif kind == "in place":
        layer.register_forward_hook(lambda module, args, output: output.mul_(0.5))
    elif kind == "backward":
        layer.register_full_backward_hook(_triple)
    return layer


def _batch_norm(width: int, kind: type[nn.Module]) -> nn.Module:
    norm = kind(width)
    norm.running_mean.normal_()  # type: ignore[union-attr,operator]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr,operator]
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return norm


def _layers(width: int, out: int) -> dict[str, Callable[[], nn.Module]]:
    """Layers (…, width) → (…, out) by name."""
    linear = lambda bias=True: nn.Linear(width, out, bias=bias)  # noqa: E731
    return {
        "linear": linear,
        "linear without bias": lambda: linear(False),
        "weight norm": lambda: parametrizations.weight_norm(linear()),
        "spectral norm": lambda: parametrizations.spectral_norm(linear()),
        "computed bias": lambda: _parametrized(linear(), "bias"),
        "computed weight": lambda: _parametrized(linear(), "weight"),
        "pruned weight": lambda: _pruned(linear(), "weight"),
        "pruned bias": lambda: _pruned(linear(), "bias"),
        "hook clamp": lambda: _hooked(linear(), "clamp"),
        "hook scale": lambda: _hooked(linear(), "scale"),
        "hook before": lambda: _hooked(linear(), "before"),
        "hook in place": lambda: _hooked(linear(), "in place"),
        "hook backward": lambda: _hooked(linear(), "backward"),
        "low rank": lambda: Part(
            lambda self, x: x @ self.a @ self.b, a=_parameter(width, 1), b=_parameter(1, out)
        ),
        "bilinear": lambda: Part(lambda self, x: self.f(x, x), f=nn.Bilinear(width, width, out)),
        "matrix on the right": lambda: Part(lambda self, x: x @ self.w, w=_parameter(width, out)),
        "einsum": lambda: Part(
            lambda self, x: torch.einsum("...i,io->...o", x, self.w), w=_parameter(width, out)
        ),
        "sliced weight": lambda: Part(
            lambda self, x: functional.linear(x, self.w[:out, :width]),
            w=_parameter(out + 1, width + 1),
        ),
        "expanded weight": lambda: Part(
            lambda self, x: functional.linear(x, self.w.expand(out, width)), w=_parameter(1, width)
        ),
        "own function": lambda: Part(
            lambda self, x: functions.Gradient.apply(self.f(x), "scaled"), f=linear()
        ),
    }


def _parametrized(layer: nn.Module, name: str) -> nn.Module:
    parametrize.register_parametrization(layer, name, _Soft())
    return layer


def _between(width: int) -> dict[str, Callable[[], nn.Module]]:
    """Layers (…, width) → (…, width) with few parameters."""
    return {
        "layer norm": lambda: _scrambled(nn.LayerNorm(width)),
        "prelu": nn.PReLU,
        "scale": lambda: Part(lambda self, x: self.a * x + self.b, a=_parameter(), b=_parameter(1)),
        "scale per unit": lambda: Part(lambda self, x: x * self.a, a=_parameter(width)),
        "twice": lambda: Part(lambda self, x: self.f(self.f(x).tanh()), f=nn.Linear(width, width)),
        "transposed too": lambda: Part(
            lambda self, x: functional.linear((x @ self.w).tanh(), self.w),
            w=_parameter(width, width),
        ),
        "residual": lambda: Part(lambda self, x: x + self.f(x).tanh(), f=nn.Linear(width, width)),
        "gate": lambda: Part(lambda self, x: x * self.f(x).sigmoid(), f=nn.Linear(width, 1)),
        "unused": lambda: Part(lambda self, x: x, idle=_parameter(2)),
        "exponential": lambda: Part(lambda self, x: x * self.s.exp(), s=_parameter(1, 1)),
    }


def _scrambled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def _function(rng: random.Random, tags: set[str], odd: float) -> nn.Module:
    """A function between layers, as a function or as a module."""
    if rng.random() < odd:
        name = rng.choice(list(functions.ODD))
        tags.add(name)
        return Apply(functions.ODD[name])
    if rng.random() < 0.3:
        kind = rng.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.Dropout, nn.ELU])
        if kind in (nn.ReLU, nn.SiLU, nn.ELU) and rng.random() < 0.3:
            tags.add("in-place module")
            return kind(inplace=True)
        return kind()
    return Apply(functions.PLAIN[rng.choice(list(functions.PLAIN))])


def _vectors(rng: random.Random, width: int, odd: float, tags: set[str]) -> list[nn.Module]:
    """Layers from (…, width) to (…, something), in a random order."""
    layers: list[nn.Module] = []
    for depth in range(rng.choice([1, 1, 2, 2, 2, 3])):
        if depth:
            layers.append(_function(rng, tags, odd))
        out = rng.randint(1, 4)
        kinds = _layers(width, out)
        name = rng.choice(list(kinds)) if rng.random() < odd else "linear"
        if name == "linear" and rng.random() < 0.25:
            name = "linear without bias"
        if name not in ("linear", "linear without bias"):
            tags.add(name)
        layers.append(kinds[name]())
        width = out
        if rng.random() < odd:
            more = _between(width)
            name = rng.choice(list(more))
            tags.add(name)
            layers.append(more[name]())
    if rng.random() < 0.2:
        layers.append(_function(rng, tags, odd))
    return layers


def draw_chain(rng: random.Random, n: int, odd: float = 0.0) -> DrawnNetwork:
    """A chain of Linear layers; odd things with some probability in each place."""
    width = rng.randint(1, 5)
    inputs = normal(rng, n, width)
    seed, tags = rng.getrandbits(31), {"odd chain" if odd else "chain"}
    choices = rng.getrandbits(31)

    def build() -> nn.Module:
        return nn.Sequential(*_vectors(random.Random(choices), width, odd, tags))

    return DrawnNetwork(_seeded(build, seed), inputs, tags)


def draw_wrong(rng: random.Random, n: int) -> DrawnNetwork:
    """A chain in which points influence each other or that is random: to be refused."""
    width, out = rng.randint(1, 4), rng.randint(1, 3)
    name = rng.choice(list(functions.WRONG))
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(width, 3), nn.Tanh(), Apply(functions.WRONG[name]), nn.Linear(3, out)
    )
    # A single point cannot be influenced by others.
    must = n > 1 or name in ("dropout", "noise")
    return DrawnNetwork(
        _seeded(build, rng.getrandbits(31)), normal(rng, n, width), {name}, must_refuse=must
    )


def _attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.f(x).chunk(3, 2)
    return torch.softmax(q @ k.mT, 2) @ v


def _sequence_steps(width: int, length: int) -> dict[str, Callable[[], nn.Module]]:
    """Layers (n, length, width) → (n, length, width)."""
    return {
        "attention": lambda: Part(_attention, f=nn.Linear(width, 3 * width)),
        "multi-head attention": lambda: Part(
            lambda self, x: self.f(x, x, x)[0], f=nn.MultiheadAttention(width, 1, batch_first=True)
        ),
        "sequence linear": lambda: nn.Linear(width, width),
        "sequence norm": lambda: _scrambled(nn.LayerNorm(width)),
        "positions": lambda: Part(lambda self, x: x + self.p, p=_parameter(length, width)),
        "convolution 1d": lambda: Part(
            lambda self, x: self.f(x.mT).mT, f=nn.Conv1d(width, width, 3, padding=1)
        ),
        "recurrent": lambda: Part(
            lambda self, x: self.f(x)[0], f=nn.RNN(width, width, batch_first=True)
        ),
        "gru": lambda: Part(lambda self, x: self.f(x)[0], f=nn.GRU(width, width, batch_first=True)),
        "lstm": lambda: Part(
            lambda self, x: self.f(x.transpose(0, 1))[0].transpose(0, 1), f=nn.LSTM(width, width)
        ),
        "time mixing": lambda: Part(
            lambda self, x: torch.einsum("st,btd->bsd", self.w, x), w=_parameter(length, length)
        ),
        "feed forward": lambda: Part(
            lambda self, x: x + self.g(functional.gelu(self.f(x))),
            f=nn.Linear(width, 3),
            g=nn.Linear(3, width),
        ),
    }


def draw_sequence(rng: random.Random, n: int) -> DrawnNetwork:
    """A network of sequences of vectors or of words."""
    width, length, words = rng.randint(1, 2), rng.randint(2, 4), rng.random() < 0.35
    tags: set[str] = {"sequence"}
    inputs = integers(rng, 5, n, length) if words else normal(rng, n, length, width)
    names = [rng.choice(list(_sequence_steps(1, 1))) for _ in range(rng.randint(1, 2))]
    tied = words and rng.random() < 0.4
    end = rng.choice(["mean", "last", "flat", "all"])
    out, seed = rng.randint(1, 3), rng.getrandbits(31)
    padding = rng.choice([None, 0]) if words else None
    tags |= {*names, f"end: {end}"}
    tags |= {name for name, is_so in (("tied", tied), ("words", words)) if is_so}
    choices = rng.getrandbits(31)

    def build() -> nn.Module:
        again = random.Random(choices)
        parts: list[nn.Module] = []
        embedding = nn.Embedding(5, width, padding_idx=padding) if words else None
        if embedding is not None:
            parts.append(embedding)
        parts += [_sequence_steps(width, length)[name]() for name in names]
        parts.append(_function(again, tags, 0.1))
        if end == "mean":
            parts.append(Apply(lambda x: x.mean(1)))
        elif end == "last":
            parts.append(Apply(lambda x: x[:, -1]))
        elif end == "flat":
            parts.append(nn.Flatten())
        if tied and embedding is not None and end != "flat":
            head = nn.Linear(width, 5, bias=False)
            head.weight = embedding.weight
            parts.append(head)
        else:
            parts.append(nn.Linear(width * (length if end == "flat" else 1), out))
        if end == "all":
            parts.append(Apply(lambda x: x.mT))  # classes lie on axis 1
        return nn.Sequential(*parts)

    return DrawnNetwork(_seeded(build, seed), inputs, tags)


def _image_steps(channels: int, out: int) -> dict[str, Callable[[], nn.Module]]:
    """Layers (n, channels, h, w) → (n, out, h', w'), h' ≥ 2."""
    return {
        "convolution": lambda: nn.Conv2d(channels, out, 2),
        "convolution without bias": lambda: nn.Conv2d(channels, out, 2, bias=False),
        "strided": lambda: nn.Conv2d(channels, out, 2, stride=(1, 2), padding=1),
        "dilated": lambda: nn.Conv2d(channels, out, 2, dilation=(1, 2), padding=(0, 1)),
        "padded in circles": lambda: nn.Conv2d(
            channels, out, 3, padding=1, padding_mode="circular"
        ),
        "padded by reflection": lambda: nn.Conv2d(
            channels, out, 3, padding=1, padding_mode="reflect"
        ),
        "grouped": lambda: nn.Conv2d(channels, channels * out, 2, groups=channels),
        "transposed convolution": lambda: nn.ConvTranspose2d(channels, out, 2),
        "strided transposed": lambda: nn.ConvTranspose2d(
            channels, out, 2, stride=2, output_padding=1
        ),
        "pruned convolution": lambda: _pruned(nn.Conv2d(channels, out, 2), "weight"),
        "convolution with weight norm": lambda: parametrizations.weight_norm(
            nn.Conv2d(channels, out, 2)
        ),
        "unfolded": lambda: Part(
            lambda self, x: functional.linear(x.movedim(1, -1), self.w).movedim(-1, 1),
            w=_parameter(out, channels),
        ),
    }


def _image_norms(channels: int) -> dict[str, Callable[[], nn.Module]]:
    return {
        "batch norm": lambda: _batch_norm(channels, nn.BatchNorm2d),
        # The backward pass of torch's GroupNorm ends the process (it writes to address 0) if its
        # inputs are "channels last" and need no gradient. That is so for loss.backward() as well.
        "group norm": lambda: Part(
            lambda self, x: self.f(x.clone(memory_format=torch.contiguous_format)),
            f=_scrambled(nn.GroupNorm(1, channels)),
        ),
        "instance norm": lambda: _scrambled(nn.InstanceNorm2d(channels, affine=True)),
        "image scale": lambda: Part(lambda self, x: x * self.a, a=_parameter(channels, 1, 1)),
        "pooling": lambda: nn.AvgPool2d(2, 1),
        "largest": lambda: nn.MaxPool2d(2, 1),
        "dropout of channels": lambda: nn.Dropout2d(0.5),
        "pixels shuffled": lambda: Apply(lambda x: x.transpose(2, 3)),
    }


def draw_images(rng: random.Random, n: int) -> DrawnNetwork:
    """A network of convolutions."""
    channels, size = rng.randint(1, 2), rng.randint(4, 5)
    inputs = normal(rng, n, channels, size, size)
    step = rng.choice(list(_image_steps(1, 1)))
    norm = rng.choice(list(_image_norms(1))) if rng.random() < 0.6 else None
    end = rng.choice(["mean", "flat", "all", "all"])
    middle, out, seed = rng.randint(1, 2), rng.randint(1, 3), rng.getrandbits(31)
    tags = {"images", step, f"end: {end}"} | ({norm} if norm else set())
    choices = rng.getrandbits(31)

    def build() -> nn.Module:
        again = random.Random(choices)
        parts = [_image_steps(channels, middle)[step]()]
        with torch.no_grad():
            found = parts[0](torch.zeros(1, channels, size, size)).shape
        if norm is not None:
            parts.append(_image_norms(found[1])[norm]())
        parts.append(_function(again, tags, 0.1))
        if end == "mean":
            parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(found[1], out)]
        elif end == "flat":
            with torch.no_grad():
                width = nn.Sequential(*parts).eval()(torch.zeros(1, channels, size, size)).numel()
            parts += [nn.Flatten(), nn.Linear(width, 1)]
        else:
            parts.append(Apply(lambda x: x[:, :, :2, 1:3]))
        return nn.Sequential(*parts)

    return DrawnNetwork(_seeded(build, seed), inputs, tags)


def draw_inputs_of_several_kinds(rng: random.Random, n: int) -> DrawnNetwork:
    """A network with two inputs, named ones, or a forward function of its own."""
    kind = rng.choice(["two inputs", "named inputs", "own forward", "experts", "single points"])
    x, words, seed = normal(rng, n, 3), integers(rng, 4, n, 2), rng.getrandbits(31)
    out = rng.randint(1, 3)
    if kind in ("two inputs", "named inputs"):
        build: Callable[[], nn.Module] = lambda: Part(  # noqa: E731
            lambda self, x, words: self.f(x).tanh() + self.e(words).sum(1),
            f=nn.Linear(3, out),
            e=nn.Embedding(4, out),
        )
        inputs: Inputs = (x, words) if kind == "two inputs" else {"words": words, "x": x}
        return DrawnNetwork(_seeded(build, seed), inputs, {kind})
    if kind == "own forward":
        return DrawnNetwork(
            _seeded(lambda: nn.Linear(3, out), seed),
            x,
            {kind},
            lambda model, inputs: model(inputs).tanh() * model(inputs**2),
        )
    if kind == "single points":  # a loop over points
        build = lambda: Part(  # noqa: E731
            lambda self, x: torch.stack([self.f(point).tanh() for point in x]), f=nn.Linear(3, out)
        )
        return DrawnNetwork(_seeded(build, seed), x, {kind})

    def routed(self: Any, x: Tensor) -> Tensor:
        result = x.new_zeros(len(x), out)
        for expert, chosen in ((self.a, x[:, 0] > 0), (self.b, x[:, 0] <= 0)):
            result[chosen] = expert(x[chosen])
        return result

    build = lambda: Part(routed, a=nn.Linear(3, out), b=nn.Linear(3, out))  # noqa: E731
    return DrawnNetwork(_seeded(build, seed), x, {kind})


def _seeded(build: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    """Build a model in evaluation mode, without touching the global random state."""

    def run() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build().eval()

    return run


def draw_network(rng: random.Random, n: int) -> DrawnNetwork:
    """Any of these networks, with some parameters frozen now and then."""
    chance = rng.random()
    if chance < 0.3:
        network = draw_chain(rng, n)
    elif chance < 0.55:
        network = draw_chain(rng, n, 0.4)
    elif chance < 0.7:
        network = draw_sequence(rng, n)
    elif chance < 0.85:
        network = draw_images(rng, n)
    elif chance < 0.95:
        network = draw_inputs_of_several_kinds(rng, n)
    else:
        network = draw_wrong(rng, n)
    if rng.random() < 0.25:
        network.build = _frozen(network.build, rng.getrandbits(31), rng.choice([0.3, 0.7, 1.0]))
        network.tags.add("frozen")
    return network


def _frozen(build: Callable[[], nn.Module], seed: int, share: float) -> Callable[[], nn.Module]:
    def run() -> nn.Module:
        model, chosen = build(), random.Random(seed)
        for parameter in model.parameters():
            if chosen.random() < share:
                parameter.requires_grad_(False)
        return model

    return run
