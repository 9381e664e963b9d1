"""Conjugate gradients and eigenpairs against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hcurv
from cases import CASES, assert_close, both_dtypes, normal
from matrices import kernel_matrix


def spd(size: int = 60, condition: float = 1e3) -> Tensor:
    basis = torch.linalg.qr(normal(size, size)).Q
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), size, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("num_columns", [None, 1, 5])
def test_cg_solves(num_columns: int | None) -> None:
    dense = spd()
    rhs = normal(60) if num_columns is None else normal(60, num_columns)
    result = hcurv.cg(dense, rhs, damping=0.1, tolerance=1e-10)
    expected = torch.linalg.solve(dense + 0.1 * torch.eye(60, dtype=torch.float64), rhs)
    assert result.converged
    assert result.message.startswith("converged to 1.0e-10 in")
    assert result.solution.shape == rhs.shape
    assert float((result.solution - expected).norm() / expected.norm()) < 1e-8
    assert float(result.residuals.max()) < 1.01e-10
    assert result.history.shape == (int(result.num_iterations.max()) + 1, num_columns or 1)
    assert torch.equal(result.history[0], torch.ones(num_columns or 1))
    assert float(result.history[-1].max()) <= 1e-10


def test_columns_are_independent() -> None:
    """Each column takes the iterations that it takes alone, and gets the same solution."""
    # So well conditioned that rounding hardly changes the number of iterations.
    dense = spd(condition=1e3)
    rhs = normal(60, 4)
    rhs[:, 1] = dense @ (dense @ rhs[:, 1])  # easier
    rhs[:, 2] = 0
    together = hcurv.cg(dense, rhs, damping=0.1, tolerance=1e-10)
    assert together.converged
    assert int(together.num_iterations[2]) == 0
    assert not together.solution[:, 2].any()
    for column in range(4):
        alone = hcurv.cg(dense, rhs[:, column], damping=0.1, tolerance=1e-10)
        assert abs(int(alone.num_iterations) - int(together.num_iterations[column])) <= 1
        assert_close(alone.solution, together.solution[:, column], 1e9)
    assert int(together.num_iterations[1]) < int(together.num_iterations[0])


@pytest.mark.parametrize("kind", ["factorization", "diagonal", "callable"])
def test_preconditioners(kind: str) -> None:
    scales = torch.logspace(0, 3, 80, dtype=torch.float64)
    dense = torch.eye(80, dtype=torch.float64) + 0.1 * kernel_matrix("gaussian", 80, 1)
    dense *= torch.outer(scales, scales).sqrt()
    rhs, damping = normal(80, 2), 1e-2
    plain = hcurv.cg(dense, rhs, damping=damping)
    if kind == "factorization":
        preconditioner = hcurv.compress(dense, tolerance=1e-7, leaf_size=10).factorize(damping)
    elif kind == "diagonal":
        preconditioner = dense.diagonal() + damping
    else:
        inverse = torch.linalg.inv(dense + damping * torch.eye(80, dtype=torch.float64))
        preconditioner = inverse.__matmul__
    result = hcurv.cg(dense, rhs, damping=damping, preconditioner=preconditioner)
    assert result.converged
    assert int(result.num_iterations.max()) < int(plain.num_iterations.max())
    if kind != "diagonal":
        assert int(result.num_iterations.max()) <= 3


def test_single_precision_preconditioner_serves_double_precision() -> None:
    dense = kernel_matrix("gaussian", 80, 1)
    factors = hcurv.compress(dense.float(), tolerance=1e-5, leaf_size=10).factorize(1e-2)
    result = hcurv.cg(dense, normal(80), damping=1e-2, preconditioner=factors, tolerance=1e-12)
    assert result.converged
    assert result.solution.dtype == torch.float64


def test_first_guess() -> None:
    dense, rhs = spd(), normal(60, 2)
    exact = torch.linalg.solve(dense, rhs)
    assert int(hcurv.cg(dense, rhs, start=exact, tolerance=1e-9).num_iterations.max()) == 0
    near = hcurv.cg(dense, rhs, start=exact + 1e-3 * normal(60, 2, seed=5))
    assert near.converged
    assert_close(near.solution, exact, 1e12)


def test_no_convergence_is_said() -> None:
    result = hcurv.cg(spd(condition=1e8), normal(60, 3), max_iterations=4)
    assert not result.converged
    assert result.history.shape[0] == 5
    assert "3 of 3 right-hand sides reached only" in result.message
    assert "more iterations" in result.message
    single = hcurv.cg(spd(condition=1e5).float(), normal(60).float(), tolerance=1e-7)
    assert not single.converged
    assert "this is as far as torch.float32 goes" in single.message


def test_indefinite_matrices_are_noticed() -> None:
    dense = spd() - 0.5 * torch.eye(60, dtype=torch.float64)
    result = hcurv.cg(dense, normal(60))
    assert not result.converged
    assert "not positive definite" in result.message
    result = hcurv.cg(spd(), normal(60), preconditioner=lambda values: -values)
    assert not result.converged
    assert "not positive definite" in result.message
    assert not result.solution.any()


def test_zero_iterations_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    result = hcurv.cg(spd(), normal(60), max_iterations=0)
    assert not result.converged
    assert not result.solution.any()
    hcurv.cg(spd(), normal(60), progress=True)
    assert "residual" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rhs": normal(61)}, r"must be a tensor of shape \(60,\) or \(60, k\); got \(61,\)"),
        ({"rhs": normal(60).float()}, r"must be torch\.float64, like the operator"),
        ({"rhs": normal(60) * torch.nan}, "NaN or infinite"),
        ({"damping": float("nan")}, "damping must be one finite number"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"max_iterations": -1}, "max_iterations must be"),
        ({"start": normal(60, 1)}, "start must be like the right-hand side"),
        ({"preconditioner": normal(61)}, r"must have shape \(60,\); got \(61,\)"),
        ({"preconditioner": torch.zeros(60)}, "must be positive"),
        ({"preconditioner": 3}, "a preconditioner must be a Factorization"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hcurv.cg(spd(), **{"rhs": normal(60), **options})


@given(size=st.integers(1, 30), num_columns=st.integers(0, 4), seed=st.integers(0, 50))
def test_cg_on_any_gram_matrix(size: int, num_columns: int, seed: int) -> None:
    factor = normal(size, 3, seed=seed)
    result = hcurv.cg(factor @ factor.T, normal(size, num_columns, seed=seed + 1), damping=1.0)
    assert result.converged
    assert result.solution.shape == (size, num_columns)


OPERATORS = {
    "exact": lambda: CASES["deep autoencoder"].operator(),
    "compressed": lambda: hcurv.compress(
        kernel_matrix("gaussian", 150, 1), tolerance=1e-6, leaf_size=16
    ),
}


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
@pytest.mark.parametrize("name", OPERATORS)
def test_largest_eigenpairs(name: str, method: str) -> None:
    operator = OPERATORS[name]()
    expected = torch.linalg.eigvalsh(operator.to_dense())
    result = hcurv.eigsh(operator, 4, method=method)
    assert_close(result.values, expected[-4:].flip(0), 1e7)
    assert float(result.residuals.max()) < 1e-5 * float(expected[-1])
    assert torch.allclose(
        result.vectors.T @ result.vectors, torch.eye(4, dtype=torch.float64), atol=1e-6
    )
    again = hcurv.eigsh(operator, 4, method=method)
    assert torch.equal(again.values, result.values)


@pytest.mark.parametrize("method", ["lanczos", "lobpcg"])
def test_smallest_eigenpairs(method: str) -> None:
    dense = kernel_matrix("gaussian", 150, 1) + torch.diag(torch.linspace(1, 2, 150)).double()
    matrix = hcurv.compress(dense, tolerance=1e-9, leaf_size=16)
    expected = torch.linalg.eigvalsh(matrix.to_dense())
    result = hcurv.eigsh(
        matrix,
        3,
        which="smallest",
        method=method,
        factorization=matrix.factorize(0.0),
        tolerance=1e-8,
    )
    assert_close(result.values, expected[:3], 1e9)
    plain = hcurv.eigsh(matrix, 3, which="smallest")
    assert_close(plain.values, expected[:3], 1e9)


def test_interior_eigenpairs() -> None:
    dense = kernel_matrix("gaussian", 150, 1, width=0.05)
    matrix = hcurv.compress(dense, tolerance=1e-8, leaf_size=16)
    expected = torch.linalg.eigvalsh(matrix.to_dense())
    middle = float(0.6 * expected[-10] + 0.4 * expected[-11])  # no two are equally near
    nearest = expected[(expected - middle).abs().argsort()[:4]]
    result = hcurv.eigsh(matrix, 4, near=middle)
    assert_close(result.values, nearest, 1e8)
    factors = matrix.factorize(-middle, definite=False)
    again = hcurv.eigsh(matrix, 4, near=middle, factorization=factors)
    assert torch.equal(again.values, result.values)
    with pytest.raises(ValueError, match="the factorization must have damping"):
        hcurv.eigsh(matrix, 4, near=2 * middle, factorization=factors)


def test_eigsh_refuses_what_it_cannot_do() -> None:
    operator = CASES["deep autoencoder"].operator()
    with pytest.raises(ValueError, match="need a factorization: compress the matrix"):
        hcurv.eigsh(operator, 2, near=0.5)
    with pytest.raises(ValueError, match="k must be less than N"):
        hcurv.eigsh(operator, operator.shape[0])
    with pytest.raises(ValueError, match="which must be"):
        hcurv.eigsh(operator, which="LM")
    with pytest.raises(ValueError, match="method must be"):
        hcurv.eigsh(operator, method="qr")
    with pytest.raises(ValueError, match="near works with"):
        hcurv.eigsh(operator, near=1.0, method="lobpcg")
    with pytest.raises(RuntimeError, match="eigenvalues converged in 1 iterations"):
        hcurv.eigsh(
            hcurv.compress(kernel_matrix("gaussian", 150, 2), global_rank=0),
            20,
            which="smallest",
            max_iterations=1,
        )


@both_dtypes
def test_eigenpairs_of_dense_tensors(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 80, 1, width=0.05) + torch.linspace(1, 2, 80).double().diag()
    dense = dense.to(dtype)
    expected = torch.linalg.eigvalsh(dense.double())
    rounding = 1e3 * torch.finfo(dtype).eps * float(expected[-1])
    middle = float(expected[-7] + 2 * expected[-8]) / 3
    nearest = expected[(expected - middle).abs().argsort()[:3]]
    for options, wanted in (
        ({}, expected[-3:].flip(0)),
        ({"which": "smallest"}, expected[:3]),
        ({"near": middle}, nearest),
        ({"method": "lobpcg"}, expected[-3:].flip(0)),
    ):
        result = hcurv.eigsh(dense, 3, **options)
        assert result.values.dtype == torch.float64
        assert result.vectors.dtype == dtype
        assert float((result.values - wanted).abs().max()) < rounding
        errors = dense.double() @ result.vectors.double() - result.vectors.double() * result.values
        assert float(errors.norm()) < 1e-2 * float(expected[-1])


def test_eigenpairs_with_the_factorizations_of_other_methods() -> None:
    case = CASES["hand-written"]
    data = (case.inputs, case.targets)
    kfac = hcurv.baselines.KFAC(case.build(), case.loss, data, ekfac=True)
    expected = torch.linalg.eigvalsh(kfac.to_dense())
    largest = float(expected[-1])
    shift = 1e-7 * largest
    result = hcurv.eigsh(kfac, 2, near=-shift)
    assert float((result.values - expected[:2]).abs().max()) < 1e-9 * largest
    factors = kfac.factorize(shift)
    again = hcurv.eigsh(kfac, 2, which="smallest", factorization=factors)
    assert float((again.values - expected[:2]).abs().max()) < 1e-9 * largest
    operator = case.operator()
    exact = torch.linalg.eigvalsh(operator.to_dense())
    top = hcurv.eigsh(operator, 2, method="lobpcg", factorization=kfac.factorize(largest))
    assert float((top.values - exact[-2:].flip(0)).abs().max()) < 1e-5 * float(exact[-1])
    with pytest.raises(ValueError, match=r"eigenvalues near .* of KFAC need a factorization"):
        hcurv.eigsh(kfac, 2, near=0.5 * largest)
    other = hcurv.baselines.KFAC(case.build(), case.loss, data).factorize(1e-2 * largest)
    with pytest.raises(ValueError, match="the factorization is not one of this operator"):
        hcurv.eigsh(kfac, 2, which="smallest", factorization=other)


def test_eigsh_and_cg_refuse_what_is_no_matrix() -> None:
    dense = spd()
    for function in (lambda a: hcurv.eigsh(a, 2), lambda a: hcurv.cg(a, normal(60))):
        with pytest.raises(TypeError, match=r"must be a hcurv\.SymmetricOperator, a dense"):
            function(dense.tolist())
        with pytest.raises(TypeError, match=r"must be float32 or float64; got torch\.int64"):
            function(torch.eye(60, dtype=torch.long))
        with pytest.raises(ValueError, match="must be square"):
            function(dense[:50])
        with pytest.raises(ValueError, match="must be symmetric"):
            function(dense.triu())
    with pytest.raises(TypeError, match="factorization must have a method solve"):
        hcurv.eigsh(dense, 2, factorization=dense)
    factors = hcurv.compress(dense, tolerance=1e-8).factorize(torch.ones(60).double())
    small = hcurv.compress(torch.eye(3, dtype=torch.float64)).factorize(1.0)
    with pytest.raises(ValueError, match="one damping for all rows"):
        hcurv.eigsh(dense, 2, which="smallest", factorization=factors)
    with pytest.raises(ValueError, match=r"must have shape \(60, 60\); got \(3, 3\)"):
        hcurv.eigsh(dense, 2, which="smallest", factorization=small)


def test_a_damping_for_each_row_in_conjugate_gradients() -> None:
    dense, rhs = spd(), normal(60, 2)
    damping = torch.linspace(0.1, 2, 60, dtype=torch.float64)
    result = hcurv.cg(dense, rhs, damping=damping, tolerance=1e-12)
    expected = torch.linalg.solve(dense + damping.diag(), rhs)
    assert_close(result.solution, expected, 1e6)
