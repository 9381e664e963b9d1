"""Cluster trees: the tree itself, and orderings against the points behind a kernel."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import both_dtypes, normal
from hcurv.hierarchical.tree.cluster_tree import (
    ClusterTree,
    Distance,
    cluster,
    depth_for,
    pair_distances,
)
from hcurv.sources import DenseMatrix
from matrices import Plain

both_distances = pytest.mark.parametrize("distance", ["angle", "gram"])


class Counted(DenseMatrix):
    """Counts the calls and remembers the largest one."""

    calls = 0
    largest = 0

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        result = super().blocks(rows, cols)
        self.calls += 1
        self.largest = max(self.largest, result.numel())
        return result


class Ordered(DenseMatrix):
    """Offers an order of its own, and a wrong one."""

    def orders(self) -> dict[str, Tensor]:
        size = self.shape[0]
        return {"reversed": torch.arange(size).flip(0), "wrong": torch.zeros(size).long()}


def gaussian(points: Tensor, width: float) -> Tensor:
    return torch.exp(-(torch.cdist(points, points) ** 2) / (2 * width**2))


def leaf_lists(tree: ClusterTree) -> list[list[int]]:
    return [[row for row in leaf if row >= 0] for leaf in tree.leaves().tolist()]


@given(st.integers(0, 200), st.integers(1, 40))
def test_nodes_nest_cover_and_differ_by_at_most_one(num_rows: int, leaf_size: int) -> None:
    depth = depth_for(num_rows, leaf_size)
    tree = ClusterTree(num_rows, torch.arange(num_rows), depth, "natural")
    finest = [j * num_rows // 2**depth for j in range(2**depth + 1)]
    for level in range(depth + 1):
        bounds = tree.bounds(level).tolist()
        assert bounds == finest[:: 2 ** (depth - level)]
        sizes = {end - start for start, end in itertools.pairwise(bounds)}
        assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= leaf_size
    assert tree.leaves().shape == (2**depth, max(sizes))
    assert leaf_lists(tree) == [list(range(*ends)) for ends in itertools.pairwise(finest)]
    assert depth == 0 or math.ceil(num_rows / 2 ** (depth - 1)) > leaf_size
    assert tree.scores == {}


@given(
    st.sampled_from([1, 2, 3, 5, 17, 31, 64, 97]),
    st.integers(1, 20),
    st.sampled_from(["angle", "gram", "natural"]),
    st.integers(0, 4),
    st.integers(0, 2**16),
)
def test_every_row_that_is_not_zero_is_in_one_leaf(
    size: int, leaf_size: int, ordering: str, rank: int, seed: int
) -> None:
    factor = normal(size, rank, seed=seed).round()  # with zeros, parallel and repeated rows
    matrix = factor @ factor.T
    tree = cluster(DenseMatrix(matrix), leaf_size=leaf_size, ordering=ordering, seed=seed)
    present = [row for row in range(size) if matrix[row, row] > 0]
    assert (
        sorted(itertools.chain(*leaf_lists(tree))) == present == sorted(tree.permutation.tolist())
    )
    assert tree.zero_rows.tolist() == [row for row in range(size) if row not in present]
    assert tree.num_kept == len(present)
    assert (tree.size, tree.ordering) == (size, ordering)
    assert all(len(leaf) <= leaf_size for leaf in leaf_lists(tree))


@both_dtypes
@both_distances
@pytest.mark.parametrize(("width", "spread"), [(0.5, 1.3), (0.1, 3.0)])
def test_leaves_of_a_kernel_on_a_line_are_short(
    dtype: torch.dtype, distance: str, width: float, spread: float
) -> None:
    points = torch.linspace(0, 1, 1000, dtype=torch.float64)
    points = points[normal(1000, seed=3).argsort()]
    source = DenseMatrix(gaussian(points[:, None], width).to(dtype))
    tree = cluster(source, leaf_size=40, ordering=distance, seed=0)
    lengths = [float(points[leaf].max() - points[leaf].min()) for leaf in leaf_lists(tree)]
    assert tree.depth == 5
    assert sum(lengths) / len(lengths) <= spread / 32  # 1 for intervals, nearly 32 at random


@both_dtypes
@both_distances
def test_the_root_separates_two_clusters(dtype: torch.dtype, distance: str) -> None:
    points = normal(101, 3) + 8.0 * (torch.arange(101) % 2)[:, None]
    points = points[:100]
    source = DenseMatrix((2.0 * gaussian(points, 3.0)).to(dtype))
    tree = cluster(source, leaf_size=50, ordering=distance, seed=1)
    assert {frozenset(row % 2 for row in leaf) for leaf in leaf_lists(tree)} == {
        frozenset({0}),
        frozenset({1}),
    }


@both_distances
def test_a_split_is_at_the_median_between_far_rows(distance: Distance) -> None:
    # Up to 16 rows the sample of the centroid is the whole node, and nothing is random.
    for seed in range(10):
        features = normal(15, 4, seed=seed)
        matrix = features @ features.T
        if distance == "gram":
            to_centroid = (features - features.mean(0)).square().sum(1)
            exact = torch.cdist(features, features).square()
        else:
            unit = features / features.norm(dim=1, keepdim=True)
            exact = 1 - (unit @ unit.T).square()
            to_centroid = exact.mean(1)
        far = exact[to_centroid.argmax()]
        expected = (far - exact[far.argmax()]).argsort()[:7]
        tree = cluster(DenseMatrix(matrix), leaf_size=8, ordering=distance, seed=seed)
        assert set(leaf_lists(tree)[0]) == set(expected.tolist())


@both_distances
def test_repeated_rows_stay_together(distance: str) -> None:
    points = normal(16, 2).repeat_interleave(4, dim=0)
    shuffle = normal(64, seed=2).argsort()
    source = DenseMatrix(gaussian(points[shuffle], 1.0))
    tree = cluster(source, leaf_size=4, ordering=distance, seed=0)
    assert {len({int(shuffle[row]) // 4 for row in leaf}) for leaf in leaf_lists(tree)} == {1}


@both_distances
@pytest.mark.parametrize("matrix", [torch.ones(37, 37), torch.eye(37)], ids=["ones", "identity"])
def test_equal_distances_are_no_obstacle(distance: str, matrix: Tensor) -> None:
    tree = cluster(DenseMatrix(matrix), leaf_size=3, ordering=distance, seed=0)
    assert sorted(tree.permutation.tolist()) == list(range(37))
    if matrix[0, 1] == 1:
        assert tree.permutation.tolist() == list(range(37))  # ties keep the order


def test_zero_rows_are_set_aside_and_the_others_keep_their_order() -> None:
    matrix = torch.diag(torch.tensor([0.0, 2.0, 0.0, 1.0, 3.0, 0.0]))
    order = torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int32)
    natural = cluster(DenseMatrix(matrix), leaf_size=2, ordering="natural", seed=0)
    given_order = cluster(DenseMatrix(matrix), leaf_size=2, ordering=order, seed=0)
    own_order = cluster(Ordered(matrix), leaf_size=2, ordering="reversed", seed=0)
    assert natural.permutation.tolist() == [1, 3, 4]
    assert given_order.permutation.tolist() == own_order.permutation.tolist() == [4, 3, 1]
    assert (given_order.ordering, own_order.ordering) == ("given", "reversed")
    assert natural.zero_rows.tolist() == given_order.zero_rows.tolist() == [0, 2, 5]
    # Six rows, zero ones counted, need four leaves of two.
    assert natural.leaves().tolist() == [[-1], [1], [3], [4]]
    nothing = cluster(DenseMatrix(0 * matrix), leaf_size=2, ordering="angle", seed=0)
    assert (nothing.num_kept, nothing.depth, nothing.leaves().shape) == (0, 0, (1, 0))
    assert nothing.bounds(0).tolist() == [0, 0]


@both_dtypes
def test_pair_distances_are_those_of_the_vectors(dtype: torch.dtype) -> None:
    rows, cols = normal(2, 5, 3, seed=1), normal(2, 4, 3, seed=2)
    entries = (rows @ cols.mT).to(dtype)
    diagonals = rows.square().sum(2).to(dtype), cols.square().sum(2).to(dtype)
    gram = torch.cdist(rows, cols).square()
    cosines = torch.cosine_similarity(rows[:, :, None], cols[:, None], dim=3)
    tolerance = 20 * torch.finfo(dtype).eps * float(gram.max())
    for distance, expected in (("gram", gram), ("angle", 1 - cosines.square())):
        actual = pair_distances(entries, *diagonals, distance)
        assert actual.dtype == dtype
        assert torch.allclose(actual.double(), expected, rtol=0, atol=tolerance)


def test_pair_distances_stay_in_range() -> None:
    tiny = torch.full((1,), 1e-30)
    assert pair_distances(tiny[:, None], tiny, tiny, "angle") == pytest.approx(0, abs=1e-6)
    assert pair_distances(0 * tiny[:, None], tiny, tiny, "angle") == 1
    assert pair_distances(0 * tiny[:, None], 0 * tiny, tiny, "angle") == 1
    noisy = torch.tensor([[1.1, -1.1]])
    one = torch.ones(2)
    assert pair_distances(noisy, one[:1], one, "angle").tolist() == [[0, 0]]
    assert pair_distances(noisy, one[:1], one, "gram")[0, 0] == 0


@both_distances
def test_noisy_entries_still_give_an_order(distance: str) -> None:
    points = normal(200, 1)
    noise = normal(200, 200, seed=5)
    matrix = gaussian(points, 1.0) + 0.05 * (noise + noise.T)
    source = DenseMatrix(matrix)
    tree = cluster(source, leaf_size=10, ordering=distance, seed=0, diagonal=torch.ones(200))
    assert sorted(tree.permutation.tolist()) == list(range(200))


@both_distances
def test_the_order_is_a_function_of_the_seed_and_the_entries_alone(distance: str) -> None:
    matrix = gaussian(normal(130, 3), 1.0)
    state = torch.random.get_rng_state()

    def order(source: object, seed: int = 7, **options: int) -> list[int]:
        tree = cluster(source, leaf_size=9, ordering=distance, seed=seed, **options)
        return tree.permutation.tolist()

    expected = order(DenseMatrix(matrix))
    assert order(DenseMatrix(matrix)) == expected
    assert order(Plain(matrix)) == expected
    assert order(DenseMatrix(matrix), seed=8) != expected
    for entries in (2000, 300, 1):  # pieces of levels, pieces of nodes, single rows
        source = Counted(matrix)
        assert order(source, max_entries=entries) == expected
        assert source.largest <= max(entries, 16)
    assert torch.equal(torch.random.get_rng_state(), state)


@both_distances
def test_calls_grow_with_the_depth_and_not_with_the_nodes(distance: str) -> None:
    for depth in (2, 5, 8):
        source = Counted(gaussian(normal(700, 2), 1.0))
        tree = cluster(source, leaf_size=-(-700 // 2**depth), ordering=distance, seed=0)
        assert tree.depth == depth
        assert source.calls == 3 * depth


def test_bad_arguments_are_refused() -> None:
    source = Ordered(torch.eye(4))

    def build(ordering: object, leaf_size: int = 2) -> ClusterTree:
        return cluster(source, leaf_size=leaf_size, ordering=ordering, seed=0)

    names = r"one of 'angle', 'gram', 'natural', 'reversed', 'wrong', or a permutation of the 4"
    with pytest.raises(ValueError, match=f"ordering must be {names}.*; got 'angel'"):
        build("angel")
    with pytest.raises(TypeError, match=f"ordering must be {names}.*; got list"):
        build([0, 1, 2, 3])
    with pytest.raises(TypeError, match=r"ordering must hold integers; got .* torch.float32"):
        build(torch.arange(4.0))
    with pytest.raises(ValueError, match=r"permutation of range\(4\).*; got shape \(3,\)"):
        build(torch.arange(3))
    with pytest.raises(ValueError, match=r"permutation of range\(4\).*; row 0 is missing"):
        build(torch.arange(1, 5))
    with pytest.raises(ValueError, match=r"order 'wrong' of the source .*; row 1 is missing"):
        build("wrong")
    with pytest.raises(ValueError, match="leaf_size must be an integer of at least 1; got 0"):
        build("natural", leaf_size=0)
    with pytest.raises(ValueError, match="level must be an integer from 0 to 1; got 2"):
        build("natural").bounds(2)
    with pytest.raises(ValueError, match="distance must be 'angle' or 'gram'; got 'cosine'"):
        pair_distances(torch.ones(1, 1), torch.ones(1), torch.ones(1), "cosine")
