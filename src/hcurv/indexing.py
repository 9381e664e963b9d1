"""Check indices, counts and seeds that users pass, and turn indices into tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "Index",
    "Indices",
    "check_count",
    "check_generator",
    "check_seed",
    "is_integer",
    "resolve_blocks",
    "resolve_indices",
    "resolve_pairs",
]

Indices: TypeAlias = Tensor | Sequence[int] | slice | range | npt.NDArray[np.integer]
Index: TypeAlias = int | Indices

_EXPECTED = "integers: a list, range, slice, NumPy array or tensor, or a boolean mask of length N"


def is_integer(index: object) -> bool:
    """Tell whether ``index`` is a single position."""
    if isinstance(index, Tensor):
        return index.ndim == 0 and _holds_integers(index)
    if isinstance(index, np.ndarray):
        return index.ndim == 0 and index.dtype.kind in "ui"
    return isinstance(index, int | np.integer) and not isinstance(index, bool)


def _holds_integers(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def resolve_indices(indices: Index, size: int, device: torch.device, name: str) -> Tensor:
    """Resolve ``indices`` into a one-dimensional int64 tensor of values in ``[0, size)``.

    Negative integers count from the end, as in Python; a boolean mask selects where it is true.

    Args:
        indices: the indices as the user passed them.
        size: the number of rows or columns.
        device: the device of the result.
        name: "rows" or "cols", for error messages.

    Raises:
        TypeError: ``indices`` are not integers.
        IndexError: an index is out of range, or a mask has the wrong length.
    """
    if isinstance(indices, slice):
        try:
            chosen = range(*indices.indices(size))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be {_EXPECTED}; got {indices!r}") from error
        return _arange(chosen, device)
    if isinstance(indices, range):
        _check_range(indices, size, name)
        index = _arange(indices, device)
    else:
        index = _as_tensor(indices, device, name)
    if index.dtype == torch.bool:
        if index.shape != (size,):
            raise IndexError(
                f"a boolean mask for {name} must have shape ({size},); got {tuple(index.shape)}"
            )
        return index.nonzero().squeeze(1)
    if index.numel() == 0 and not isinstance(indices, Tensor | np.ndarray):
        index = index.long()  # Torch makes an empty list floating-point.
    if not _holds_integers(index):
        raise TypeError(f"{name} must be {_EXPECTED}; got values of type {index.dtype}")
    if index.ndim > 1:
        raise TypeError(f"{name} must be one-dimensional; got shape {tuple(index.shape)}")
    index = index.long().reshape(-1)
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < -size or high >= size:
            worst = low if low < -size else high
            raise IndexError(f"{name} must lie in [0, {size}); got {worst}")
        if low < 0:
            index = torch.where(index < 0, index + size, index)
    return index


def _arange(numbers: range, device: torch.device) -> Tensor:
    """Return the numbers of a range as a tensor; none of them for an empty one."""
    if len(numbers) == 0:
        return torch.zeros(0, dtype=torch.long, device=device)
    return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)


def _check_range(numbers: range, size: int, name: str) -> None:
    """Raise if a range leaves the matrix, before a tensor is made of it."""
    for number in (numbers[0], numbers[-1]) if numbers else ():
        if not -size <= number < size:
            raise IndexError(f"{name} must lie in [0, {size}); got {number}")


def _as_tensor(indices: object, device: torch.device, name: str) -> Tensor:
    """Return the user's list, array or tensor as a tensor."""
    wrong = TypeError(f"{name} must be {_EXPECTED}; got {type(indices).__name__}")
    if isinstance(indices, Tensor):
        if indices.is_meta or indices.is_nested or indices.layout != torch.strided:
            raise TypeError(f"{name} must be {_EXPECTED}; got a tensor without dense values")
        return indices.to(device)
    if isinstance(indices, str | bytes | dict | set | frozenset) or indices is None:
        raise wrong
    try:
        if isinstance(indices, np.ndarray):
            if indices.dtype.kind in "ui":  # of any byte order, sign and direction
                if indices.dtype.kind == "u" and indices.size and int(indices.max()) >= 2**63:
                    raise IndexError(f"{name} are too large: got {int(indices.max())}")
                indices = indices.astype(np.int64)
            indices = np.ascontiguousarray(indices).reshape(indices.shape)
        return torch.as_tensor(indices, device=device)
    except OverflowError as error:
        raise IndexError(f"{name} are too large for an index: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error


def resolve_pairs(
    rows: Indices, cols: Indices, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Resolve rows and cols that belong together element by element.

    Args:
        rows: the row of each pair.
        cols: the column of each pair.
        size: the number of rows, and of columns.
        device: the device of the result.

    Returns:
        Two int64 tensors of equal length.

    Raises:
        TypeError, IndexError: as in `resolve_indices`.
        ValueError: rows and cols differ in length.
    """
    row_index = resolve_indices(rows, size, device, "rows")
    col_index = resolve_indices(cols, size, device, "cols")
    if row_index.numel() != col_index.numel():
        raise ValueError(
            f"rows and cols must have the same length; got {row_index.numel()} and"
            f" {col_index.numel()} (for a block use [rows, cols] or block)"
        )
    return row_index, col_index


def check_count(value: SupportsIndex, name: str, least: int = 1, most: int | None = None) -> int:
    """Return a count as a Python integer.

    Args:
        value: any integer (Python's, NumPy's or a tensor with one).
        name: the name of the argument, for error messages.
        least: the smallest number that is allowed.
        most: the largest number that is allowed, or None for no limit.

    Raises:
        ValueError: ``value`` is not an integer, or out of range.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        count = least - 1
    if count < least or (most is not None and count > most):
        wanted = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{name} must be an integer {wanted}; got {value!r}")
    return count


def check_seed(seed: SupportsIndex) -> int:
    """Return a seed as a Python integer.

    Args:
        seed: any integer (Python's, NumPy's or a tensor with one) that fits into 64 bits.

    Raises:
        TypeError: ``seed`` is not an integer.
        ValueError: ``seed`` does not fit into 64 bits.
    """
    try:
        number = operator.index(seed)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"seed must be an integer; got {seed!r} of type {type(seed).__name__}"
        ) from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed must lie between -2**63 and 2**63 - 1; got {number}")
    return number


def check_generator(generator: object) -> None:
    """Raise a TypeError unless ``generator`` is one of torch's, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            "generator must be a torch.Generator, as in torch.Generator().manual_seed(0), or None;"
            f" got {type(generator).__name__}"
        )


def resolve_blocks(
    rows: Tensor, cols: Tensor, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Check the indices of many blocks.

    Args:
        rows: rows of each block, (B, m); negative indices count from the end.
        cols: columns of each block, (B, k).
        size: N.
        device: the device of the result.

    Returns:
        Both as int64 indices in [0, N).

    Raises:
        TypeError: they are not two-dimensional tensors of integers.
        ValueError: they differ in the number of blocks.
        IndexError: an index is out of range.
    """
    for name, index in (("rows", rows), ("cols", cols)):
        if not isinstance(index, Tensor) or index.ndim != 2:
            given = type(index).__name__
            if isinstance(index, Tensor):
                given = f"shape {tuple(index.shape)}"
            raise TypeError(f"{name} must be a tensor of shape (blocks, indices); got {given}")
        if index.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers; got values of type {index.dtype}")
    if rows.shape[0] != cols.shape[0]:
        raise ValueError(
            f"rows and cols must be of equally many blocks; got {rows.shape[0]} and {cols.shape[0]}"
        )
    row_index = resolve_indices(rows.reshape(-1), size, device, "rows").view(rows.shape)
    if rows is cols:
        return row_index, row_index
    return row_index, resolve_indices(cols.reshape(-1), size, device, "cols").view(cols.shape)
