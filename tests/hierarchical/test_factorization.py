"""Factorization of hierarchical matrices against dense linear algebra in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hcurv
from cases import CASES, DTYPES, NETWORKS, assert_close, both_dtypes, normal, pairwise
from conformance import check_operator
from hcurv.hierarchical.parts.nested_tensors import tensors_of
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


@pairwise(name=NETWORKS, dtype=DTYPES, global_rank=(0, 4))
def test_gauss_newton(name: str, dtype: torch.dtype, global_rank: int) -> None:
    operator = CASES[name].operator(dtype)
    matrix = hcurv.compress(operator, tolerance=1e-5, leaf_size=8, global_rank=global_rank)
    assert matrix.relative_error(operator) < 1e-4
    check_factorization(matrix, 1e-2 * max(1.0, float(matrix.diagonal().max())))


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
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
    matrix = compress_tree(
        kernel_matrix("gaussian", 101, 2).to(dtype), tolerance=1e-3, leaf_size=10
    )
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


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
def test_indefinite_matrices_are_refused_with_a_damping_that_works() -> None:
    matrix = indefinite()
    lowest = float(torch.linalg.eigvalsh(matrix.to_dense())[0])
    with pytest.raises(hcurv.NotPositiveDefiniteError, match="compress for the damping") as caught:
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
    for first in (3, 100, 190):
        # Between eigenvalues that differ, so that the shifted matrix is not nearly singular.
        number = first + int(values[first - 1 : first + 5].diff().argmax())
        shift = float(values[number - 1] + values[number]) / 2
        factors = matrix.factorize(-shift, definite=False)
        assert factors.num_negative == number
        dense = damped(matrix, -shift)
        rhs = normal(200, 2)
        solution = factors.solve(rhs, operator=matrix, tolerance=5e-10)
        assert float((dense @ solution - rhs).norm() / rhs.norm()) < 1e-9
        expected = torch.linalg.slogdet(dense).logabsdet
        assert float(factors.logdet()) == pytest.approx(float(expected), abs=1e-6)
        assert_close(factors.inverse_diagonal(), torch.linalg.inv(dense).diagonal(), 1e9)
        with pytest.raises(ValueError, match=f"has {number} negative eigenvalues"):
            factors.sample()


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
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
    with pytest.warns(hcurv.ConvergenceWarning, match="relative residual of up to"):
        once = residual(factors.solve(rhs, operator=exact, num_refinements=1))
    fully = factors.solve(rhs, operator=exact, num_refinements=50, tolerance=2e-13)
    assert fully.dtype == torch.float64
    assert residual(factors.solve(rhs, operator=exact, num_refinements=0)) < 2 * rough
    assert residual(fully) < 1e-12 < once < rough
    with pytest.raises(ValueError, match=r"operator must have shape \(180, 180\); got \(3, 3\)"):
        factors.solve(rhs, operator=torch.eye(3, dtype=torch.float64))


def test_gradients() -> None:
    dense = kernel_matrix("gaussian", 18, 2)
    dense[3] = dense[:, 3] = 0
    matrix = compress_tree(dense, tolerance=1e-2, leaf_size=4)
    damping = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    rhs = normal(18, 2).requires_grad_()

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


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
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
    with pytest.raises(ValueError, match="damping must be one finite number"):
        matrix.factorize(damping)


def test_repr_and_storage() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 400, 1), tolerance=1e-4, leaf_size=32)
    factors = matrix.factorize(1.0)
    assert "N=400, damping=1" in repr(factors)
    assert factors.num_stored < 3 * matrix.num_stored


def varied(size: int) -> Tensor:
    """A damping for each row, over two orders of magnitude, in no order."""
    values = torch.logspace(-1, 1, size, dtype=torch.float64)
    return values[torch.randperm(size, generator=torch.Generator().manual_seed(1))]


@both_dtypes
def test_padding_takes_no_eigenvector(dtype: torch.dtype) -> None:
    """Blocks of a batch differ in size; the padding of one must not mix with what it stores."""
    for seed, damping in ((2, 0.5), (3, -1.547), (4, 0.0888)):
        generator = torch.Generator().manual_seed(seed)
        points = torch.rand(300, 2, dtype=torch.float64, generator=generator)
        dense = torch.exp(-(torch.cdist(points, points) / 0.05).square())
        matrix = compress_tree((dense + dense.T).to(dtype) / 2, tolerance=1e-6, leaf_size=16)
        factors = matrix.factorize(damping, definite=False)
        rhs = normal(300)
        solution = factors.solve(rhs.to(dtype)).double()
        residual = float((damped(matrix, damping) @ solution - rhs).norm() / rhs.norm())
        assert residual < 1e4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("zeros", [0, 5])
@pytest.mark.parametrize("definite", [True, False])
def test_a_damping_for_each_row(definite: bool, zeros: int, tmp_path: Path) -> None:
    dense = kernel_matrix("gaussian", 90, 2)
    dense[:zeros] = 0
    dense[:, :zeros] = 0
    damping = 3 * varied(90)  # well conditioned, so that only rounding differs
    for options in ({"global_rank": 0}, {"global_rank": 4}):
        matrix = hcurv.compress(dense, tolerance=1e-3, leaf_size=16, **options)
        shifted = matrix.to_dense() + damping.diag()
        inverse = torch.linalg.inv(shifted)
        factors = matrix.factorize(damping, definite=definite)
        assert torch.equal(factors.damping, damping)
        assert factors.num_negative == 0
        # Over 48 seeds, eliminating without definiteness was wrong by 20 to 252 rounding units.
        check_operator(factors, inverse, 100 if definite else 500)
        factors.save(tmp_path / "f.safetensors")
        loaded = hcurv.load(tmp_path / "f.safetensors")
        assert isinstance(loaded, hcurv.Factorization)
        for other in (factors, loaded, factors.to(dtype=torch.float64)):
            assert float(other.logdet()) == pytest.approx(float(torch.logdet(shifted)), abs=1e-8)
            assert_close(other.inverse_diagonal(), inverse.diagonal(), 1e5)
            assert_close(other.solve(dense), inverse @ dense, 1e5)
            assert other.num_stored == factors.num_stored
        if definite:
            half = factors.sqrt_solve(torch.eye(90, dtype=torch.float64))
            assert_close(half @ half.T, inverse, 1e5)
            samples = factors.sample(20_000, torch.Generator().manual_seed(0))
            variances = samples.square().mean(0) / inverse.diagonal()
            assert float((variances - 1).abs().max()) < 6 * (2 / 20_000) ** 0.5


@both_dtypes
def test_dampings_of_rows_may_differ_by_orders_of_magnitude(dtype: torch.dtype) -> None:
    """What is lost is at most the ratio of the largest to the smallest damping."""
    matrix = compress_tree(kernel_matrix("gaussian", 60, 1).to(dtype), leaf_size=8)
    for power in (2, 4):
        damping = torch.logspace(0, power, 60, dtype=torch.float64)
        expected = torch.linalg.inv(matrix.to_dense().double() + damping.diag())
        found = matrix.factorize(damping).inverse_diagonal()
        assert_close(found, expected.diagonal(), 10 * 10.0**power)


def test_gradients_of_a_damping_for_each_row() -> None:
    dense = kernel_matrix("gaussian", 13, 2)
    dense[3] = dense[:, 3] = 0
    damping, rhs = varied(13).requires_grad_(), normal(13, 2).requires_grad_()
    for options in ({"global_rank": 0}, {"global_rank": 3}):
        matrix = hcurv.compress(dense, tolerance=1e-2, leaf_size=4, **options)

        def solve(rhs: Tensor, damping: Tensor, matrix: hcurv.HMatrix = matrix) -> Tensor:
            return matrix.factorize(damping).solve(rhs)

        def logdet(damping: Tensor, matrix: hcurv.HMatrix = matrix) -> Tensor:
            return matrix.factorize(damping).logdet()

        assert torch.autograd.gradcheck(solve, (rhs, damping))
        assert torch.autograd.gradcheck(logdet, (damping,))


def test_dampings_by_name_of_a_compressed_network(tmp_path: Path) -> None:
    operator = CASES["hand-written"].operator()
    matrix = hcurv.compress(operator, tolerance=1e-3, leaf_size=8)
    names = {name: 0.1 * (number + 1) for number, name in enumerate(operator.layout.names)}
    expected = operator.layout.expand(names)
    matrix.save(tmp_path / "a.safetensors")
    loaded = hcurv.load(tmp_path / "a.safetensors")
    for other in (matrix, loaded, matrix.to(dtype=torch.float32)):
        assert other.layout == operator.layout
        assert torch.equal(other.factorize(names).damping, expected)
    strength = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    matrix.factorize({"*": strength}).logdet().backward()
    trace = torch.linalg.inv(damped(matrix, 0.3)).trace()
    assert float(strength.grad) == pytest.approx(float(trace))
    with pytest.raises(TypeError, match="damping by names needs a matrix that knows the names"):
        compress_tree(torch.eye(4)).factorize(names)
    with pytest.raises(ValueError, match="the layout must have 4 parameters"):
        compress_tree(torch.eye(4)).with_layout(operator.layout)


def test_conversion_keeps_the_values_of_a_global_part_in_double_precision() -> None:
    dense = kernel_matrix("gaussian", 60, 1) + torch.ones(60, 60, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        matrix = hcurv.compress(dense.to(dtype), tolerance=1e-4, global_rank=3, leaf_size=8)
        damping = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        inverse = torch.linalg.inv(damped(matrix, 0.5))
        for definite in (True, False):
            factors = matrix.factorize(damping, definite=definite)
            for other in (torch.float32, torch.float64):
                moved = factors.to(dtype=other)
                assert moved.dtype == other
                assert_close(moved.inverse_diagonal().float(), inverse.diagonal(), 1e4)
                (slope,) = torch.autograd.grad(moved.logdet(), damping)
                assert float(slope) == pytest.approx(float(inverse.trace()), rel=1e-4)


def test_matrices_that_overflow_are_refused() -> None:
    dense = 1e39 * kernel_matrix("gaussian", 60, 1)
    for options in ({"global_rank": 0}, {"global_rank": 3}):
        matrix = hcurv.compress(dense, tolerance=1e-3, leaf_size=8, **options)
        with pytest.raises(ValueError, match="values that are NaN or infinite, or become"):
            matrix.to(dtype=torch.float32).factorize(1.0)


@pytest.mark.filterwarnings("ignore::hcurv.AccuracyWarning")  # the matrix is rough
@both_dtypes
def test_suggested_dampings_give_accurate_solutions(dtype: torch.dtype) -> None:
    """With zero rows, of low rank, of tiny and of huge entries, and for a zero matrix."""
    factor = normal(60, 5).to(dtype)
    with_zeros = factor @ factor.T
    with_zeros[:9] = 0
    with_zeros[:, :9] = 0
    positive = kernel_matrix("gaussian", 60, 1, width=0.01).to(dtype)
    positive[:9] = 0
    positive[:, :9] = 0
    for scale in (1e-12, 1.0, 1e12):
        for dense in (with_zeros, factor @ factor.T, positive, torch.zeros(5, 5, dtype=dtype)):
            for options in ({}, {"global_rank": 0, "leaf_size": 8}):
                matrix = hcurv.compress(scale * dense, tolerance=1e-6, **options)
                with pytest.raises(hcurv.NotPositiveDefiniteError) as caught:
                    matrix.factorize()
                suggested = caught.value.smallest_damping
                assert f"Use damping={suggested:.2e} or more" in str(caught.value)
                rhs = normal(dense.shape[0])
                solution = matrix.factorize(suggested).solve(rhs.to(dtype)).double()
                residual = damped(matrix, suggested) @ solution - rhs
                assert float(residual.norm() / rhs.norm()) < 1e-2


def test_messages_about_singular_matrices_are_true() -> None:
    positive = kernel_matrix("gaussian", 60, 1, width=0.01)
    positive[:9] = 0
    positive[:, :9] = 0
    with pytest.raises(hcurv.NotPositiveDefiniteError, match="9 rows of A are zero, and need a"):
        compress_tree(positive, leaf_size=8, tolerance=1e-6).factorize()
    factor = normal(60, 5)
    for dense in (factor @ factor.T, torch.ones(40, 40, dtype=torch.float64)):
        with pytest.raises(hcurv.NotPositiveDefiniteError) as caught:
            compress_tree(dense, leaf_size=100).factorize()
        message = str(caught.value)
        assert "singular up to rounding in torch.float64" in message or "down to about -" in message
    with pytest.raises(hcurv.NotPositiveDefiniteError, match="down to about -"):
        indefinite().factorize(1e-4)


@pytest.mark.filterwarnings("ignore::hcurv.CompressionWarning")
@both_dtypes
def test_refined_solutions_are_never_worse_and_never_silently_wrong(dtype: torch.dtype) -> None:
    """Also with a matrix so rough that plain refinement would diverge."""
    exact = kernel_matrix("gaussian", 150, 2).to(dtype)
    largest = float(torch.linalg.eigvalsh(exact.double())[-1])
    for relative in (1e-1, 1e-2, 1e-3):
        damping = relative * largest
        rough = hcurv.compress(
            exact,
            tolerance=3e-2,
            leaf_size=16,
            global_rank=0,
            damping=damping,
        )
        factors = rough.factorize(damping)
        shifted = exact.double() + damping * torch.eye(150, dtype=torch.float64)
        rhs = normal(150, 3)

        def residuals(solution: Tensor, shifted: Tensor = shifted, rhs: Tensor = rhs) -> Tensor:
            return (shifted @ solution.double() - rhs).norm(dim=0) / rhs.norm(dim=0)

        plain = residuals(factors.solve(rhs.to(dtype)))
        refined = residuals(factors.solve(rhs.to(dtype), operator=exact))
        assert bool((refined <= plain + 1e-6).all())
        assert float(refined.max()) < (1.1e-6 if dtype == torch.float64 else 1.1e-4)
        with pytest.warns(hcurv.ConvergenceWarning, match="3 of 3 refined solutions have"):
            few = factors.solve(rhs.to(dtype), operator=exact, num_refinements=1, tolerance=1e-9)
        assert bool((residuals(few) <= plain + 1e-6).all())
