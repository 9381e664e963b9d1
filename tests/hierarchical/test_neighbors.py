"""Nearest neighbours against all pairwise distances."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import both_dtypes, normal
from hcurv.hierarchical.tree.neighbors import nearest_neighbors, neighbor_lists
from hcurv.sources import DenseMatrix
from matrices import Plain

both_distances = pytest.mark.parametrize("distance", ["angle", "gram"])


class Counted(DenseMatrix):
    """Counts the calls."""

    calls = 0

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        self.calls += 1
        return super().blocks(rows, cols)


def gaussian(num_points: int, dimension: int, width: float, seed: int = 1) -> Tensor:
    points = normal(num_points, dimension, seed=seed)
    return torch.exp(-(torch.cdist(points, points) ** 2) / (2 * width**2))


def all_distances(matrix: Tensor, distance: str) -> Tensor:
    """Dense distances; infinite from a row to itself."""
    values = matrix.double()
    diagonal = values.diagonal()
    if distance == "gram":
        dense = diagonal[:, None] + diagonal - 2 * values
    else:
        dense = 1 - values.square() / (diagonal[:, None] * diagonal)
    return dense.fill_diagonal_(torch.inf)


def recall(matrix: Tensor, found: Tensor, distance: str) -> float:
    """Share of the neighbours that are as near as the k-th nearest."""
    dense = all_distances(matrix, distance)
    bound = dense.topk(found.shape[1], largest=False).values[:, -1:]
    rounding = 10 * torch.finfo(matrix.dtype).eps
    return float((dense.gather(1, found) <= bound + rounding).double().mean())


@both_distances
@pytest.mark.parametrize(
    ("num_points", "dimension", "width", "num_neighbors"),
    [
        (1000, 1, 0.1, 16),
        (700, 2, 0.3, 8),
        (1000, 3, 0.5, 16),
        (600, 6, 1.0, 8),
        (1100, 6, 2.0, 16),
    ],
)
def test_most_neighbours_are_found(
    num_points: int, dimension: int, width: float, num_neighbors: int, distance: str
) -> None:
    matrix = gaussian(num_points, dimension, width)
    found = nearest_neighbors(DenseMatrix(matrix), num_neighbors, distance=distance)
    assert found.shape == (num_points, num_neighbors)
    assert recall(matrix, found, distance) >= 0.9


@both_dtypes
@both_distances
def test_lists_are_sorted_and_hold_every_row_once_and_never_their_own(
    dtype: torch.dtype, distance: str
) -> None:
    matrix = gaussian(500, 4, 1.0).to(dtype)
    found = nearest_neighbors(DenseMatrix(matrix), 12, distance=distance)
    near = all_distances(matrix, distance).gather(1, found)
    assert found.min() >= 0
    assert (near.diff(dim=1) >= -10 * torch.finfo(dtype).eps).all()
    assert (found != torch.arange(500)[:, None]).all()
    assert (found.sort(dim=1).values.diff(dim=1) > 0).all()


@both_distances
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**16))
def test_few_rows_are_compared_exactly_and_lists_padded(
    distance: str, size: int, num_neighbors: int, rank: int, seed: int
) -> None:
    factor = normal(size, rank, seed=seed).round()  # with zeros, parallel and repeated rows
    matrix = factor @ factor.T
    found = nearest_neighbors(DenseMatrix(matrix), num_neighbors, distance=distance, seed=seed)
    kept = matrix.diagonal().nonzero().squeeze(1)
    others = min(num_neighbors, max(kept.numel() - 1, 0))
    assert found.shape == (kept.numel(), num_neighbors)
    assert (found[:, others:] == -1).all()
    assert torch.isin(found[:, :others], kept).all()
    dense = all_distances(matrix[kept][:, kept], distance).clamp(min=0)
    best = dense.sort(dim=1).values[:, :others]
    places = torch.searchsorted(kept, found[:, :others].contiguous())
    assert torch.allclose(dense.gather(1, places), best, atol=1e-12)


@both_distances
def test_repeated_rows_and_equal_distances(distance: str) -> None:
    ones = nearest_neighbors(DenseMatrix(torch.ones(400, 400)), 5, distance=distance)
    assert (ones.sort(dim=1).values.diff(dim=1) > 0).all()
    matrix = gaussian(150, 2, 0.5).repeat_interleave(4, 0).repeat_interleave(4, 1)
    found = nearest_neighbors(DenseMatrix(matrix), 3, distance=distance, leaf_size=20)
    same = found // 4 == (torch.arange(600) // 4)[:, None]
    assert same.double().mean() >= 0.9


def test_only_the_given_rows_are_looked_at() -> None:
    matrix = gaussian(400, 2, 0.5)
    matrix[::5] = 0
    matrix[:, ::5] = 0
    kept = [row for row in range(400) if row % 5]
    found = nearest_neighbors(DenseMatrix(matrix), 6)
    assert found.shape == (320, 6)
    assert recall(matrix[kept][:, kept], (found * 4) // 5, "angle") >= 0.9
    rows = torch.tensor([17, 3, 399, 121, 44])
    found = nearest_neighbors(DenseMatrix(matrix), 9, rows=rows)
    for row, others in zip(rows.tolist(), found.tolist(), strict=True):
        assert others[4:] == [-1] * 5
        assert {row, *others[:4]} == set(rows.tolist())
        assert all(matrix[row, a] >= matrix[row, b] for a, b in itertools.pairwise(others[:4]))


@both_distances
def test_neighbours_are_a_function_of_the_seed_and_the_entries_alone(distance: str) -> None:
    matrix = gaussian(500, 5, 1.0)
    state = torch.random.get_rng_state()
    options = {"distance": distance, "num_trees": 3, "leaf_size": 40}
    expected = nearest_neighbors(DenseMatrix(matrix), 10, seed=5, **options)
    repeated = nearest_neighbors(Plain(matrix), 10, seed=5, diagonal=matrix.diagonal(), **options)
    other = nearest_neighbors(DenseMatrix(matrix), 10, seed=6, **options)
    pieces, _ = neighbor_lists(DenseMatrix(matrix), 10, seed=5, max_entries=500, **options)
    assert torch.equal(expected, repeated)
    assert torch.equal(expected, pieces)
    assert not torch.equal(expected, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_recall_grows_with_trees_and_they_end_when_settled() -> None:
    matrix = gaussian(900, 6, 1.5)
    shares = [
        recall(matrix, nearest_neighbors(DenseMatrix(matrix), 8, num_trees=num), "angle")
        for num in (1, 3, 8)
    ]
    assert shares[0] < shares[1] < shares[2]
    source = Counted(gaussian(900, 1, 0.5))
    nearest_neighbors(source, 8, num_trees=100)
    levels_and_leaves = 3 + 1  # calls of a tree: depth 3
    assert source.calls <= 15 * levels_and_leaves
    exact = Counted(gaussian(100, 1, 0.5))
    nearest_neighbors(exact, 8)
    assert exact.calls == 1


def test_bad_arguments_are_refused() -> None:
    source = DenseMatrix(torch.eye(4))
    with pytest.raises(ValueError, match="num_neighbors must be an integer of at least 1; got 0"):
        nearest_neighbors(source, 0)
    with pytest.raises(ValueError, match="num_trees must be an integer of at least 1; got 0"):
        nearest_neighbors(source, 2, num_trees=0)
    with pytest.raises(ValueError, match="leaf_size must be an integer of at least 6; got 5"):
        nearest_neighbors(source, 2, leaf_size=5)
    with pytest.raises(ValueError, match="distance must be 'angle' or 'gram'; got 'cosine'"):
        nearest_neighbors(source, 2, distance="cosine")
    with pytest.raises(ValueError, match="rows must be different from each other"):
        nearest_neighbors(source, 2, rows=[1, 1])
    with pytest.raises(IndexError, match=r"rows must lie in \[0, 4\); got 4"):
        nearest_neighbors(source, 2, rows=[4])
