"""Choose how to evaluate many blocks: by a table, in Gram form, or by columns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv import entries
from hcurv.entry_batches.forms import (
    ColumnForm,
    CrossForm,
    GramForm,
    StoredGram,
    WholeGram,
    plan_gram,
)
from hcurv.entry_batches.parts import Items, Places, Side
from hcurv.entry_batches.products import Task, multiply
from hcurv.entry_batches.tables import EntryTable, plan_table
from hcurv.indexing import resolve_indices
from hcurv.layer_factors import LayerFactors
from hcurv.narrow_jacobian import NarrowJacobian
from hcurv.wide_jacobian import WideJacobian

__all__ = ["blocks", "resolve_blocks"]

_CHUNK = 2**21  # entries evaluated at a time
_LARGE = 2**18  # entries of a block that is worth a call of its own


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
    for start in range(0, num_blocks, max(1, step)):
        part = slice(start, start + max(1, step))
        plans = None
        if step:
            plans = _plan(factors, rows[part], cols[part], symmetric, workspace // 2)
        if plans is None:
            for target, row, col in zip(result[part], rows[part], cols[part], strict=True):
                entries.block(factors, row, col, workspace, target)
        else:
            for plan in plans:
                plan.carry_out(factors, result[part], workspace // 2)
    return result


@dataclass(frozen=True)
class _TablePlan:
    """Look up the entries of some of the blocks in a table."""

    table: EntryTable
    rows: Places
    cols: Places
    blocks: Tensor

    def carry_out(self, factors: LayerFactors, result: Tensor, workspace: int) -> None:
        values = self.table.evaluate(factors, workspace // 4)
        self.table.add_entries(values, self.rows, self.cols, self.blocks, result)


@dataclass(frozen=True)
class _ProductPlan:
    """Evaluate parts of blocks by products."""

    tasks: list[Task]

    def carry_out(self, factors: LayerFactors, result: Tensor, workspace: int) -> None:
        for task in self.tasks:
            if task.items.row.numel():
                multiply(task, factors.num_points, result, workspace // 2)


def _plan(
    factors: LayerFactors, rows: Tensor, cols: Tensor, symmetric: bool, workspace: int
) -> list[_TablePlan | _ProductPlan] | None:
    """How to evaluate some blocks, or None: one after the other."""
    num_hidden = factors.jacobian.num_hidden
    row_places = Places(*factors.locate(rows))
    col_places = row_places if symmetric else Places(*factors.locate(cols))
    row_side = Side(row_places, num_hidden)
    col_side = row_side if symmetric else Side(col_places, num_hidden)
    size = rows.shape[1] * cols.shape[1]
    narrow = isinstance(factors.jacobian, NarrowJacobian)
    large = size >= _LARGE or (narrow and len(rows) <= 2)
    plans: list[_TablePlan | _ProductPlan] = []
    for row_tail, col_tail in itertools.product((False, True), repeat=2):
        num_rows, num_cols = row_side.segments(row_tail)[1], col_side.segments(col_tail)[1]
        present = ((num_rows > 0) & (num_cols > 0)).nonzero().squeeze(1)
        if not present.numel() or (symmetric and row_tail > col_tail):
            continue
        if row_tail != col_tail:
            tasks = [_cross_task(factors, row_side, col_side, row_tail, symmetric)]
        else:
            gram = None
            if not row_tail:
                gram = plan_gram(factors, row_places, col_places, workspace // 4)
            tasks, work = _square_tasks(factors, row_side, col_side, row_tail, symmetric, gram)
            table = plan_table(factors, row_places, col_places, row_tail, workspace // 2)
            if table is not None and table.work(factors, present.numel() * size) <= work:
                plans.append(_TablePlan(table, row_places, col_places, present))
                continue
        if large:  # there is no gain in doing these together
            return None
        plans.append(_ProductPlan(tasks))
    return plans


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
    stored: StoredGram | WholeGram | None,
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
    if stored is not None and float(column_work[gram_work > 0].sum()) < total + stored.work:
        chosen, total = gram_work > 0, float(column_work[gram_work > 0].sum())
    elif stored is not None:
        total += stored.work
    rest = replace(gram, items=items.select(~chosen[block]))
    return [Task(columns, whole.select(chosen), square=symmetric), rest], total
