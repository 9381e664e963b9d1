"""Choose how to evaluate many blocks: by a table, by factored Gram values, or unit by unit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.network import entries
from hcurv.network.block_batches.batched_products import BatchedProducts
from hcurv.network.block_batches.block_axes import BlockAxis, SubBlocks
from hcurv.network.block_batches.entry_tables import EntryTable, plan_table
from hcurv.network.block_batches.gram_values import StoredGram, plan_gram
from hcurv.network.block_batches.operands import FactoredOperands, GramOperands
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.jacobians.output_jacobian import UnitGroup
from hcurv.network.layer_factors import Connections, LayerFactors

__all__ = ["blocks"]

_DEFAULT_TUNING = BlockTuning()


def blocks(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    workspace: int,
    tuning: BlockTuning = _DEFAULT_TUNING,
) -> Tensor:
    """H[rows[b], cols[b]] for every b: (B, m), (B, k) → (B, m, k).

    Temporaries stay within ``workspace`` bytes.
    """
    num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
    result = factors.inputs.new_zeros(num_blocks, num_rows, num_cols)
    if not result.numel():
        return result
    symmetric = rows is cols or (rows.shape == cols.shape and torch.equal(rows, cols))
    # An entry takes up to 64 bytes of indices; half of the workspace is for these.
    step = min(tuning.chunk_entries, workspace // 128) // (num_rows * num_cols)
    for start in range(0, num_blocks, max(1, step)):
        chunk = slice(start, start + max(1, step))
        methods = None
        if step:
            request = _Request.locate(factors, rows[chunk], cols[chunk], symmetric, tuning)
            methods = _choose(request, workspace // 2)
        if methods is None:
            for target, row, col in zip(result[chunk], rows[chunk], cols[chunk], strict=True):
                entries.block(factors, row, col, workspace, target)
        else:
            for method in methods:
                method.carry_out(factors, result[chunk], workspace // 2)
    return result


@dataclass(frozen=True)
class _Request:
    """Blocks that are evaluated together.

    Attributes:
        factors: what entries are made of.
        rows: unit and input of the rows, (B, m).
        cols: the same of the columns, (B, k); the same object if the blocks are symmetric.
        row_axis: the rows, sorted by unit.
        col_axis: the columns, sorted by unit.
        symmetric: whether rows and columns are equal.
        tuning: sizes and costs.
    """

    factors: LayerFactors
    rows: Connections
    cols: Connections
    row_axis: BlockAxis
    col_axis: BlockAxis
    symmetric: bool
    tuning: BlockTuning

    @classmethod
    def locate(
        cls,
        factors: LayerFactors,
        rows: Tensor,
        cols: Tensor,
        symmetric: bool,
        tuning: BlockTuning,
    ) -> _Request:
        row_places = factors.locate(rows)
        col_places = row_places if symmetric else factors.locate(cols)
        row_axis = BlockAxis(row_places, factors.jacobian.groups)
        col_axis = row_axis if symmetric else BlockAxis(col_places, factors.jacobian.groups)
        return cls(factors, row_places, col_places, row_axis, col_axis, symmetric, tuning)


@dataclass(frozen=True)
class _LookUp:
    """Look up the entries of some of the blocks in a table."""

    table: EntryTable
    rows: Connections
    cols: Connections
    blocks: Tensor

    def carry_out(self, factors: LayerFactors, result: Tensor, workspace: int) -> None:
        values = self.table.evaluate(factors, workspace // 4)
        self.table.add_entries(values, self.rows, self.cols, self.blocks, result)


@dataclass(frozen=True)
class _Multiply:
    """Evaluate sub-blocks by matrix products."""

    products: list[BatchedProducts]

    def carry_out(self, factors: LayerFactors, result: Tensor, workspace: int) -> None:
        for products in self.products:
            products.evaluate(factors.num_points, result, workspace // 2)


def _choose(request: _Request, workspace: int) -> list[_LookUp | _Multiply] | None:
    """One method for each pair of groups, or None to evaluate the blocks one after the other."""
    rows, cols, tuning = request.rows, request.cols, request.tuning
    num_blocks, size = len(rows.units), rows.units.shape[1] * cols.units.shape[1]
    methods: list[_LookUp | _Multiply] = []
    for row_group, col_group in itertools.product(request.factors.jacobian.groups, repeat=2):
        num_rows = request.row_axis.segments(row_group)[1]
        num_cols = request.col_axis.segments(col_group)[1]
        present = ((num_rows > 0) & (num_cols > 0)).nonzero().squeeze(1)
        below = request.symmetric and row_group.start > col_group.start
        if not present.numel() or below:
            continue
        stored, table = None, None
        if row_group == col_group:
            arguments = (request.factors, row_group, rows, cols)
            stored = plan_gram(*arguments, workspace // 4, tuning)
            table = plan_table(*arguments, workspace // 2, tuning)
        products, work = _plan_products(request, row_group, col_group, stored)
        if table is not None:
            table_work = table.work(request.factors.num_points, present.numel() * size)
            if table_work <= work:
                methods.append(_LookUp(table, rows, cols, present))
                continue
        if size >= tuning.large_block or num_blocks <= 2:
            return None  # nothing is gained by doing these together
        methods.append(_Multiply(products))
    return methods


def _plan_products(
    request: _Request, row_group: UnitGroup, col_group: UnitGroup, stored: StoredGram | None
) -> tuple[list[BatchedProducts], float]:
    """The cheapest products for the entries between two groups, and their flops per point."""
    swapped = row_group.start > col_group.start
    groups = (col_group, row_group) if swapped else (row_group, col_group)
    gram = request.factors.jacobian.factored(*groups)
    if gram is None:
        by_units, work = _unit_products(request, row_group, col_group, stored)
        return [by_units], float(work.sum()) + (0.0 if stored is None else stored.work)
    axes = (request.row_axis, request.col_axis)
    outer, inner = axes[::-1] if swapped else axes
    square = request.symmetric and row_group == col_group
    gram = gram.simplified(outer.units[groups[0].contains(outer.units)])
    operands = FactoredOperands(request.factors, outer, inner, gram, request.tuning, square)
    whole = SubBlocks(*outer.segments(groups[0]), *inner.segments(groups[1]))
    factored_work = operands.work(whole)
    needed = (whole.num_rows > 0) & (whole.num_cols > 0)
    mirrored = request.symmetric and not square
    factored = BatchedProducts(
        operands, whole.select(needed), request.tuning, swapped, mirrored, square
    )
    all_factored = float(factored_work[needed].sum())
    if gram.depth == 1 and row_group != col_group:
        return [factored], all_factored  # nothing is cheaper than a product with one term
    by_units, work = _unit_products(request, row_group, col_group, stored)
    block = by_units.operands.outer.block(by_units.sub_blocks.row)
    unit_work = work.new_zeros(len(whole.row)).index_add_(0, block, work)
    chosen = needed & (factored_work < unit_work)  # for each block the cheaper of the two
    total = float(torch.where(chosen, factored_work, unit_work).sum())
    # Stored Gram values cost something once, however few blocks use them.
    if stored is not None and all_factored < total + stored.work:
        return [factored], all_factored
    total += 0.0 if stored is None else stored.work
    rest = replace(by_units, sub_blocks=by_units.sub_blocks.select(~chosen[block]))
    return [replace(factored, sub_blocks=whole.select(chosen)), rest], total


def _unit_products(
    request: _Request, row_group: UnitGroup, col_group: UnitGroup, stored: StoredGram | None
) -> tuple[BatchedProducts, Tensor]:
    """Products for the rows, or the columns, of one unit each, and their flops per point."""
    factors, symmetric, tuning = request.factors, request.symmetric, request.tuning
    rows, cols = request.row_axis, request.col_axis
    cost = factors.jacobian.gram_cost(row_group, col_group)
    operands = GramOperands(factors, rows, cols, cost, tuning, stored)
    same = row_group == col_group
    square = symmetric and same
    if same and row_group.orthogonal:
        sub_blocks = _within_units(factors.num_units, row_group, rows, cols)
    elif square:
        sub_blocks = _upper_half(row_group, rows)
    else:
        sub_blocks = _runs_by_segments(rows, row_group, cols, col_group)
    products = BatchedProducts(operands, sub_blocks, tuning, False, symmetric, square)
    work = operands.work(sub_blocks)
    if square or (same and row_group.orthogonal):
        return products, work
    other = replace(operands, outer=cols, inner=rows)
    other_sub_blocks = _runs_by_segments(cols, col_group, rows, row_group)
    other_work = other.work(other_sub_blocks)
    if other_work.sum() < work.sum():
        products = BatchedProducts(other, other_sub_blocks, tuning, True, symmetric, square)
        return products, other_work
    return products, work


def _runs_by_segments(
    outer: BlockAxis, outer_group: UnitGroup, inner: BlockAxis, inner_group: UnitGroup
) -> SubBlocks:
    """The rows of each unit by all columns of their block that belong to the inner group."""
    row, num_rows = outer.runs(outer_group)
    col, num_cols = (values[outer.block(row)] for values in inner.segments(inner_group))
    return SubBlocks(row, num_rows, col, num_cols).select(num_cols > 0)


def _upper_half(group: UnitGroup, axis: BlockAxis) -> SubBlocks:
    """The rows of each unit by the columns of their block from these rows on."""
    row, num_rows = axis.runs(group)
    first, length = (values[axis.block(row)] for values in axis.segments(group))
    return SubBlocks(row, num_rows, row, first + length - row)


def _within_units(num_units: int, group: UnitGroup, rows: BlockAxis, cols: BlockAxis) -> SubBlocks:
    """The rows by the columns of the same unit in each block."""
    (row, num_rows), (col, num_cols) = rows.runs(group), cols.runs(group)
    row_keys = rows.block(row) * num_units + rows.units[row]
    col_keys = cols.block(col) * num_units + cols.units[col]
    match = torch.searchsorted(col_keys, row_keys).clamp_(max=col.numel() - 1)
    sub_blocks = SubBlocks(row, num_rows, col[match], num_cols[match])
    return sub_blocks.select(col_keys[match] == row_keys)
