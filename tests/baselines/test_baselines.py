"""Rivals: low rank, diagonal and block-diagonal, matrix-free, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
from cases import (
    CASES,
    DTYPES,
    NETWORKS,
    assert_close,
    both_dtypes,
    normal,
    pairwise,
    seeded,
)
from conformance import check_operator
from hcurv.baselines import BlockDiagonal, Diagonal, LowRank, MatrixFree
from matrices import kernel_matrix


def check_solves(factors: object, dense: Tensor) -> None:
    """solve and logdet of a factorization against the dense damped matrix."""
    rhs = normal(dense.shape[0], 3)
    expected = torch.linalg.solve(dense, rhs)
    assert_close(factors.solve(rhs), expected, 1e8)
    assert_close(factors.solve(rhs[:, 0].contiguous()), expected[:, 0], 1e8)
    assert float(factors.logdet()) == pytest.approx(
        float(torch.linalg.slogdet(dense).logabsdet), rel=1e-6, abs=1e-6
    )


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_root_products(name: str, dtype: torch.dtype) -> None:
    operator = CASES[name].operator(dtype)
    dense = operator.to_dense().double()
    identity = torch.eye(dense.shape[0], dtype=dtype)
    root = operator.root_product(identity).double()
    assert_close((root.T @ root).to(dtype), dense, 1e3)
    values = normal(root.shape[0], 5).to(dtype)
    assert_close(operator.root_transposed(values), root.T @ values.double(), 1e3)
    assert_close(operator.root_transposed(values[:, 0]), root.T @ values[:, 0].double(), 1e3)
    vector = normal(dense.shape[0]).to(dtype)
    assert_close(operator.root_product(vector), root @ vector.double(), 1e3)
    with pytest.raises(ValueError, match="values must have shape"):
        operator.root_transposed(values[1:])


@pairwise(name=NETWORKS, method=("symmetric", "jacobian"), dtype=DTYPES)
def test_low_rank_is_exact_at_full_rank(name: str, method: str, dtype: torch.dtype) -> None:
    operator = CASES[name].operator(dtype)
    dense = operator.to_dense().double()
    matrix = LowRank(operator, dense.shape[0], method=method)
    assert float((matrix.to_dense() - dense).norm()) <= 2e3 * torch.finfo(dtype).eps * float(
        dense.norm()
    )
    expected = torch.linalg.eigvalsh(dense).flip(0)
    assert_close(matrix.values.to(dtype), expected[: matrix.values.numel()], 1e3)


@pytest.mark.parametrize("method", ["symmetric", "jacobian"])
def test_low_rank_is_as_good_as_a_truncated_svd(method: str) -> None:
    operator = CASES["deep autoencoder"].operator()
    dense = operator.to_dense()
    values = torch.linalg.eigvalsh(dense).flip(0)
    for rank in (1, 5, 20):
        best = float(values[rank:].norm() / values.norm())
        matrix = LowRank(operator, rank, method=method, power_iterations=2)
        assert matrix.values.shape == (rank,)
        assert_close(matrix.vectors.T @ matrix.vectors, torch.eye(rank, dtype=torch.float64), 1e6)
        error = float((matrix.to_dense() - dense).norm() / dense.norm())
        assert best * (1 - 1e-9) <= error <= 1.02 * best
        left, middle, right = torch.svd_lowrank(dense, rank + 10, niter=2)
        reference = left[:, :rank] @ torch.diag(middle[:rank]) @ right[:, :rank].T
        assert error <= 1.02 * float((reference - dense).norm() / dense.norm())


@both_dtypes
def test_low_rank_conformance_and_solves(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 90, 2).to(dtype)
    matrix = LowRank(dense, 12)
    known = matrix.vectors.double() @ torch.diag(matrix.values.double()) @ matrix.vectors.double().T
    check_operator(matrix, known)
    damped = known + 0.3 * torch.eye(90, dtype=torch.float64)
    rhs = normal(90, 2).to(dtype)
    factors = matrix.factorize(0.3)
    assert_close(factors.solve(rhs), torch.linalg.solve(damped, rhs.double()), 1e4)
    assert float(factors.logdet()) == pytest.approx(float(torch.logdet(damped)), rel=1e-4)
    samples = factors.sample(100_000, torch.Generator().manual_seed(0)).double()
    inverse = torch.linalg.inv(damped)
    spread = (inverse.square() + torch.outer(inverse.diagonal(), inverse.diagonal())).sqrt()
    difference = samples.T @ samples / 100_000 - inverse
    assert float((difference / spread).abs().max()) < 5.5 / 100_000**0.5


@both_dtypes
@pytest.mark.parametrize("method", ["symmetric", "jacobian"])
@pytest.mark.parametrize("power_iterations", [0, 1])
def test_vectors_of_small_eigenvalues_are_orthonormal(
    power_iterations: int, method: str, dtype: torch.dtype
) -> None:
    """Those of eigenvalues that rounding of the largest outweighs."""
    model = seeded(lambda: nn.Sequential(nn.Linear(40, 8, bias=False))).to(dtype)
    basis = torch.linalg.qr(normal(60, 40)).Q * 2.0 ** -torch.arange(40, dtype=torch.float64)
    operator = hcurv.GaussNewton(model, nn.MSELoss(), basis.to(dtype))
    matrix = LowRank(operator, 200, method=method, power_iterations=power_iterations)
    assert float(matrix.values[-1]) < 1e-5 * float(matrix.values[0])
    assert bool((matrix.values > 0).all())
    vectors = matrix.vectors.double()
    assert_close((vectors.T @ vectors).to(dtype), torch.eye(vectors.shape[1]).double(), 1e2)


@given(size=st.integers(1, 40), rank=st.integers(0, 40), true_rank=st.integers(0, 10))
def test_low_rank_of_any_gram_matrix(size: int, rank: int, true_rank: int) -> None:
    factor = normal(size, true_rank)
    dense = factor @ factor.T
    matrix = LowRank(dense, min(rank, size))
    assert matrix.num_stored <= (size + 1) * min(rank, size)
    assert bool((matrix.values >= 0).all())
    if rank >= true_rank:
        assert_close(matrix.to_dense(), dense, 1e6)


def test_low_rank_input() -> None:
    dense = torch.eye(5)
    with pytest.raises(ValueError, match="rank must be an integer from 0 to 5; got 6"):
        LowRank(dense, 6)
    with pytest.raises(ValueError, match="needs a GaussNewton"):
        LowRank(dense, 2, method="jacobian")
    with pytest.raises(ValueError, match="method must be"):
        LowRank(dense, 2, method="svd")
    with pytest.raises(ValueError, match="damping must be positive"):
        LowRank(dense, 2).factorize(0.0)


@pairwise(name=NETWORKS, dtype=DTYPES)
def test_diagonal_and_blocks(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    operator = case.operator(dtype)
    exact = case.dense
    check_operator(Diagonal(operator), torch.diag(exact.diagonal()))
    units, _ = operator.root.factors.locate(torch.arange(operator.shape[0]))
    same = units[:, None] == units
    check_operator(BlockDiagonal(operator, "unit"), exact * same)
    ends = torch.tensor([slot.units.stop for slot in operator.root.factors.layers])
    layers = torch.searchsorted(ends, units, right=True)
    check_operator(BlockDiagonal(operator, "layer"), exact * (layers[:, None] == layers))


def test_block_solves() -> None:
    operator = CASES["classifier"].operator()
    damping = 1e-2
    size = operator.shape[0]
    identity = damping * torch.eye(size, dtype=torch.float64)
    for kind in ("unit", "layer"):
        matrix = BlockDiagonal(operator, kind)
        check_solves(matrix.factorize(damping), matrix.to_dense() + identity)
    diagonal = Diagonal(operator)
    rhs = normal(size, 2)
    expected = torch.linalg.solve(diagonal.to_dense() + identity, rhs)
    assert_close(diagonal.factorize(damping).solve(rhs), expected)
    some = BlockDiagonal(operator, [torch.arange(3, 9), torch.arange(20, 22)])
    check_solves(some.factorize(damping), some.to_dense() + identity)
    from_the_end = BlockDiagonal(operator, [torch.arange(3, 9), torch.tensor([-2, -1])])
    same = BlockDiagonal(operator, [torch.arange(3, 9), torch.arange(size - 2, size)])
    assert torch.equal(from_the_end.to_dense(), same.to_dense())
    check_solves(from_the_end.factorize(damping), same.to_dense() + identity)
    for repeated in ([torch.tensor([-1]), torch.tensor([size - 1])], [torch.tensor([3, 3])]):
        with pytest.raises(ValueError, match="must not overlap, and a block must not repeat"):
            BlockDiagonal(operator, repeated)
    with pytest.raises(IndexError, match="blocks"):
        BlockDiagonal(operator, [torch.tensor([size])])
    with pytest.raises(ValueError, match="must not overlap"):
        BlockDiagonal(operator, [torch.arange(3), torch.arange(2, 5)])
    with pytest.raises(TypeError, match="needs a GaussNewton"):
        BlockDiagonal(hcurv.compress(torch.eye(3)), "layer")
    with pytest.raises(ValueError, match="blocks must be"):
        BlockDiagonal(operator, "row")


def test_a_diagonal_shares_no_memory() -> None:
    values = normal(5).abs()
    diagonal = Diagonal(values)
    before = diagonal.to_dense()
    values.zero_()
    assert torch.equal(diagonal.to_dense(), before)


def test_matrix_free() -> None:
    operator = CASES["classifier"].operator()
    matrix = MatrixFree(operator, tolerance=1e-10)
    dense = operator.to_dense()
    check_operator(matrix, dense)
    rhs = normal(dense.shape[0], 2)
    damped = dense + 1e-2 * torch.eye(dense.shape[0], dtype=torch.float64)
    factors = matrix.factorize(1e-2)
    assert_close(factors.solve(rhs), torch.linalg.solve(damped, rhs), 1e9)
    assert int(factors.iterate(rhs).num_iterations.max()) > 1
    with pytest.raises(RuntimeError, match="conjugate gradients: 2 of 2"):
        MatrixFree(operator, max_iterations=1).factorize(1e-6).solve(rhs)


@pytest.mark.parametrize("build", ["low rank", "compressed"])
def test_errors_are_measured_with_vectors_of_their_own(build: str) -> None:
    """A sketch as wide as the probes, from the same seed, must not be the probes."""
    factor = normal(600, 600, seed=5) * torch.arange(1, 601) ** -0.5
    dense = factor @ factor.T
    if build == "low rank":
        approximation = LowRank(dense, 118, oversampling=10)
    else:
        approximation = hcurv.compress(dense, max_rank=16, leaf_size=32, global_rank=0)
    true = float(torch.linalg.norm(approximation.to_dense() - dense) / torch.linalg.norm(dense))
    assert approximation.relative_error(dense) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_low_rank_of_extreme_entries_is_that_of_usual_ones(scale: float) -> None:
    factor = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    matrix = factor @ factor.T
    found = hcurv.baselines.LowRank(matrix * scale, 5).to_dense() / scale
    assert (found - matrix).norm() <= 1e-5 * matrix.norm()
