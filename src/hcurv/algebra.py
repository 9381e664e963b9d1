"""Sums and multiples of operators.

They are what ``2 * H``, ``H - G`` and ``H + hcurv.Diagonal(d)`` make. A combination in which every
operator offers entries offers entries too, so that it can be compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hcurv.diagonal import Diagonal
from hcurv.indexing import Index, resolve_indices
from hcurv.layout import ParameterLayout, layout_of
from hcurv.operators import EntryOperator, EntrySource, SymmetricOperator
from hcurv.sources import blocks, structural_orders

__all__ = ["EntrySum", "OperatorSum", "combine"]


class OperatorSum(SymmetricOperator):
    """The sum c₁A₁ + c₂A₂ + … of operators times numbers. Made by ``+``, ``-``, ``*`` and ``/``.

    Attributes:
        terms: the pairs (c, A).
    """

    def __init__(self, terms: Sequence[tuple[float, SymmetricOperator]]) -> None:
        self.terms = tuple(terms)

    def __repr__(self) -> str:
        """The terms, each with its factor."""
        terms = " + ".join(f"{factor:g} * {operator!r}" for factor, operator in self.terms)
        return f"{type(self).__name__}({terms})"

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self.terms[0][1].shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries of every term."""
        return self.terms[0][1].dtype

    @property
    def device(self) -> torch.device:
        """Device of every term."""
        return self.terms[0][1].device

    @property
    def num_stored(self) -> int:
        """Number of floats that all operators store; an operator that appears twice counts once."""
        distinct = {id(operator): operator for _, operator in self.terms}
        return sum(operator.num_stored for operator in distinct.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes that all operators store."""
        distinct = {id(operator): operator for _, operator in self.terms}
        return sum(operator.nbytes for operator in distinct.values())

    @property
    def layout(self) -> ParameterLayout | None:
        """The parameter layout of the first operator that has one, or None."""
        layouts = (layout_of(operator) for _, operator in self.terms)
        return next((layout for layout in layouts if layout is not None), None)

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return _sum((factor, operator.diagonal()) for factor, operator in self.terms)

    def _matmat(self, rhs: Tensor) -> Tensor:
        return _sum((factor, operator._matmat(rhs)) for factor, operator in self.terms)


class EntrySum(OperatorSum, EntryOperator):
    """A sum of operators that all offer entries."""

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``, always with two dimensions."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        return _sum(
            (factor, source.block(row_index, col_index)) for factor, source in self._sources()
        )

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        return _sum((factor, blocks(source, rows, cols)) for factor, source in self._sources())

    def orders(self) -> dict[str, Tensor]:
        """Return the orders of the rows that any of the operators offers, by name."""
        orders: dict[str, Tensor] = {}
        for _, source in self._sources():
            orders = {**structural_orders(source), **orders}
        return orders

    def _sources(self) -> list[tuple[float, EntrySource]]:
        return [
            (factor, source) for factor, source in self.terms if isinstance(source, EntrySource)
        ]


def combine(terms: Sequence[tuple[float, SymmetricOperator]]) -> SymmetricOperator:
    """Return the sum of operators times numbers, in its simplest form.

    Sums among the operators are multiplied out. A sum of diagonal operators is one of them, and a
    sum of operators that offer entries offers entries.

    Args:
        terms: pairs (number, operator), at least one.

    Raises:
        ValueError: the operators differ in shape or device.
        TypeError: they differ in type.
    """
    flat: list[tuple[float, SymmetricOperator]] = []
    for factor, operator in terms:
        inner = operator.terms if isinstance(operator, OperatorSum) else ((1.0, operator),)
        flat += [(factor * number, term) for number, term in inner]
    first = flat[0][1]
    for _, other in flat[1:]:
        if other.shape != first.shape:
            raise ValueError(
                f"operators that are added must have equal shapes; got {first.shape} and"
                f" {other.shape}"
            )
        if other.dtype != first.dtype:
            raise TypeError(
                f"operators that are added must have equal types; got {first.dtype} and"
                f" {other.dtype} (convert one of them)"
            )
        if other.device != first.device:
            raise ValueError(
                f"operators that are added must be on one device; got {first.device} and"
                f" {other.device}"
            )
    if all(isinstance(operator, Diagonal) for _, operator in flat):
        return Diagonal(_sum((factor, operator.diagonal()) for factor, operator in flat))
    if all(isinstance(operator, EntrySource) for _, operator in flat):
        return EntrySum(flat)
    return OperatorSum(flat)


def _sum(terms: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of tensors times numbers."""
    total: Tensor | None = None
    for factor, values in terms:
        total = values * factor if total is None else total.add_(values, alpha=factor)
    assert total is not None
    return total
