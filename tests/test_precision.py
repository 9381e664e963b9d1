"""Results have the precision of their operands, whatever was switched on around the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded

INPUTS, LABELS = normal(60, 9).float(), labels(60, 4)


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4)).float())


def convolution() -> nn.Module:
    parts = lambda: (nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))  # noqa: E731
    return seeded(lambda: nn.Sequential(nn.Unflatten(1, (1, 9)), *parts()).float())


MODEL, CONVOLUTION = model(), convolution()


def matrix(network: nn.Module = MODEL) -> hcurv.GaussNewton:
    return hcurv.GaussNewton(network, nn.CrossEntropyLoss(), (INPUTS, LABELS))


def vector(operator: Any) -> Tensor:
    return normal(operator.shape[0]).float()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


USES: dict[str, Callable[[], Callable[[], Any]]] = {
    "read a chain": lambda: lambda: matrix().to_dense(),
    "read a convolution": lambda: lambda: matrix(CONVOLUTION).to_dense(),
    "product": lambda: (lambda H: lambda: H @ vector(H))(matrix()),
    "block": lambda: (lambda H: lambda: H[:50, 20:])(matrix()),
    "diagonal": lambda: matrix(CONVOLUTION).diagonal,
    "gradient": lambda: matrix(CONVOLUTION).gradient,
    "kernel": lambda: (lambda H: lambda: H.kernel().to_dense())(matrix()),
    "jacobian": lambda: (lambda H: lambda: H.jacobian(INPUTS) @ vector(H))(matrix()),
    "solve": lambda: (lambda F: lambda: F.solve(vector(F)))(matrix().factorize(0.1)),
    "log-determinant": lambda: matrix().factorize(0.1).logdet,
    "sample": lambda: (lambda F: lambda: F.sample(3, generator()))(matrix().factorize(0.1)),
    "compress": lambda: (lambda H: lambda: hcurv.compress(H, tolerance=1e-5).to_dense())(matrix()),
    "sample of a compressed matrix": lambda: (lambda F: lambda: F.sample(3, generator()))(
        hcurv.compress(matrix(), tolerance=1e-5).factorize(0.1)
    ),
    "kfac": lambda: (
        lambda: hcurv.baselines.KFAC(MODEL, nn.CrossEntropyLoss(), (INPUTS, LABELS)).to_dense()
    ),
    "cg": lambda: (
        lambda H: (
            lambda: hcurv.cg(H + hcurv.Diagonal(torch.ones_like(vector(H))), vector(H)).solution
        )
    )(matrix()),
    "posterior": lambda: (
        lambda: (
            hcurv.laplace(MODEL, nn.CrossEntropyLoss(), (INPUTS, LABELS))
            .predict(INPUTS[:5])
            .probabilities
        )
    ),
}


@contextlib.contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "half by default": lambda: _default_type(torch.float16),
    "bfloat16 by default": lambda: _default_type(torch.bfloat16),
    "products of medium precision": lambda: _matmul_precision("medium"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
@pytest.mark.parametrize("prepare", USES.values(), ids=USES.keys())
def test_results_do_not_depend_on_what_is_around(
    prepare: Callable[[], Callable[[], Any]], surroundings: Callable[[], Any]
) -> None:
    use = prepare()
    expected = use()
    with surroundings():
        found = use()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_what_is_around_is_restored() -> None:
    with torch.autocast("cpu"), _matmul_precision("medium"), _default_type(torch.float16):
        matrix()
        with pytest.raises(TypeError):
            matrix() @ "nothing"  # type: ignore[operator]
        state = torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
        assert (*state, torch.get_float32_matmul_precision()) == (True, torch.float16, "medium")
