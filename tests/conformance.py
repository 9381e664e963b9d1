"""What every `SymmetricOperator` must satisfy; a new one is tested by one line in its test file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import assert_close, normal
from hcurv import SymmetricOperator


def check_operator(operator: SymmetricOperator, dense: torch.Tensor) -> None:
    """Compare all that an operator can do with the dense matrix that it stands for."""
    size = dense.shape[0]
    kind, device = operator.dtype, operator.device
    assert operator.shape == (size, size)
    assert operator.nbytes >= operator.num_stored * kind.itemsize
    assert operator.compression_rate == pytest.approx(operator.num_stored / size**2)
    assert_close(operator.to_dense(), dense)
    assert_close(operator.diagonal(), dense.diagonal())
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
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor; got ndarray"):
        operator @ np.zeros(size)
