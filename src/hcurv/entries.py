"""Exact entries and blocks, each by the cheapest of three evaluations.

H_km = Σ_i g_i[μ, μ'] x_i[ν] x_i[ν'] (paper, Eqs. 3.2 and 3.5), where g_i[μ, μ'], the inner product
of two columns of C_i, depends only on the units.

- *pairs*: g for every distinct pair of units, then one weighted inner product per entry;
- *columns*: H_RC = V_R V_Cᵀ with the Jacobian columns v_k(i) = C_i[:, μ] x_i[ν], one matrix product
  with inner dimension n·q;
- *Gram form*: rows of one unit μ share g_i[μ, ·], so H_RC = X_R (g ⊙ X_C)ᵀ, a matrix product with
  inner dimension n; it pays where many rows share a unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.layer_factors import LayerFactors
from hcurv.narrow_jacobian import NarrowJacobian
from hcurv.output_jacobian import OutputJacobian

__all__ = ["block", "pair_gram", "pairs"]

_CACHE_FLOATS = 640_000  # of one operand in the loop over pairs
_CACHE_POINTS = 2048
_MIRROR = 256  # rows copied at a time
_TILE = 8192  # rows and columns of a block evaluated at a time
# An elementwise multiplication costs about as much as this many flops of a matrix product.
_ELEMENTWISE = 100


def pairs(factors: LayerFactors, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
    """H[rows[j], cols[j]] for index tensors of equal length."""
    result = factors.inputs.new_zeros(rows.numel())
    row_units, row_inputs = factors.locate(rows)
    col_units, col_inputs = factors.locate(cols)
    # H is symmetric: let the smaller unit come first, so that hidden comes before tail.
    swap = row_units > col_units
    first, second = torch.minimum(row_units, col_units), torch.maximum(row_units, col_units)
    first_inputs = torch.where(swap, col_inputs, row_inputs)
    second_inputs = torch.where(swap, row_inputs, col_inputs)
    num_hidden = factors.jacobian.num_hidden
    related = ~factors.jacobian.orthogonal(first, second)
    for first_hidden, second_hidden in ((True, True), (True, False), (False, False)):
        chosen = ((first < num_hidden) == first_hidden) & ((second < num_hidden) == second_hidden)
        chosen &= related
        index = chosen.nonzero().squeeze(1)
        if index.numel():
            key = first[index] * factors.num_units + second[index]
            key, order = key.sort()
            index = index[order]
            result[index] = _sorted_pairs(
                factors, key, first_inputs[index], second_inputs[index], workspace
            )
    return result


def _sorted_pairs(
    factors: LayerFactors,
    keys: Tensor,
    first_inputs: Tensor,
    second_inputs: Tensor,
    workspace: int,
) -> Tensor:
    """Entries of one kind, sorted by their pair of units, key = first · units + second."""
    jacobian, num_points = factors.jacobian, factors.num_points
    unit_pairs, inverse, counts = torch.unique_consecutive(
        keys, return_inverse=True, return_counts=True
    )
    first = unit_pairs.div(factors.num_units, rounding_mode="floor")
    second = unit_pairs % factors.num_units
    ends = [0, *counts.cumsum(0).tolist()]
    floats = max(1, min(_CACHE_FLOATS, workspace // (8 * factors.inputs.dtype.itemsize)))
    points_step = min(num_points, _CACHE_POINTS)
    step = max(1, floats // (max(1, jacobian.gram_cost) * points_step))
    entries_step = max(1, floats // points_step)
    scratch = factors.inputs.new_empty(
        2, min(step, first.numel()) * jacobian.gram_cost * points_step
    )
    result = factors.inputs.new_zeros(keys.numel())
    for point in range(0, num_points, points_step):
        points = slice(point, point + points_step)
        inputs = factors.inputs[:, points]
        for start in range(0, first.numel(), step):
            stop = min(start + step, first.numel())
            gram = pair_gram(jacobian, first[start:stop], second[start:stop], points, scratch)
            # Many entries may share a pair of units; take those in steps as well.
            for begin in range(ends[start], ends[stop], entries_step):
                part = slice(begin, min(begin + entries_step, ends[stop]))
                weights = gram.index_select(0, inverse[part] - start)
                weights.mul_(inputs.index_select(0, first_inputs[part]))
                others = inputs.index_select(0, second_inputs[part])
                result[part] += torch.linalg.vecdot(weights, others)
    return result


def pair_gram(
    jacobian: OutputJacobian,
    first: Tensor,
    second: Tensor,
    points: slice,
    scratch: Tensor | None = None,
) -> Tensor:
    """g of pairs of units, (pairs, b): all hidden, all of the tail, or hidden with tail."""
    num_hidden = jacobian.num_hidden
    if int(second[0]) < num_hidden:
        return jacobian.hidden_gram(first, second, points, scratch)
    if int(first[0]) < num_hidden:
        return jacobian.cross_gram(first, second - num_hidden, points)
    return jacobian.tail_gram(first - num_hidden, points)


@dataclass(frozen=True)
class _Side:
    """Rows or columns of a block, sorted by unit."""

    units: Tensor
    inputs: Tensor
    order: Tensor  # positions in the block

    @classmethod
    def sort(cls, factors: LayerFactors, index: Tensor) -> _Side:
        units, inputs = factors.locate(index)
        units, order = units.sort(stable=True)
        return cls(units, inputs[order], order)

    def __len__(self) -> int:
        return self.units.numel()

    @property
    def in_order(self) -> bool:
        """Whether sorting changed nothing."""
        return torch.equal(self.order, torch.arange(len(self), device=self.order.device))

    def split(self, unit: int) -> tuple[_Side, _Side]:
        """The parts below and from a unit on."""
        cut = int((self.units < unit).sum())
        return (
            _Side(self.units[:cut], self.inputs[:cut], self.order[:cut]),
            _Side(self.units[cut:], self.inputs[cut:], self.order[cut:]),
        )

    def groups(self) -> list[tuple[int, int, int]]:
        """(unit, start, stop) of each run of equal units."""
        units, counts = torch.unique_consecutive(self.units, return_counts=True)
        stops = counts.cumsum(0)
        return list(zip(units.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))


def block(
    factors: LayerFactors,
    rows: Tensor,
    cols: Tensor,
    workspace: int,
    result: Tensor | None = None,
) -> Tensor:
    """The dense block rows x cols, within ``workspace`` bytes of temporary memory.

    It is written to ``result`` if that is given.
    """
    symmetric = rows.numel() == cols.numel() and torch.equal(rows, cols)
    # A tile may be there twice, sorted by unit and in the order asked for: half is for that.
    half = workspace // 2
    size = max(1, min(_TILE, math.isqrt(half // (2 * factors.inputs.dtype.itemsize))))
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


def _tile(
    factors: LayerFactors, rows: Tensor, cols: Tensor, symmetric: bool, workspace: int
) -> Tensor:
    """One tile: hidden rows and columns, tail rows and columns, and what is between them."""
    row_side = _Side.sort(factors, rows)
    col_side = row_side if symmetric else _Side.sort(factors, cols)
    num_hidden = factors.jacobian.num_hidden
    row_hidden, row_tail = row_side.split(num_hidden)
    col_hidden, col_tail = (row_hidden, row_tail) if symmetric else col_side.split(num_hidden)
    all_hidden = len(row_hidden) == len(rows) and len(col_hidden) == len(cols)
    if all_hidden and len(rows) and len(cols) and row_side.in_order and col_side.in_order:
        values = _hidden_block(factors, row_hidden, col_hidden, symmetric, workspace)
        return _mirror(values) if symmetric else values
    result = factors.inputs.new_zeros(len(row_side), len(col_side))

    def put(row: _Side, col: _Side, values: Tensor) -> None:
        result[row.order[:, None], col.order] = values

    if len(row_hidden) and len(col_hidden):
        values = _hidden_block(factors, row_hidden, col_hidden, symmetric, workspace)
        put(row_hidden, col_hidden, _mirror(values) if symmetric else values)
    if len(row_hidden) and len(col_tail):
        values = _by_units(factors, row_hidden, col_tail, False, workspace)
        put(row_hidden, col_tail, values)
        if symmetric:
            put(col_tail, row_hidden, values.T)
    if len(row_tail) and len(col_hidden) and not symmetric:
        values = _by_units(factors, row_tail, col_hidden, False, workspace)
        put(row_tail, col_hidden, values)
    if len(row_tail) and len(col_tail):
        _tail_block(factors, row_tail, col_tail, symmetric, result, workspace)
    return result


def _mirror(block: Tensor) -> Tensor:
    """Copy the upper half onto the lower: symmetric blocks are symmetric to the last bit."""
    for start in range(0, block.shape[0], _MIRROR):
        stop = start + _MIRROR
        corner = block[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
        block[stop:, start:stop] = block[start:stop, stop:].T
    return block


def _hidden_block(
    factors: LayerFactors, rows: _Side, cols: _Side, symmetric: bool, workspace: int
) -> Tensor:
    """Rows and columns of hidden units: columns or Gram form, whichever costs less.

    Of a symmetric block only the upper half need be right.
    """
    jacobian = factors.jacobian
    if isinstance(jacobian, NarrowJacobian):
        q = jacobian.num_rows
        num_rows, num_cols = len(rows), len(cols)
        row_units = rows.units.unique_consecutive().numel()
        col_units = cols.units.unique_consecutive().numel()
        by_columns = 2 * q * num_rows * num_cols + _ELEMENTWISE * q * (num_rows + num_cols)
        scaled = min(row_units * num_cols, col_units * num_rows) + row_units * col_units * q
        if by_columns <= 2 * num_rows * num_cols + _ELEMENTWISE * scaled:
            return _by_columns(factors, jacobian, rows, cols, symmetric, workspace)
    return _by_units(factors, rows, cols, symmetric, workspace)


def _by_columns(
    factors: LayerFactors,
    jacobian: NarrowJacobian,
    rows: _Side,
    cols: _Side,
    symmetric: bool,
    workspace: int,
) -> Tensor:
    """V_R V_Cᵀ."""
    result = factors.inputs.new_zeros(len(rows), len(cols))
    per_point = 2 * (len(rows) + len(cols)) * jacobian.num_rows * result.dtype.itemsize
    step = max(1, workspace // per_point)

    def columns(side: _Side, points: slice) -> Tensor:
        values = jacobian.columns(side.units, points)
        values.mul_(factors.inputs[:, points].index_select(0, side.inputs)[:, None])
        return values.flatten(1)

    for start in range(0, factors.num_points, step):
        points = slice(start, start + step)
        left = columns(rows, points)
        result.addmm_(left, (left if symmetric else columns(cols, points)).T)
    return result


def _by_units(
    factors: LayerFactors, rows: _Side, cols: _Side, symmetric: bool, workspace: int
) -> Tensor:
    """The Gram form, one matrix product per unit of that side which has the larger groups."""
    row_work = rows.units.unique_consecutive().numel() * len(cols)
    col_work = cols.units.unique_consecutive().numel() * len(rows)
    if col_work < row_work:
        return _gram_form(factors, cols, rows, symmetric, workspace).T
    return _gram_form(factors, rows, cols, symmetric, workspace)


def _gram_form(
    factors: LayerFactors, outer: _Side, inner: _Side, symmetric: bool, workspace: int
) -> Tensor:
    """X_O (g[μ, ·] ⊙ X_I)ᵀ for the rows O of each unit μ; of a symmetric block the upper half."""
    result = factors.inputs.new_zeros(len(outer), len(inner))
    outer_groups, inner_groups = outer.groups(), inner.groups()
    units, inverse = torch.unique_consecutive(inner.units, return_inverse=True)
    large_groups = len(inner) >= 32 * units.numel()
    gram_floats = units.numel() * (factors.jacobian.gram_cost + 2)
    per_point = (2 * len(inner) + len(outer) + gram_floats) * result.dtype.itemsize
    step = min(factors.num_points, max(1, workspace // per_point))
    buffer = factors.inputs.new_empty(len(inner) * step)
    for point in range(0, factors.num_points, step):
        points = slice(point, min(point + step, factors.num_points))
        inputs = factors.inputs[:, points]
        outer_inputs = inputs.index_select(0, outer.inputs)
        inner_inputs = outer_inputs if symmetric else inputs.index_select(0, inner.inputs)
        scaled = buffer[: inner_inputs.numel()].view(inner_inputs.shape)
        for position, (unit, start, stop) in enumerate(outer_groups):
            skip, begin = (position, start) if symmetric else (0, 0)
            gram = _gram_row(factors.jacobian, unit, units[skip:], points)
            if large_groups:
                for row, (_, left, right) in zip(gram, inner_groups[skip:], strict=True):
                    torch.mul(inner_inputs[left:right], row, out=scaled[left:right])
            else:
                torch.index_select(gram, 0, inverse[begin:] - skip, out=scaled[begin:])
                scaled[begin:].mul_(inner_inputs[begin:])
            result[start:stop, begin:].addmm_(outer_inputs[start:stop], scaled[begin:].T)
    return result


def _gram_row(jacobian: OutputJacobian, unit: int, units: Tensor, points: slice) -> Tensor:
    """g[unit, units], (units, b); not both sides are the tail."""
    num_hidden = jacobian.num_hidden
    if unit >= num_hidden:
        return jacobian.cross_gram(units, unit - num_hidden, points)
    if int(units[0]) >= num_hidden:
        return jacobian.cross_gram(unit, units - num_hidden, points)
    return jacobian.hidden_gram(unit, units, points)


def _tail_block(
    factors: LayerFactors,
    rows: _Side,
    cols: _Side,
    symmetric: bool,
    result: Tensor,
    workspace: int,
) -> None:
    """Write the entries between units of the tail: nonzero only within a unit.

    Units with equally many rows and equally many columns are done in one batched product.
    """
    jacobian = factors.jacobian
    col_ranges = {unit: (start, stop) for unit, start, stop in cols.groups()}
    buckets: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for unit, start, stop in rows.groups():
        if unit in col_ranges:
            begin, end = col_ranges[unit]
            members = buckets.setdefault((stop - start, end - begin), [])
            members.append((unit - jacobian.num_hidden, start, begin))
    for (num_rows, num_cols), members in buckets.items():
        units, starts, lefts = torch.tensor(members, device=result.device).T
        row_index = starts[:, None] + torch.arange(num_rows, device=result.device)
        col_index = lefts[:, None] + torch.arange(num_cols, device=result.device)
        values = result.new_zeros(len(members), num_rows, num_cols)
        per_point = len(members) * (2 * num_rows + num_cols + 2) * result.dtype.itemsize
        step = max(1, workspace // per_point)
        for point in range(0, factors.num_points, step):
            points = slice(point, point + step)
            inputs = factors.inputs[:, points]
            left = inputs[rows.inputs[row_index]]
            left.mul_(jacobian.tail_gram(units, points)[:, None])
            values.baddbmm_(left, inputs[cols.inputs[col_index]].transpose(1, 2))
        if symmetric:
            values = (values + values.transpose(1, 2)) / 2
        result[rows.order[row_index][:, :, None], cols.order[col_index][:, None, :]] = values
