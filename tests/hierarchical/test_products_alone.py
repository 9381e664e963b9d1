"""A matrix that can only be multiplied is compressed to a global part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hcurv


class Products:
    """A matrix without entries, which counts the columns that it is multiplied with."""

    def __init__(self, dense: Tensor) -> None:
        self._dense, self.num_columns = dense, 0
        self.shape, self.dtype, self.device = tuple(dense.shape), dense.dtype, dense.device

    def __matmul__(self, rhs: Tensor) -> Tensor:
        self.num_columns += rhs.shape[1] if rhs.ndim == 2 else 1
        return self._dense @ rhs


def decaying(size: int = 150, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator).double()).Q
    dense = (basis * torch.logspace(0, -10, size, dtype=torch.float64)) @ basis.T
    return ((dense + dense.T) / 2).to(dtype)


def error(A: hcurv.HMatrix, dense: Tensor) -> float:
    return float((A.to_dense() - dense).norm() / dense.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4])
def test_the_error_meets_the_tolerance_and_its_estimate(
    dtype: torch.dtype, tolerance: float
) -> None:
    dense = decaying(dtype=dtype)
    source = Products(dense)
    A = hcurv.compress(source, tolerance=tolerance)
    assert error(A, dense) < 1.1 * tolerance
    assert error(A, dense) / 2 < A.estimated_error < 2 * error(A, dense)
    # The best rank for this tolerance, from the eigenvalues.
    squares = torch.linalg.eigvalsh(dense.double()).flip(0).square()
    tails = squares.flip(0).cumsum(0).flip(0)
    best = int((tails > tolerance**2 * squares.sum()).sum())
    assert best <= A.global_rank <= 1.5 * best + 3
    assert source.num_columns < 150 + 6 * A.global_rank
    assert A.plan is not None
    assert A.plan.chosen.global_rank == A.global_rank


def test_rank_and_storage_are_respected() -> None:
    dense = decaying()
    assert hcurv.compress(Products(dense), global_rank=7).global_rank == 7
    A = hcurv.compress(Products(dense), max_storage=0.1)
    assert A.compression_rate <= 0.1
    assert error(A, dense) < 0.15
    loose = hcurv.compress(Products(dense), max_storage=0.5, tolerance=0.2)
    assert loose.global_rank < A.global_rank


def test_a_tolerance_of_zero_gives_all_of_it() -> None:
    dense = decaying()
    assert error(hcurv.compress(Products(dense), tolerance=0), dense) < 1e-12
    few = dense[:, :3] @ dense[:3, :]
    few = few @ few
    A = hcurv.compress(Products((few + few.T) / 2), tolerance=0)
    assert A.global_rank == 3


def test_the_result_is_a_function_of_the_seed_and_can_be_saved_and_solved_with(tmp_path) -> None:
    dense = decaying()
    first, second = (hcurv.compress(Products(dense), tolerance=1e-8, seed=3) for _ in range(2))
    assert torch.equal(first.to_dense(), second.to_dense())
    first.save(tmp_path / "A.safetensors")
    loaded = hcurv.load(tmp_path / "A.safetensors")
    b = torch.ones(150, dtype=torch.float64)
    x = loaded.factorize(1e-3).solve(b)
    exact = torch.linalg.solve(dense + 1e-3 * torch.eye(150).double(), b)
    assert float((x - exact).norm()) < 1e-4 * float(exact.norm())


def test_zero_and_tiny_matrices() -> None:
    assert hcurv.compress(Products(torch.zeros(5, 5))).global_rank == 0
    one = hcurv.compress(Products(torch.full((1, 1), 4.0)))
    torch.testing.assert_close(one.to_dense(), torch.full((1, 1), 4.0))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"leaf_size": 8}, "leaf_size"),
        ({"accuracy": "low"}, "leaf_size, max_rank"),
        ({"ordering": "natural"}, "ordering"),
        ({"near_budget": 0.1}, "near_budget"),
        ({"method": "neighbors"}, 'method="neighbors"'),
        ({"global_rank": 0}, "global_rank=0"),
        ({"damping": 0.1}, "damping"),
    ],
)
def test_options_that_need_entries_are_refused(options: dict[str, object], named: str) -> None:
    source = Products(decaying(20))
    with pytest.raises(ValueError, match=rf"no entries.*need entries: {named}\."):
        hcurv.compress(source, **options)
    assert source.num_columns == 0  # before work starts


def test_matrices_that_are_not_positive_semi_definite_are_refused() -> None:
    dense = decaying(30)
    with pytest.raises(ValueError, match="positive semi-definite"):
        hcurv.compress(Products(-dense))
    with pytest.raises(ValueError, match="must be symmetric"):
        hcurv.compress(Products(dense + torch.triu(torch.ones(30, 30).double())))
    with pytest.raises(ValueError, match="NaN or infinite"):
        hcurv.compress(Products(dense * float("nan")))
    with pytest.raises(ValueError, match="must be square"):
        hcurv.compress(Products(dense[:, :7]))
    with pytest.raises(ValueError, match=r"smallest value is 0\.0333"):
        hcurv.compress(Products(dense), max_storage=1e-3)


def test_too_small_a_workspace_is_named() -> None:
    with pytest.raises(hcurv.InsufficientMemoryError, match="workspace"):
        hcurv.compress(Products(decaying(400)), tolerance=1e-8, workspace=400 * 8 * 100)


def test_a_rank_that_misses_a_given_tolerance_warns() -> None:
    with pytest.warns(hcurv.CompressionWarning, match="rank 2 leaves it. Raise global_rank"):
        hcurv.compress(Products(decaying()), global_rank=2, tolerance=1e-3)
