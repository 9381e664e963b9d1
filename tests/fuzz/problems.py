"""A random model, loss and data together, the matrix that the package makes of them, the truth."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hcurv
from fuzz.criteria import DrawnLoss, draw_loss, with_end
from fuzz.networks import DrawnNetwork, Inputs, draw_network
from fuzz.outcomes import Refused, WrongError, check_close, size_of
from fuzz.randomness import often
from fuzz.truth import Truth, plain_state


def mapped(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """A function of every tensor of the inputs."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def called(model: nn.Module, inputs: Inputs, forward_fn: Any) -> Tensor:
    if forward_fn is not None:
        return forward_fn(model, inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


class Reused:
    """A loader that writes every batch into the same memory."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int) -> None:
        self._inputs, self._targets, self._size = inputs, targets, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._inputs[: self._size].clone(), self._targets[: self._size].clone()
        for start in range(0, len(self._inputs), self._size):
            count = min(self._size, len(self._inputs) - start)
            x[:count] = self._inputs[start : start + count]
            y[:count] = self._targets[start : start + count]
            yield x[:count], y[:count]


def _batched(inputs: Inputs, targets: Tensor, sizes: list[int]) -> list[tuple[Inputs, Tensor]]:
    """Batches of the given sizes; the last one has the rest."""
    batches, start, n = [], 0, len(targets)
    for size in [*sizes, n]:
        part = slice(start, min(start + size, n))
        if start < n or size == 0:
            batches.append((mapped(lambda tensor: tensor[part], inputs), targets[part]))  # noqa: B023
        start = min(start + size, n)
    return batches


@dataclass
class Problem:
    """What a case is about.

    Attributes:
        network, drawn: the model and the loss.
        dtype: the precision of the model.
        data: what is passed to the package.
        inputs, targets: the same, in double precision.
        options: of `GaussNewton`.
        tags: what is special about it.
        must_refuse: whether no matrix of it can be right.
        ambient: the state of torch that the package is called in.
    """

    network: DrawnNetwork
    drawn: DrawnLoss
    dtype: torch.dtype
    data: Any
    inputs: Inputs
    targets: Tensor
    options: dict[str, Any]
    tags: set[str]
    model: nn.Module
    must_refuse: bool = False
    ambient: str = "plain"
    has_targets: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def truth(self, dtype: torch.dtype = torch.float64) -> Truth:
        """The dense oracle."""
        with plain_state():
            model = with_end(self.network.build, self.drawn.before).to(dtype)
            inputs = mapped(lambda tensor: as_type(tensor, dtype), self.inputs)
        targets, value, hessian = self.targets, self.drawn.value, self.drawn.root_hessian
        # The value of the loss is taken in double precision, whatever the model's is.
        return Truth(
            model,
            lambda own: called(own, inputs, self.network.forward_fn).double(),
            value,
            as_type(targets, torch.float64),
            hessian,
        )

    @property
    def is_exact(self) -> bool:
        return not self.options.get("num_samples") and self.options.get("fisher") != "empirical"

    def build(self) -> hcurv.GaussNewton:
        return hcurv.GaussNewton(self.model, self.drawn.loss, self.data, **self.options)  # type: ignore[arg-type]


@contextmanager
def ambient(kind: str) -> Iterator[None]:
    """A state of torch that users may be in."""
    if kind == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    elif kind == "inference":
        with torch.inference_mode():
            yield
    elif kind == "no grad":
        with torch.no_grad():
            yield
    elif kind in ("float64 default", "float16 default"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if kind == "float64 default" else torch.float16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
    elif kind == "matmul precision":
        before_precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before_precision)
    else:
        yield


AMBIENTS = ["autocast", "inference", "no grad", "float64 default", "float16 default"]
AMBIENTS.append("matmul precision")


def draw_problem(rng: random.Random) -> Problem:
    """A random problem."""
    n = rng.choice([1, 2, 3, 3, 4, 5, 6, 8, 11])
    network = draw_network(rng, n)
    dtype = torch.float32 if rng.random() < 0.4 else torch.float64
    scale = often(rng, 1.0, [1e-20, 1e-8, 1e-3, 1e3, 1e8, 1e19], 0.06)
    tags = {"float32" if dtype == torch.float32 else "float64"}
    if scale != 1:
        tags.add("extreme scale")
        network.inputs = mapped(
            lambda tensor: (
                (tensor * scale).float().double() if tensor.is_floating_point() else tensor
            ),
            network.inputs,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first = network.build().double()
            shape = tuple(called(first, network.inputs, network.forward_fn).shape)
    drawn = draw_loss(rng, shape)
    targets = drawn.targets.float().double() if drawn.targets.is_floating_point() else drawn.targets
    options: dict[str, Any] = {"forward_fn": network.forward_fn}
    if rng.random() < 0.1:
        options["fisher"] = "empirical"
        tags.add("empirical")
    elif rng.random() < 0.05:
        options["num_samples"] = rng.choice([1, 3])
        tags.add("samples")
    if rng.random() < 0.2:
        options["workspace"] = rng.choice([2**16, 2**20])
    if rng.random() < 0.3:
        options["seed"] = rng.choice([1, 2**31 - 1, 2**63 - 1])
    problem = Problem(
        network,
        drawn,
        dtype,
        None,
        network.inputs,
        targets,
        options,
        tags | network.tags | drawn.tags,
        with_end(network.build, drawn.before).to(dtype),
        network.must_refuse or drawn.must_refuse,
        often(rng, "plain", AMBIENTS, 0.06),
    )
    if problem.ambient != "plain":
        problem.tags.add(problem.ambient)
    _give_data(rng, problem)
    return problem


def _give_data(rng: random.Random, problem: Problem) -> None:
    """Choose the form in which the data is passed, and now and then spoil it."""
    dtype = problem.dtype
    x = mapped(lambda tensor: as_type(tensor, dtype), problem.inputs)
    y = as_type(problem.targets, dtype)
    n = len(y)
    kinds = ["pair"] * 6 + ["batches"] * 4 + ["loader"] * 2 + ["reused"]
    kind = often(rng, rng.choice(kinds), ["list", "odd", "spoiled"], 0.16)
    if problem.network.must_refuse:
        kind = "pair"  # in batches of one point, points cannot influence each other
    whole = isinstance(x, Tensor)
    if kind in ("loader", "reused", "list") and not whole:
        kind = "batches"
    sizes = [rng.randint(0, 3) for _ in range(rng.randint(1, 3))]
    if kind == "batches":
        problem.data = _batched(x, y, sizes)
        if all(len(t) == 0 for _, t in problem.data):
            problem.data = [(x, y)]
    elif kind == "loader":
        problem.data = DataLoader(
            TensorDataset(x, y), batch_size=rng.randint(1, 4), generator=torch.Generator()
        )
    elif kind == "reused":
        problem.data = Reused(x, y, rng.randint(1, 4))
    elif kind == "list":
        problem.data = [x, y]
    elif kind == "odd":
        kind, problem.data = _odd_form(rng, problem, x, y)
    elif kind == "spoiled":
        kind, problem.data = _spoiled(rng, problem, x, y)
        problem.must_refuse = kind != "numpy"  # arrays are taken for tensors
    else:
        problem.data = (x, y)
    problem.tags.add(f"data: {kind}")
    problem.extra["n"] = n


def _odd_form(rng: random.Random, problem: Problem, x: Any, y: Tensor) -> tuple[str, Any]:
    """Data that means the same as the pair, in an unusual form."""
    kind = rng.choice(["inputs alone", "strided", "requires grad", "small labels", "expanded"])
    if kind == "inputs alone" and not bool((y == -100).any()):  # labels to ignore must be known
        problem.has_targets = False
        return kind, (x if not isinstance(x, tuple) else [(x,)])
    if kind == "strided" and isinstance(x, Tensor):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return kind, (wide[..., ::2], y)
    if kind == "requires grad" and isinstance(x, Tensor) and x.is_floating_point():
        return kind, (x.clone().requires_grad_(), y)
    if kind == "small labels" and not y.is_floating_point():
        smaller = rng.choice([torch.int8, torch.int16, torch.int32])
        if bool((y >= 0).all()):
            smaller = rng.choice([torch.uint8, smaller])
        return kind, (x, y.to(smaller))
    if kind == "expanded" and isinstance(x, Tensor):
        problem.inputs = mapped(lambda t: t[:1].expand_as(t), problem.inputs)
        return kind, (x[:1].expand_as(x), y)
    return "pair", (x, y)


def _spoiled(rng: random.Random, problem: Problem, x: Any, y: Tensor) -> tuple[str, Any]:
    """Data that nobody can make sense of; or arrays."""
    kinds = ["generator", "empty", "numpy", "missing targets", "wrong type", "none", "string"]
    if isinstance(x, Tensor) and x.is_floating_point():
        kinds += ["nan", "infinite", "other float", "sparse", "meta", "complex", "scalar"]
    kind = rng.choice(kinds)
    n = len(y)
    if kind == "generator":
        return kind, iter([(x, y)])
    if kind == "empty":
        return kind, rng.choice([[], (mapped(lambda t: t[:0], x), y[:0])])
    if kind == "numpy":
        return kind, (mapped(lambda t: t.numpy(), x), y.numpy())  # type: ignore[arg-type,return-value]
    if kind == "missing targets":
        return kind, (x, torch.cat([y, y[:1]]) if rng.random() < 0.5 else y[: n - 1])
    if kind == "wrong type":
        return kind, (x, y.to(torch.complex64))
    if kind == "none":
        return kind, rng.choice([None, (x, None, y), [None], 3, {}])
    if kind == "string":
        return kind, "data"
    if kind in ("nan", "infinite"):
        spoiled = x.clone()
        spoiled.view(-1)[rng.randrange(x.numel())] = float("nan" if kind == "nan" else "inf")
        return kind, (spoiled, y)
    if kind == "other float":
        other = rng.choice([torch.float16, torch.bfloat16])
        return kind, (x.to(other), y)
    if kind == "sparse":
        return kind, (x.to_sparse(), y)
    if kind == "meta":
        return kind, (x.to("meta"), y)
    if kind == "complex":
        return kind, (x.to(torch.complex64), y)
    return kind, (x.sum(), y)


@dataclass
class Made:
    """A matrix of the package beside the truth.

    Attributes:
        H: the matrix.
        truth: the oracle.
        matrix: its dense matrix, that of the options.
        tolerance: the relative error that rounding explains: 1e-9 in double precision; in single
            precision 3e-5 and 30 times the error that automatic differentiation itself makes, but
            not more than 0.1. Where that error alone is larger, single precision has no digits of
            the matrix, and the package may be three times as wrong as automatic differentiation.
    """

    problem: Problem
    H: hcurv.GaussNewton
    truth: Truth
    matrix: Tensor
    tolerance: float


def make(problem: Problem) -> Made:
    """Build the matrix and compare it with the truth.

    Raises:
        WrongError: it is wrong, or something that has no matrix was not refused.
    """
    from fuzz.outcomes import refusals

    with refusals():
        H = problem.build()
    truth = problem.truth()
    if problem.must_refuse:
        # Where all units are saturated, points that could influence each other do not.
        error = float((H.to_dense().double() - truth.matrix).abs().max())
        if error > 1e-3 * float(truth.matrix.abs().max()):
            raise WrongError("this has no matrix, but was not refused")
        raise Refused("points do not influence each other at these inputs")
    tolerance, share = 1e-9, 0.0
    expected = rough = _wanted(problem, truth, H)
    if problem.dtype == torch.float32:
        rough = _wanted(problem, problem.truth(torch.float32), H)
        share = float(size_of(rough - expected) / size_of(expected)) if size_of(expected) else 0.0
        tolerance = min(0.1, 3e-5 + 30 * share) if share == share else 0.1
        if "probabilities" in problem.tags and share > 0.1:
            expected = rough  # probabilities that single precision rounds to 0 or 1
    with refusals():
        dense = H.to_dense()
    if problem.options.get("num_samples"):
        expected = dense.double()  # random, but everything else must agree with it
    if not bool(torch.isfinite(expected).all()):
        raise WrongError("the true matrix is not finite, but this was not refused")
    rounding = (rough - expected).abs()
    scale = float(size_of(expected))
    if share > 0.1:
        scale += 3 / tolerance * float(size_of(rounding))
    if problem.tags & {"ce", "bce"}:
        # Where a probability is near 1, the truth has few digits of 1 − p, or none.
        most = float(size_of(truth.jacobian)) ** 2 * abs(H.loss_scale)
        scale, rounding = max(scale, 1e-4 * most), rounding + 1e-13 * most
    check_close(dense, expected, tolerance, "dense matrix", scale)
    _check_parts(truth, dense.double(), expected, tolerance, rounding)
    if scale > float(size_of(expected)):
        expected = dense.double()  # more digits than the truth has; the rest must agree with it
    return Made(problem, H, truth, expected, tolerance)


def _wanted(problem: Problem, truth: Truth, matrix: hcurv.GaussNewton) -> Tensor:
    """The matrix that the options ask for."""
    if problem.options.get("fisher") != "empirical":
        return truth.matrix
    gradients = truth.point_gradients
    return gradients.T @ gradients / matrix.loss_scale


def _check_parts(
    truth: Truth, found: Tensor, expected: Tensor, tolerance: float, rounding: Tensor
) -> None:
    """Compare the block of every two parameters, scaled by its own diagonal blocks."""
    ends = torch.tensor([0] + [p.numel() for p in truth.parameters]).cumsum(0).tolist()
    parts = [slice(*pair) for pair in pairwise(ends)]
    sizes = [float(size_of(expected[s, s])) ** 0.5 for s in parts]
    floor = 1e-3 * float(size_of(expected)) ** 0.5
    for first, own in zip(parts, sizes, strict=True):
        for second, other in zip(parts, sizes, strict=True):
            scale = max(own, floor) * max(other, floor)
            scale += 3 / tolerance * float(size_of(rounding[first, second]))
            what = f"block of {own:.1g} x {other:.1g}"
            check_close(found[first, second], expected[first, second], 10 * tolerance, what, scale)
