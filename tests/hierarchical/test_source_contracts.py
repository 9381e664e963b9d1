"""Sources that are not one symmetric positive semi-definite matrix are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hcurv
from matrices import Plain, WithProduct, kernel_matrix

SIZE = 300
DENSE = kernel_matrix("gaussian", SIZE, 2)


def _adjacency() -> Tensor:
    drawn = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.01
    return (drawn | drawn.T).double().fill_diagonal_(0)


def _distances() -> Tensor:
    points = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1)).double()
    return torch.cdist(points, points)


def _one_zero() -> Tensor:
    """A matrix that is not semi-definite because of one diagonal entry."""
    dense = DENSE.clone()
    dense[250, 250] = 0
    return dense


def _one_asymmetric_entry() -> Tensor:
    dense = 2 * DENSE
    dense[17, 203] += 0.1
    return dense


BAD = {
    "adjacency": (_adjacency, "must be positive semi-definite"),
    "distances": (_distances, "must be positive semi-definite"),
    "one zero on the diagonal": (_one_zero, "must be positive semi-definite"),
    "one asymmetric entry": (_one_asymmetric_entry, "must be symmetric"),
}


@pytest.mark.parametrize("wrap", [lambda dense: dense, Plain, WithProduct])
@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_not_semidefinite_is_refused(
    make: Callable[[], Tensor], message: str, wrap: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        hcurv.compress(wrap(make()), leaf_size=32)


def test_differences_of_matrices_with_a_zero_diagonal_are_refused() -> None:
    both = hcurv.compress(DENSE, tolerance=1e-3) - hcurv.Diagonal(torch.ones(SIZE).double())
    rest = both + hcurv.Diagonal(-both.diagonal())
    assert float(rest.to_dense().norm()) > 1
    with pytest.raises(ValueError, match=r"row 0, or another row with a zero on the diagonal"):
        hcurv.compress(rest)


class _OtherProducts(WithProduct):
    def __matmul__(self, rhs: Tensor) -> Tensor:
        return torch.eye(SIZE, dtype=rhs.dtype) @ rhs


class _SlightlyOther(WithProduct):
    def __matmul__(self, rhs: Tensor) -> Tensor:
        return 1.01 * (self.dense @ rhs)


class _Arrays(Plain):
    def block(self, rows: Tensor, cols: Tensor) -> Any:
        return super().block(rows, cols).numpy()


class _Lists(Plain):
    def diagonal(self) -> Any:
        return self.dense.diagonal().tolist()


class _OtherType(Plain):
    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        return super().block(rows, cols).float()


class _Sparse(Plain):
    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        return super().block(rows, cols).to_sparse()


class _Transposed(Plain):
    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        return super().block(rows, cols)[:, :-1]


class _ProductArrays(WithProduct):
    def __matmul__(self, rhs: Tensor) -> Any:
        return (self.dense @ rhs).numpy()


class _LateNaN(Plain):
    """NaN in one entry that no small sample of blocks contains."""

    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense.clone())
        self.dense[123, 45] = self.dense[45, 123] = np.nan


class _BadShape(Plain):
    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense)
        self.shape = SIZE  # type: ignore[assignment]


class _BadDevice(Plain):
    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense)
        self.device = "nowhere"  # type: ignore[assignment]


class _BadType(Plain):
    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense)
        self.dtype = "float64"  # type: ignore[assignment]


CONTRADICTIONS = {
    _OtherProducts: "products of the source belong to another matrix than its entries",
    _SlightlyOther: "products of the source belong to another matrix than its entries",
    _Arrays: r"block\(rows, cols\) of _Arrays must return a torch.Tensor; it returned ndarray",
    _Lists: r"diagonal\(\) of _Lists must return a torch.Tensor; it returned list",
    _OtherType: r"block\(rows, cols\) of _OtherType must be dense and torch.float64",
    _Sparse: "must be dense",
    _Transposed: r"must have shape \(64, 64\); got \(64, 63\)",
    _ProductArrays: "source @ matrix of _ProductArrays must return a torch.Tensor",
    _LateNaN: "NaN or infinite",
    _BadShape: r"the source's shape must be \(N, N\)",
    _BadDevice: "the source's device must be a torch.device",
    _BadType: "the source's dtype must be",
}


@pytest.mark.parametrize(("kind", "message"), CONTRADICTIONS.items())
def test_sources_that_return_something_else_are_refused(kind: type[Plain], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hcurv.compress(kind(DENSE), leaf_size=32)


class _Expanded(WithProduct):
    """A matrix of ones: all entries share their memory."""

    def diagonal(self) -> Tensor:
        return torch.ones(1, dtype=self.dtype).expand(SIZE)

    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        return torch.ones(1, 1, dtype=self.dtype).expand(rows.numel(), cols.numel())

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        return torch.ones(1, 1, 1, dtype=self.dtype).expand(*rows.shape, cols.shape[1])

    def __matmul__(self, rhs: Tensor) -> Tensor:
        return rhs.sum(0, keepdim=True).expand_as(rhs)


class _Views(WithProduct):
    """It returns its own numbers, which nobody may change."""

    def diagonal(self) -> Tensor:
        return self.dense.diagonal()

    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        if rows.numel() and torch.equal(rows, torch.arange(rows[0], rows[0] + rows.numel())):
            part = self.dense[int(rows[0]) : int(rows[0]) + rows.numel()]
            if torch.equal(cols, torch.arange(SIZE)):
                return part
        return super().block(rows, cols)


@pytest.mark.parametrize(
    "options", [{}, {"global_rank": 0}, {"method": "neighbors"}, {"damping": 0.1}]
)
def test_expanded_views_and_views_are_compressed_rightly(options: dict[str, Any]) -> None:
    before = DENSE.clone()
    for source in (_Expanded(torch.ones_like(DENSE)), _Views(DENSE)):
        built = hcurv.compress(source, leaf_size=32, tolerance=1e-2, **options)
        truth = before if isinstance(source, _Views) else torch.ones_like(before)
        error = float((built.to_dense() - truth).norm() / truth.norm())
        assert error < 3e-2 + 2 * built.estimated_error
        assert error < 0.2
    assert torch.equal(before, DENSE)


@pytest.mark.parametrize("call", [hcurv.cg, lambda matrix, rhs: hcurv.eigsh(matrix, 2)])
def test_operators_that_return_something_else_are_refused(call: Callable[..., object]) -> None:
    class Operator:
        shape, dtype, device = (SIZE, SIZE), torch.float64, torch.device("cpu")

        def __init__(self, product: Callable[[Tensor], object]) -> None:
            self.product = product

        def __matmul__(self, rhs: Tensor) -> object:
            return self.product(rhs)

    rhs = torch.ones(SIZE, dtype=torch.float64)
    for product in (lambda v: v.numpy(), lambda v: v[:-1], lambda v: v.float(), lambda v: None):
        with pytest.raises((TypeError, ValueError), match="Operator @ vectors must"):
            call(Operator(product), rhs)
    call(Operator(lambda v: v), rhs)  # the identity returns what it is given


@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1e18, 1e33])
@pytest.mark.parametrize("options", [{}, {"damped": True}, {"method": "neighbors"}])
def test_tiny_and_huge_entries_are_compressed_and_solved_with_as_any_others(
    scale: float, options: dict[str, Any]
) -> None:
    dense, options = (DENSE[:100, :100] * scale).float(), dict(options)
    if options.pop("damped", False):
        options["damping"] = 0.1 * scale
    built = hcurv.compress(dense, leaf_size=16, tolerance=1e-2, **options)
    truth = dense.double() / scale
    error = float((built.to_dense().double() / scale - truth).norm() / truth.norm())
    assert error < 3e-2
    assert error < 3 * built.estimated_error + 1e-6
    try:
        factors = built.factorize(0.1 * scale, warn=False)
    except hcurv.NotPositiveDefiniteError as found:
        factors = built.factorize(found.smallest_damping, warn=False)
    assert 0 < float(factors.damping) < 100 * scale
    rhs = torch.ones(100)
    damped = built.to_dense().double() + float(factors.damping) * torch.eye(100).double()
    solved = torch.linalg.solve(damped, rhs.double())
    torch.testing.assert_close(
        factors.solve(rhs).double() * scale,
        solved * scale,
        rtol=1e-2,
        atol=1e-3 * float(solved.abs().max() * scale),
    )
