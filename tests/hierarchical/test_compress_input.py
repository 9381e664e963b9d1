"""Unfit options and sources: clear errors before work starts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hcurv
from matrices import Plain, kernel_matrix

BAD_OPTIONS = {
    "accuracy": ({"accuracy": "medium"}, 'accuracy must be "low" or "high"; got \'medium\''),
    "tolerance": ({"tolerance": -1e-3}, "tolerance must be a number of at least 0; got -0.001"),
    "nan": ({"tolerance": math.nan}, "tolerance must be a number"),
    "text": ({"tolerance": "small"}, "tolerance must be a number of at least 0; got 'small'"),
    "leaf": ({"leaf_size": 0}, "leaf_size must be an integer of at least 1; got 0"),
    "rank": ({"max_rank": -1}, "max_rank must be an integer of at least 0; got -1"),
    "fraction": ({"max_rank": 2.5}, "max_rank must be an integer of at least 0; got 2.5"),
    "method": ({"method": "svd"}, 'method must be "auto", "sketch" or "neighbors"; got'),
    "distance": ({"distance": "cosine"}, 'distance must be "angle" or "gram"; got'),
    "ordering": ({"ordering": "random"}, "ordering"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hcurv.compress(torch.eye(4), **options)


def test_bad_sources() -> None:
    eye = torch.eye(4)
    with pytest.raises(TypeError, match=r"must be a dense tensor or offer shape.*got list"):
        hcurv.compress([[1.0]])
    with pytest.raises(ValueError, match=r"must be square.*got shape \(4, 3\)"):
        hcurv.compress(eye[:, :3])
    with pytest.raises(ValueError, match="must be square"):
        hcurv.compress(eye[0])
    with pytest.raises(ValueError, match=r"N > 0; got shape \(0, 0\)"):
        hcurv.compress(torch.zeros(0, 0))
    with pytest.raises(TypeError, match=r"float32 or float64; got torch\.int64"):
        hcurv.compress(eye.long())
    skew = eye.clone()
    skew[0, 1] = 0.1
    with pytest.raises(ValueError, match=r"must be symmetric.*differ by up to 1\.00e-01"):
        hcurv.compress(skew)
    with pytest.raises(ValueError, match="must be symmetric"):
        hcurv.compress(Plain(skew))
    for value in (math.nan, math.inf):
        broken = eye.clone()
        broken[1, 2] = broken[2, 1] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            hcurv.compress(broken)
        with pytest.raises(ValueError, match="NaN or infinite"):
            hcurv.compress(Plain(broken))
    negative = eye.clone()
    negative[2, 2] = -1.0
    with pytest.raises(ValueError, match=r"entry \(2, 2\) is -1.000e\+00"):
        hcurv.compress(negative)
    with pytest.raises(ValueError, match=r'"sketch" needs products, but Plain has no "@"'):
        hcurv.compress(Plain(eye), method="sketch")


def test_sources_that_contradict_themselves() -> None:
    class WrongDiagonal(Plain):
        def diagonal(self) -> Tensor:
            return 2 * self.dense.diagonal()

    class WrongShape(Plain):
        def block(self, rows: Tensor, cols: Tensor) -> Tensor:
            return self.dense[rows]

    class WrongProduct(Plain):
        def __matmul__(self, rhs: Tensor) -> Tensor:
            return self.dense @ rhs[:, :1]

    dense = kernel_matrix("gaussian", 100, 2)
    with pytest.raises(ValueError, match=r"diagonal\(\) and block\(i, i\) of the source differ"):
        hcurv.compress(WrongDiagonal(dense))
    with pytest.raises(ValueError, match=r"must have shape \(64, 64\); got \(64, 100\)"):
        hcurv.compress(WrongShape(dense))
    with pytest.raises(
        ValueError, match=r"source @ matrix of WrongProduct must have shape \(100, "
    ):
        hcurv.compress(WrongProduct(dense))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    with pytest.raises(hcurv.InsufficientMemoryError, match="smaller leaf_size or max_rank"):
        hcurv.compress(kernel_matrix("gaussian", 90, 2))
