"""The user's own matrices: everything that they return is checked, and their parts are compared.

A source gives a diagonal, blocks and perhaps products. `hcurv.compress` believes that these belong
to one symmetric positive semi-definite matrix. What is not so is refused here, before work starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hcurv.indexing import Index, resolve_indices
from hcurv.layout import ParameterLayout, layout_of
from hcurv.operators import EntrySource

__all__ = ["CheckedProducts", "CheckedSource", "check_psd_entries", "compare_parts"]

# So many entries of a source are compared with their mirror images and with products: all of them
# up to N = 1024, and whole columns of larger matrices.
_COMPARED = 2**20
# Entries and products may differ by this much, relative to the norm of the product. In single
# precision sums of a million terms agree to about 1e-4.
_AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-6}
# Two ways to compute an entry may differ by this many units of rounding of the largest one.
_ROUNDING = 1e3
# An entry may exceed √(H_ii H_jj) by this share, which leaves room for rough diagonals.
_EXCESS = 1e-2


class CheckedSource:
    """A user's object with entries. What it returns is checked, and copied.

    A copy is needed because what is returned may be changed: it could be a view of the user's own
    numbers, or an expanded one, in which many entries share their memory.

    Args:
        source: the object.

    Attributes:
        name: the name of its class, for error messages.

    Raises:
        TypeError, ValueError: its shape, dtype or device are not those of a matrix.
    """

    def __init__(self, source: EntrySource) -> None:
        self._source, self.name = source, type(source).__name__
        self._shape = _checked_shape(source.shape, self.name)
        if source.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"the source's dtype must be torch.float32 or torch.float64; {self.name} has"
                f" {source.dtype!r}"
            )
        try:
            self._device = torch.device(source.device)
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"the source's device must be a torch.device; {self.name} has {source.device!r}"
            ) from error

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the object."""
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        """That of the object."""
        return self._device

    @property
    def layout(self) -> ParameterLayout | None:
        """That of the object, if it has one."""
        return layout_of(self._source)

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return self._checked(self._source.diagonal(), "diagonal()", self._shape[:1])

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``. The object is given tensors of indices."""
        row_index = resolve_indices(rows, self._shape[0], self._device, "rows")
        col_index = resolve_indices(cols, self._shape[0], self._device, "cols")
        shape = (row_index.numel(), col_index.numel())
        return self._checked(self._source.block(row_index, col_index), "block(rows, cols)", shape)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        if hasattr(self._source, "blocks"):
            found = self._source.blocks(rows, cols)
            return self._checked(found, "blocks(rows, cols)", (*rows.shape, cols.shape[1]))
        return torch.stack([self.block(row, col) for row, col in zip(rows, cols, strict=True)])

    def orders(self) -> dict[str, Tensor]:
        """Return the orders of the rows that the object offers, by name."""
        return dict(self._source.orders()) if hasattr(self._source, "orders") else {}

    def _checked(self, values: object, what: str, shape: Sequence[int]) -> Tensor:
        """Return a copy of what the object returned, if it is what it should be."""
        owner = f"{what} of {self.name}"
        if not isinstance(values, Tensor):
            raise TypeError(
                f"{owner} must return a torch.Tensor; it returned {type(values).__name__}"
                " (convert it with torch.as_tensor)"
            )
        if tuple(values.shape) != tuple(shape):
            raise ValueError(f"{owner} must have shape {tuple(shape)}; got {tuple(values.shape)}")
        if values.dtype != self.dtype or values.layout != torch.strided:
            raise TypeError(
                f"{owner} must be dense and {self.dtype}, as its dtype says; got {values.dtype},"
                f" {values.layout}"
            )
        if values.device.type != self._device.type:
            raise ValueError(
                f"{owner} must be on {self._device}, as its device says; got {values.device}"
            )
        copied = values.detach().clone(memory_format=torch.contiguous_format)
        if copied.numel() and not math.isfinite(float(copied.abs().max())):
            raise ValueError(f"{owner} has entries that are NaN or infinite")
        return copied


class CheckedProducts(CheckedSource):
    """A user's object with entries and products."""

    def __matmul__(self, rhs: Tensor) -> Tensor:
        """Return the product with (N,) or (N, k)."""
        return self._checked(self._source @ rhs, "source @ matrix", rhs.shape)  # type: ignore[operator]


def _checked_shape(shape: object, name: str) -> tuple[int, int]:
    try:
        rows, cols = (int(length) for length in shape)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the source's shape must be (N, N); {name} has {shape!r}") from error
    if rows != cols or rows <= 0:
        raise ValueError(f"the source must be square, (N, N) with N > 0; got shape {shape}")
    return rows, cols


def compare_parts(source: CheckedSource, seed: int = 0) -> None:
    """Raise unless the blocks, the diagonal and the products of a source are those of one matrix.

    Whole columns of entries are compared with the rows of the same numbers and, if the source has
    products, with products of a vector that is zero elsewhere.

    Raises:
        ValueError: the matrix is not symmetric, not positive semi-definite, or not one matrix.
    """
    size = source.shape[0]
    generator = torch.Generator().manual_seed(seed)
    diagonal = source.diagonal()
    chosen = torch.randperm(size, generator=generator)[: max(4, _COMPARED // size)]
    every = torch.arange(size, device=source.device)
    # Rows with a zero on the diagonal come first: they are believed to be zero rows.
    zero = (diagonal == 0).nonzero().squeeze(1)[:4].cpu()
    chosen = torch.cat([zero, chosen]).unique().to(source.device)
    step = max(1, _COMPARED // size)
    weights = torch.randn(chosen.numel(), dtype=source.dtype, generator=generator)
    weights = weights.to(source.device)
    expected = torch.zeros(size, dtype=torch.float64, device=source.device)
    for start in range(0, chosen.numel(), step):
        part = chosen[start : start + step]
        columns, rows = source.block(every, part), source.block(part, every)
        largest = float(columns.abs().max())
        difference = float((columns - rows.T).abs().max())
        if difference > _ROUNDING * torch.finfo(source.dtype).eps * largest:
            raise ValueError(
                "the source must be symmetric; its entries (i, j) and (j, i) differ by up to"
                f" {difference:.2e}, with entries up to {largest:.2e}"
            )
        check_psd_entries(columns, diagonal, diagonal[part], part)
        expected += columns.double() @ weights[start : start + step].double()
    if isinstance(source, CheckedProducts):
        vector = torch.zeros(size, 1, dtype=source.dtype, device=source.device)
        vector[chosen, 0] = weights
        found = (source @ vector)[:, 0].double()
        difference, norm = float((found - expected).norm()), float(expected.norm())
        if difference > _AGREEMENT[source.dtype] * max(norm, float(found.norm())):
            raise ValueError(
                "the products of the source belong to another matrix than its entries: (source @ v)"
                f" and the sum of its columns times v differ by {difference:.2e}, with a norm of"
                f" {norm:.2e}"
            )


def check_psd_entries(values: Tensor, first: Tensor, second: Tensor, cols: Tensor) -> None:
    """Raise if an entry shows that a matrix is not positive semi-definite: H_ij² > H_ii H_jj.

    Args:
        values: columns of the matrix, (N, k), or rows of them.
        first: the diagonal at the rows of ``values``.
        second: the diagonal at its columns.
        cols: the numbers of these columns.

    Raises:
        ValueError: there is such an entry. A row with a zero on the diagonal has to be zero.
    """
    largest = max(float(first.max()), float(values.abs().max()))
    slack = _ROUNDING * torch.finfo(values.dtype).eps * largest
    bound = first.double().sqrt()[:, None] * second.double().sqrt() * (1 + _EXCESS) + slack
    excess = values.abs() - bound
    if not bool((excess > 0).any()):
        return
    worst = int(excess.argmax())
    row, col = worst // values.shape[1], worst % values.shape[1]
    raise ValueError(
        "the matrix must be positive semi-definite; entry"
        f" ({row}, {int(cols[col])}) is {float(values[row, col]):.3e}, where the diagonal entries"
        f" of its row and column are {float(first[row]):.3e} and {float(second[col]):.3e}: no entry"
        " of such a matrix exceeds the root of their product (add a multiple of the identity,"
        " matrix + hcurv.Diagonal(d), or use hcurv.eigsh and hcurv.cg, which take any symmetric"
        " matrix)"
    )
