"""Where entries come from: dense tensors, the user's own objects, and blocks of many at once."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hcurv.indexing import Index, resolve_indices
from hcurv.operators import EntrySource, SymmetricOperator

__all__ = ["DenseMatrix", "as_source", "blocks", "has_product", "structural_orders"]

_STRIP = 2**24  # entries of a dense matrix checked at a time
_SPOT = 64  # rows and columns of the block that is checked of any other source
_ROUNDING = 1e3  # asymmetry allowed, in units of rounding of the largest entry


class DenseMatrix(SymmetricOperator):
    """A dense symmetric tensor as an operator and a source of entries."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach()

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._values.shape[0], self._values.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self._values.device

    @property
    def num_stored(self) -> int:
        """N²."""
        return self._values.numel()

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        return self._values.diagonal().clone()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        return self._values[row_index[:, None], col_index]

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        return self._values[rows[:, :, None], cols[:, None, :]]

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._values @ rhs


@runtime_checkable
class _BlocksSource(Protocol):
    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor: ...


@runtime_checkable
class _OrderedSource(Protocol):
    def orders(self) -> dict[str, Tensor]: ...


def blocks(source: EntrySource, rows: Tensor, cols: Tensor) -> Tensor:
    """Blocks rows[b] x cols[b] of a source, (B, m), (B, k) → (B, m, k); index -1 stands for zeros.

    A source may offer a method ``blocks(rows, cols)`` that takes many at once; else it is asked
    for one after the other.
    """
    num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
    if 0 in (num_blocks, num_rows, num_cols):
        return torch.zeros(num_blocks, num_rows, num_cols, dtype=source.dtype, device=source.device)
    safe_rows, safe_cols = rows.clamp(min=0), cols.clamp(min=0)
    if isinstance(source, _BlocksSource):
        values = source.blocks(safe_rows, safe_cols)
    else:
        pairs = zip(safe_rows, safe_cols, strict=True)
        values = torch.stack([source.block(row, col) for row, col in pairs])
    for padding, shape in ((rows < 0, (-1, num_rows, 1)), (cols < 0, (-1, 1, num_cols))):
        if bool(padding.any()):
            values.masked_fill_(padding.view(shape), 0.0)
    return values


def has_product(source: EntrySource) -> bool:
    """Whether ``source @ matrix`` is offered."""
    return hasattr(source, "__matmul__")


def structural_orders(source: EntrySource) -> dict[str, Tensor]:
    """The orders of its rows that a source offers by name (a method ``orders()``)."""
    return source.orders() if isinstance(source, _OrderedSource) else {}


def as_source(matrix: EntrySource | Tensor) -> EntrySource:
    """Check that ``matrix`` can be compressed: square, real, symmetric, finite, diagonal ≥ 0.

    A dense tensor is looked at entirely; of any other source the diagonal and a small block are.

    Raises:
        TypeError: it is neither a tensor nor offers the `EntrySource` protocol.
        ValueError: it is no symmetric positive semi-definite matrix.
    """
    if isinstance(matrix, Tensor):
        _check_shape(tuple(matrix.shape), matrix.dtype)
        source: EntrySource = DenseMatrix(matrix)
        _check_dense(matrix.detach())
    elif isinstance(matrix, EntrySource):
        source = matrix
        _check_shape(tuple(source.shape), source.dtype)
        _check_spot(source)
    else:
        raise TypeError(
            "a matrix to compress must be a dense tensor or offer shape, dtype, device, diagonal()"
            f" and block(rows, cols) (hcurv.EntrySource); got {type(matrix).__name__}"
        )
    return source


def _check_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"the matrix must be square, (N, N) with N > 0; got shape {shape}")
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the matrix must be float32 or float64; got {dtype} (convert it with .to())"
        )


def _check_dense(values: Tensor) -> None:
    size = values.shape[0]
    _check_diagonal(values.diagonal(), size)
    largest, asymmetry = 0.0, 0.0
    step = max(1, _STRIP // size)
    for start in range(0, size, step):
        strip = values[start : start + step]
        largest = max(largest, _finite_max(strip))
        asymmetry = max(asymmetry, float((strip - values[:, start : start + step].T).abs().max()))
    _check_asymmetry(asymmetry, largest, values.dtype)


def _check_spot(source: EntrySource) -> None:
    size = source.shape[0]
    diagonal = source.diagonal()
    _check_diagonal(diagonal, size)
    index = torch.linspace(0, size - 1, min(size, _SPOT), dtype=torch.float64).round().long()
    index = index.to(source.device)
    spot = source.block(index, index)
    if tuple(spot.shape) != (index.numel(), index.numel()):
        raise ValueError(
            f"block(rows, cols) of {index.numel()} rows and columns must have shape"
            f" ({index.numel()}, {index.numel()}); got {tuple(spot.shape)}"
        )
    largest = _finite_max(spot)
    _check_asymmetry(float((spot - spot.T).abs().max()), largest, source.dtype)
    difference = float((spot.diagonal() - diagonal[index]).abs().max())
    if difference > 1e-2 * largest:
        raise ValueError(
            f"diagonal() and block(i, i) of the source differ by {difference:.2e},"
            f" with entries up to {largest:.2e}"
        )


def _check_diagonal(diagonal: Tensor, size: int) -> None:
    if tuple(diagonal.shape) != (size,):
        raise ValueError(
            f"the diagonal of an N = {size} matrix must have shape ({size},);"
            f" got {tuple(diagonal.shape)}"
        )
    _finite_max(diagonal)
    lowest = int(diagonal.argmin())
    if float(diagonal[lowest]) < 0:
        raise ValueError(
            "a positive semi-definite matrix has no negative diagonal entry; entry"
            f" ({lowest}, {lowest}) is {float(diagonal[lowest]):.3e}"
        )


def _finite_max(values: Tensor) -> float:
    largest = float(values.abs().max())
    if largest != largest or largest == float("inf"):
        raise ValueError("the matrix has entries that are NaN or infinite")
    return largest


def _check_asymmetry(asymmetry: float, largest: float, dtype: torch.dtype) -> None:
    if asymmetry > _ROUNDING * torch.finfo(dtype).eps * largest:
        raise ValueError(
            f"the matrix must be symmetric; entries (i, j) and (j, i) differ by up to"
            f" {asymmetry:.2e}, with entries up to {largest:.2e} (take (A + A.T) / 2 if that is"
            " what you mean)"
        )
