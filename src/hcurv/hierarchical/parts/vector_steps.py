"""What multiplies one vector: few sparse matrices of small blocks, and large blocks as views.

A tree holds many small blocks of many shapes. For many columns they are multiplied in batches, but
for one vector nearly all of the time would go into calling these batches. Here small blocks are
copied, without padding, into one sparse matrix for each step (`sparse_blocks`), which costs an
index of four bytes for each float. Blocks that are large enough to be worth a call of their own
stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "MAX_ENTRIES",
    "MAX_TOP_FLOATS",
    "DenseBlocks",
    "places_of",
    "top_number",
]

# Small blocks are copied only if they have at most this many entries, which take 17 MB in single
# precision. In larger trees batches are large, so that calling them costs little.
MAX_ENTRIES = 2**21
# All levels of a tree above some level are one dense matrix if it has at most this many floats.
MAX_TOP_FLOATS = 2**17


@dataclass(frozen=True)
class DenseBlocks:
    """A few large blocks, each multiplied by itself.

    Attributes:
        blocks: views of what the tree stores, (m, r) each.
        transposed: the same views, transposed.
        rows: positions of the rows of all blocks, one after the other.
        cols: positions of their columns.
        num_rows: number of rows of each block.
        num_cols: number of its columns.
    """

    blocks: tuple[Tensor, ...]
    transposed: tuple[Tensor, ...]
    rows: Tensor
    cols: Tensor
    num_rows: tuple[int, ...]
    num_cols: tuple[int, ...]

    @classmethod
    def of(cls, triples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> DenseBlocks | None:
        """Return blocks from (rows, columns, padded block) of each; None for no blocks.

        The padding of rows and columns, −1, comes last.
        """
        found = []
        for rows, cols, values in triples:
            own_rows, own_cols = rows[rows >= 0], cols[cols >= 0]
            found.append((own_rows, own_cols, values[: own_rows.numel(), : own_cols.numel()]))
        if not found:
            return None
        all_rows, all_cols, blocks = zip(*found, strict=True)
        return cls(
            tuple(blocks),
            tuple(block.T for block in blocks),
            torch.cat(all_rows),
            torch.cat(all_cols),
            tuple(len(rows) for rows in all_rows),
            tuple(len(cols) for cols in all_cols),
        )

    def times(self, values: Tensor) -> Tensor:
        """Return the blocks times the values at `cols`, for `rows`."""
        return _products(self.blocks, values, self.num_cols, self.num_rows)

    def transposed_times(self, values: Tensor) -> Tensor:
        """Return the transposed blocks times the values at `rows`, for `cols`."""
        return _products(self.transposed, values, self.num_rows, self.num_cols)

    def both_times(self, at_rows: Tensor, at_cols: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks times ``at_cols`` and their transposes times ``at_rows``.

        Both products of a block follow each other, so that it is read from memory once.
        """
        for_rows, for_cols = torch.empty_like(at_rows), torch.empty_like(at_cols)
        parts = zip(
            self.blocks,
            self.transposed,
            at_rows.split(self.num_rows),
            at_cols.split(self.num_cols),
            for_rows.split(self.num_rows),
            for_cols.split(self.num_cols),
            strict=True,
        )
        for block, transposed, left, right, left_out, right_out in parts:
            torch.mv(block, right, out=left_out)
            torch.mv(transposed, left, out=right_out)
        return for_rows, for_cols


def _products(
    blocks: tuple[Tensor, ...], values: Tensor, lengths: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """Products of blocks with parts of ``values`` of these lengths, one after the other."""
    result = values.new_empty(sum(sizes))
    parts = zip(blocks, values.split(lengths), result.split(sizes), strict=True)
    for block, own, out in parts:
        torch.mv(block, own, out=out)
    return result


def top_number(sizes: Sequence[int]) -> int:
    """Return the number of the lowest level from which on all levels are one small dense matrix.

    Args:
        sizes: rows of a vector on each level, from the lowest up.

    Returns:
        A position in ``sizes``, or their number if the vectors of all levels are too long.
    """
    small = [number for number, size in enumerate(sizes) if size**2 <= MAX_TOP_FLOATS]
    return min(small, default=len(sizes))


def places_of(index: Tensor, size: int, places: Tensor | None = None, start: int = 0) -> Tensor:
    """Return positions in a flat vector, and −1 for padding.

    Args:
        index: positions in the vector of a level, of any shape; ``size`` marks padding.
        size: number of rows of that vector.
        places: where each of these rows lies; None where they lie one after the other.
        start: where that vector begins in the flat vector.
    """
    found = index if places is None else places[index.clamp(max=size - 1)]
    return (found + start).masked_fill_(index >= size, -1)
