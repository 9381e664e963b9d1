"""Choose how to evaluate many blocks: by a table, in Gram form, or by columns."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from hcurv import entries
from hcurv.entry_batches.forms import ColumnForm, CrossForm, GramForm, StoredGram, store_gram
from hcurv.entry_batches.parts import Items, Places, Side
from hcurv.entry_batches.products import Task, multiply
from hcurv.entry_batches.tables import plan_table
from hcurv.indexing import resolve_indices
from hcurv.layer_factors import LayerFactors
from hcurv.narrow_jacobian import NarrowJacobian
from hcurv.wide_jacobian import WideJacobian

__all__ = ["blocks", "resolve_blocks"]

_CHUNK = 2**21  # entries evaluated at a time


def resolve_blocks(
    rows: Tensor, cols: Tensor, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Check the indices of many blocks, (B, m) and (B, k).

    Raises:
        TypeError: they are not two-dimensional tensors of integers.
        ValueError: they differ in the number of blocks.
        IndexError: an index is out of range.
    """
    for name, index in (("rows", rows), ("cols", cols)):
        if not isinstance(index, Tensor) or index.ndim != 2:
            given = type(index).__name__
            if isinstance(index, Tensor):
                given = f"shape {tuple(index.shape)}"
            raise TypeError(f"{name} must be a tensor of shape (blocks, indices); got {given}")
        if index.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers; got values of type {index.dtype}")
    if rows.shape[0] != cols.shape[0]:
        raise ValueError(
            f"rows and cols must be of equally many blocks; got {rows.shape[0]} and {cols.shape[0]}"
        )
    row_index = resolve_indices(rows.reshape(-1), size, device, "rows").view(rows.shape)
    if rows is cols:
        return row_index, row_index
    return row_index, resolve_indices(cols.reshape(-1), size, device, "cols").view(cols.shape)


def blocks(factors: LayerFactors, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
    """H[rows[b], cols[b]] for every b: (B, m), (B, k) → (B, m, k).

    Temporaries stay within ``workspace`` bytes.
    """
    num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
    result = factors.inputs.new_zeros(num_blocks, num_rows, num_cols)
    if not result.numel():
        return result
    symmetric = rows is cols or (rows.shape == cols.shape and torch.equal(rows, cols))
    # An entry takes up to 64 bytes of indices; half of the workspace is for these.
    step = min(_CHUNK, workspace // 128) // (num_rows * num_cols)
    if step == 0:
        for target, row, col in zip(result, rows, cols, strict=True):
            entries.block(factors, row, col, workspace, target)
        return result
    for start in range(0, num_blocks, step):
        part = slice(start, start + step)
        _fill(factors, rows[part], cols[part], symmetric, result[part], workspace // 2)
    return result


def _fill(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    symmetric: bool,
    result: Tensor,
    workspace: int,
) -> None:
    """Evaluate some blocks into ``result``, which is zero."""
    num_hidden = factors.jacobian.num_hidden
    row_places = Places(*factors.locate(rows))
    col_places = row_places if symmetric else Places(*factors.locate(cols))
    row_side = Side(row_places, num_hidden)
    col_side = row_side if symmetric else Side(col_places, num_hidden)
    for row_tail, col_tail in itertools.product((False, True), repeat=2):
        num_rows, num_cols = row_side.segments(row_tail)[1], col_side.segments(col_tail)[1]
        present = ((num_rows > 0) & (num_cols > 0)).nonzero().squeeze(1)
        if not present.numel() or (symmetric and row_tail > col_tail):
            continue
        if row_tail != col_tail:
            tasks = [_cross_task(factors, row_side, col_side, row_tail, symmetric)]
        else:
            stored = None
            if not row_tail:
                stored = store_gram(factors, row_places, col_places, workspace // 4)
            tasks, work = _square_tasks(factors, row_side, col_side, row_tail, symmetric, stored)
            num_entries = present.numel() * result[0].numel()
            table = plan_table(factors, row_places, col_places, row_tail, workspace // 2)
            if table is not None and table.work(factors, num_entries) <= work:
                del stored, tasks
                values = table.evaluate(factors, workspace // 4)
                table.add_entries(values, row_places, col_places, present, result)
                continue
        for task in tasks:
            if task.items.row.numel():
                multiply(task, factors.num_points, result, workspace // 2)


def _cross_task(
    factors: LayerFactors, rows: Side, cols: Side, row_tail: bool, symmetric: bool
) -> Task:
    """Hidden rows by columns of the tail, or the other way round."""
    hidden, tail = (cols, rows) if row_tail else (rows, cols)
    jacobian = factors.jacobian
    if isinstance(jacobian, WideJacobian):
        items = Items(*hidden.segments(False), *tail.segments(True))
        chosen = items.num_rows * items.num_cols > 0
        form = CrossForm(factors, jacobian, hidden, tail)
        return Task(form, items.select(chosen), transposed=row_tail, mirrored=symmetric)
    by_hidden = GramForm(factors, hidden, tail), _run_items(hidden, tail, False, True)
    by_tail = GramForm(factors, tail, hidden), _run_items(tail, hidden, True, False)
    work, other_work = (float(form.work(items).sum()) for form, items in (by_hidden, by_tail))
    if work <= other_work:
        return Task(*by_hidden, transposed=row_tail, mirrored=symmetric)
    return Task(*by_tail, transposed=not row_tail, mirrored=symmetric)


def _run_items(outer: Side, inner: Side, outer_tail: bool, inner_tail: bool) -> Items:
    """Rows of one unit by all columns of their block."""
    place, length = outer.runs(outer_tail)
    col, num_cols = (values[outer.block(place)] for values in inner.segments(inner_tail))
    return Items(place, length, col, num_cols).select(num_cols > 0)


def _half_items(side: Side) -> Items:
    """Hidden rows of one unit by all hidden columns of their block from these rows on."""
    place, length = side.runs(False)
    first, num_hidden = (values[side.block(place)] for values in side.segments(False))
    return Items(place, length, place, first + num_hidden - place)


def _tail_items(factors: LayerFactors, rows: Side, cols: Side) -> Items:
    """Rows by columns of the same unit of the tail: between others entries are zero."""
    (row, num_rows), (col, num_cols) = rows.runs(True), cols.runs(True)
    row_keys = rows.block(row) * factors.num_units + rows.units[row]
    col_keys = cols.block(col) * factors.num_units + cols.units[col]
    match = torch.searchsorted(col_keys, row_keys).clamp_(max=col.numel() - 1)
    items = Items(row, num_rows, col[match], num_cols[match])
    return items.select(col_keys[match] == row_keys)


def _square_tasks(
    factors: LayerFactors,
    rows: Side,
    cols: Side,
    tail: bool,
    symmetric: bool,
    stored: StoredGram | None,
) -> tuple[list[Task], float]:
    """Hidden by hidden or tail by tail: the cheapest form for each block, and flops per point."""
    form, transposed = GramForm(factors, rows, cols, stored), False
    if tail:
        items = _tail_items(factors, rows, cols)
    elif symmetric:
        items = _half_items(rows)
    else:
        items = _run_items(rows, cols, False, False)
    work = form.work(items)
    if not tail and not symmetric:
        other = GramForm(factors, cols, rows, stored)
        other_items = _run_items(cols, rows, False, False)
        other_work = other.work(other_items)
        if other_work.sum() < work.sum():
            form, items, work, transposed = other, other_items, other_work, True
    gram = Task(form, items, transposed, mirrored=symmetric, square=symmetric)
    if tail or not isinstance(factors.jacobian, NarrowJacobian):
        return [gram], float(work.sum())
    columns = ColumnForm(factors, factors.jacobian, rows, cols)
    block = form.outer.block(items.row)
    gram_work = work.new_zeros(len(rows.num_hidden)).index_add_(0, block, work)
    whole = Items(*rows.segments(False), *cols.segments(False))
    column_work = columns.work(whole)
    chosen = column_work < gram_work  # never where there is nothing to do
    total = float(torch.minimum(column_work, gram_work).sum())
    rest = replace(gram, items=items.select(~chosen[block]))
    return [Task(columns, whole.select(chosen), square=symmetric), rest], total
