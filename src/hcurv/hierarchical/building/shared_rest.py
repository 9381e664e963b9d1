"""What a shared global part leaves of a matrix, asked for by all ranks together or one by one.

A source that is spread over ranks is a sum of terms, one on each rank: every rank has to take part
in every question. During a build the ranks have different questions, each about its own rows. They
are asked in rounds. In a round each rank names the blocks that it needs, or that it needs none; all
ranks compute their terms of all these blocks; and each term is sent to the rank that asked. Rounds
go on until no rank has questions left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.indexing import Index, resolve_indices
from hcurv.operators import EntryOperator, EntrySource
from hcurv.sources import SharedBlocks, blocks, has_product, ranks_behind, structural_orders

__all__ = ["OwnEntries", "SharedRest"]

# All ranks together ask for at most so many entries in a round: 64 MB in double precision.
_ROUND_ENTRIES = 2**23


class SharedRest(EntryOperator):
    """H − V Vᵀ as a source whose calls are collective: all ranks make the same ones.

    Args:
        source: H, whose own calls are collective, or which every rank has to itself.
        share: the rows that are not zero, and which of them are this rank's.
        part: V Vᵀ, not larger than H, over the rows of ``share``; or None.
        diagonal: of H.
    """

    def __init__(
        self, source: EntrySource, share: RowShare, part: SharedPart | None, diagonal: Tensor
    ) -> None:
        if not has_product(source):
            raise TypeError(f"ranks share products, and {type(source).__name__} has none")
        self.source, self.share, self.part = source, share, part
        self._diagonal = diagonal
        if part is not None:
            # See `Remainder`: zero marks a row that is truly zero.
            least = torch.finfo(source.dtype).eps * diagonal
            self._diagonal = torch.maximum(diagonal - part.diagonal().to(diagonal), least)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the source."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """That of the source."""
        return self.source.device

    @property
    def num_stored(self) -> int:
        """Number of floats of the global part that this rank stores."""
        return 0 if self.part is None else self.part.num_stored

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return self._diagonal.clone()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        values = self.source.block(row_index, col_index)
        if self.part is None:
            return values
        left, right = self.part.rows_of(row_index), self.part.rows_of(col_index)
        return values.addmm_(left, right.T, alpha=-1)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        values = blocks(self.source, rows, cols)
        if self.part is None:
            return values
        left, right = self.part.rows_of(rows), self.part.rows_of(cols)
        return values.baddbmm_(left, right.transpose(1, 2), alpha=-1)

    def orders(self) -> dict[str, Tensor]:
        """Return the orders of the source."""
        return structural_orders(self.source)

    def _matmat(self, rhs: Tensor) -> Tensor:
        own = self.own_product(rhs[self.share.own_rows])
        return self.share.spread(self.share.whole(own), self.shape[0])

    def own_product(self, own: Tensor) -> Tensor:
        """The own rows of the product with own rows."""
        result = self.share.product(self.source, own)
        return result if self.part is None else result - self.part.own_product(own)


class OwnEntries:
    """The entries of a `SharedRest` as a source that each rank asks for its own ones.

    A rank that has no more questions calls `finish`, and answers those of the others.

    Args:
        rest: the matrix.
    """

    def __init__(self, rest: SharedRest) -> None:
        self._rest, self._ranks = rest, rest.share.ranks
        self._is_private = ranks_behind(rest.source).size == 1  # every rank has all of it
        self.shape, self.dtype, self.device = rest.shape, rest.dtype, rest.device

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return self._rest.diagonal()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        height = max(1, _ROUND_ENTRIES // max(1, self._ranks.size * col_index.numel()))
        parts = [self.blocks(some[None], col_index[None])[0] for some in row_index.split(height)]
        return torch.cat(parts)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        step = _ROUND_ENTRIES // max(1, self._ranks.size * rows.shape[1] * cols.shape[1])
        step = max(1, step)
        parts = []
        for some_rows, some_cols in zip(rows.split(step), cols.split(step), strict=True):
            found = self._round(some_rows, some_cols, is_last=False)
            assert found is not None
            parts.append(found)
        return torch.cat(parts)

    def own_product(self, own: Tensor) -> Tensor:
        """The own rows of the product with own rows."""
        return self._rest.own_product(own)

    def finish(self) -> None:
        """Take part in the questions of other ranks until nobody has any."""
        none = torch.zeros(0, 0, dtype=torch.long, device=self.device)
        while self._needs_rounds and self._round(none, none, is_last=True) is not None:
            pass

    @property
    def _needs_rounds(self) -> bool:
        return not self._is_private or self._rest.part is not None

    def _round(self, rows: Tensor, cols: Tensor, is_last: bool) -> Tensor | None:
        """One round: the blocks of this rank, or None if no rank has asked for any."""
        if not self._needs_rounds:
            return blocks(self._rest.source, rows, cols)
        shapes = torch.zeros(self._ranks.size, 4, dtype=torch.long)
        shapes[self._ranks.rank] = torch.tensor([*rows.shape, cols.shape[1], int(is_last)])
        sizes = self._ranks.sum(shapes).tolist()
        if all(last for *_, last in sizes):
            return None
        if self._is_private:
            values = blocks(self._rest.source, rows, cols)
        else:
            values = self._asked(rows, cols, [(b, m, k) for b, m, k, _ in sizes])
        return values if self._rest.part is None else self._without_part(values, rows, cols)

    def _asked(self, rows: Tensor, cols: Tensor, sizes: list[tuple[int, int, int]]) -> Tensor:
        """The own blocks of the source, where all ranks compute those of all, in one call."""
        own = torch.cat([rows.reshape(-1), cols.reshape(-1)])
        counts = [b * (m + k) for b, m, k in sizes]
        height, width = max(m for _, m, _ in sizes), max(k for _, _, k in sizes)
        tables = []
        for index, (b, m, k) in zip(
            self._ranks.collect(own, counts).split(counts), sizes, strict=True
        ):
            left, right = index[: b * m].view(b, m), index[b * m :].view(b, k)
            tables.append((_filled(left, height), _filled(right, width)))
        every_row, every_col = (torch.cat(parts) for parts in zip(*tables, strict=True))
        numbers = [b for b, _, _ in sizes]
        source, rank = self._rest.source, self._ranks.rank
        if not isinstance(source, SharedBlocks):
            found: Tensor = blocks(source, every_row, every_col).split(numbers)[rank]
            return found[:, : rows.shape[1], : cols.shape[1]].contiguous()
        terms = _term(source, every_row, every_col).split(numbers)
        flat = [t[:, :m, :k].reshape(-1) for t, (_, m, k) in zip(terms, sizes, strict=True)]
        summed = self._ranks.scatter_sum(torch.cat(flat), [b * m * k for b, m, k in sizes])
        return summed.view(*rows.shape, cols.shape[1])

    def _without_part(self, values: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Subtract V Vᵀ from own blocks."""
        part = self._rest.part
        assert part is not None
        share = part.share
        tables = [
            part.places[index.clamp(min=0)].masked_fill(index < 0, -1) for index in (rows, cols)
        ]
        # Most rows are this rank's. The others are asked for together.
        wanted = torch.cat([table.reshape(-1) for table in tables]).unique()
        foreign = wanted[(wanted >= 0) & ((wanted < share.start) | (wanted >= share.stop))]
        lists = self._ranks.gather(foreign)
        others = torch.cat(lists).unique()
        known = share.at(part.factor, others) if others.numel() else part.factor[:0]
        sides = [_rows_of(part, table, others, known) for table in tables]
        return values.baddbmm_(sides[0], sides[1].transpose(1, 2), alpha=-1)


def _filled(index: Tensor, width: int) -> Tensor:
    """An index table (B, m) with more columns, of −1."""
    return torch.nn.functional.pad(index, (0, width - index.shape[1]), value=-1)


def _term(source: SharedBlocks, rows: Tensor, cols: Tensor) -> Tensor:
    """Blocks of the own term of a source; −1 stands for a row or a column of zeros."""
    values = source.partial_blocks(rows.clamp(min=0), cols.clamp(min=0))
    values = values.masked_fill((rows < 0)[:, :, None], 0.0)
    return values.masked_fill_((cols < 0)[:, None, :], 0.0)


def _rows_of(part: SharedPart, table: Tensor, others: Tensor, known: Tensor) -> Tensor:
    """Rows of V by their places, (B, m, g); those of other ranks are ``known``."""
    share, flat = part.share, table.reshape(-1)
    result = part.factor.new_zeros(flat.numel(), part.rank)
    own = ((flat >= share.start) & (flat < share.stop)).nonzero().squeeze(1)
    result[own] = part.factor[flat[own] - share.start]
    if others.numel():
        slots = torch.searchsorted(others, flat).clamp_(max=others.numel() - 1)
        is_foreign = (others[slots] == flat) & ((flat < share.start) | (flat >= share.stop))
        foreign = is_foreign.nonzero().squeeze(1)
        result[foreign] = known[slots[foreign]]
    return result.view(*table.shape, part.rank)
