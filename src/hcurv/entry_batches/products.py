"""Evaluate parts of blocks by batched matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.entry_batches.forms import Form, Scratch
from hcurv.entry_batches.parts import Items

__all__ = ["Task", "multiply"]

_CACHE_FLOATS = 2**21  # of the operands of one batched product
_LARGE = 2**15  # entries of an item that is worth a product of its own
_CLASSES = 3  # sizes of small items within a factor of two that are told apart


@dataclass(frozen=True)
class Task:
    """Items to evaluate in one form.

    Attributes:
        form: which.
        items: which.
        transposed: whether the outer side of the form is the columns of the blocks.
        mirrored: whether the transposes are entries, too.
        square: whether each item begins with a square that is symmetric.
    """

    form: Form
    items: Items
    transposed: bool = False
    mirrored: bool = False
    square: bool = False


def multiply(task: Task, num_points: int, result: Tensor, workspace: int) -> None:
    """Evaluate items and write them to the blocks, (B, m, k), contiguous."""
    budget = min(_CACHE_FLOATS, workspace // (4 * result.dtype.itemsize))
    form, scratch = task.form, Scratch(result, budget)
    for bucket in _buckets(task.items):
        size = int(bucket.num_rows.max()) * int(bucket.num_cols.max())
        floats = form.floats(bucket)
        points_step = min(num_points, max(1, budget // floats))
        step = max(1, min(budget // (floats * points_step), budget // (8 * size)))
        for start in range(0, bucket.row.numel(), step):
            items = bucket.select(slice(start, start + step))
            rows, cols = _Range.of(items.row, items.num_rows), _Range.of(items.col, items.num_cols)
            operands = form.bind(rows.places, cols.places)
            values = result.new_empty(*rows.places.shape, cols.places.shape[1])
            for point in range(0, num_points, points_step):
                scratch.reset(step * floats * points_step)
                points = slice(point, min(point + points_step, num_points))
                left, right = operands(points, scratch)
                values.baddbmm_(left, right.mT, beta=int(point > 0))
            form.finish(rows.places, cols.places, values)
            _write(task, rows, cols, values, result)


def _buckets(items: Items) -> Iterator[Items]:
    """Items of similar size, or of equal size if they are large."""
    small = items.num_rows * items.num_cols < _LARGE
    heights, widths = (
        torch.where(small, (_CLASSES * sizes.double().log2()).ceil_().long(), 1000 + sizes)
        for sizes in (items.num_rows, items.num_cols)
    )
    base = 1001 + int(items.num_cols.max())
    keys = heights * base + widths
    order = (items.num_rows * base + items.num_cols).argsort()
    keys, again = keys[order].sort(stable=True)
    counts = torch.unique_consecutive(keys, return_counts=True)[1]
    for index in order[again].split(counts.tolist()):
        yield items.select(index)


class _Range(NamedTuple):
    """Consecutive places, as many for every item; those beyond its end repeat its last."""

    places: Tensor  # (items, width)
    valid: Tensor | None  # which are not beyond the end, if some are

    @classmethod
    def of(cls, first: Tensor, length: Tensor) -> _Range:
        width = int(length.max())
        offsets = torch.arange(width, device=first.device)
        if int(length.min()) == width:
            return cls(first[:, None] + offsets, None)
        last = length[:, None] - 1
        return cls(first[:, None] + torch.minimum(offsets, last), offsets <= last)


def _write(task: Task, rows: _Range, cols: _Range, values: Tensor, result: Tensor) -> None:
    """Put values of items where they belong."""
    outer, inner = task.form.outer, task.form.inner
    if task.square:
        square = values[:, :, : values.shape[1]]
        mean = (square + square.mT).mul_(0.5)
        if rows.valid is not None:  # columns beyond the square are entries of their own
            inside = rows.valid[:, :, None] & rows.valid[:, None, :]
            mean = torch.where(inside, mean, square)
        square.copy_(mean)
    block = outer.block(rows.places[:, 0])
    above, beside = outer.order[rows.places], inner.order[cols.places]
    # A square contains its transpose.
    mirrored = task.mirrored and not (task.square and torch.equal(rows.places, cols.places))
    if len(values) == 1 and _consecutive(above[0]) and _consecutive(beside[0]):
        target = result[int(block)].mT if task.transposed else result[int(block)]
        top, left = int(above[0, 0]), int(beside[0, 0])
        for view in (target, target.mT) if mirrored else (target,):
            part = view.narrow(0, top, values.shape[1]).narrow(1, left, values.shape[2])
            part.copy_(values[0])
        return
    flat = values.view(-1)
    kept = _kept(values, rows.valid, cols.valid)
    if kept is not None:
        flat = flat.index_select(0, kept)
    start = block * (result.shape[1] * result.shape[2])
    strides = (1, result.shape[2]) if task.transposed else (result.shape[2], 1)
    for down, right in (strides, strides[::-1]) if mirrored else (strides,):
        place = (start[:, None] + above * down)[:, :, None] + (beside * right)[:, None, :]
        place = place.view(-1) if kept is None else place.view(-1).index_select(0, kept)
        result.view(-1).scatter_(0, place, flat)


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
