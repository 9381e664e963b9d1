"""Factorization of hierarchical matrices against dense linear algebra in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hcurv
from cases import CASES, assert_close, both_dtypes, normal
from conformance import check_operator
from hcurv.hierarchical.parts import tensors_of
from matrices import KERNELS, compress_tree, kernel_matrix


def damped(matrix: hcurv.HMatrix, damping: float) -> Tensor:
    """What is factorized, densely."""
    return matrix.to_dense().double() + damping * torch.eye(matrix.shape[0], dtype=torch.float64)


def check_factorization(matrix: hcurv.HMatrix, damping: float) -> None:
    """All that a factorization gives, against the dense matrix."""
    dense = damped(matrix, damping)
    inverse = torch.linalg.inv(dense)
    size = matrix.shape[0]
    values = torch.linalg.eigvalsh(dense)
    slack = max(1.0, float(values[-1] / values[0])) * 50  # eps times it: what solving may lose
    factors = matrix.factorize(damping)
    assert factors.damping == damping
    assert factors.num_negative == 0
    rhs = normal(size, 3)
    assert_close(factors.solve(rhs.to(matrix.dtype)), inverse @ rhs, slack)
    assert_close(factors @ rhs[:, 0].to(matrix.dtype), inverse @ rhs[:, 0], slack)
    half = factors.sqrt_solve(torch.eye(size, dtype=matrix.dtype)).double()
    assert_close((half @ half.T).to(matrix.dtype), inverse, slack)
    assert_close(factors.inverse_diagonal(), inverse.diagonal(), slack)
    expected = torch.linalg.slogdet(dense).logabsdet
    assert float(factors.logdet()) == pytest.approx(
        float(expected), abs=slack * size * torch.finfo(matrix.dtype).eps
    )
    assert factors.logdet().dtype == torch.float64


@both_dtypes
@pytest.mark.parametrize("dimension", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_matrices(kernel: str, dimension: int, dtype: torch.dtype) -> None:
    dense = kernel_matrix(kernel, 203, dimension).to(dtype)
    matrix = compress_tree(dense, tolerance=1e-4, leaf_size=16)
    check_factorization(matrix, 0.1)


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_gauss_newton(name: str, dtype: torch.dtype) -> None:
    matrix = compress_tree(CASES[name].operator(dtype), tolerance=1e-5, leaf_size=8)
    check_factorization(matrix, 1e-2 * max(1.0, float(matrix.diagonal().max())))


@given(
    size=st.integers(1, 90),
    leaf_size=st.integers(1, 40),
    max_rank=st.integers(0, 12),
    num_zero=st.integers(0, 30),
    seed=st.integers(0, 100),
    power=st.integers(-3, 3),
)
def test_any_shape(
    size: int, leaf_size: int, max_rank: int, num_zero: int, seed: int, power: int
) -> None:
    factor = normal(size, 4, seed=seed)
    factor[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:num_zero]] = 0
    matrix = compress_tree(factor @ factor.T, max_rank=max_rank, leaf_size=leaf_size, seed=seed)
    lowest = float(torch.linalg.eigvalsh(matrix.to_dense())[0])
    check_factorization(matrix, 10.0**power - min(0.0, lowest))


@both_dtypes
def test_conformance(dtype: torch.dtype) -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 101, 2).to(dtype), leaf_size=10)
    damping = 1.0
    inverse = torch.linalg.inv(damped(matrix, damping))
    check_operator(matrix.factorize(damping), inverse)


def test_huge_damping() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 101, 2), leaf_size=10)
    check_factorization(matrix, 1e12)


def test_zero_matrix() -> None:
    factors = compress_tree(torch.zeros(5, 5, dtype=torch.float64)).factorize(0.5)
    assert torch.equal(factors.solve(torch.ones(5, dtype=torch.float64)), torch.full((5,), 2.0))
    assert float(factors.logdet()) == pytest.approx(5 * torch.tensor(0.5).log().item())
    assert torch.equal(factors.inverse_diagonal(), torch.full((5,), 2.0))
    assert factors.num_stored == 0


def indefinite() -> hcurv.HMatrix:
    """So roughly compressed that it has negative eigenvalues."""
    dense = kernel_matrix("gaussian", 200, 2)
    matrix = compress_tree(dense, tolerance=1e-2, leaf_size=20)
    assert float(torch.linalg.eigvalsh(matrix.to_dense())[0]) < -1e-3
    return matrix


def test_indefinite_matrices_are_refused_with_a_damping_that_works() -> None:
    matrix = indefinite()
    lowest = float(torch.linalg.eigvalsh(matrix.to_dense())[0])
    with pytest.raises(hcurv.NotPositiveDefiniteError, match="positive_definite=True") as caught:
        matrix.factorize(1e-4)
    smallest = caught.value.smallest_damping
    assert caught.value.damping == 1e-4
    assert -lowest < smallest < 2 * -lowest
    assert f"damping={smallest:.2e}" in str(caught.value)
    matrix.factorize(smallest)
    matrix.factorize(-lowest * 1.0001)
    with pytest.raises(hcurv.NotPositiveDefiniteError):
        matrix.factorize(-lowest * 0.9999)


@both_dtypes
def test_singular_matrices_are_refused(dtype: torch.dtype) -> None:
    factor = normal(60, 5).to(dtype)
    for dense in (
        factor @ factor.T,
        torch.ones(40, 40, dtype=dtype),
        torch.zeros(3, 3, dtype=dtype),
    ):
        for leaf_size in (8, 100):
            matrix = compress_tree(dense, tolerance=1e-6, leaf_size=leaf_size)
            with pytest.raises(hcurv.NotPositiveDefiniteError) as caught:
                matrix.factorize()
            matrix.factorize(caught.value.smallest_damping)


def test_indefinite_shifts() -> None:
    """definite=False: solves beyond the spectrum's end, and counts eigenvalues."""
    matrix = indefinite()
    values = torch.linalg.eigvalsh(matrix.to_dense())
    for number in (3, 100, 195):
        shift = float(values[number - 1] + values[number]) / 2
        factors = matrix.factorize(-shift, definite=False)
        assert factors.num_negative == number
        dense = damped(matrix, -shift)
        rhs = normal(200, 2)
        solution = factors.solve(rhs, operator=matrix)
        assert float((dense @ solution - rhs).norm() / rhs.norm()) < 1e-9
        expected = torch.linalg.slogdet(dense).logabsdet
        assert float(factors.logdet()) == pytest.approx(float(expected), abs=1e-6)
        assert_close(factors.inverse_diagonal(), torch.linalg.inv(dense).diagonal(), 1e9)
        with pytest.raises(ValueError, match=f"has {number} negative eigenvalues"):
            factors.sample()


def test_many_right_hand_sides_equal_one_at_a_time() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 150, 2), leaf_size=16)
    factors = matrix.factorize(1.0)
    rhs = normal(150, 40)
    together = factors.solve(rhs)
    for column in range(40):
        assert_close(factors.solve(rhs[:, column].contiguous()), together[:, column], 100)


@both_dtypes
def test_samples_have_the_inverse_as_covariance(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 30, 1)
    dense[7] = dense[:, 7] = 0
    matrix = compress_tree(dense.to(dtype), tolerance=1e-3, leaf_size=4)
    factors = matrix.factorize(0.2)
    samples = factors.sample(200_000, torch.Generator().manual_seed(0)).double()
    assert samples.shape == (200_000, 30)
    covariance = samples.T @ samples / 200_000
    expected = torch.linalg.inv(damped(matrix, 0.2))
    # Standard deviation of an entry of the empirical covariance.
    spread = (expected.square() + torch.outer(expected.diagonal(), expected.diagonal())).sqrt()
    assert float(((covariance - expected) / spread).abs().max()) < 5 / 200_000**0.5
    again = factors.sample(3, torch.Generator().manual_seed(0))
    assert torch.equal(again, factors.sample(3, torch.Generator().manual_seed(0)))
    assert factors.sample(0).shape == (0, 30)


def test_refinement_reaches_the_precision_of_the_operator() -> None:
    exact = kernel_matrix("inverse multiquadric", 180, 2)
    factors = compress_tree(exact.float(), tolerance=1e-4, leaf_size=16).factorize(0.05)
    rhs = normal(180, 2)
    dense = exact + 0.05 * torch.eye(180, dtype=torch.float64)

    def residual(solution: Tensor) -> float:
        return float((dense @ solution - rhs).norm() / rhs.norm())

    rough = residual(factors.solve(rhs.float()).double())
    once = residual(factors.solve(rhs, operator=exact, num_refinements=1))
    fully = factors.solve(rhs, operator=exact, num_refinements=50)
    assert fully.dtype == torch.float64
    assert residual(factors.solve(rhs, operator=exact, num_refinements=0)) < 2 * rough
    assert residual(fully) < 1e-12 < once < rough
    with pytest.raises(ValueError, match=r"operator must have shape \(180, 180\); got \(3, 3\)"):
        factors.solve(rhs, operator=torch.eye(3, dtype=torch.float64))


def test_gradients() -> None:
    dense = kernel_matrix("gaussian", 40, 2)
    dense[3] = dense[:, 3] = 0
    matrix = compress_tree(dense, tolerance=1e-2, leaf_size=8)
    damping = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    rhs = normal(40, 2).requires_grad_()

    def solve(rhs: Tensor, damping: Tensor) -> Tensor:
        return matrix.factorize(damping).solve(rhs)

    assert torch.autograd.gradcheck(solve, (rhs, damping))
    assert torch.autograd.gradcheck(solve, (rhs[:, 0].detach().requires_grad_(), damping))
    assert torch.autograd.gradcheck(lambda d: matrix.factorize(d).logdet(), (damping,))
    (slope,) = torch.autograd.grad(matrix.factorize(damping).logdet(), damping)
    assert float(slope) == pytest.approx(float(torch.linalg.inv(damped(matrix, 1.3)).trace()))
    assert not matrix.factorize(1.3).solve(rhs.detach()).requires_grad
    with torch.no_grad():
        assert not matrix.factorize(damping).logdet().requires_grad


def test_float32_damping_gets_a_gradient() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 40, 2).float(), leaf_size=8)
    damping = torch.tensor([2.0], requires_grad=True)
    factors = matrix.factorize(damping)
    (factors.logdet() + factors.solve(torch.ones(40)).sum()).backward()
    inverse = torch.linalg.inv(damped(matrix, 2.0))
    expected = inverse.trace() - (inverse @ inverse).sum()
    assert damping.grad is not None
    assert float(damping.grad) == pytest.approx(float(expected), rel=1e-5)


@both_dtypes
def test_files(dtype: torch.dtype, tmp_path: Path) -> None:
    dense = kernel_matrix("gaussian", 90, 2).to(dtype)
    dense[13] = dense[:, 13] = 0
    matrix = compress_tree(dense, tolerance=1e-3, leaf_size=16)
    matrix.save(tmp_path / "a.safetensors")
    rhs = normal(90, 3).to(dtype)
    for options in ({}, {"definite": False}):
        factors = matrix.factorize(0.3, **options)
        again = hcurv.load(tmp_path / "a.safetensors").factorize(0.3, **options)
        factors.save(tmp_path / "f.safetensors")
        loaded = hcurv.load(tmp_path / "f.safetensors")
        assert isinstance(loaded, hcurv.Factorization)
        for other in (again, loaded):
            pairs = zip(tensors_of(other.levels), tensors_of(factors.levels), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            assert_close(other.solve(rhs), factors.solve(rhs))
            assert float(other.logdet()) == float(factors.logdet())
            assert_close(other.inverse_diagonal(), factors.inverse_diagonal())
            assert other.damping == 0.3
            assert other.num_stored == factors.num_stored
    content = (tmp_path / "f.safetensors").read_bytes()
    (tmp_path / "f.safetensors").write_bytes(content[:-5])
    with pytest.raises(hcurv.FileFormatError, match="truncated"):
        hcurv.load(tmp_path / "f.safetensors")


def test_precision_can_be_changed() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 90, 2), leaf_size=16)
    factors = matrix.factorize(0.5)
    rhs = normal(90)
    single = factors.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    assert_close(single.solve(rhs.float()), factors.solve(rhs), 1e4)
    with pytest.raises(TypeError, match=r"must be torch\.float32 or torch\.float64"):
        factors.to(dtype=torch.float16)


@pytest.mark.parametrize("damping", [float("nan"), float("inf"), torch.zeros(2)])
def test_bad_damping(damping: float | Tensor) -> None:
    matrix = compress_tree(torch.eye(4))
    with pytest.raises(ValueError, match="damping must be one finite number; got"):
        matrix.factorize(damping)


def test_repr_and_storage() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 400, 1), tolerance=1e-4, leaf_size=32)
    factors = matrix.factorize(1.0)
    assert "N=400, damping=1" in repr(factors)
    assert factors.num_stored < 3 * matrix.num_stored
