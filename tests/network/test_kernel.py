"""The tangent kernel K = S D⁻¹ Sᵀ against the dense root from automatic differentiation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hcurv
from cases import CASES, Case, all_cases, all_forms, assert_close, both_dtypes
from conformance import check_factorized, check_operator


def by_row(size: int) -> Tensor:
    return 10 ** (-1 - 2 * torch.rand(size, generator=torch.Generator().manual_seed(0)).double())


def dense_kernel(operator: hcurv.GaussNewton, damping: float | Tensor = 1.0) -> Tensor:
    """From products with unit vectors, which have tests of their own."""
    root = operator.root_product(torch.eye(operator.shape[0], dtype=operator.dtype)).double()
    return (root / torch.as_tensor(damping, dtype=torch.float64)) @ root.T


@all_cases
@both_dtypes
def test_conformance(case: Case, dtype: torch.dtype) -> None:
    operator = case.operator(dtype)
    check_operator(operator.kernel(), dense_kernel(operator))


@all_forms
def test_a_damping_for_each_row(case: Case) -> None:
    operator = case.operator()
    damping = by_row(operator.shape[0])
    check_operator(operator.kernel(damping), dense_kernel(operator, damping))


@all_cases
def test_entries_equal_the_dense_kernel(case: Case) -> None:
    operator = case.operator()
    for damping in (0.5, by_row(operator.shape[0])):
        kernel, dense = operator.kernel(damping), dense_kernel(operator, damping)
        size = dense.shape[0]
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, size, (7,), generator=generator)
        cols = torch.randint(0, size, (5,), generator=generator)
        assert_close(kernel.block(rows, cols), dense[rows][:, cols], 1e3)
        many_rows = torch.randint(0, size, (4, 3), generator=generator)
        many_cols = torch.randint(0, size, (4, 6), generator=generator)
        expected = dense[many_rows[:, :, None], many_cols[:, None, :]]
        assert_close(kernel.blocks(many_rows, many_cols), expected, 1e3)
    assert kernel.block([], cols).shape == (0, 5)


@all_forms
def test_factorizations_of_the_kernel(case: Case) -> None:
    operator = case.operator()
    dense = dense_kernel(operator)
    largest = float(torch.linalg.eigvalsh(dense)[-1])
    check_factorized(operator.kernel().factorize, dense, 1e-2 * largest)
    check_factorized(operator.kernel().factorize, dense, largest * by_row(dense.shape[0]))


@pytest.mark.parametrize("ratio", [1e-2, 1e-5, 1e-8])
def test_a_kernel_in_single_precision_is_factorized_in_double_where_it_must(ratio: float) -> None:
    operator = next(iter(CASES.values())).operator(torch.float32)
    kernel = operator.kernel()
    # The factors of S have single precision; what is factorized is right for them.
    dense = dense_kernel(operator.in_precision(torch.float64))
    damping = ratio * float(torch.linalg.eigvalsh(dense)[-1])
    rhs = dense[:, :3].float()
    found = kernel.factorize(damping).solve(rhs)
    damped = dense + damping * torch.eye(dense.shape[0], dtype=torch.float64)
    expected = torch.linalg.solve(damped, rhs.double())
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_a_kernel_refuses_dampings_that_are_not_positive() -> None:
    kernel = next(iter(CASES.values())).operator().kernel()
    with pytest.raises(ValueError, match="damping"):
        kernel.factorize(0.0)


@all_cases
def test_columns_of_the_root(case: Case) -> None:
    operator = case.operator()
    root = operator.root_product(torch.eye(operator.shape[0], dtype=torch.float64))
    assert_close(operator.root_columns(slice(None)), root)
    some = torch.tensor([operator.shape[0] - 1, 0, 0])
    assert_close(operator.root_columns(some), root[:, some])
    assert operator.root_columns([]).shape == (root.shape[0], 0)


def test_the_kernel_has_the_eigenvalues_of_the_matrix() -> None:
    operator = CASES["classifier"].operator()
    first = torch.linalg.eigvalsh(operator.to_dense()).flip(0)
    second = torch.linalg.eigvalsh(operator.kernel().to_dense()).flip(0)
    count = min(first.numel(), second.numel())
    assert_close(first[:count], second[:count], 1e3)


def test_the_dense_kernel_is_symmetric_to_the_last_bit() -> None:
    dense = CASES["classifier"].operator().kernel().to_dense()
    assert torch.equal(dense, dense.T)


def test_orders_are_permutations_of_the_rows() -> None:
    kernel = CASES["classifier"].operator().kernel()
    for order in kernel.orders().values():
        assert order.sort().values.tolist() == list(range(kernel.shape[0]))


def test_the_kernel_can_be_compressed_and_asked_for_eigenvalues() -> None:
    operator = CASES["classifier"].operator()
    kernel = operator.kernel()
    compressed = hcurv.compress(kernel, tolerance=1e-3)
    assert compressed.relative_error(kernel) < 2e-3
    expected = torch.linalg.eigvalsh(kernel.to_dense())[-1]
    assert float(hcurv.eigsh(kernel, 2).values[0]) == pytest.approx(float(expected))


def test_dampings_must_be_positive() -> None:
    operator = CASES["classifier"].operator()
    with pytest.raises(ValueError, match="damping must be positive: the kernel divides by it"):
        operator.kernel(0.0)
    named = operator.kernel({"0": 2.0, "*": 1.0})
    damping = operator.layout.expand({"0": 2.0, "*": 1.0})
    assert_close(named.to_dense(), dense_kernel(operator, damping))
