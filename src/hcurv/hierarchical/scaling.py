"""Matrices with very large or very small entries are compressed as a multiple near one.

Squares of entries appear everywhere, in norms and in angles between rows. In single precision they
overflow for entries beyond 1e19, and vanish for entries below 1e-19. The factor is a power of four,
so that it and its root are exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hcurv.hierarchical.matrix.hmatrix import HMatrix, completed
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.levels import Coupling
from hcurv.indexing import Index, resolve_indices
from hcurv.operators import EntryOperator, EntrySource
from hcurv.sources import blocks, has_product, structural_orders

__all__ = ["scale_of", "scaled", "unscaled"]

# Entries of this size, and of its inverse, are left as they are.
_HARMLESS = {torch.float32: 2.0**20, torch.float64: 2.0**200}


def scale_of(diagonal: Tensor) -> float:
    """Return a power of four near the largest entry; 1 if that is neither very large nor small.

    Args:
        diagonal: that of a positive semi-definite matrix.
    """
    largest = float(diagonal.max())
    bound = _HARMLESS[diagonal.dtype]
    if largest == 0 or 1 / bound <= largest <= bound:
        return 1.0
    return 4.0 ** round(math.log2(largest) / 2)


class _Scaled(EntryOperator):
    """A source divided by a power of four."""

    def __init__(self, source: EntrySource, scale: float) -> None:
        self._source, self._scale = source, scale

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._source.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the source."""
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        """That of the source."""
        return self._source.device

    @property
    def num_stored(self) -> int:
        """Zero: nothing but a number is stored."""
        return 0

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return self._source.diagonal() / self._scale

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        return self._source.block(row_index, col_index) / self._scale

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        return blocks(self._source, rows, cols) / self._scale

    def orders(self) -> dict[str, Tensor]:
        """Return the orders of the source."""
        return structural_orders(self._source)

    def _matmat(self, rhs: Tensor) -> Tensor:
        assert has_product(self._source)
        # The vectors are divided, because products of large entries could overflow.
        return self._source @ (rhs / self._scale)


class _ScaledEntries:
    """A source without products divided by a power of four."""

    def __init__(self, source: EntrySource, scale: float) -> None:
        whole = _Scaled(source, scale)
        self.shape, self.dtype, self.device = whole.shape, whole.dtype, whole.device
        self.diagonal, self.block, self.blocks = whole.diagonal, whole.block, whole.blocks
        self.orders = whole.orders


def scaled(source: EntrySource, scale: float) -> EntrySource:
    """Return a source divided by a power of four; itself for 1."""
    if scale == 1:
        return source
    return _Scaled(source, scale) if has_product(source) else _ScaledEntries(source, scale)


def unscaled(matrix: HMatrix, scale: float) -> HMatrix:
    """Return a compressed matrix multiplied by a power of four."""
    if scale == 1:
        return matrix

    def larger(couplings: tuple[Coupling, ...]) -> tuple[Coupling, ...]:
        return tuple(replace(coupling, values=coupling.values * scale) for coupling in couplings)

    levels = tuple(replace(level, couplings=larger(level.couplings)) for level in matrix.levels)
    leaves = replace(matrix.leaves, values=matrix.leaves.values * scale)
    parts: dict[str, Any] = {"leaves": leaves, "levels": levels}
    if matrix.near:
        parts["near"] = larger(matrix.near)
    part, record = matrix.global_part, matrix.record
    if part is not None:
        part = GlobalPart(part.rows, part.factor * math.sqrt(scale))
    damping = None if record.damping is None else record.damping * scale
    record = replace(record, norm=record.norm * scale, damping=damping)
    return completed(matrix.with_parts(**parts), record, part)
