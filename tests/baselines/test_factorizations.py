"""Every baseline's factorization against the dense inverse: one line for each in `SOLVERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hcurv
from cases import CASES, both_dtypes, normal
from conformance import check_factorized
from hcurv.baselines import BlockDiagonal, Diagonal, LowRank, MatrixFree
from matrices import kernel_matrix

SOLVERS: dict[str, tuple[Callable[[hcurv.GaussNewton], Any], dict[str, Any]]] = {
    "diagonal": (Diagonal, {}),
    "blocks per unit": (lambda matrix: BlockDiagonal(matrix, "unit"), {}),
    "blocks per layer": (BlockDiagonal, {}),
    "some blocks": (lambda matrix: BlockDiagonal(matrix, [torch.arange(3, 9)]), {}),
    "low rank": (lambda matrix: LowRank(matrix, 9), {}),
    "rank 0": (lambda matrix: LowRank(matrix, 0), {}),
    "matrix-free": (
        lambda matrix: MatrixFree(matrix, tolerance=torch.finfo(matrix.dtype).eps ** 0.5),
        {"logdet": False, "half": False, "movable": False, "digits": 0.5},
    ),
}
all_solvers = pytest.mark.parametrize("name", SOLVERS)


def by_row(size: int) -> Tensor:
    """A damping for each row, over two orders of magnitude."""
    return 10 ** (-1 - 2 * torch.rand(size, generator=torch.Generator().manual_seed(0)).double())


@all_solvers
@both_dtypes
def test_numbers_as_damping(name: str, dtype: torch.dtype) -> None:
    build, can = SOLVERS[name]
    matrix = build(CASES["classifier"].operator(dtype))
    check_factorized(matrix.factorize, matrix.to_dense(), 1e-2, names={"*": 1e-2}, **can)


@all_solvers
@both_dtypes
def test_a_damping_for_each_row(name: str, dtype: torch.dtype) -> None:
    build, can = SOLVERS[name]
    matrix = build(CASES["dead units"].operator(dtype))
    check_factorized(matrix.factorize, matrix.to_dense(), by_row(matrix.shape[0]), **can)


@all_solvers
def test_damping_by_names(name: str) -> None:
    build, can = SOLVERS[name]
    matrix = build(CASES["classifier"].operator())
    names = {"0": 0.1, "2.weight": 0.02, "2.bias": 0.03, "4": 1.0}
    damping = matrix.layout.expand(names)
    check_factorized(matrix.factorize, matrix.to_dense(), damping, names=names, **can)


@all_solvers
@pytest.mark.parametrize("exponent", [-1, -4, -8])
def test_small_dampings(name: str, exponent: int) -> None:
    """From 1e-1 to 1e-8 of the largest eigenvalue, which rounding limits in what it can solve."""
    if name == "matrix-free":
        exponent = max(exponent, -6)  # below, rounding keeps residuals from falling to 1e-8
    build, can = SOLVERS[name]
    matrix = build(CASES["classifier"].operator())
    dense = matrix.to_dense()
    largest = max(float(torch.linalg.matrix_norm(dense, 2)), 1e-3)
    check_factorized(matrix.factorize, dense, 10.0**exponent * largest, **can)


@all_solvers
def test_bad_dampings_are_refused(name: str) -> None:
    build, _ = SOLVERS[name]
    matrix = build(CASES["classifier"].operator())
    size = matrix.shape[0]
    with pytest.raises(ValueError, match=rf"one finite number or have shape \({size},\)"):
        matrix.factorize(torch.ones(size + 1))
    with pytest.raises(ValueError, match="damping must be one finite number"):
        matrix.factorize(float("nan"))
    with pytest.raises(ValueError, match="it has NaN or infinite values"):
        matrix.factorize(torch.full((size,), torch.inf))
    with pytest.raises(TypeError, match="damping must be a number, a tensor"):
        matrix.factorize("large")
    with pytest.raises(TypeError, match="damping must hold real numbers"):
        matrix.factorize(torch.ones(size, dtype=torch.complex64))
    with pytest.raises(KeyError, match="none is given for"):
        matrix.factorize({"0": 1.0})


def test_names_need_a_matrix_that_knows_them() -> None:
    with pytest.raises(TypeError, match="damping by names needs a matrix that knows the names"):
        LowRank(kernel_matrix("gaussian", 20, 2), 3).factorize({"0": 1.0})


def test_low_rank_and_blocks_need_a_positive_damping() -> None:
    operator = CASES["classifier"].operator()
    for matrix in (LowRank(operator, 3), BlockDiagonal(operator)):
        with pytest.raises(ValueError, match=r"damping must be positive: .*; got 0\.0"):
            matrix.factorize(0.0)


def test_samples_of_conjugate_gradients_have_the_right_covariance() -> None:
    operator = CASES["one layer"].operator()
    solver = MatrixFree(operator, tolerance=1e-10).factorize(0.3)
    samples = solver.sample(20_000, torch.Generator().manual_seed(0))
    size = operator.shape[0]
    inverse = torch.linalg.inv(operator.to_dense() + 0.3 * torch.eye(size, dtype=torch.float64))
    spread = (inverse.square() + torch.outer(inverse.diagonal(), inverse.diagonal())).sqrt()
    difference = samples.T @ samples / len(samples) - inverse
    assert float((difference / spread).abs().max()) < 5.5 / len(samples) ** 0.5


def test_what_conjugate_gradients_cannot_do_is_said() -> None:
    dense = kernel_matrix("gaussian", 30, 2)
    solver = MatrixFree(hcurv.compress(dense)).factorize(0.3)
    with pytest.raises(hcurv.NotFactorizableError, match="no log-determinant"):
        solver.logdet()
    with pytest.raises(hcurv.NotFactorizableError, match="samples need a matrix with a root"):
        solver.sample(2)
    with pytest.raises(hcurv.NotFactorizableError, match="no square root"):
        solver.sqrt_solve(normal(30))
    with pytest.raises(hcurv.NotFactorizableError, match=r"is torch\.float64 on cpu"):
        solver.to(dtype=torch.float32)


def test_one_power_iteration_is_near_the_optimum() -> None:
    """Without it the error was more than twice the optimum for such networks."""
    operator = CASES["deep autoencoder"].operator()
    values = torch.linalg.eigvalsh(operator.to_dense()).flip(0)
    for rank in (3, 10, 30):
        best = float(values[rank:].norm() / values.norm())
        assert LowRank(operator, rank).relative_error(operator) < 1.3 * best
