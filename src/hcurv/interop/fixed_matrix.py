"""A matrix inside an operator of linear_operator: one matrix, the same for a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from hcurv.factorized import Factorizable, Factorized
from hcurv.operators import EntrySource, SymmetricOperator
from hcurv.sources import blocks

__all__ = ["FixedMatrix", "HeldMatrix"]

# A block of at most so many entries is computed when it is asked for (128 MB in double precision).
# A larger one is a lazy product with the whole matrix.
_MAX_BLOCK = 2**24


class HeldMatrix:
    """A matrix with its last factorization. linear_operator makes copies of operators all the time.

    Args:
        matrix: A.
        options: of ``A.factorize``.
    """

    def __init__(self, matrix: SymmetricOperator, options: dict[str, Any]) -> None:
        self.matrix, self._options = matrix, options
        self._last: tuple[Tensor, Factorized] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the matrix without its factorization."""
        return {"matrix": self.matrix, "_options": self._options, "_last": None}

    def factorized(self, damping: Tensor) -> Factorized:
        """A + D, factorized; the last one is kept."""
        known = self._last
        if known is None or known[0].shape != damping.shape or not torch.equal(known[0], damping):
            assert isinstance(self.matrix, Factorizable)
            found = self.matrix.factorize(damping, **self._options)  # type: ignore[arg-type]
            self._last = known = (damping.clone(), found)
        return known[1]

    def columns(self, rhs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a function of (N, k) on (…, N, k) or (N,), in the precision of the matrix."""
        if rhs.ndim == 1:
            return self.columns(rhs[:, None], run)[:, 0]
        flat = rhs.detach().movedim(-2, 0).reshape(self.matrix.shape[0], -1).contiguous()
        with torch.no_grad():
            found = run(flat.to(self.matrix.device, self.matrix.dtype)).to(rhs)
        return found.view(rhs.shape[-2], *rhs.shape[:-2], rhs.shape[-1]).movedim(0, -2)

    def product(self, rhs: Tensor) -> Tensor:
        """A times (…, N, k) or (N,)."""
        return self.columns(rhs, self.matrix.__matmul__)

    def pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        """The entries (rows[i], cols[i])."""
        if hasattr(self.matrix, "pairs"):
            found: Tensor = self.matrix.pairs(rows, cols)
            return found
        if isinstance(self.matrix, EntrySource):
            return blocks(self.matrix, rows[:, None], cols[:, None]).view(-1)
        wanted, place = cols.unique(return_inverse=True)
        return self.block(torch.arange(self.matrix.shape[0], device=rows.device), wanted)[
            rows, place
        ]

    def block(self, rows: Tensor, cols: Tensor) -> Tensor:
        """The dense block rows x cols."""
        if isinstance(self.matrix, EntrySource):
            return self.matrix.block(rows, cols)
        shape = (self.matrix.shape[0], cols.numel())
        units = torch.zeros(shape, dtype=self.matrix.dtype, device=self.matrix.device)
        units[cols, torch.arange(cols.numel(), device=cols.device)] = 1.0
        return (self.matrix @ units)[rows]


class FixedMatrix(LinearOperator):
    """What both operators share: one symmetric matrix, the same for every place of a batch."""

    _held: HeldMatrix
    _batch: torch.Size

    def _size(self) -> torch.Size:
        return torch.Size([*self._batch, *self._held.matrix.shape])

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _batched(self, batch: Sequence[int]) -> LinearOperator:
        """The same matrix for another batch."""
        kwargs = {**self._kwargs, "batch": torch.Size(batch)}
        return type(self)(*self._args, **kwargs)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._batched([*self._batch[:dim], 1, *self._batch[dim:]])

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return self._batched(batch_shape)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._batched([self._batch[dim] for dim in dims])

    def _spread(self, values: Tensor) -> Tensor:
        """A result (…, N, k), or (N,) without a batch, for every place of the batch."""
        if not self._batch:
            return values
        batch = torch.broadcast_shapes(self._batch, values.shape[:-2])
        return values.expand(*batch, *values.shape[-2:])

    def _entries(self, values: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Entries of this operator, from those of the matrix, at rows and columns like them."""
        raise NotImplementedError

    def _index(self, index: Any) -> Tensor:
        every = torch.arange(self._held.matrix.shape[0], device=self._held.matrix.device)
        return every[index.to(every.device) if isinstance(index, Tensor) else index]

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        shape = torch.broadcast_shapes(*(i.shape for i in (row_index, col_index, *batch_indices)))
        rows, cols = (self._index(i.expand(shape).reshape(-1)) for i in (row_index, col_index))
        values = self._held.pairs(rows, cols).to(self.device, self.dtype)
        return self._entries(values, rows, cols).view(shape)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        batch = torch.empty(self._batch, device="meta")[batch_indices].shape
        rows, cols = self._index(row_index), self._index(col_index)
        is_whole = rows.numel() == cols.numel() == self.shape[-1] and bool((rows == cols).all())
        if is_whole and bool((rows.diff() > 0).all()):
            return self._batched(batch)
        if rows.numel() * cols.numel() > _MAX_BLOCK:
            return super()._getitem(row_index, col_index, *batch_indices)
        values = self._held.block(rows, cols).to(self.device, self.dtype)
        values = self._entries(values, rows[:, None], cols)
        return DenseLinearOperator(values.expand(*batch, *values.shape))
