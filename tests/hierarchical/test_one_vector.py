"""One vector through matrices and factorizations: other code than for many, the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hcurv
from cases import DTYPES, assert_close, both_dtypes, normal, pairwise
from hcurv.hierarchical.matrix import vector_product
from hcurv.hierarchical.parts import vector_steps
from hcurv.hierarchical.parts.global_part import GlobalPart, GlobalUpdate
from hcurv.hierarchical.solving import vector_solve
from matrices import compress_tree, kernel_matrix

# Which levels become one dense matrix, and which blocks count as large. The matrices of these tests
# are so small that with the real numbers all of them would be dense.
PATHS = {
    "dense": (2**17, 2**12),
    "sparse": (0, 2**12),
    "sparse with a dense top": (30**2, 2**12),
    "large blocks": (0, 0),
    "some large blocks": (12**2, 40),
}


def choose_path(patch: pytest.MonkeyPatch, name: str) -> None:
    top, large = PATHS[name]
    patch.setattr(vector_steps, "MAX_TOP_FLOATS", top)
    patch.setattr(vector_product, "_LARGE", large)
    patch.setattr(vector_product, "_LARGE_LEAF", large)
    patch.setattr(vector_solve, "_LARGE", large)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_path(monkeypatch, request.param)


def kernel(size: int, num_zero: int = 0, dimension: int = 2) -> Tensor:
    dense = kernel_matrix("inverse multiquadric", size, dimension, width=0.2)
    rows = torch.randperm(size, generator=torch.Generator().manual_seed(1))[:num_zero]
    dense[rows] = dense[:, rows] = 0
    return dense


def check_vector(matrix: hcurv.SymmetricOperator, dense: Tensor, slack: float = 100) -> None:
    """One vector, one column, a strided vector and many columns against the dense matrix."""
    vectors = normal(matrix.shape[0], 3).to(matrix.dtype)
    expected = dense.double() @ vectors.double()
    before = vectors.clone()
    assert_close(matrix @ vectors[:, 1].contiguous(), expected[:, 1], slack)
    assert_close(matrix @ vectors[:, 1], expected[:, 1], slack)
    assert_close(matrix @ vectors[:, 1:2], expected[:, 1:2], slack)
    assert_close(matrix @ vectors, expected, slack)
    assert torch.equal(vectors, before)
    assert torch.equal(matrix @ vectors[:, 0], matrix @ vectors[:, 0])


def check_solves(matrix: hcurv.HMatrix, damping: float | Tensor, **options: Any) -> None:
    factors = matrix.factorize(damping, warn=False, **options)
    added = torch.as_tensor(damping, dtype=torch.float64).expand(matrix.shape[0])
    dense = matrix.to_dense().double() + torch.diag(added)
    values = torch.linalg.eigvalsh(dense).abs()
    slack = max(1.0, float(values.max() / values.min())) * 50
    check_vector(factors, torch.linalg.inv(dense), slack)
    if factors.is_definite:
        both = normal(matrix.shape[0], 2).to(matrix.dtype)
        assert_close(factors.sqrt_solve(both[:, 0]), factors.sqrt_solve(both)[:, 0].double(), slack)


@pairwise(path=PATHS, rows=((203, 0), (150, 17), (64, 1)), dtype=DTYPES)
def test_trees(
    path: str, rows: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_path(monkeypatch, path)
    size, num_zero = rows
    matrix = compress_tree(kernel(size, num_zero).to(dtype), tolerance=1e-3, leaf_size=8)
    check_vector(matrix, matrix.to_dense())
    check_solves(matrix, 0.5)
    check_solves(matrix, 0.5 + torch.rand(size, dtype=torch.float64))


@both_dtypes
@pytest.mark.usefixtures("path")
def test_scipy_multiplies_where_torch_has_no_mkl(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = kernel(150, 17).to(dtype)
    expected = compress_tree(dense, tolerance=1e-3, leaf_size=8).to_dense()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    matrix = compress_tree(dense, tolerance=1e-3, leaf_size=8)
    check_vector(matrix, expected)
    check_solves(matrix, 0.5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("options", [{"max_rank": 0}, {"max_rank": 2}, {"leaf_size": 500}])
def test_levels_without_rank_and_trees_without_levels(options: dict[str, int]) -> None:
    matrix = compress_tree(kernel(90, 5), **{"leaf_size": 8, **options})
    check_vector(matrix, matrix.to_dense())
    check_solves(matrix, 3.0)


@pytest.mark.usefixtures("path")
def test_solves_with_negative_eigenvalues() -> None:
    matrix = compress_tree(kernel(120, 7), tolerance=1e-4, leaf_size=8)
    check_solves(matrix, -0.7, definite=False)


@both_dtypes
@pytest.mark.usefixtures("path")
def test_global_parts_on_top_of_trees(dtype: torch.dtype) -> None:
    factor = normal(150, 4)
    dense = kernel(150, dimension=1) + factor @ factor.T
    dense[11] = dense[:, 11] = 0
    matrix = hcurv.compress(dense.to(dtype), tolerance=1e-3, leaf_size=8, global_rank=4)
    assert matrix.global_rank == 4
    assert matrix.tree.num_kept == 149
    check_vector(matrix, matrix.to_dense())
    check_solves(matrix, 0.5)
    check_solves(matrix, -0.7, definite=False)


@pytest.mark.usefixtures("path")
def test_near_fields() -> None:
    matrix = hcurv.compress(kernel(150, 9), near_budget=0.2, leaf_size=8, global_rank=0)
    assert matrix.near
    check_vector(matrix, matrix.to_dense())


@given(
    size=st.integers(1, 90),
    leaf_size=st.integers(1, 40),
    max_rank=st.integers(0, 12),
    num_zero=st.integers(0, 30),
    name=st.sampled_from(sorted(PATHS)),
)
def test_any_shape(size: int, leaf_size: int, max_rank: int, num_zero: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose_path(patch, name)
        dense = kernel(size, min(num_zero, size))
        matrix = compress_tree(dense, max_rank=max_rank, leaf_size=leaf_size)
        check_vector(matrix, matrix.to_dense())
        lowest = float(torch.linalg.eigvalsh(matrix.to_dense())[0])
        check_solves(matrix, 1.0 - min(0.0, lowest))


def test_large_trees_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_path(monkeypatch, "sparse")
    monkeypatch.setattr(vector_product, "MAX_ENTRIES", 1000)
    monkeypatch.setattr(vector_solve, "MAX_ENTRIES", 1000)
    matrix = compress_tree(kernel(150), leaf_size=8)
    assert vector_product.make_vector_product(matrix) is None
    check_vector(matrix, matrix.to_dense())
    check_solves(matrix, 0.5)


@both_dtypes
@pytest.mark.usefixtures("path")
def test_files_and_conversions(dtype: torch.dtype, tmp_path: Path) -> None:
    factor = normal(90, 3)
    dense = (kernel(90, dimension=1) + factor @ factor.T).to(dtype)
    matrix = hcurv.compress(dense, leaf_size=8, global_rank=3, tolerance=1e-3)
    factors, vector = matrix.factorize(0.3, warn=False), normal(90).to(dtype)
    for number, saved in enumerate((matrix, factors)):
        product = saved @ vector
        saved.save(tmp_path / f"{number}.safetensors")
        assert torch.equal(hcurv.load(tmp_path / f"{number}.safetensors") @ vector, product)
        other = torch.float32 if dtype == torch.float64 else torch.float64
        assert (saved.to(dtype=other) @ vector.to(other)).dtype == other


def test_files_hold_tall_factors_by_rows(tmp_path: Path) -> None:
    """As files always did: the layout in memory is no part of the format."""
    from safetensors.torch import load_file

    factor = normal(80, 5)
    matrix = hcurv.compress(factor @ factor.T, tolerance=1e-3)
    factors = matrix.factorize(0.1)
    matrix.save(tmp_path / "A.safetensors")
    factors.save(tmp_path / "F.safetensors")
    stored = load_file(tmp_path / "A.safetensors")["global.factor"]
    assert torch.equal(stored, matrix.global_part.factor)
    stored = load_file(tmp_path / "F.safetensors")["update.basis"]
    assert torch.equal(stored, factors.update.basis)
    for path, original in (("A", matrix), ("F", factors)):
        loaded = hcurv.load(tmp_path / f"{path}.safetensors")
        assert torch.equal(loaded.to_dense(), original.to_dense())


@pytest.mark.parametrize("num_rows", [30, 20])
def test_tall_factors_are_taken_in_any_layout(num_rows: int) -> None:
    rows = torch.arange(30)[:num_rows]
    by_rows, vectors = normal(num_rows, 4), normal(30, 3)
    expected = torch.zeros(30, 4, dtype=torch.float64)
    expected[rows] = by_rows
    for factor in (by_rows, by_rows.T.contiguous().T, normal(num_rows, 8)[:, ::2].copy_(by_rows)):
        part = GlobalPart(rows, factor)
        assert part.factor.T.is_contiguous()
        assert torch.equal(part.whole(30), expected)
        index = torch.tensor([[0, 29], [7, 3]])
        assert torch.equal(part.rows_of(index), expected[index])
        assert part.num_stored == 4 * num_rows
        update = GlobalUpdate(rows, factor, torch.ones(4, dtype=torch.float64), True)
        for columns in (vectors, vectors[:, :1].contiguous()):
            result = torch.zeros_like(columns)
            part.add_product(columns, result, 2.0)
            assert_close(result, 2 * expected @ (expected.T @ columns), 100)
            changed = update.invert(columns.clone())
            assert_close(changed, columns - expected @ (expected.T @ columns) / 2, 100)


def test_tall_factors_are_not_copied_twice() -> None:
    factor = normal(4, 30).T
    assert GlobalPart(torch.arange(30), factor).factor.data_ptr() == factor.data_ptr()


@both_dtypes
def test_low_rank(dtype: torch.dtype) -> None:
    matrix = hcurv.baselines.LowRank(kernel(70).to(dtype), rank=9)
    assert matrix.vectors.T.is_contiguous()
    check_vector(matrix, matrix.to_dense())
    factors = matrix.factorize(0.2)
    dense = matrix.to_dense().double() + 0.2 * torch.eye(70, dtype=torch.float64)
    check_vector(factors, torch.linalg.inv(dense), 1e4)
