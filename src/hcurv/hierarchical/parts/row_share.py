"""The rows of a matrix, one run of them on each rank.

A tall matrix whose rows belong to rows of H (a sketch, a global part, vectors) is cut between the
ranks: each of them holds the rows of its own run. What is small, such as a product Vᵀ X of two of
them, is on all ranks. In one process the run is all rows, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hcurv.operators import EntrySource
from hcurv.ranks import OneRank
from hcurv.sources import MatrixProduct, SharedProduct, product, ranks_behind

__all__ = ["OwnProduct", "RowShare", "cut_level", "largest_of"]

# Columns that all ranks need whole are gathered in panels of at most so many floats, but of at
# least so many columns: enough for efficient products. Up to five such panels exist at a time.
_PANEL_FLOATS, _LEAST_PANEL = 2**22, 16
# Where a product reads the data again, panels may have so many floats.
_DEAR_PANEL_FLOATS = 2**24
# Rows that only change places are gathered in panels of so many floats.
_MOVED_FLOATS = 2**20
_DEEP = 64
# Random numbers are drawn for so many rows at a time, of which a rank keeps its own.
_DRAWN_ROWS = 2**12


def cut_level(num_ranks: int, depth: int) -> int | None:
    """The level of a tree at which subtrees are given to ranks, or None if it has too few leaves.

    It has as many nodes as there are ranks. If that number is no power of two, it has four to eight
    times as many, so that the ranks differ little in what they hold; but fewer in a tree of few
    levels, because all ranks have everything above this level.
    """
    least = max(0, num_ranks - 1).bit_length()
    if depth < least:
        return None
    return least if num_ranks == 2**least else max(least, min(least + 2, depth - 4))


def largest_of(ranks: OneRank, value: int) -> int:
    """The largest of one number of each rank, on every rank."""
    if ranks.size == 1:
        return value
    values = torch.zeros(ranks.size, dtype=torch.int64)
    values[ranks.rank] = value
    return int(ranks.sum(values).max())


@runtime_checkable
class OwnProduct(Protocol):
    """A matrix that knows how its rows are shared."""

    def own_product(self, own: Tensor, /) -> Tensor:
        """Return the own rows of the product with a tall matrix, from the own rows of it."""


class RowShare:
    """Rows of a matrix in some order, cut into one run for each rank.

    Args:
        rows: the numbers of the rows, in order, (M,), the same on every rank.
        ranks: the ranks; None for one process.
        bounds: where the runs begin and end, one number more than there are ranks; None for the
            bounds of the subtrees that a tree over the rows would give to the ranks.
        depth: depth of that tree; None for a deep one.

    Attributes:
        rows: as given.
        ranks: as given.
        bounds: as given, or chosen.
        start: where the run of this rank begins.
        stop: where it ends.
    """

    def __init__(
        self,
        rows: Tensor,
        ranks: OneRank | None = None,
        bounds: list[int] | None = None,
        depth: int | None = None,
    ) -> None:
        ranks = OneRank() if ranks is None else ranks
        self.rows, self.ranks = rows, ranks
        if bounds is None:
            size = ranks.size
            level = cut_level(size, _DEEP if depth is None else depth)
            parts = size if level is None else 2**level
            nodes = [parts * rank // size for rank in range(size + 1)]
            bounds = [rows.numel() * node // parts for node in nodes]
        self.bounds = bounds
        self.start, self.stop = bounds[ranks.rank], bounds[ranks.rank + 1]

    @property
    def num_rows(self) -> int:
        """Number M of all rows."""
        return self.rows.numel()

    @property
    def num_own(self) -> int:
        """Number of rows of this rank."""
        return self.stop - self.start

    @property
    def counts(self) -> list[int]:
        """Number of rows of each rank."""
        return [b - a for a, b in pairwise(self.bounds)]

    @property
    def own_rows(self) -> Tensor:
        """The rows of this rank, (m,)."""
        return self.rows[self.start : self.stop]

    @property
    def is_split(self) -> bool:
        """Whether there are other ranks."""
        return self.ranks.size > 1

    def total(self, values: Tensor) -> Tensor:
        """The sum of small values over all ranks, on every rank; ``values`` may be overwritten."""
        return self.ranks.sum(values) if self.is_split else values

    def squared_norm(self, values: Tensor) -> float:
        """‖X‖_F² of a tall matrix, from its own rows."""
        square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        return float(self.total(square))

    def own(self, values: Tensor) -> Tensor:
        """The own rows of values that all ranks have whole, (M, k) → (m, k)."""
        return values[self.start : self.stop]

    def whole(self, own: Tensor) -> Tensor:
        """All rows of a tall matrix on every rank, (m, k) → (M, k)."""
        if not self.is_split:
            return own
        return self.ranks.collect(own, self.counts)

    def at(self, own: Tensor, index: Tensor) -> Tensor:
        """Rows of a tall matrix, by their places among all M rows, on every rank.

        Args:
            own: the own rows, (m, k), or more, of which the later ones are never looked at.
            index: places, of any shape, the same on every rank.
        """
        if not self.is_split:
            return own[index]
        flat = index.reshape(-1)
        mine = ((flat >= self.start) & (flat < self.stop)).nonzero().squeeze(1)
        found = own.new_zeros(flat.numel(), own.shape[1])
        found[mine] = own[flat[mine] - self.start]
        return self.total(found).view(*index.shape, own.shape[1])

    def moved(self, own: Tensor, target: RowShare) -> Tensor:
        """Rows of this share as those of another one, with its rows in another order.

        Args:
            own: (m, k).
            target: all its rows are rows here.
        """
        if self.rows is target.rows and self.bounds == target.bounds:
            return own
        places = self.rows.new_zeros(int(self.rows.max()) + 1 if self.num_rows else 0)
        places[self.rows] = torch.arange(self.num_rows, device=self.rows.device)
        wanted = places[target.own_rows]
        result = own.new_empty(target.num_own, own.shape[1])
        for columns in self._panels(own.shape[1], _MOVED_FLOATS, 1):
            result[:, columns] = self.whole(own[:, columns]).index_select(0, wanted)
        return result

    def product(self, source: EntrySource | MatrixProduct, own: Tensor) -> Tensor:
        """The own rows of H X, from the own rows of X, (m, k); X and H X are zero elsewhere.

        Each rank gathers some columns of X, multiplies them, and keeps its own rows. If the source
        is a sum over ranks, each rank multiplies by its own term, and rows are summed where they
        belong.
        """
        if self.num_rows == 0:
            return own
        if self.is_split and isinstance(source, OwnProduct):
            return source.own_product(own)
        if not self.is_split:
            return self.select(_checked(product, source, self.spread(own, source.shape[0])))
        result = torch.empty_like(own)
        is_dear = getattr(source, "factors", "memory") == "recompute"
        most = _DEAR_PANEL_FLOATS if is_dear else _PANEL_FLOATS
        for columns in self._panels(own.shape[1], most, _LEAST_PANEL):
            vectors = self.spread(self.whole(own[:, columns]), source.shape[0])
            if isinstance(source, SharedProduct) and ranks_behind(source).size > 1:
                term = self.select(_checked(_partial, source, vectors))
                del vectors  # before rows are exchanged
                result[:, columns] = self.ranks.scatter_sum(term, self.counts)
            else:
                result[:, columns] = _checked(product, source, vectors)[self.own_rows]
        return result

    def spread(self, values: Tensor, size: int) -> Tensor:
        """Values (M, k) as rows of the matrix, (N, k)."""
        if self._is_whole(size):
            return values
        return values.new_zeros(size, values.shape[1]).index_copy_(0, self.rows, values)

    def select(self, values: Tensor) -> Tensor:
        """Rows of the matrix, (N, k), as values here, (M, k)."""
        return values if self._is_whole(values.shape[0]) else values.index_select(0, self.rows)

    def _is_whole(self, size: int) -> bool:
        return self.num_rows == size and bool((self.rows.diff() > 0).all())

    def _panels(self, num_columns: int, most: int, least: int) -> Iterator[slice]:
        width = max(least, most // max(1, self.num_rows))
        if not self.is_split:
            width = max(1, num_columns)
        for start in range(0, num_columns, width):
            yield slice(start, start + width)

    def normal(
        self, num_columns: int, generator: torch.Generator, like: EntrySource | MatrixProduct
    ) -> Tensor:
        """Own rows of a Gaussian matrix (M, k), with a last row of zeros: (m + 1, k).

        Every rank draws all numbers, some rows at a time, so that the matrix is the same for any
        number of ranks.
        """
        dtype, device = like.dtype, like.device
        result = torch.zeros(self.num_own + 1, num_columns, dtype=dtype, device=device)
        stops = [*range(_DRAWN_ROWS, self.num_rows - _DRAWN_ROWS + 1, _DRAWN_ROWS), self.num_rows]
        first = 0
        for last in stops:
            if not self.is_split:
                result[first:last].normal_(generator=generator)
            else:
                drawn = torch.empty(last - first, num_columns, dtype=dtype, device=device)
                drawn.normal_(generator=generator)
                begin, end = max(first, self.start), min(last, self.stop)
                if begin < end:
                    result[begin - self.start : end - self.start] = drawn[
                        begin - first : end - first
                    ]
            first = last
        return result


def _partial(source: SharedProduct, vectors: Tensor) -> Tensor:
    return source.partial_product(vectors)


def _checked(multiply: Callable[..., Tensor], source: object, vectors: Tensor) -> Tensor:
    """A product, which must have the shape of the vectors."""
    found = multiply(source, vectors)
    if found.shape != vectors.shape:
        raise ValueError(
            f"source @ matrix must have shape {tuple(vectors.shape)}; got {tuple(found.shape)}"
        )
    return found
