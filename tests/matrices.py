"""Matrices to compress: kernel matrices, and sources with nothing but the protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hcurv


def compress_tree(source: Any, **options: Any) -> hcurv.HMatrix:
    """A tree without any global part, whatever would be best."""
    return hcurv.compress(source, **{"global_rank": 0, **options})


def gaussian(distances: Tensor) -> Tensor:
    return torch.exp(-distances.square())


def inverse_multiquadric(distances: Tensor) -> Tensor:
    return (1 + distances.square()).rsqrt()


KERNELS = {"gaussian": gaussian, "inverse multiquadric": inverse_multiquadric}


def kernel_matrix(name: str, size: int, dimension: int, width: float = 0.5) -> Tensor:
    """A kernel matrix of points in random order."""
    points = torch.rand(
        size, dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(size)
    )
    return KERNELS[name](torch.cdist(points, points) / width)


class Plain:
    """A user's object with nothing but the protocol."""

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense
        self.shape = tuple(dense.shape)
        self.dtype, self.device = dense.dtype, dense.device

    def diagonal(self) -> Tensor:
        return self.dense.diagonal()

    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        rows, cols = (
            torch.arange(self.shape[0])[i] if isinstance(i, slice) else i for i in (rows, cols)
        )
        return self.dense[rows[:, None], cols]


class WithProduct(Plain):
    def __matmul__(self, rhs: Tensor) -> Tensor:
        return self.dense @ rhs
