"""Global low-rank parts: on top of a tree, alone, and in factorizations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_factorization import check_factorization, damped
from torch import Tensor

import hcurv
from cases import assert_close, both_dtypes, normal
from conformance import check_operator
from hcurv.hierarchical.parts.global_part import GlobalPart, Remainder
from hcurv.linalg.nystrom import nystrom
from hcurv.sources import DenseMatrix
from matrices import kernel_matrix


def mixed_matrix(size: int = 150, rank: int = 6) -> Tensor:
    """Few large eigenvalues on top of a kernel matrix in one dimension."""
    factor = 3 * normal(size, rank, seed=3)
    return kernel_matrix("gaussian", size, 1, width=0.05) + factor @ factor.T


def compressed(dtype: torch.dtype, global_rank: int = 6, tolerance: float = 1e-4) -> hcurv.HMatrix:
    dense = mixed_matrix().to(dtype)
    dense[5] = dense[:, 5] = 0
    return hcurv.compress(dense, tolerance=tolerance, leaf_size=16, global_rank=global_rank)


@both_dtypes
def test_conformance(dtype: torch.dtype) -> None:
    matrix = compressed(dtype)
    assert matrix.global_rank == 6
    assert matrix.tree.num_kept == 149
    check_operator(matrix, matrix.to_dense().double())
    dense = mixed_matrix()
    dense[5] = dense[:, 5] = 0
    assert matrix.relative_error(dense.to(dtype)) < 3e-4
    assert matrix.estimated_error == pytest.approx(matrix.relative_error(dense.to(dtype)), rel=0.6)


@both_dtypes
def test_entries(dtype: torch.dtype) -> None:
    matrix = compressed(dtype)
    dense = matrix.to_dense()
    rows, cols = torch.tensor([0, 5, 149, 3, 3]), torch.tensor([7, 7, 5, 3, 140])
    assert_close(matrix.pairs(rows, cols), dense[rows, cols].double(), 100)
    assert_close(matrix.block(rows, cols), dense[rows][:, cols].double(), 100)
    plain = matrix.hierarchical_part
    assert plain.global_rank == 0
    rest = dense - matrix.global_part.whole(150) @ matrix.global_part.whole(150).T
    assert_close(plain.to_dense(), rest.double(), 1e3)
    assert matrix.num_stored == plain.num_stored + 149 * 6


def test_the_remainder_is_positive_semidefinite() -> None:
    dense = mixed_matrix()
    for rank in (1, 6, 20):
        values, vectors = nystrom(dense.__matmul__, normal(150, rank + 5), 1)
        factor = (vectors * values.sqrt())[:, :rank]
        left = torch.linalg.eigvalsh(dense - factor @ factor.T)
        assert float(left[0]) > -1e-10
    assert float(left[-1]) < 1.5 * float(torch.linalg.eigvalsh(dense)[-21])


@both_dtypes
def test_remainders_are_sources(dtype: torch.dtype) -> None:
    dense = mixed_matrix(60).to(dtype)
    dense[7] = dense[:, 7] = 0
    kept = (torch.arange(60) != 7).nonzero().squeeze(1)
    part = GlobalPart(kept, 0.1 * normal(59, 4).to(dtype))
    whole = part.whole(60)
    expected = (dense - whole @ whole.T).double()
    source = Remainder(DenseMatrix(dense), part, dense.diagonal())
    check_operator(source, expected)
    rows, cols = torch.tensor([[0, 7, 3], [59, 1, 8]]), torch.tensor([[7, 2], [59, 30]])
    for number in range(2):
        block = expected[rows[number]][:, cols[number]]
        assert_close(source.blocks(rows, cols)[number], block, 100)
        assert_close(source.block(rows[number], cols[number]), block, 100)


@both_dtypes
@pytest.mark.parametrize("global_rank", [1, 6, 20])
def test_factorizations(dtype: torch.dtype, global_rank: int) -> None:
    matrix = compressed(dtype, global_rank)
    check_factorization(matrix, 0.3)
    check_factorization(matrix, 10.0)
    check_operator(matrix.factorize(1e3), torch.linalg.inv(damped(matrix, 1e3)))


def test_small_damping_is_stable() -> None:
    """The residual is as small as the condition number allows, in single precision."""
    matrix = compressed(torch.float32, tolerance=1e-6)
    largest = float(torch.linalg.eigvalsh(matrix.to_dense().double())[-1])
    for power in range(1, 6):
        damping = 10.0**-power * largest
        dense = damped(matrix, damping)
        rhs = normal(150, 4)
        solution = matrix.factorize(damping).solve(rhs.float()).double()
        residual = float((dense @ solution - rhs).norm() / rhs.norm())
        assert residual < 20 * torch.finfo(torch.float32).eps * 10.0**power


@both_dtypes
def test_without_a_tree(dtype: torch.dtype) -> None:
    factor = normal(80, 5).to(dtype)
    matrix = hcurv.compress(factor @ factor.T, tolerance=1e-3)
    assert matrix.global_rank == 5
    assert matrix.tree.num_kept == 0
    assert matrix.num_stored == 5 * 80
    assert matrix.estimated_error < 1e-5
    check_operator(matrix, matrix.to_dense().double())
    check_factorization(matrix, 0.5)
    with pytest.raises(hcurv.NotPositiveDefiniteError) as caught:
        matrix.factorize()
    matrix.factorize(caught.value.smallest_damping)


def test_indefinite_shifts() -> None:
    matrix = compressed(torch.float64)
    values = torch.linalg.eigvalsh(matrix.to_dense())
    for number in (3, 100, 148):
        shift = float(values[number - 1] + values[number]) / 2
        factors = matrix.factorize(-shift, definite=False)
        assert factors.num_negative == number
        dense = damped(matrix, -shift)
        rhs = normal(150, 2)
        solution = factors.solve(rhs, operator=matrix, tolerance=1e-9)
        assert float((dense @ solution - rhs).norm() / rhs.norm()) < 1e-8
        expected = torch.linalg.slogdet(dense).logabsdet
        assert float(factors.logdet()) == pytest.approx(float(expected), abs=1e-5)
        assert_close(factors.inverse_diagonal(), torch.linalg.inv(dense).diagonal(), 1e9)


def test_gradients() -> None:
    matrix = compressed(torch.float64, tolerance=1e-3)
    damping = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    rhs = normal(150).requires_grad_()
    solve = lambda b, d: matrix.factorize(d).solve(b)  # noqa: E731
    assert torch.autograd.gradcheck(solve, (rhs, damping), fast_mode=True)
    assert torch.autograd.gradcheck(lambda d: matrix.factorize(d).logdet(), (damping,))


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
def test_samples_have_the_inverse_as_covariance() -> None:
    matrix = compressed(torch.float64, tolerance=1e-2)
    samples = matrix.factorize(2.0).sample(50_000, torch.Generator().manual_seed(0))
    covariance = samples.T @ samples / 50_000
    expected = torch.linalg.inv(damped(matrix, 2.0))
    spread = (expected.square() + torch.outer(expected.diagonal(), expected.diagonal())).sqrt()
    assert float(((covariance - expected) / spread).abs().max()) < 6 / 50_000**0.5


def test_positive_definite() -> None:
    dense = kernel_matrix("gaussian", 200, 2)
    options = {"leaf_size": 20, "max_rank": 8, "damping": 1e-4}
    matrix = hcurv.compress(dense, global_rank=3, **options)
    assert matrix.global_rank == 3
    check_factorization(matrix, 1e-4)
    assert matrix.relative_error(dense) < 2e-2


@both_dtypes
def test_files(dtype: torch.dtype, tmp_path: Path) -> None:
    matrix = compressed(dtype)
    matrix.save(tmp_path / "a.safetensors")
    loaded = hcurv.load(tmp_path / "a.safetensors")
    assert isinstance(loaded, hcurv.HMatrix)
    assert torch.equal(loaded.to_dense(), matrix.to_dense())
    assert loaded.plan == matrix.plan
    assert str(loaded.plan) == str(matrix.plan)
    rhs = normal(150, 3).to(dtype)
    for definite in (True, False):
        factors = matrix.factorize(0.3, definite=definite)
        factors.save(tmp_path / "f.safetensors")
        again = hcurv.load(tmp_path / "f.safetensors")
        assert isinstance(again, hcurv.Factorization)
        assert_close(again.solve(rhs), factors.solve(rhs).double())
        assert float(again.logdet()) == float(factors.logdet())
        assert again.num_stored == factors.num_stored


def test_precision_can_be_changed() -> None:
    matrix = compressed(torch.float64)
    single = matrix.to(dtype=torch.float32)
    assert single.global_part.factor.dtype == torch.float32
    assert_close(single.to_dense(), matrix.to_dense(), 100)
    factors = matrix.factorize(0.5).to(dtype=torch.float32)
    assert_close(factors.solve(normal(150).float()), matrix.factorize(0.5).solve(normal(150)), 1e4)


@given(
    size=st.integers(1, 70),
    leaf_size=st.integers(1, 30),
    global_rank=st.integers(0, 8),
    rank=st.integers(0, 10),
    num_zero=st.integers(0, 20),
    seed=st.integers(0, 100),
)
def test_any_shape(
    size: int, leaf_size: int, global_rank: int, rank: int, num_zero: int, seed: int
) -> None:
    factor = normal(size, rank, seed=seed)
    factor[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:num_zero]] = 0
    dense = factor @ factor.T
    matrix = hcurv.compress(
        dense,
        tolerance=1e-8,
        leaf_size=leaf_size,
        global_rank=min(global_rank, size),
        seed=seed,
    )
    assert_close(matrix.to_dense(), dense, 1e10)
    check_factorization(matrix, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_rank": -1}, "global_rank must be an integer"),
        ({"global_rank": 151}, "global_rank must be an integer"),
        ({"global_rank": "all"}, "global_rank must be a number or \"auto\"; got 'all'"),
        ({"global_rank": 3, "method": "neighbors"}, "global_rank needs products"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcurv.compress(mixed_matrix(), **options)


def test_pictures_without_a_tree_show_eigenvalues_and_diagonal() -> None:
    factor = normal(80, 5)
    factor[:3] = 0
    matrix = hcurv.compress(factor @ factor.T, tolerance=1e-3)
    assert matrix.tree.num_kept == 0
    spectrum, diagonal = matrix.plot().axes
    drawn = torch.tensor(spectrum.lines[0].get_ydata())
    assert_close(drawn, torch.linalg.eigvalsh(matrix.to_dense())[-5:].flip(0), 1e4)
    assert_close(torch.tensor(diagonal.lines[0].get_ydata()), matrix.diagonal()[3:])
    assert "3 are zero" in diagonal.get_title()
    assert "rank 5 and no tree" in matrix.plot().get_suptitle()
    empty = hcurv.compress(torch.zeros(5, 5)).plot().axes[0]
    assert empty.texts[0].get_text() == "the matrix is zero"
