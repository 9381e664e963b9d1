"""Interpolative decompositions against the singular value decomposition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import both_dtypes, normal
from hcurv.linalg.interpolative import Interpolation, interpolate_rows


def rebuilt(samples: torch.Tensor, result: Interpolation) -> torch.Tensor:
    chosen = torch.stack([y[s] for y, s in zip(samples, result.skeleton, strict=True)])
    return result.weights @ chosen


def true_errors(samples: torch.Tensor, result: Interpolation) -> torch.Tensor:
    return torch.linalg.vector_norm((samples - rebuilt(samples, result)).double(), dim=(1, 2))


def decaying(num: int, rows: int, cols: int, dtype: torch.dtype, rate: float = 8.0) -> torch.Tensor:
    """Matrices with singular values from 1 to 10^-rate."""
    rank = min(rows, cols)
    left = torch.linalg.qr(normal(num, rows, rank, seed=1)).Q
    right = torch.linalg.qr(normal(num, cols, rank, seed=2)).Q
    values = torch.logspace(0, -rate, rank, dtype=torch.float64)
    return ((left * values) @ right.mT).to(dtype)


@both_dtypes
def test_exactly_low_rank_matrices_are_reproduced(dtype: torch.dtype) -> None:
    samples = (normal(5, 80, 7, seed=1) @ normal(5, 7, 60, seed=2)).to(dtype)
    result = interpolate_rows(samples, tolerance=1e3 * torch.finfo(dtype).eps)
    scale = samples.double().norm(dim=(1, 2))
    assert (result.ranks == 7).all()
    assert (true_errors(samples, result) <= 20 * torch.finfo(dtype).eps * scale).all()


@both_dtypes
@pytest.mark.parametrize("shape", [(3, 100, 150), (3, 150, 70), (2, 200, 200)])
@pytest.mark.parametrize("tolerance", [3e-1, 1e-2, 1e-3])
def test_the_tolerance_is_met_with_few_rows(
    dtype: torch.dtype, shape: tuple[int, int, int], tolerance: float
) -> None:
    samples = decaying(*shape, dtype)
    result = interpolate_rows(samples, tolerance=tolerance)
    errors = true_errors(samples, result)
    assert (errors <= 1.01 * tolerance).all()
    assert torch.allclose(result.errors.double(), errors, rtol=1e-2)
    singular = torch.linalg.svdvals(samples.double())
    tails = singular.square().flip(1).cumsum(1).flip(1).sqrt()
    best = (tails > tolerance).sum(1)
    assert (result.ranks <= 1.3 * best + 3).all()
    assert result.weights.abs().max() < 10


@both_dtypes
def test_many_matrices_are_treated_as_well_as_few(dtype: torch.dtype) -> None:
    samples = decaying(90, 60, 80, dtype, rate=5.0)
    together = interpolate_rows(samples, tolerance=1e-3)
    assert (true_errors(samples, together) <= 1.01e-3).all()
    for first in range(0, 90, 30):
        few = interpolate_rows(samples[first : first + 30], tolerance=1e-3)
        assert (true_errors(samples[first : first + 30], few) <= 1.01e-3).all()
        assert ((few.ranks - together.ranks[first : first + 30]).abs() <= 2).all()


@both_dtypes
def test_weights_are_the_identity_on_the_skeleton(dtype: torch.dtype) -> None:
    samples = decaying(4, 90, 50, dtype)
    tolerances = torch.tensor([1.0, 1e-1, 1e-3, 0.0])
    result = interpolate_rows(samples, tolerance=tolerances)
    assert (result.ranks.diff() > 0).all()
    for weights, skeleton, rank in zip(result.weights, result.skeleton, result.ranks, strict=True):
        assert len(set(skeleton[:rank].tolist())) == rank
        assert torch.equal(weights[skeleton[:rank], :rank], torch.eye(int(rank), dtype=dtype))
        assert (weights[:, rank:] == 0).all()
    assert (true_errors(samples, result)[:3] <= 1.01 * tolerances[:3]).all()


def test_the_cap_binds_and_the_error_falls_with_it() -> None:
    samples = decaying(3, 120, 120, torch.float64)
    errors = [interpolate_rows(samples, max_rank=rank).errors.max() for rank in (0, 1, 20, 50, 90)]
    for rank in (0, 1, 20):
        assert (interpolate_rows(samples, max_rank=rank).ranks == rank).all()
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert float(errors[0]) == pytest.approx(float(samples[0].norm()), rel=1e-12)


def test_double_precision_goes_beyond_the_square_root_of_rounding() -> None:
    samples = normal(2, 60, 12, seed=3) @ torch.diag(torch.logspace(0, -6, 12).double())
    samples = samples @ normal(12, 80, seed=4)
    result = interpolate_rows(samples, tolerance=1e-9)
    assert (true_errors(samples, result) <= 1e-9).all()


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)])
def test_empty_matrices(shape: tuple[int, int, int]) -> None:
    result = interpolate_rows(torch.zeros(shape))
    assert result.weights.shape == (*shape[:2], 0)
    assert result.skeleton.shape == (shape[0], 0)
    assert (result.ranks == 0).all()


def test_zero_and_repeated_rows() -> None:
    samples = torch.zeros(3, 40, 30)
    row = normal(30).float()
    samples[1, 5] = row
    samples[2] = row
    result = interpolate_rows(samples)
    assert result.ranks.tolist() == [0, 1, 1]
    assert result.skeleton[1, 0] == 5
    assert (result.weights[0] == 0).all()
    assert torch.allclose(result.weights[2], torch.ones(40, 1))
    assert (true_errors(samples, result) <= 1e-6 * row.norm()).all()


@given(
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 70),
    st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 1e3]),
    st.integers(0, 2**16),
)
def test_any_shape_rank_and_tolerance(
    num: int, rows: int, cols: int, rank: int, tolerance: float, seed: int
) -> None:
    samples = normal(num, rows, rank, seed=seed) @ normal(num, rank, cols, seed=seed + 1)
    result = interpolate_rows(samples, max_rank=40, tolerance=tolerance)
    errors = true_errors(samples, result)
    scale = samples.norm(dim=(1, 2))
    assert (result.ranks <= min(rows, cols, 40)).all()
    assert (errors <= scale * (1 + 1e-12)).all()
    reached = errors <= 1.01 * tolerance + 1e-11 * scale
    assert (reached | (result.ranks == min(rows, cols, 40))).all()


def test_weights_stay_small_where_the_largest_rows_are_dependent() -> None:
    """A panel of candidates without independent rows must not be exhausted down to rounding."""
    large = 10 * normal(200, 3) @ normal(3, 150, seed=2) + 1e-5 * normal(200, 150, seed=5)
    hard = torch.cat([large, normal(60, 150, seed=3)])
    easy = normal(260, 150, seed=4)
    mixed = torch.cat([10 * normal(100, 40) @ normal(40, 150, seed=2), normal(160, 150, seed=3)])
    samples = torch.stack([hard, easy, mixed])
    for max_rank in (20, 50, 100, None):
        found = interpolate_rows(samples, max_rank, 1e-8)
        assert float(found.weights.abs().max()) < 40
        for number, rank in enumerate(found.ranks.tolist()):
            assert found.skeleton[number, :rank].unique().numel() == rank
        actual = (samples - rebuilt(samples, found)).flatten(1).norm(dim=1)
        assert torch.allclose(actual, found.errors.double(), rtol=1e-3, atol=1e-6)
    assert found.ranks.tolist() == [150, 150, 150]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(B, m, s\); got \(3, 4\)"):
        interpolate_rows(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="max_rank must not be negative; got -1"):
        interpolate_rows(torch.zeros(1, 3, 4), max_rank=-1)
    with pytest.raises(ValueError, match="tolerance must not be negative"):
        interpolate_rows(torch.zeros(1, 3, 4), tolerance=-1.0)
