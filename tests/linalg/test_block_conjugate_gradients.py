"""Block conjugate gradients against dense linear algebra in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hcurv
from cases import assert_close, both_dtypes, normal, pairwise
from hcurv.linalg.block_conjugate_gradients import BlockResult, block_cg


class System:
    """P X = B with a known spectrum, and its solution in double precision.

    Args:
        size: N.
        condition: λ₁/λ_N; the eigenvalues fall geometrically from 1.
        dtype: P and B are rounded to this type first, and are exact from then on.
        rhs: B, (N, k); by default 3 random columns.
    """

    def __init__(
        self,
        size: int = 60,
        condition: float = 1e3,
        dtype: torch.dtype = torch.float64,
        rhs: Tensor | None = None,
    ) -> None:
        basis = torch.linalg.qr(normal(size, size)).Q
        exponents = torch.linspace(0, 1, size, dtype=torch.float64)
        matrix = (basis * condition**-exponents) @ basis.T
        self.matrix = (matrix + matrix.T).div(2).to(dtype)
        self.rhs = (normal(size, 3, seed=2) if rhs is None else rhs).to(dtype)
        self.dense, self.columns = self.matrix.double(), self.rhs.double()
        self.exact = torch.linalg.solve(self.dense, self.columns)
        # Rounding changes solutions by this much, relative to them, whatever the method.
        self.rounding = 100 * torch.finfo(dtype).eps * condition

    def run(self, tolerance: float, **options: object) -> BlockResult:
        return block_cg(self.matrix.__matmul__, self.rhs, tolerance=tolerance, **options)

    def residuals(self, solution: Tensor) -> Tensor:
        lengths = self.columns.norm(dim=0)
        wrong = (self.columns - self.dense @ solution.double()).norm(dim=0)
        return wrong / torch.where(lengths > 0, lengths, 1.0)

    def errors(self, solution: Tensor) -> Tensor:
        """‖x − P⁻¹b‖_P/‖P⁻¹b‖_P of each column."""
        wrong = solution.double() - self.exact
        energies = (self.exact * self.columns).sum(0)
        return (
            (wrong * (self.dense @ wrong)).sum(0).clamp(min=0)
            / torch.where(energies > 0, energies, 1.0)
        ).sqrt()

    def check(self, found: BlockResult, tolerance: float) -> None:
        """The solution has converged in both measures."""
        assert found.converged
        assert found.solution.dtype == self.rhs.dtype
        assert found.solution.shape == self.rhs.shape
        assert found.residuals.shape == found.errors.shape == self.rhs.shape[1:]
        assert float(self.residuals(found.solution).max()) <= 1.2 * tolerance
        # The error is estimated. Where the estimate was right, at most three times it remains.
        assert float(self.errors(found.solution).max()) <= 3 * tolerance + self.rounding


@pairwise(
    num_columns=(1, 2, 7, 64, 65, 150), condition=(1.0, 1e2, 1e4), tolerance=(1e-2, 1e-5, 1e-9)
)
def test_residual_and_error_reach_the_tolerance(
    num_columns: int, condition: float, tolerance: float
) -> None:
    system = System(condition=condition, rhs=normal(60, num_columns, seed=2))
    system.check(system.run(tolerance), tolerance)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
def test_single_precision_reaches_what_rounding_allows(condition: float) -> None:
    system = System(condition=condition, dtype=torch.float32)
    tolerance = max(1e-5, system.rounding / 100)
    system.check(system.run(tolerance), tolerance)


@both_dtypes
@pytest.mark.parametrize("num_columns", [1, 4])
def test_residuals_are_those_of_the_solution(num_columns: int, dtype: torch.dtype) -> None:
    system = System(dtype=dtype, rhs=normal(60, num_columns, seed=2))
    for max_iterations in (1, 5, 200):
        found = system.run(1e-3, max_iterations=max_iterations)
        allowed = 10 * len(system.rhs) ** 0.5 * torch.finfo(dtype).eps
        assert float((found.residuals - system.residuals(found.solution)).abs().max()) <= allowed
        assert found.num_iterations <= max_iterations
        assert found.converged == (max_iterations == 200)


def test_one_product_with_one_column_confirms_many_residuals() -> None:
    system = System(400, 1e2, rhs=normal(400, 8, seed=2))
    widths = []

    def product(columns: Tensor) -> Tensor:
        widths.append(columns.shape[1])
        return system.matrix @ columns

    found = block_cg(product, system.rhs, tolerance=1e-4)
    system.check(found, 1e-4)
    assert widths == [8] * found.num_iterations + [1]


@pytest.mark.parametrize("drift", [1e-3, 1e-2])
def test_residuals_that_drift_from_the_recursion_are_found(drift: float) -> None:
    """The first products are wrong by this share, so that the recursion follows another matrix."""
    system = System(condition=1e2, rhs=normal(60, 8, seed=2))
    other = system.matrix + drift * torch.diag(normal(60).abs())
    calls = 0

    def product(columns: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (other if calls <= 3 else system.matrix) @ columns

    found = block_cg(product, system.rhs, tolerance=1e-4)
    system.check(found, 1e-4)
    allowed = 1e-5  # a tenth of the tolerance: what the random signs may have hidden
    assert float((found.residuals - system.residuals(found.solution)).abs().max()) <= allowed


@pairwise(tolerance=(1e-1, 1e-2, 1e-4), num_columns=(1, 4), condition=(1e2, 1e4))
def test_estimated_errors_are_within_a_factor_of_three(
    num_columns: int, condition: float, tolerance: float
) -> None:
    """While the Krylov spaces together span a small share of the whole."""
    system = System(300, condition, rhs=normal(300, num_columns, seed=2))
    found = system.run(tolerance)
    ratios = found.errors / system.errors(found.solution)
    assert float(ratios.min()) > 1 / 3
    assert float(ratios.max()) < 3


@pairwise(tolerance=(1e-1, 1e-2, 1e-4), num_columns=(16, 32), condition=(1e2, 1e4, 1e6))
def test_estimated_errors_are_not_too_small_where_blocks_span_everything(
    num_columns: int, condition: float, tolerance: float
) -> None:
    """The error then falls suddenly, to far below the tolerance, and may be unlike the estimate."""
    system = System(300, condition, rhs=normal(300, num_columns, seed=2))
    found = system.run(tolerance)
    errors = system.errors(found.solution)
    assert bool((errors <= 3 * found.errors.clamp(min=0.1 * tolerance)).all())


@pytest.mark.parametrize("num_columns", [1, 2, 5, 20])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_errors_are_never_larger_than_those_of_single_columns(
    num_columns: int, condition: float
) -> None:
    """After as many iterations: the block minimises over a space that contains theirs."""
    system = System(condition=condition, rhs=normal(60, num_columns, seed=2))
    for count in (1, 2, 3, 6, 12):
        together = system.errors(system.run(1e-14, max_iterations=count).solution)
        alone = hcurv.cg(system.matrix, system.rhs, tolerance=1e-14, max_iterations=count)
        allowed = (1 + 1e-6) * system.errors(alone.solution) + system.rounding
        assert bool((together <= allowed).all())


@pairwise(num_columns=(2, 5, 20, 60), condition=(1e2, 1e4), tolerance=(1e-2, 1e-6))
def test_no_more_iterations_than_single_columns(
    num_columns: int, condition: float, tolerance: float
) -> None:
    system = System(condition=condition, rhs=normal(60, num_columns, seed=2))
    alone = hcurv.cg(system.matrix, system.rhs, tolerance=tolerance)
    together = system.run(tolerance)
    assert together.converged
    assert together.num_iterations < int(alone.num_iterations.max())


def test_one_column_takes_the_iterations_of_conjugate_gradients() -> None:
    """Where a residual of the tolerance means an error of the tolerance, as it does here."""
    system = System(400, 1e2, rhs=normal(400, 1, seed=2))
    alone = hcurv.cg(system.matrix, system.rhs, tolerance=1e-6)
    assert abs(system.run(1e-6).num_iterations - int(alone.num_iterations)) <= 1


@both_dtypes
def test_columns_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    rhs = normal(60, 4, seed=2)
    rhs[:, [0, 2]] = 0
    system = System(dtype=dtype, condition=1e2, rhs=rhs)
    found = system.run(1e-4)
    system.check(found, 1e-4)
    assert not found.solution[:, [0, 2]].any()
    assert not found.residuals[[0, 2]].any()
    assert not found.errors[[0, 2]].any()
    nothing = System(dtype=dtype, rhs=torch.zeros(60, 2)).run(1e-4)
    assert nothing.converged
    assert nothing.num_iterations == 0
    assert not nothing.solution.any()


def test_no_columns_are_solved_at_once() -> None:
    found = System(rhs=torch.zeros(60, 0)).run(1e-4)
    assert found.converged
    assert found.num_iterations == 0
    assert found.solution.shape == (60, 0)


@both_dtypes
def test_dependent_columns_are_solved_like_others(dtype: torch.dtype) -> None:
    first = normal(60, 2, seed=2)
    repeated = torch.cat([first, first[:, :1], -2 * first, 1e-6 * first.sum(1, keepdim=True)], 1)
    system = System(condition=1e2, dtype=dtype, rhs=repeated)
    found = system.run(1e-4)
    system.check(found, 1e-4)
    few = System(condition=1e2, dtype=dtype, rhs=first).run(1e-4)
    assert abs(found.num_iterations - few.num_iterations) <= 1  # the space is no larger


@both_dtypes
@pytest.mark.parametrize("size", [1, 2, 7])
def test_more_columns_than_rows(size: int, dtype: torch.dtype) -> None:
    system = System(size, 10.0, dtype, normal(size, 3 * size + 2, seed=2))
    found = system.run(1e-4)
    system.check(found, 1e-4)
    assert found.num_iterations <= 2  # the block spans everything at once


@both_dtypes
def test_columns_of_different_sizes_are_all_solved(dtype: torch.dtype) -> None:
    scales = torch.logspace(-15, 15, 7, dtype=torch.float64)
    system = System(condition=1e2, dtype=dtype, rhs=normal(60, 7, seed=2) * scales)
    system.check(system.run(1e-4), 1e-4)


@both_dtypes
def test_the_exact_inverse_as_preconditioner_takes_two_iterations(dtype: torch.dtype) -> None:
    system = System(condition=1e3, dtype=dtype)
    inverse = torch.linalg.inv(system.dense)
    inverse = ((inverse + inverse.T) / 2).to(dtype)
    found = system.run(1e-3, precondition=inverse.__matmul__)
    system.check(found, 1e-3)
    assert found.num_iterations <= 2


@pytest.mark.parametrize("num_columns", [1, 4])
def test_a_good_preconditioner_saves_iterations(num_columns: int) -> None:
    """Jacobi's takes away bad scaling, and a solution stays the same."""
    system = System(150, 1e2, rhs=normal(150, num_columns, seed=2))
    scales = torch.logspace(-2, 2, 150, dtype=torch.float64)
    system.matrix = system.dense = system.dense * torch.outer(scales, scales)
    system.exact = torch.linalg.solve(system.dense, system.columns)
    diagonal = system.dense.diagonal()[:, None]
    found = system.run(1e-6, precondition=lambda columns: columns / diagonal)
    system.check(found, 1e-6)
    plain = system.run(1e-6, max_iterations=2 * found.num_iterations)
    assert not plain.converged


def test_a_good_start_saves_iterations() -> None:
    system = System(400, 1e3)
    near = system.exact + 1e-4 * system.exact.norm(dim=0) * normal(400, 3, seed=5) / 20
    found = system.run(1e-6, start=near)
    system.check(found, 1e-6)
    assert found.num_iterations < system.run(1e-6).num_iterations
    far = system.run(1e-6, start=100 * normal(400, 3, seed=5))
    system.check(far, 1e-6)


def test_a_start_is_not_changed() -> None:
    start = normal(60, 3, seed=5)
    kept = start.clone()
    System().run(1e-6, start=start)
    assert torch.equal(start, kept)


@both_dtypes
def test_the_solution_as_start_takes_no_iteration(dtype: torch.dtype) -> None:
    identity = torch.eye(8, dtype=dtype)
    rhs = normal(8, 3).to(dtype)
    found = block_cg(identity.__matmul__, rhs, tolerance=1e-6, start=rhs)
    assert found.converged
    assert found.num_iterations == 0
    assert torch.equal(found.solution, rhs)
    assert not found.errors.any()


@pytest.mark.parametrize("num_columns", [4, 20])
def test_ill_conditioned_systems_are_solved(num_columns: int) -> None:
    system = System(condition=1e8, rhs=normal(60, num_columns, seed=2))
    found = system.run(1e-6, max_iterations=5000)
    system.check(found, 1e-6)


@pytest.mark.parametrize("num_columns", [1, 20, 100])
@pytest.mark.parametrize("condition", [1e4, 1e6, 1e9])
def test_what_single_precision_cannot_reach_is_said(num_columns: int, condition: float) -> None:
    rhs = normal(60, num_columns, seed=2)
    system = System(condition=condition, dtype=torch.float32, rhs=rhs)
    found = system.run(1e-8, max_iterations=200)
    assert not found.converged
    assert bool(torch.isfinite(found.solution).all())
    assert bool(torch.isfinite(found.residuals).all())
    assert bool(torch.isfinite(found.errors).all())
    assert float(found.residuals.max()) > 1e-8
    if condition > 1e8:  # nothing can be solved, and zero is as good as anything
        assert float(found.residuals.max()) <= 1 + system.rounding


@both_dtypes
@pytest.mark.parametrize("max_iterations", [0, 1, 3, 10, 40])
def test_the_solution_is_never_worse_than_zero(max_iterations: int, dtype: torch.dtype) -> None:
    """In the norm of P. The residual may rise at first, by the root of the condition number."""
    for condition in (1e2, 1e6):
        system = System(condition=condition, dtype=dtype)
        found = system.run(1e-12, max_iterations=max_iterations)
        assert not found.converged or dtype == torch.float64
        assert float(system.errors(found.solution).max()) <= 1 + system.rounding


@given(
    size=st.integers(1, 30),
    num_columns=st.integers(0, 40),
    rank=st.integers(1, 30),
    damping=st.sampled_from([1e-3, 1e-1, 1.0]),
    seed=st.integers(0, 50),
    single=st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_damped_gram_matrix_is_solved(
    size: int, num_columns: int, rank: int, damping: float, seed: int, single: bool
) -> None:
    dtype = torch.float32 if single else torch.float64
    factor = normal(size, rank, seed=seed)
    matrix = (factor @ factor.T + damping * torch.eye(size, dtype=torch.float64)).to(dtype)
    rhs = normal(size, num_columns, seed=seed + 1).to(dtype)
    found = block_cg(matrix.__matmul__, rhs, tolerance=1e-2)
    exact = torch.linalg.solve(matrix.double(), rhs.double())
    assert found.converged
    condition = float(torch.linalg.cond(matrix.double()))
    relative = 3e-2 * condition**0.5 + 100 * torch.finfo(dtype).eps * condition
    assert_close(found.solution, exact, relative * size**0.5 / torch.finfo(dtype).eps)
