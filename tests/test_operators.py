"""Sums, multiples and diagonal operators; any matrix as an operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import hcurv
from cases import CASES, assert_close, both_dtypes, normal
from conformance import check_operator
from hcurv.algebra import EntrySum, OperatorSum
from hcurv.operators import EntrySource
from hcurv.sources import DenseMatrix, MatrixProduct, ProductSource, as_operator
from matrices import Plain, WithProduct, kernel_matrix

SIZE = 40


def dense(seed: int) -> Tensor:
    factor = normal(SIZE, SIZE, seed=seed)
    return factor @ factor.T / SIZE


COMBINATIONS = {
    "twice": (lambda a, b, d: 2 * a, lambda a, b, d: 2 * a),
    "times NumPy": (lambda a, b, d: np.float64(2) * a, lambda a, b, d: 2 * a),
    "times a tensor": (lambda a, b, d: a * torch.tensor(2.0), lambda a, b, d: 2 * a),
    "half": (lambda a, b, d: a / 2, lambda a, b, d: a / 2),
    "negative": (lambda a, b, d: -a, lambda a, b, d: -a),
    "sum": (lambda a, b, d: a + b, lambda a, b, d: a + b),
    "difference": (lambda a, b, d: a - b, lambda a, b, d: a - b),
    "plus a diagonal": (lambda a, b, d: a + hcurv.Diagonal(d), lambda a, b, d: a + d.diag()),
    "diagonal plus": (lambda a, b, d: hcurv.Diagonal(d) - a, lambda a, b, d: d.diag() - a),
    "plus a tensor": (lambda a, b, d: a + b.to_dense(), lambda a, b, d: a + b),
    "tensor minus": (lambda a, b, d: b.to_dense() - a, lambda a, b, d: b - a),
    "nested": (
        lambda a, b, d: 3 * (a - 2 * (b + hcurv.Diagonal(d))) / 4 + a,
        lambda a, b, d: 3 * (a - 2 * (b + d.diag())) / 4 + a,
    ),
    "diagonals": (
        lambda a, b, d: 2 * hcurv.Diagonal(d) - hcurv.Diagonal(b),
        lambda a, b, d: (2 * d - b.diagonal()).diag(),
    ),
}


@both_dtypes
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_are_operators_with_entries(name: str, dtype: torch.dtype) -> None:
    make, expect = COMBINATIONS[name]
    first, second, diagonal = dense(0).to(dtype), dense(1).to(dtype), normal(SIZE, seed=2).to(dtype)
    combined = make(DenseMatrix(first), DenseMatrix(second), diagonal)
    expected = expect(first.double(), second.double(), diagonal.double())
    check_operator(combined, expected)
    assert isinstance(combined, EntrySource)
    assert combined.trace() == pytest.approx(float(expected.trace()), rel=1e-5)
    rows, cols = torch.tensor([3, 0, 39]), torch.tensor([0, 3])
    assert_close(combined.block(rows, cols), expected[rows][:, cols])
    assert_close(combined[rows, 5], expected[rows, 5])
    assert_close(combined[3, 3], expected[3, 3])
    assert_close(combined[:5, [True] + [False] * 38 + [True]], expected[:5][:, [0, 39]])
    many = combined.blocks(torch.stack([rows, rows + 0]), torch.stack([cols, cols + 1]))
    assert_close(many[1], expected[rows][:, cols + 1])


def test_sums_without_entries_are_operators() -> None:
    low = hcurv.baselines.LowRank(as_operator(dense(0)), rank=5)
    total = low + DenseMatrix(dense(1))
    expected = low.to_dense() + dense(1)
    assert type(total) is OperatorSum
    assert not isinstance(total, EntrySource)
    check_operator(total, expected)


def test_sums_count_what_they_store_once() -> None:
    matrix = DenseMatrix(dense(0))
    assert (matrix + matrix).num_stored == SIZE**2
    assert (matrix + DenseMatrix(dense(1))).num_stored == 2 * SIZE**2
    assert (matrix + hcurv.Diagonal(matrix)).num_stored == SIZE**2 + SIZE


def test_sums_of_networks_and_compressed_matrices_can_be_compressed() -> None:
    operator = CASES["deep autoencoder"].operator()
    size = operator.shape[0]
    prior = hcurv.Diagonal(torch.linspace(0.1, 1, size, dtype=torch.float64))
    total = operator + prior
    assert isinstance(total, EntrySum)
    assert total.orders().keys() == operator.orders().keys()
    compressed = hcurv.compress(total, tolerance=1e-6)
    assert compressed.relative_error(operator.to_dense() + prior.to_dense()) < 1e-5
    again = compressed - prior / 2
    assert_close(again[3, :], compressed.to_dense()[3] - prior.to_dense()[3] / 2, 1e3)


def test_entries_of_compressed_matrices_are_indexed_as_those_of_networks() -> None:
    operator = CASES["hand-written"].operator()
    compressed = hcurv.compress(operator, tolerance=1e-3, leaf_size=8)
    whole = compressed.to_dense()
    assert_close(compressed[2, 5], whole[2, 5])
    assert_close(compressed[2, :], whole[2])
    assert_close(compressed[[4, -1], 1:3], whole[[4, -1], 1:3])
    assert compressed[2, 5].shape == operator[2, 5].shape == ()
    for matrix in (operator, compressed, 2 * compressed):
        with pytest.raises(TypeError, match="two indices are expected"):
            matrix[3]


def test_operators_that_do_not_fit_are_refused() -> None:
    matrix = DenseMatrix(dense(0))
    with pytest.raises(ValueError, match=r"equal shapes; got \(40, 40\) and \(3, 3\)"):
        matrix + torch.eye(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"equal types; got torch\.float64 and torch\.float32"):
        matrix + DenseMatrix(dense(0).float())
    with pytest.raises(TypeError, match="unsupported operand"):
        matrix + 3
    with pytest.raises(TypeError, match="unsupported operand"):
        matrix * matrix
    with pytest.raises(TypeError, match="unsupported operand"):
        matrix / "two"
    with pytest.raises(ZeroDivisionError):
        matrix / 0
    with pytest.raises(ValueError, match=r"must have shape \(N,\) with N > 0; got \(40, 40\)"):
        hcurv.Diagonal(dense(0))
    with pytest.raises(TypeError, match=r"must be float32 or float64; got torch\.int64"):
        hcurv.Diagonal(torch.arange(3))
    with pytest.raises(TypeError, match=r"a tensor .* or an object with a method diagonal"):
        hcurv.Diagonal([1.0, 2.0])


def test_complex_vectors_keep_their_imaginary_part_in_scipy() -> None:
    operator = CASES["hand-written"].operator()
    expected = operator.to_dense().numpy()
    size = operator.shape[0]
    vectors = normal(size, 2).numpy() + 1j * normal(size, 2, seed=5).numpy()
    for matrix in (operator, hcurv.compress(operator, tolerance=1e-10)):
        linear = matrix.to_scipy()
        np.testing.assert_allclose(linear @ vectors, expected @ vectors, atol=1e-6)
        np.testing.assert_allclose(linear @ vectors[:, 0], expected @ vectors[:, 0], atol=1e-6)
        product = linear.matvec(vectors[:, 1])
        assert np.iscomplexobj(product)


def test_relative_error_takes_any_matrix_of_either_type() -> None:
    exact = dense(0)
    single = DenseMatrix(exact.float())
    for reference in (exact, exact.float(), DenseMatrix(exact), WithProduct(exact)):
        assert single.relative_error(reference) < 1e-6
    with pytest.raises(TypeError, match=r"the reference must be a hcurv\.SymmetricOperator"):
        single.relative_error(exact.tolist())
    with pytest.raises(ValueError, match="the reference must be symmetric"):
        single.relative_error(exact.triu())


def test_any_matrix_becomes_an_operator() -> None:
    matrix = kernel_matrix("gaussian", 30, 1)
    for source in (matrix, DenseMatrix(matrix), WithProduct(matrix)):
        check_operator(as_operator(source), matrix)
    assert isinstance(WithProduct(matrix), ProductSource)
    assert isinstance(WithProduct(matrix), MatrixProduct)
    assert not isinstance(Plain(matrix), ProductSource)
    with pytest.raises(TypeError, match=r"or an object with shape, dtype, device and @; got Plain"):
        as_operator(Plain(matrix))
    with pytest.raises(TypeError, match=r"must be float32 or float64; got torch\.float16"):
        as_operator(matrix.half())
    with pytest.raises(ValueError, match=r"must be square.*got shape \(30, 29\)"):
        as_operator(matrix[:, 1:])
    with pytest.raises(ValueError, match="NaN or infinite"):
        as_operator(matrix * torch.inf)
