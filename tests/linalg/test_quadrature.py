"""Lanczos quadrature of a preconditioned matrix against eigendecompositions for the same probes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import both_dtypes, normal
from hcurv.linalg.quadrature import Quadrature, preconditioned_quadrature
from matrices import kernel_matrix


class Pair:
    """P = H + λI, a stand-in A + λI = (GGᵀ)⁻¹ that knows some eigenpairs, and GᵀPG = I + E.

    Args:
        size: N.
        rank: the number of leading eigenpairs that the stand-in has.
        damping: λ.
        dtype: the type that is worked in.
    """

    def __init__(
        self, size: int = 50, rank: int = 5, damping: float = 1e-2, dtype: torch.dtype | None = None
    ) -> None:
        self.size, self.dtype = size, dtype or torch.float64
        dense = kernel_matrix("gaussian", size, 2)
        self.damped = dense + damping * torch.eye(size, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(dense)
        values, vectors = values[size - rank :], vectors[:, size - rank :]
        self.stand_in = (vectors * values) @ vectors.T
        self.stand_in += damping * torch.eye(size, dtype=torch.float64)
        inner, basis = torch.linalg.eigh(self.stand_in)
        self.half = (basis * inner.rsqrt()) @ basis.T
        self.values, self.vectors = torch.linalg.eigh(self.half @ self.damped @ self.half)

    def exact(self, function: Callable[[Tensor], Tensor], probes: Tensor) -> Tensor:
        """zᵀ f(I + E) z for each probe."""
        return (self.vectors.T @ probes).square().T @ function(self.values)

    def run(self, probes: Tensor, **options: float) -> Quadrature:
        damped, stand_in = self.damped.to(self.dtype), self.stand_in.to(self.dtype)
        inverse = (self.half @ self.half).to(self.dtype)
        start = (self.half @ probes).to(self.dtype)
        return preconditioned_quadrature(
            damped.__matmul__, inverse.__matmul__, start, stand_in @ start, **options
        )


def unit_probes(size: int, count: int, seed: int = 3) -> Tensor:
    """Probes of length √N, which is what the weights add up to."""
    probes = normal(size, count, seed=seed)
    return probes * size**0.5 / probes.norm(dim=0)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logarithm": torch.log,
    "inverse": torch.reciprocal,
    "identity": lambda nodes: nodes,
    "divergence": lambda nodes: (nodes - 1 - nodes.log()) / 2,
    "share": lambda nodes: nodes / (1 + nodes),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@every_function
@pytest.mark.parametrize("rank", [0, 5, 30])
def test_quadratic_forms_are_exact_at_convergence(name: str, rank: int) -> None:
    function = FUNCTIONS[name]
    pair, probes = Pair(rank=rank), unit_probes(50, 6)
    found = pair.run(probes, tolerance=1e-9).traces(function)
    expected = pair.exact(function, probes)
    # The largest value that the sum could have is the scale of rounding.
    scale = float(function(pair.values).abs().max()) * pair.size
    assert found.shape == (6,)
    assert float((found - expected).abs().max()) < 1e-9 * scale


@both_dtypes
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
def test_errors_are_about_the_square_of_the_tolerance(tolerance: float, dtype: torch.dtype) -> None:
    pair, probes = Pair(dtype=dtype), unit_probes(50, 6)
    found = pair.run(probes, tolerance=tolerance).traces(torch.log)
    expected = pair.exact(torch.log, probes)
    scale = float(pair.values.log().abs().max()) * pair.size
    condition = float(torch.linalg.cond(pair.damped))
    rounding = 10 * torch.finfo(dtype).eps * condition
    assert float((found - expected).abs().max()) < (3 * tolerance**2 + rounding) * scale


@pytest.mark.parametrize("rank", [0, 5, 50])
@pytest.mark.parametrize("max_steps", [1, 3, 100])
def test_weights_are_positive_and_add_up_to_the_size(rank: int, max_steps: int) -> None:
    found = Pair(rank=rank).run(unit_probes(50, 4), max_steps=max_steps)
    assert float(found.weights.min()) >= 0
    assert float(found.nodes.min()) > 0
    assert torch.allclose(found.weights.sum(1), torch.full((4,), 50.0).double(), rtol=1e-12)
    assert found.nodes.shape == found.weights.shape
    assert found.nodes.shape[1] <= max_steps


def test_nodes_lie_within_the_spectrum() -> None:
    pair = Pair()
    found = pair.run(unit_probes(50, 4))
    nodes = found.nodes[found.weights > 1e-12 * pair.size]
    slack = 1e-9 * float(pair.values.max())
    assert float(nodes.min()) >= float(pair.values.min()) - slack
    assert float(nodes.max()) <= float(pair.values.max()) + slack


def test_the_mean_over_normal_probes_is_the_trace() -> None:
    pair = Pair()
    traces = pair.run(normal(50, 2000, seed=8), tolerance=1e-6).traces(torch.log)
    expected = float(pair.values.log().sum())
    error = float(traces.std()) / len(traces) ** 0.5
    assert abs(float(traces.mean()) - expected) < 4 * error
    assert 4 * error < 0.2 * abs(expected)  # otherwise this would show nothing


def test_a_perfect_stand_in_has_nothing_to_correct() -> None:
    pair = Pair(rank=50)
    found = pair.run(unit_probes(50, 4))
    assert found.nodes.shape[1] == 1
    assert float(found.traces(torch.log).abs().max()) < 1e-9 * pair.size


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_matrices(size: int) -> None:
    pair = Pair(size, rank=0)
    probes = unit_probes(size, 3)
    expected = pair.exact(torch.log, probes)
    assert torch.allclose(pair.run(probes).traces(torch.log), expected, rtol=1e-6)


def test_probes_of_zero_count_as_ones_of_a_perfect_stand_in() -> None:
    pair = Pair()
    probes = unit_probes(50, 3)
    probes[:, 1] = 0
    found = pair.run(probes).traces(torch.log)
    assert bool(torch.isfinite(found).all())
    assert float(found[1]) == 0
    assert torch.allclose(found, pair.exact(torch.log, probes), rtol=1e-4)


@every_function
def test_joined_quadratures_give_the_estimates_of_both(name: str) -> None:
    pair = Pair()
    first, second = pair.run(unit_probes(50, 2), max_steps=4), pair.run(unit_probes(50, 3, seed=7))
    assert first.nodes.shape[1] < second.nodes.shape[1]
    for left, right in ((first, second), (second, first)):
        joined = left.join(right)
        function = FUNCTIONS[name]
        expected = torch.cat([left.traces(function), right.traces(function)])
        assert torch.equal(joined.weights.sum(1) > 0, torch.ones(5).bool())
        assert torch.allclose(joined.traces(function), expected, rtol=1e-12)
