"""Where entries and products come from: dense tensors, operators, and the user's own objects."""

from __future__ import annotations

from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import as_tensor
from hcurv.indexing import Index, resolve_indices
from hcurv.operators import EntryOperator, EntrySource, SymmetricOperator
from hcurv.ranks import OneRank
from hcurv.source_checks import CheckedProducts, CheckedSource, check_psd_entries, compare_parts

__all__ = [
    "DenseMatrix",
    "MatrixProduct",
    "ProductSource",
    "RootedSource",
    "SharedBlocks",
    "SharedProduct",
    "as_operator",
    "as_products",
    "as_source",
    "blocks",
    "has_entries",
    "has_product",
    "name_of",
    "product",
    "ranks_behind",
    "structural_orders",
]

# A dense matrix is checked in strips of this many entries, which bounds the memory of the check.
_STRIP = 2**20
# Of any other source, a block of this many rows and columns is checked.
_SPOT = 64
# Entries (i, j) and (j, i) may differ by this many units of rounding of the largest entry, because
# sums over data points that are taken in another order differ by some tens of units.
_ROUNDING = 1e3
# A matrix without entries is tried on so many random vectors.
_TRIED = 8


@runtime_checkable
class MatrixProduct(Protocol):
    """A symmetric matrix that can be multiplied with vectors."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""

    def __matmul__(self, rhs: Tensor, /) -> Tensor:
        """Return the product with (N,) or (N, k)."""


@runtime_checkable
class ProductSource(EntrySource, Protocol):
    """An `EntrySource` that can also be multiplied with vectors."""

    def __matmul__(self, rhs: Tensor, /) -> Tensor:
        """Return the product with (N,) or (N, k)."""


class DenseMatrix(EntryOperator):
    """A dense symmetric tensor as an operator and as a source of entries."""

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
        """Return the N diagonal entries, (N,)."""
        return self._values.diagonal().clone()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        return self._values[row_index[:, None], col_index]

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        return self._values[rows[:, :, None], cols[:, None, :]]

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._values @ rhs


class _WrappedProduct(SymmetricOperator):
    """The user's own object with a product, as an operator."""

    def __init__(self, matrix: MatrixProduct) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._matrix.shape[0], self._matrix.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """That of the object."""
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        """That of the object."""
        return torch.device(self._matrix.device)

    @property
    def num_stored(self) -> int:
        """Zero: what the object stores is not known."""
        return 0

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,), if the object offers them."""
        if not isinstance(self._matrix, EntrySource):
            raise TypeError(
                f"the diagonal is needed, but {type(self._matrix).__name__} offers no diagonal()"
            )
        return self._matrix.diagonal()

    def _matmat(self, rhs: Tensor) -> Tensor:
        found, name = self._matrix @ rhs, type(self._matrix).__name__
        if not isinstance(found, Tensor) or found.layout != torch.strided:
            raise TypeError(f"{name} @ vectors must be a dense tensor; got {type(found).__name__}")
        if found.shape != rhs.shape or found.dtype != rhs.dtype:
            raise ValueError(
                f"{name} @ vectors must have shape {tuple(rhs.shape)} and be {rhs.dtype}; got"
                f" {tuple(found.shape)} and {found.dtype}"
            )
        # A copy, because what is returned may be changed, and may be the vectors themselves.
        return found.clone(memory_format=torch.contiguous_format)


@runtime_checkable
class RootedSource(ProductSource, Protocol):
    """A source SᵀS that can be multiplied by its root S alone, as `GaussNewton` can."""

    @property
    def num_root_rows(self) -> int:
        """Number of rows of S."""

    def root_product(self, rhs: Tensor, /) -> Tensor:
        """Return S times (N, k)."""

    def root_transposed(self, rhs: Tensor, /) -> Tensor:
        """Return Sᵀ times (rows of S, k)."""


@runtime_checkable
class SharedProduct(Protocol):
    """A matrix that is a sum of one term on each rank, and can be multiplied by its own term."""

    def partial_product(self, rhs: Tensor, /) -> Tensor:
        """Return the term of this rank times (N, k)."""


@runtime_checkable
class SharedBlocks(Protocol):
    """A matrix that is a sum of one term on each rank, and knows the blocks of its own term."""

    def partial_blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of the term of this rank: (B, m), (B, k) → (B, m, k)."""


def ranks_behind(source: object) -> OneRank:
    """Return the ranks that a source is spread over, which are in its attribute ``ranks``.

    All of them have to ask such a source for the same things in the same order. Of any other
    source, every process has its own.
    """
    found = getattr(source, "ranks", None)
    return found if isinstance(found, OneRank) else OneRank()


@runtime_checkable
class _BlocksSource(Protocol):
    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor: ...


@runtime_checkable
class _OrderedSource(Protocol):
    def orders(self) -> dict[str, Tensor]: ...


def blocks(source: EntrySource, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the blocks rows[b] x cols[b] of a source.

    A source may offer a method ``blocks(rows, cols)`` that computes many blocks at once. Any other
    source is asked for one block after the other.

    Args:
        source: the matrix.
        rows: indices, (B, m); -1 stands for a row of zeros.
        cols: indices, (B, k); -1 stands for a column of zeros.

    Returns:
        The blocks, (B, m, k).
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


def has_product(source: EntrySource | MatrixProduct) -> TypeGuard[ProductSource]:
    """Whether the source offers ``source @ vectors``."""
    return hasattr(source, "__matmul__")


def has_entries(matrix: object) -> TypeGuard[EntrySource | Tensor]:
    """Whether the matrix is dense or can be asked for its entries."""
    return isinstance(matrix, Tensor | np.ndarray | EntrySource)


def product(source: EntrySource | MatrixProduct, vectors: Tensor) -> Tensor:
    """Return ``source @ vectors``, (N, k), of a source that has a product.

    Raises:
        TypeError: it has none.
    """
    if not has_product(source):
        raise TypeError(f"products are needed, and {name_of(source)} has none (source @ v)")
    return source @ vectors


def name_of(source: object) -> str:
    """Return the name of the class of a source, which is the user's own where there are checks."""
    return source.name if isinstance(source, CheckedSource) else type(source).__name__


def structural_orders(source: EntrySource) -> dict[str, Tensor]:
    """Return the orders of its rows that a source offers by name, in its method ``orders()``."""
    return source.orders() if isinstance(source, _OrderedSource) else {}


def as_source(matrix: EntrySource | Tensor) -> EntrySource:
    """Check that ``matrix`` can be compressed: square, real, symmetric, finite, diagonal ≥ 0.

    Every entry of a dense tensor is checked. Of any other source, the diagonal, some blocks and
    some products are compared with each other, and everything that it returns later is checked. A
    SᵀS of this package is one by its form, and to read its entries may take a pass over much data,
    so that only its diagonal is looked at.

    Raises:
        TypeError: ``matrix`` is neither a tensor nor offers the `EntrySource` protocol.
        ValueError: it is not symmetric positive semi-definite.
    """
    if isinstance(matrix, np.ndarray):
        matrix = as_tensor(matrix)
    if isinstance(matrix, Tensor):
        check_dense(matrix, "the matrix")
        _check_shape(tuple(matrix.shape), matrix.dtype, "the matrix")
        _check_diagonal(matrix.detach().diagonal(), matrix.shape[0])
        _check_dense(matrix.detach(), "the matrix", definite=True)
        return DenseMatrix(matrix)
    if isinstance(matrix, EntrySource):
        # A check of what one rank receives would not be one of what all ranks receive.
        is_plain = _is_ours(matrix) or ranks_behind(matrix).size > 1
        checked: EntrySource = matrix if is_plain else _checked(matrix)
        _check_shape(tuple(checked.shape), checked.dtype, "the matrix")
        if _is_ours(matrix) and isinstance(matrix, RootedSource):
            _check_diagonal(matrix.diagonal(), matrix.shape[0])
            return matrix
        _check_spot(checked)
        if isinstance(checked, CheckedSource):
            compare_parts(checked)
        else:
            _check_zero_rows(checked)
        return checked
    raise TypeError(
        "a matrix to compress must be a dense tensor or offer shape, dtype, device, diagonal()"
        " and block(rows, cols) (hcurv.EntrySource), or shape, dtype, device and @; got"
        f" {type(matrix).__name__}"
    )


def _is_ours(matrix: object) -> bool:
    """Whether the class of a matrix is one of this package, which needs no checks."""
    return type(matrix).__module__.partition(".")[0] == "hcurv"


def _checked(matrix: EntrySource) -> CheckedSource:
    """Return the user's own object with checks of all that it returns."""
    return CheckedProducts(matrix) if has_product(matrix) else CheckedSource(matrix)


def _check_zero_rows(source: EntrySource) -> None:
    """Raise unless rows with a zero on the diagonal are zero, by one product with a random vector.

    Differences of matrices can have such rows, which `compress` would leave out.
    """
    zero = (source.diagonal() == 0).nonzero().squeeze(1)
    if zero.numel() == 0 or not has_product(source):
        return
    generator = torch.Generator().manual_seed(0)
    vector = torch.zeros(source.shape[0], 1, dtype=source.dtype, device=source.device)
    numbers = torch.randn(zero.numel(), dtype=source.dtype, generator=generator)
    vector[zero, 0] = numbers.to(source.device)
    largest = float((source @ vector).abs().max())
    if largest > _ROUNDING * torch.finfo(source.dtype).eps * float(source.diagonal().max()):
        raise ValueError(
            f"the matrix must be positive semi-definite; row {int(zero[0])}, or another row with a"
            " zero on the diagonal, is not zero (add a multiple of the identity first)"
        )


def as_products(matrix: MatrixProduct, seed: int) -> SymmetricOperator:
    """Check that a matrix without entries can be compressed, by products with random vectors.

    Raises:
        TypeError: it is not of type float32 or float64.
        ValueError: it is not square, or products show that it is not symmetric positive
            semi-definite.
    """
    operator = as_operator(matrix, "the matrix")
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(operator.shape[0], _TRIED, generator=generator, dtype=operator.dtype)
    vectors = vectors.to(operator.device)
    products = operator @ vectors
    if products.shape != vectors.shape:
        raise ValueError(
            f"source @ matrix must have shape {tuple(vectors.shape)}; got {tuple(products.shape)}"
        )
    _finite_max(products, "the matrix")
    # Rounding of xᵀ H y is relative to the norms of its factors.
    norms = torch.linalg.vector_norm(vectors, dim=0)[:, None]
    largest = float((norms * torch.linalg.vector_norm(products, dim=0)).max())
    forms = (vectors.T @ products) / max(largest, torch.finfo(operator.dtype).tiny)
    _check_asymmetry(float((forms - forms.T).abs().max()), 1.0, operator.dtype, "the matrix")
    lowest = float(torch.linalg.eigvalsh((forms + forms.T).double() / 2)[0])
    if lowest < -_ROUNDING * torch.finfo(operator.dtype).eps:
        raise ValueError(
            "the matrix must be positive semi-definite; it is negative in a random direction (of a"
            " Hessian, take the Gauss-Newton matrix instead)"
        )
    return operator


def as_operator(
    matrix: SymmetricOperator | MatrixProduct | Tensor, name: str = "the operator"
) -> SymmetricOperator:
    """Return a matrix of any kind as a `SymmetricOperator`.

    Args:
        matrix: an operator, a dense symmetric tensor (N, N), or any object with ``shape``,
            ``dtype``, ``device`` and ``@``.
        name: what error messages call it.

    Raises:
        TypeError: ``matrix`` is none of these, or not of type float32 or float64.
        ValueError: it is not square, or a tensor that is not symmetric or not finite.
    """
    if isinstance(matrix, SymmetricOperator):
        return matrix
    if isinstance(matrix, np.ndarray):
        matrix = as_tensor(matrix)
    if isinstance(matrix, Tensor):
        check_dense(matrix, name)
        _check_shape(tuple(matrix.shape), matrix.dtype, name)
        _check_dense(matrix.detach(), name)
        return DenseMatrix(matrix)
    if isinstance(matrix, MatrixProduct) and isinstance(matrix.dtype, torch.dtype):
        _check_shape(tuple(matrix.shape), matrix.dtype, name)
        return _WrappedProduct(matrix)
    raise TypeError(
        f"{name} must be a hcurv.SymmetricOperator, a dense torch.Tensor (N, N), or an object with"
        f" shape, dtype, device and @; got {type(matrix).__name__}"
    )


def _check_shape(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"{name} must be square, (N, N) with N > 0; got shape {shape}")
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64; got {dtype} (convert it with .to())")


def _check_dense(values: Tensor, name: str, definite: bool = False) -> None:
    size = values.shape[0]
    largest, asymmetry = 0.0, 0.0
    step = max(1, _STRIP // size)
    for start in range(0, size, step):
        strip = values[start : start + step]
        largest = max(largest, _finite_max(strip, name))
        asymmetry = max(asymmetry, float((strip - values[:, start : start + step].T).abs().max()))
        if definite:
            diagonal, rows = values.diagonal(), torch.arange(start, start + strip.shape[0])
            check_psd_entries(strip.T, diagonal, diagonal[start : start + step], rows)
    _check_asymmetry(asymmetry, largest, values.dtype, name)


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
    largest = _finite_max(spot, "the matrix")
    _check_asymmetry(float((spot - spot.T).abs().max()), largest, source.dtype, "the matrix")
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
    _finite_max(diagonal, "the matrix")
    lowest = int(diagonal.argmin())
    if float(diagonal[lowest]) < 0:
        raise ValueError(
            "a positive semi-definite matrix has no negative diagonal entry; entry"
            f" ({lowest}, {lowest}) is {float(diagonal[lowest]):.3e}"
        )


def _finite_max(values: Tensor, name: str) -> float:
    largest = float(values.abs().max())
    if largest != largest or largest == float("inf"):
        raise ValueError(f"{name} has entries that are NaN or infinite")
    return largest


def _check_asymmetry(asymmetry: float, largest: float, dtype: torch.dtype, name: str) -> None:
    if asymmetry > _ROUNDING * torch.finfo(dtype).eps * largest:
        raise ValueError(
            f"{name} must be symmetric; entries (i, j) and (j, i) differ by up to"
            f" {asymmetry:.2e}, with entries up to {largest:.2e} (take (A + A.T) / 2 if that is"
            " what you mean)"
        )
