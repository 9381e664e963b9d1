"""Sparse matrices that are put together from many small blocks, and multiply one vector.

Where torch has MKL, its sparse products run on all threads and are about twice as fast as SciPy's
on one. Elsewhere SciPy multiplies.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from scipy.sparse import csr_array
from torch import Tensor

__all__ = ["SparseEntries", "SparseMatrix"]


@dataclass(frozen=True)
class SparseMatrix:
    """A sparse matrix.

    Attributes:
        entries: its rows, in compressed form.
    """

    entries: csr_array

    def times(self, vector: Tensor) -> Tensor:
        """Return the product with a vector."""
        return _product(self._rows, vector)

    def transposed_times(self, vector: Tensor) -> Tensor:
        """Return the product of the transpose with a vector."""
        return _product(self._columns, vector)

    @cached_property
    def _rows(self) -> Any:
        return _multiplier(self.entries)

    @cached_property
    def _columns(self) -> Any:
        # MKL multiplies by rows alone, so that the transpose is a copy. SciPy shares the memory.
        columns = self.entries.T
        return _multiplier(columns.tocsr()) if torch.backends.mkl.is_available() else columns


def _multiplier(rows: csr_array) -> Any:
    """A matrix as torch multiplies it, or SciPy if torch cannot."""
    if not torch.backends.mkl.is_available() or not rows.nnz:
        return rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse matrices a beta version
        return torch.sparse_csr_tensor(
            torch.from_numpy(rows.indptr),
            torch.from_numpy(rows.indices),
            torch.from_numpy(rows.data),
            rows.shape,
            check_invariants=False,
        )


def _product(matrix: Any, vector: Tensor) -> Tensor:
    if isinstance(matrix, Tensor):
        return torch.mv(matrix, vector)
    return torch.from_numpy(matrix @ vector.numpy())


@dataclass
class SparseEntries:
    """Entries of a sparse matrix that is put together block by block.

    Attributes:
        shape: of the matrix.
        parts: rows, columns and values of some entries.
    """

    shape: tuple[int, int]
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """Add blocks (B, m, r) at rows (B, m) and columns (B, r); −1 marks padding."""
        rows, cols = rows[:, :, None].expand_as(values), cols[:, None, :].expand_as(values)
        # Zeros are left out, and subnormal numbers with them, because these are slow.
        kept = (rows >= 0) & (cols >= 0) & ~(values.abs() < torch.finfo(values.dtype).tiny)
        self.parts.append((rows[kept].int(), cols[kept].int(), values[kept]))

    def add_identity(self, rows: Tensor, cols: Tensor, dtype: torch.dtype) -> None:
        """Add ones at some rows and columns, both of any shape; −1 marks padding."""
        rows, cols = rows[rows >= 0], cols[cols >= 0]
        ones = torch.ones(rows.numel(), dtype=dtype, device=rows.device)
        self.parts.append((rows.int(), cols.int(), ones))

    def matrix(self, dtype: torch.dtype) -> SparseMatrix:
        """Return the matrix."""
        empty = torch.zeros(0, dtype=torch.int32)
        parts = self.parts or [(empty, empty, torch.zeros(0, dtype=dtype))]
        rows, cols, values = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        return SparseMatrix(csr_array((values, (rows, cols)), shape=self.shape))
