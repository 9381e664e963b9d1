"""A basis that grows: eigenvalues, factors and remainders against dense eigenpairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import both_dtypes, normal
from hcurv.linalg.growing_nystrom import GrowingNystrom


def decaying(size: int, rank: int, power: float = 1.5) -> tuple[Tensor, Tensor]:
    """A positive semi-definite matrix of some rank, and its eigenvalues, descending."""
    vectors = torch.linalg.qr(normal(size, size)).Q[:, :rank]
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -power
    return vectors * values @ vectors.T, values


def columns(size: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, count, dtype=torch.float64, generator=generator).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@both_dtypes
@pytest.mark.parametrize("by_root", [False, True])
def test_grows_to_the_best_of_its_rank(dtype: torch.dtype, by_root: bool) -> None:
    """Truncated, it is nearly the best; what it leaves is positive semi-definite."""
    dense, values = decaying(300, 120)
    matrix = dense.to(dtype)
    spectrum, vectors = torch.linalg.eigh(dense)
    root = (spectrum.clamp(min=0).sqrt()[:, None] * vectors.T)[-150:].to(dtype)
    sketch = GrowingNystrom(root.T.__matmul__ if by_root else matrix.__matmul__, by_root)
    for step, count in enumerate((8, 20, 40)):
        image = matrix @ columns(300, count, dtype, step)
        assert sketch.extend(root @ image if by_root else image) == count
    assert sketch.width == 68
    factor = sketch.factor(50)
    best = float(values[50:].norm() / values.norm())
    assert error(factor @ factor.T, dense) < 1.1 * best
    rounding = torch.finfo(dtype).eps
    whole = sketch.factor(sketch.values.numel()).double()
    assert float(torch.linalg.eigvalsh(dense - whole @ whole.T)[0]) > -20 * rounding
    assert torch.allclose(sketch.values[:10], values[:10], rtol=1e-2)
    squares = factor.double().square().sum(0)
    assert torch.allclose(squares, sketch.values[:50], rtol=1e-3)
    probe = columns(300, 3, dtype, 9)
    left = sketch.remainder(probe, matrix @ probe)
    assert error(left, (dense - whole @ whole.T) @ probe.double()) < 1e4 * rounding
    index = torch.tensor([[5, 7], [0, 299]])
    assert torch.allclose(
        sketch.rows(lambda block: block[index], 50), factor[index], atol=100 * rounding
    )
    assert torch.allclose(sketch.mix(probe, 50), factor.T @ probe, atol=300 * rounding)


@both_dtypes
def test_stops_at_the_rank_of_the_matrix(dtype: torch.dtype) -> None:
    dense, _ = decaying(120, 30)
    matrix = dense.to(dtype)
    sketch = GrowingNystrom(matrix.__matmul__)
    sketch.extend(matrix @ columns(120, 20, dtype, 0))
    added = sketch.extend(matrix @ columns(120, 40, dtype, 1))
    assert 10 <= added <= 14
    whole = sketch.factor(sketch.values.numel()).double()
    assert error(whole @ whole.T, dense) < 100 * torch.finfo(dtype).eps
    assert sketch.extend(torch.zeros(120, 3, dtype=dtype)) == 0


@both_dtypes
def test_images_are_the_directions_of_a_krylov_space(dtype: torch.dtype) -> None:
    """One product for each direction, and as good as random directions that take two."""
    dense, values = decaying(300, 200, 1.0)
    matrix = dense.to(dtype)
    krylov, random = (GrowingNystrom(matrix.__matmul__) for _ in range(2))
    krylov.extend(matrix @ columns(300, 20, dtype, 0))
    assert krylov.num_images == 20
    while krylov.width < 100:
        krylov.extend(krylov.images(100 - krylov.width))
    random.extend(matrix @ columns(300, 100, dtype, 0))
    best = float(values[70:].norm() / values.norm())
    for sketch in (krylov, random):
        factor = sketch.factor(70)
        assert error(factor @ factor.T, dense) < 1.1 * best


def test_all_images_can_be_given_out_once() -> None:
    dense, _ = decaying(40, 10)
    sketch = GrowingNystrom(dense.__matmul__)
    sketch.extend(dense @ normal(40, 4))
    assert sketch.images(3).shape == (40, 3)
    sketch.extend(dense @ normal(40, 2, seed=5))
    assert sketch.images(5).shape == (40, 3)
    assert sketch.num_images == 0


def test_nothing_yet() -> None:
    sketch = GrowingNystrom(torch.eye(3).__matmul__)
    assert sketch.width == 0
    assert sketch.values.numel() == 0
