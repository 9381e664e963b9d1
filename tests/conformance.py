"""What every `SymmetricOperator` and every `Factorized` must satisfy.

A new operator or solver is tested by one line in its test file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cases import assert_close, normal
from hcurv import Factorized, SymmetricOperator


def check_operator(operator: SymmetricOperator, dense: torch.Tensor, factor: float = 100.0) -> None:
    """Compare all that an operator can do with the dense matrix that it stands for.

    Entries may differ by ``factor`` rounding units of the largest.
    """
    size = dense.shape[0]
    kind, device = operator.dtype, operator.device
    assert operator.shape == (size, size)
    assert operator.nbytes >= operator.num_stored * kind.itemsize
    assert operator.compression_rate == pytest.approx(operator.num_stored / size**2)
    assert_close(operator.to_dense(), dense, factor)
    assert_close(operator.diagonal(), dense.diagonal(), factor)
    for num_columns in (0, 1, 3, 20):
        rhs = normal(size, num_columns).to(device, kind)
        assert_close(operator @ rhs, dense @ rhs.double(), 300)
    vector = normal(size).to(device, kind)
    assert_close(operator @ vector, dense @ vector.double(), 300)
    assert_close(
        operator @ torch.stack([vector, vector], 1).mT.contiguous().mT,
        torch.stack([dense @ vector.double()] * 2, 1),
        300,
    )
    check_scipy(operator, dense)
    check_bad_right_hand_sides(operator)
    assert operator.relative_error(dense.to(kind)) <= 1e3 * torch.finfo(kind).eps


def check_scipy(operator: SymmetricOperator, dense: torch.Tensor) -> None:
    linear = operator.to_scipy()
    rhs = normal(dense.shape[0], 2).numpy().astype(linear.dtype)
    expected = dense @ torch.from_numpy(rhs).double()
    assert linear.shape == operator.shape
    assert_close(torch.from_numpy(np.ascontiguousarray(linear @ rhs)), expected, 300)
    assert_close(torch.from_numpy(linear.T @ rhs[:, 0]), expected[:, 0], 300)


def check_bad_right_hand_sides(operator: SymmetricOperator) -> None:
    size, kind = operator.shape[0], operator.dtype
    other = torch.float32 if kind == torch.float64 else torch.float64
    with pytest.raises(ValueError, match=rf"must have shape \({size},\) or \({size}, k\); got"):
        operator @ torch.zeros(size + 1, dtype=kind)
    with pytest.raises(ValueError, match="must have shape"):
        operator @ torch.zeros(size, 1, 1, dtype=kind)
    with pytest.raises(TypeError, match=rf"must be {kind}, like the operator; got {other}"):
        operator @ torch.zeros(size, dtype=other)
    with pytest.raises(ValueError, match="must be on cpu, like the operator; got meta"):
        operator @ torch.zeros(size, dtype=kind, device="meta")
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor or a NumPy array; got list"):
        operator @ ([0.0] * size)
    assert isinstance(operator @ np.zeros(size), np.ndarray)


def check_factorized(
    factorize: Callable[[Any], Factorized],
    dense: torch.Tensor,
    damping: float | torch.Tensor,
    *,
    names: dict[str, float] | None = None,
    logdet: bool = True,
    half: bool = True,
    movable: bool = True,
    gradients: bool = True,
    digits: float = 1.0,
) -> None:
    """Compare all that a factorization can do with the dense inverse of A + D, in float64.

    Args:
        factorize: the method of the matrix, a function of the damping.
        dense: A.
        damping: D, a number or a tensor (N,), positive.
        names: D by the names of parameters, if the matrix knows these.
        logdet: whether it has log-determinants.
        half: whether it has a square root, to sample with.
        movable: whether it can be converted to the other float type.
        gradients: whether its derivatives with respect to the damping are those of A + D.
        digits: share of the digits of its float type to which it solves.
    """
    size = dense.shape[0]
    diagonal = torch.as_tensor(damping, dtype=torch.float64).expand(size)
    damped = dense.double() + diagonal.diag()
    inverse = torch.linalg.inv(damped)
    factorized = factorize(damping)
    kind = factorized.dtype
    # Solving may lose as many digits as the condition number has.
    slack = 100 * max(1.0, float(torch.linalg.cond(damped)))
    slack *= torch.finfo(kind).eps ** (digits - 1)
    assert isinstance(factorized, Factorized)
    assert factorized.shape == (size, size)
    assert factorized.nbytes >= factorized.num_stored * kind.itemsize
    kept = torch.as_tensor(factorized.damping, dtype=torch.float64)
    assert torch.equal(kept.expand(size), diagonal)
    rhs = normal(size, 3)
    for columns in (rhs, rhs[:, 0].contiguous(), rhs[:, :0]):
        assert_close(factorized.solve(columns.to(kind)), inverse @ columns, slack)
        assert_close(factorized @ columns.to(kind), inverse @ columns, slack)
    rows = rhs.T.to(kind)
    expected = rhs.T @ inverse @ rhs
    assert_close(factorized.quadratic(rows), expected, slack)
    assert_close(factorized.quadratic(rows, diagonal=True), expected.diagonal(), slack)
    with pytest.raises(ValueError, match=rf"rows must be a tensor of shape \(m, {size}\); got"):
        factorized.quadratic(rows[:, 1:])
    assert_close(factorized.inverse_diagonal(), inverse.diagonal(), slack)
    assert_close(factorized.diagonal(), inverse.diagonal(), slack)
    linear = factorized.to_scipy()
    assert_close(torch.from_numpy(linear @ rhs.numpy().astype(linear.dtype)), inverse @ rhs, slack)
    check_bad_right_hand_sides(factorized)
    if logdet:
        expected = float(torch.linalg.slogdet(damped).logabsdet)
        rounding = torch.finfo(kind).eps * slack
        assert float(factorized.logdet()) == pytest.approx(expected, rel=rounding, abs=rounding)
        assert factorized.logdet().dtype == torch.float64
    if half:
        root = factorized.sqrt_solve(torch.eye(size, dtype=kind)).double()
        assert_close((root @ root.T).to(kind), inverse, slack)
        samples = factorized.sample(7, torch.Generator().manual_seed(0))
        again = factorized.sample(7, torch.Generator().manual_seed(0))
        assert samples.shape == (7, size)
        assert torch.equal(samples, again)
    other = torch.float32 if kind == torch.float64 else torch.float64
    if movable:
        moved = factorized.to(dtype=other)
        assert moved.dtype == other
        coarse = slack * torch.finfo(torch.float32).eps / torch.finfo(other).eps
        assert_close(moved.solve(rhs.to(other)), inverse @ rhs, max(slack, coarse))
        assert_close(moved.inverse_diagonal(), inverse.diagonal(), max(slack, coarse))
    with pytest.raises(TypeError, match=r"dtype must be torch\.float32 or torch\.float64"):
        factorized.to(dtype=torch.float16)
    if names is not None:
        named = factorize(names)
        assert_close(named.solve(rhs.to(kind)), inverse @ rhs, slack)
    if gradients and kind == torch.float64:
        check_damping_gradients(factorize, damped - diagonal.diag(), damping, slack, logdet=logdet)


def check_damping_gradients(
    factorize: Callable[[Any], Factorized],
    dense: torch.Tensor,
    damping: float | torch.Tensor,
    slack: float,
    *,
    logdet: bool,
) -> None:
    """Derivatives with respect to the damping and the right-hand side are those of torch."""
    size = dense.shape[0]
    weights = normal(size, 2, seed=5)

    def run(by_torch: bool) -> tuple[torch.Tensor, ...]:
        given = torch.as_tensor(damping, dtype=torch.float64).clone().requires_grad_()
        rhs = normal(size, 2, seed=4).requires_grad_()
        if by_torch:
            damped = dense + given.expand(size).diag()
            value = (weights * torch.linalg.solve(damped, rhs)).sum()
            value = value + (torch.logdet(damped) if logdet else 0.0)
        else:
            factorized = factorize(given)
            value = (weights * factorized.solve(rhs)).sum()
            value = value + (factorized.logdet() if logdet else 0.0)
        return torch.autograd.grad(value, (given, rhs))

    for actual, expected in zip(run(False), run(True), strict=True):
        assert_close(actual, expected, 10 * slack)
