"""Near fields: exact blocks between leaves that hold each other's nearest neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_factorization import damped

import hcurv
from cases import CASES, DTYPES, NETWORKS, assert_close, both_dtypes, normal, pairwise
from conformance import check_operator
from hcurv.hierarchical.near_field.interactions import Interactions, near_leaves
from hcurv.sources import DenseMatrix
from matrices import Plain, kernel_matrix

DEVICE = torch.device("cpu")


@given(
    depth=st.integers(0, 5),
    pairs=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=12),
)
def test_every_pair_of_leaves_interacts_exactly_once(
    depth: int, pairs: list[tuple[int, int]]
) -> None:
    num_leaves = 2**depth
    near = sorted({tuple(sorted((a % num_leaves, b % num_leaves))) for a, b in pairs})
    near = [pair for pair in near if pair[0] != pair[1]]
    interactions = Interactions(depth, torch.tensor(near, dtype=torch.long).view(-1, 2))
    counts = torch.zeros(num_leaves, num_leaves, dtype=torch.long)
    for a, b in near:
        counts[a, b] += 1
    for level in range(1, depth + 1):
        parents, others = interactions.far(level)
        siblings = torch.stack([2 * parents, 2 * parents + 1], 1)
        width = 2 ** (depth - level)
        for a, b in [*siblings.tolist(), *others.tolist()]:
            assert a < b
            counts[a * width : (a + 1) * width, b * width : (b + 1) * width] += 1
    assert torch.equal(counts, torch.ones_like(counts).triu(1))


def test_close_nodes() -> None:
    interactions = Interactions(3, torch.tensor([[0, 5], [2, 3]]))
    close = interactions.is_close(3, torch.tensor([5, 2, 7]))
    expected = torch.zeros(3, 8, dtype=torch.bool)
    expected[0, [5, 0]] = expected[1, [2, 3]] = expected[2, 7] = True
    assert torch.equal(close, expected)
    above = interactions.is_close(2, torch.tensor([0, 1]))
    assert torch.equal(above, torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]]).bool())


def test_near_leaves_hold_the_neighbours() -> None:
    """Points on a line in order: the near leaves are those next to each other."""
    points = torch.linspace(0, 1, 256, dtype=torch.float64)
    dense = torch.exp(-((points[:, None] - points) * 60).square())
    tree = hcurv.compress(dense, leaf_size=16, ordering="natural", global_rank=0).tree
    found = near_leaves(DenseMatrix(dense), tree, dense.diagonal(), 2 / 16, "angle", 0)
    assert found.near.tolist() == [[i, i + 1] for i in range(15)]
    none = near_leaves(DenseMatrix(dense), tree, dense.diagonal(), 0.01, "angle", 0)
    assert none.near.numel() == 0


OPTIONS = {"leaf_size": 16, "global_rank": 0, "ordering": "angle"}


@pairwise(budget=(0.1, 0.4), method=("sketch", "neighbors"), dtype=DTYPES)
def test_conformance(budget: float, method: str, dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 203, 2).to(dtype)
    dense[9] = dense[:, 9] = 0
    matrix = hcurv.compress(dense, tolerance=1e-3, near_budget=budget, method=method, **OPTIONS)
    assert matrix.near
    check_operator(matrix, matrix.to_dense().double())
    assert matrix.relative_error(dense) < 1e-2
    rows, cols = torch.tensor([0, 9, 202, 3, 3]), torch.tensor([7, 7, 9, 3, 140])
    expected = matrix.to_dense().double()
    assert_close(matrix.pairs(rows, cols), expected[rows, cols], 1e3)
    assert_close(matrix.block(rows, slice(None)), expected[rows], 1e3)


def test_near_blocks_are_exact() -> None:
    dense = kernel_matrix("gaussian", 256, 2)
    matrix = hcurv.compress(dense, tolerance=1e-1, near_budget=0.2, **OPTIONS)
    leaves = matrix.tree.leaves()
    compressed = matrix.to_dense()
    pairs = torch.cat([near.pairs for near in matrix.near])
    assert pairs.shape[0] >= 16
    for a, b in pairs.tolist():
        block = compressed[leaves[a]][:, leaves[b]]
        assert_close(block, dense[leaves[a]][:, leaves[b]], 1e3)


def test_ranks_are_smaller_at_equal_error() -> None:
    """In two dimensions, most of what is between leaves is between neighbours."""
    points = torch.rand(1024, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dense = torch.exp(-(torch.cdist(points, points) * 12).square())
    found = {
        budget: hcurv.compress(
            dense, tolerance=1e-3, leaf_size=32, ordering="angle", global_rank=0, near_budget=budget
        )
        for budget in (0.0, 0.3)
    }
    errors = {budget: matrix.relative_error(dense) for budget, matrix in found.items()}
    assert errors[0.3] < 1.2 * errors[0.0]
    means = {b: [float(r.double().mean()) for r in m.ranks] for b, m in found.items()}
    assert means[0.3][-1] < 0.7 * means[0.0][-1]
    assert sum(means[0.3]) < 0.7 * sum(means[0.0])


@both_dtypes
def test_factorizations_are_preconditioners_and_say_so(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 300, 2).to(dtype)
    matrix = hcurv.compress(dense, tolerance=1e-3, near_budget=0.2, **OPTIONS)
    with pytest.warns(hcurv.NearFieldWarning, match="compressed to HSS form, with an error of"):
        factors = matrix.factorize(0.5)
    plain = matrix.without_near_field()
    assert not plain.near
    assert plain.without_near_field() is plain
    assert plain.relative_error(matrix) < 2e-3
    inverse = torch.linalg.inv(damped(plain, 0.5))
    assert_close(factors.to_dense(), inverse, 1e4)
    rhs = normal(300, 2).to(dtype)
    result = hcurv.cg(matrix, rhs, damping=0.5, preconditioner=factors, tolerance=1e-4)
    without = hcurv.cg(matrix, rhs, damping=0.5, tolerance=1e-4)
    assert result.converged
    assert int(result.num_iterations.max()) < int(without.num_iterations.min()) / 3


def test_together_with_a_global_part() -> None:
    factor = 3 * normal(256, 4, seed=3)
    dense = kernel_matrix("gaussian", 256, 2, width=0.1) + factor @ factor.T
    matrix = hcurv.compress(
        dense, tolerance=1e-3, leaf_size=16, global_rank=4, near_budget=0.2, ordering="angle"
    )
    assert matrix.near
    assert matrix.global_rank == 4
    assert matrix.relative_error(dense) < 5e-3
    check_operator(matrix, matrix.to_dense())
    with pytest.warns(hcurv.NearFieldWarning):
        factors = matrix.factorize(3.0)
    plain = matrix.without_near_field()
    assert plain.global_rank == 4
    assert plain.relative_error(matrix) < 2e-3
    assert_close(factors.to_dense(), torch.linalg.inv(damped(plain, 3.0)), 1e6)


@pytest.mark.parametrize("name", NETWORKS)
def test_gauss_newton(name: str) -> None:
    operator = CASES[name].operator()
    matrix = hcurv.compress(operator, tolerance=1e-4, leaf_size=4, global_rank=0, near_budget=0.5)
    assert matrix.relative_error(operator) < 1e-3
    assert_close(matrix.block(slice(None), slice(None)), matrix.to_dense().double(), 1e4)


def test_entries_alone_suffice() -> None:
    dense = kernel_matrix("gaussian", 150, 2)
    matrix = hcurv.compress(Plain(dense), tolerance=1e-3, leaf_size=16, near_budget=0.3)
    assert matrix.near
    assert matrix.relative_error(dense) < 1e-2


def test_files(tmp_path: Path) -> None:
    dense = kernel_matrix("gaussian", 203, 2)
    matrix = hcurv.compress(dense, tolerance=1e-3, near_budget=0.2, **OPTIONS)
    matrix.save(tmp_path / "a.safetensors")
    loaded = hcurv.load(tmp_path / "a.safetensors")
    assert isinstance(loaded, hcurv.HMatrix)
    assert torch.equal(loaded.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("budget", [-0.1, 1.0, "many"])
def test_bad_budgets(budget: float) -> None:
    with pytest.raises(ValueError, match="near_budget is a share of the leaves"):
        hcurv.compress(torch.eye(4), near_budget=budget)


def test_no_near_field_where_a_damping_is_given() -> None:
    with pytest.raises(ValueError, match="use near_budget=0"):
        hcurv.compress(torch.eye(4), near_budget=0.1, damping=1.0)
