"""Exact entries and blocks, each by the cheapest of three evaluations.

H_km = Σ_i g_i[μ, μ'] x_i[ν] x_i[ν'] (paper, Eqs. 3.2 and 3.5), where the Gram value g_i[μ, μ'], the
inner product of two columns of C_i, depends only on the units.

- *pairs*: g of every distinct pair of units, then one weighted inner product for each entry;
- *factored*: where g is an inner product itself, g = Σ_r L[μ, r] R[μ', r], a block is one matrix
  product with inner dimension n·r;
- *by units*: rows of one unit μ share g_i[μ, ·], so that H_RC = X_R (g ⊙ X_C)ᵀ, a matrix product
  with inner dimension n. It pays where many rows share a unit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.network.group_blocks import (
    SortedIndices,
    between_groups,
    mirror,
    write_within_units,
)
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.scratch import Scratch

__all__ = ["EntrySizes", "block", "block_bytes", "pairs"]


@dataclass(frozen=True)
class EntrySizes:
    """How much is evaluated at a time; the results do not depend on it but for rounding.

    The defaults keep operands in the caches of a desktop processor.

    Attributes:
        cache_floats: floats of one operand in the loop over pairs.
        cache_points: points taken at a time in that loop.
        tile: most rows and columns of a block that are evaluated together.
    """

    cache_floats: int = 640_000
    cache_points: int = 2048
    tile: int = 8192


_DEFAULT_SIZES = EntrySizes()


def pairs(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    workspace: int,
    sizes: EntrySizes = _DEFAULT_SIZES,
) -> Tensor:
    """H[rows[j], cols[j]] for index tensors of equal length."""
    result = factors.inputs.new_zeros(rows.numel())
    row_units, row_inputs = factors.locate(rows)
    col_units, col_inputs = factors.locate(cols)
    # H is symmetric: let the smaller unit come first.
    swap = row_units > col_units
    first, second = torch.minimum(row_units, col_units), torch.maximum(row_units, col_units)
    first_inputs = torch.where(swap, col_inputs, row_inputs)
    second_inputs = torch.where(swap, row_inputs, col_inputs)
    for group, other in factors.jacobian.group_pairs():
        index = group.selects(other, first, second).nonzero().squeeze(1)
        if index.numel():
            key = first[index] * factors.num_units + second[index]
            key, order = key.sort()
            index = index[order]
            cost = factors.jacobian.gram_cost(group, other)
            inputs = first_inputs[index], second_inputs[index]
            result[index] = _sorted_pairs(factors, key, *inputs, cost, workspace, sizes)
    return result


def _sorted_pairs(
    factors: LayerFactors,
    keys: Tensor,
    first_inputs: Tensor,
    second_inputs: Tensor,
    gram_cost: int,
    workspace: int,
    sizes: EntrySizes,
) -> Tensor:
    """Entries between two groups, sorted by their pair of units, key = first · units + second."""
    jacobian, num_points = factors.jacobian, factors.num_points
    unit_pairs, inverse, counts = torch.unique_consecutive(
        keys, return_inverse=True, return_counts=True
    )
    first = unit_pairs.div(factors.num_units, rounding_mode="floor")
    second = unit_pairs % factors.num_units
    ends = [0, *counts.cumsum(0).tolist()]
    floats = max(1, min(sizes.cache_floats, workspace // (8 * factors.inputs.dtype.itemsize)))
    points_step = min(num_points, sizes.cache_points)
    step = max(1, floats // (max(1, gram_cost) * points_step))
    entries_step = max(1, floats // points_step)
    scratch = Scratch(factors.inputs)
    result = factors.inputs.new_zeros(keys.numel())
    for point in range(0, num_points, points_step):
        points = slice(point, point + points_step)
        inputs = factors.inputs[:, points]
        for start in range(0, first.numel(), step):
            stop = min(start + step, first.numel())
            scratch.reset(2 * (stop - start) * max(1, gram_cost) * points_step)
            gram = jacobian.gram(first[start:stop], second[start:stop], points, scratch)
            # Many entries may share a pair of units; these are taken in steps as well.
            for begin in range(ends[start], ends[stop], entries_step):
                chosen = slice(begin, min(begin + entries_step, ends[stop]))
                weights = gram.index_select(0, inverse[chosen] - start)
                weights.mul_(inputs.index_select(0, first_inputs[chosen]))
                others = inputs.index_select(0, second_inputs[chosen])
                result[chosen] += torch.linalg.vecdot(weights, others)
    return result


def block(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    workspace: int,
    result: Tensor | None = None,
    sizes: EntrySizes = _DEFAULT_SIZES,
) -> Tensor:
    """The dense block rows x cols, within ``workspace`` bytes of temporary memory.

    It is written to ``result`` if that is given.
    """
    symmetric = rows.numel() == cols.numel() and torch.equal(rows, cols)
    size, half = _tile_size(factors, workspace, sizes)
    if max(rows.numel(), cols.numel()) <= size:
        values = _tile(factors, rows, cols, symmetric, half)
        return values if result is None else result.copy_(values)
    if result is None:
        result = factors.inputs.new_empty(rows.numel(), cols.numel())
    for top in range(0, rows.numel(), size):
        row_range = slice(top, top + size)
        for left in range(top if symmetric else 0, cols.numel(), size):
            col_range = slice(left, left + size)
            diagonal = symmetric and top == left
            result[row_range, col_range] = _tile(
                factors, rows[row_range], cols[col_range], diagonal, half
            )
            if symmetric and not diagonal:
                result[col_range, row_range] = result[row_range, col_range].T
    return result


def _tile_size(factors: LayerFactors, workspace: int, sizes: EntrySizes) -> tuple[int, int]:
    """The most rows and columns of a tile, and the bytes that evaluating it may take.

    Half of the workspace is for a second copy of a tile: one is sorted by unit, one as asked.
    """
    half = workspace // 2
    size = max(1, min(sizes.tile, math.isqrt(half // (2 * factors.inputs.dtype.itemsize))))
    return size, half


def block_bytes(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    workspace: int,
    sizes: EntrySizes = _DEFAULT_SIZES,
) -> int:
    """Bytes that `block` takes beyond its result: a second copy of a tile, and its operands.

    Operands are gathered for all points, as far as the workspace allows. Where there is one group
    of units, they are gone before its entries are copied to their places.
    """
    jacobian, itemsize = factors.jacobian, factors.inputs.dtype.itemsize
    symmetric = rows.numel() == cols.numel() and torch.equal(rows, cols)
    size, most = _tile_size(factors, workspace, sizes)
    num_rows, num_cols = min(rows.numel(), size), min(cols.numel(), size)
    wide, narrow = max(num_rows, num_cols), min(num_rows, num_cols)
    per_point = 2 * wide + (0 if symmetric else narrow) + factors.num_units * jacobian.num_rows
    operands = min(most, factors.num_points * per_point * itemsize)
    tile = num_rows * num_cols * itemsize
    within = max(tile, operands) if len(jacobian.groups) == 1 else tile + operands
    is_whole = max(rows.numel(), cols.numel()) <= size
    return within if is_whole else tile + within


def _tile(
    factors: LayerFactors, rows: Tensor, cols: Tensor, symmetric: bool, workspace: int
) -> Tensor:
    """One tile, from the entries between each two groups of units."""
    all_rows = SortedIndices.sort(factors, rows)
    all_cols = all_rows if symmetric else SortedIndices.sort(factors, cols)
    in_order = all_rows.in_order and all_cols.in_order
    result: Tensor | None = None
    for row_group, col_group in itertools.product(factors.jacobian.groups, repeat=2):
        same = row_group == col_group
        row, col = all_rows.within(row_group), all_cols.within(col_group)
        if not len(row) or not len(col) or (symmetric and row_group.start > col_group.start):
            continue
        whole = len(row) == len(rows) and len(col) == len(cols)
        if same and row_group.orthogonal:
            if result is None:
                result = factors.inputs.new_zeros(len(rows), len(cols))
            write_within_units(factors, row, col, symmetric, result, workspace)
            continue
        values = between_groups(factors, row_group, col_group, row, col, symmetric, workspace)
        if symmetric and same:
            mirror(values)
        if whole and in_order:
            return values
        if result is None:
            result = factors.inputs.new_zeros(len(rows), len(cols))
        result[row.order[:, None], col.order] = values
        if symmetric and not same:
            result[col.order[:, None], row.order] = values.T
    return factors.inputs.new_zeros(len(rows), len(cols)) if result is None else result
