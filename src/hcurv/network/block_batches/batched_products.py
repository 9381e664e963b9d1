"""Evaluate sub-blocks by batched matrix products, and write them into their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.network.block_batches.block_axes import SubBlocks
from hcurv.network.block_batches.operands import Operands
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.scratch import Scratch

__all__ = ["BatchedProducts"]

# Small sub-blocks are padded to one of this many sizes between a power of two and the next.
_SIZES_PER_OCTAVE = 3


@dataclass(frozen=True)
class BatchedProducts:
    """Sub-blocks that are evaluated by one kind of matrix product.

    Attributes:
        operands: the two operands of the products.
        sub_blocks: the sub-blocks.
        tuning: sizes and costs.
        transposed: whether the outer axis of the operands is that of the columns of the blocks.
        mirrored: whether the transposes of the sub-blocks are entries, too.
        square: whether each sub-block begins with a square that is symmetric.
    """

    operands: Operands
    sub_blocks: SubBlocks
    tuning: BlockTuning
    transposed: bool = False
    mirrored: bool = False
    square: bool = False

    def evaluate(self, num_points: int, result: Tensor, workspace: int) -> None:
        """Compute the sub-blocks and write them to the blocks, (B, m, k), contiguous."""
        if not self.sub_blocks.row.numel():
            return
        budget = min(self.tuning.product_floats, workspace // (4 * result.dtype.itemsize))
        scratch = Scratch(result, budget)
        for alike in _of_similar_size(self.sub_blocks, self.tuning.large_sub_block):
            size = int(alike.num_rows.max()) * int(alike.num_cols.max())
            floats = self.operands.floats(alike)
            points_step = min(num_points, max(1, budget // floats))
            step = max(1, min(budget // (floats * points_step), budget // (8 * size)))
            for start in range(0, alike.row.numel(), step):
                chosen = alike.select(slice(start, start + step))
                rows = _Range.of(chosen.row, chosen.num_rows)
                cols = _Range.of(chosen.col, chosen.num_cols)
                make_operands = self.operands.bind(rows.places, cols.places)
                values = result.new_empty(*rows.places.shape, cols.places.shape[1])
                for point in range(0, num_points, points_step):
                    scratch.reset(step * floats * points_step)
                    points = slice(point, min(point + points_step, num_points))
                    left, right = make_operands(points, scratch)
                    values.baddbmm_(left, right.mT, beta=int(point > 0))
                self.operands.finish(rows.places, cols.places, values)
                self._write(rows, cols, values, result)

    def _write(self, rows: _Range, cols: _Range, values: Tensor, result: Tensor) -> None:
        """Put the values of sub-blocks where they belong."""
        outer, inner = self.operands.outer, self.operands.inner
        if self.square:
            _make_symmetric(values, rows)
        block = outer.block(rows.places[:, 0])
        above, beside = outer.order[rows.places], inner.order[cols.places]
        # A square contains its transpose.
        mirrored = self.mirrored and not (self.square and torch.equal(rows.places, cols.places))
        if len(values) == 1 and _consecutive(above[0]) and _consecutive(beside[0]):
            target = result[int(block)].mT if self.transposed else result[int(block)]
            top, left = int(above[0, 0]), int(beside[0, 0])
            for view in (target, target.mT) if mirrored else (target,):
                corner = view.narrow(0, top, values.shape[1]).narrow(1, left, values.shape[2])
                corner.copy_(values[0])
            return
        flat = values.view(-1)
        kept = _kept(values, rows.valid, cols.valid)
        if kept is not None:
            flat = flat.index_select(0, kept)
        start = block * (result.shape[1] * result.shape[2])
        strides = (1, result.shape[2]) if self.transposed else (result.shape[2], 1)
        for down, right in (strides, strides[::-1]) if mirrored else (strides,):
            place = (start[:, None] + above * down)[:, :, None] + (beside * right)[:, None, :]
            place = place.view(-1) if kept is None else place.view(-1).index_select(0, kept)
            result.view(-1).scatter_(0, place, flat)


def _of_similar_size(sub_blocks: SubBlocks, large: int) -> Iterator[SubBlocks]:
    """Sub-blocks of similar size, or of equal size if they have at least ``large`` entries."""
    small = sub_blocks.num_rows * sub_blocks.num_cols < large
    heights, widths = (
        torch.where(small, (_SIZES_PER_OCTAVE * sizes.double().log2()).ceil_().long(), 1000 + sizes)
        for sizes in (sub_blocks.num_rows, sub_blocks.num_cols)
    )
    base = 1001 + int(sub_blocks.num_cols.max())
    keys = heights * base + widths
    order = (sub_blocks.num_rows * base + sub_blocks.num_cols).argsort()
    keys, again = keys[order].sort(stable=True)
    counts = torch.unique_consecutive(keys, return_counts=True)[1]
    for index in order[again].split(counts.tolist()):
        yield sub_blocks.select(index)


class _Range(NamedTuple):
    """Consecutive rows, or columns, of sub-blocks that are padded to a common width.

    Attributes:
        places: the rows, (sub-blocks, width); the padding repeats the last row of a sub-block.
        valid: which of them are no padding; None if there is none.
    """

    places: Tensor
    valid: Tensor | None

    @classmethod
    def of(cls, first: Tensor, length: Tensor) -> _Range:
        width = int(length.max())
        offsets = torch.arange(width, device=first.device)
        if int(length.min()) == width:
            return cls(first[:, None] + offsets, None)
        last = length[:, None] - 1
        return cls(first[:, None] + torch.minimum(offsets, last), offsets <= last)


def _make_symmetric(values: Tensor, rows: _Range) -> None:
    """Average the square that each sub-block begins with and its transpose."""
    square = values[:, :, : values.shape[1]]
    mean = (square + square.mT).mul_(0.5)
    if rows.valid is not None:  # columns beyond the square are entries of their own
        inside = rows.valid[:, :, None] & rows.valid[:, None, :]
        mean = torch.where(inside, mean, square)
    square.copy_(mean)


def _consecutive(index: Tensor) -> bool:
    return bool((index.diff() == 1).all())


def _kept(values: Tensor, row_valid: Tensor | None, col_valid: Tensor | None) -> Tensor | None:
    """Flat positions of the values that are valid, or None if all are."""
    if row_valid is None and col_valid is None:
        return None
    valid = torch.ones_like(values, dtype=torch.bool)
    if row_valid is not None:
        valid &= row_valid[:, :, None]
    if col_valid is not None:
        valid &= col_valid[:, None, :]
    return valid.view(-1).nonzero().squeeze(1)
