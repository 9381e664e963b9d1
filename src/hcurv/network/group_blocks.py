"""The entries between two groups of units, as a dense block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.network.jacobians.output_jacobian import FactoredGram, UnitGroup
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.scratch import Scratch

__all__ = ["SortedIndices", "between_groups", "mirror", "write_within_units"]

# An elementwise multiplication takes about as long as this many flops of a matrix product. The
# figure was fitted to timings of blocks; it decides only which way is taken.
_ELEMENTWISE_FLOPS = 100
# A symmetric block is mirrored, and a factored block finished, this many rows at a time.
_STRIP = 256


@dataclass(frozen=True)
class SortedIndices:
    """Rows or columns of a block, sorted by unit. Made by `sort`.

    Attributes:
        units: the unit of each row.
        inputs: the input of each row.
        order: the position of each row in the block.
    """

    units: Tensor
    inputs: Tensor
    order: Tensor

    @classmethod
    def sort(cls, factors: LayerFactors, index: Tensor) -> SortedIndices:
        """Find and sort the units of flat indices."""
        units, inputs = factors.locate(index)
        units, order = units.sort(stable=True)
        return cls(units, inputs[order], order)

    def __len__(self) -> int:
        return self.units.numel()

    @property
    def in_order(self) -> bool:
        """Whether sorting changed nothing."""
        return torch.equal(self.order, torch.arange(len(self), device=self.order.device))

    @property
    def num_units(self) -> int:
        """The number of different units."""
        return len(torch.unique_consecutive(self.units))

    def within(self, group: UnitGroup) -> SortedIndices:
        """The rows whose unit belongs to a group."""
        bounds = self.units.new_tensor([group.start, group.stop])
        start, stop = torch.searchsorted(self.units, bounds).tolist()
        rows = slice(start, stop)
        return SortedIndices(self.units[rows], self.inputs[rows], self.order[rows])

    def runs(self) -> list[tuple[int, int, int]]:
        """(unit, start, stop) of each run of equal units."""
        units, counts = torch.unique_consecutive(self.units, return_counts=True)
        stops = counts.cumsum(0)
        return list(zip(units.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))


def between_groups(
    factors: LayerFactors,
    row_group: UnitGroup,
    col_group: UnitGroup,
    rows: SortedIndices,
    cols: SortedIndices,
    symmetric: bool,
    workspace: int,
) -> Tensor:
    """Rows of one group by columns of another: factored or by units, whichever costs less.

    Args:
        factors: what entries are made of.
        row_group: the group of all rows.
        col_group: the group of all columns.
        rows: the rows.
        cols: the columns.
        symmetric: whether the whole block is symmetric. If, moreover, both groups are the same,
            only the upper half of the result need be right.
        workspace: bytes of temporary memory to stay within.

    Returns:
        (rows, cols), in sorted order.
    """
    if row_group.start > col_group.start:
        return between_groups(factors, col_group, row_group, cols, rows, False, workspace).T
    same = symmetric and row_group == col_group
    num_rows, num_cols, row_units, col_units = len(rows), len(cols), rows.num_units, cols.num_units
    cost = factors.jacobian.gram_cost(row_group, col_group)
    gram = factors.jacobian.factored(row_group, col_group)
    if gram is not None:
        gram = gram.simplified(rows.units)
        product = 2 * num_rows * num_cols
        factored = gram.depth * (product + _ELEMENTWISE_FLOPS * (num_rows + num_cols))
        row_cost = factors.jacobian.row_cost(row_group, col_group)
        scaled = min(row_units * num_cols, col_units * num_rows) + row_units * col_units * row_cost
        if factored <= product + _ELEMENTWISE_FLOPS * scaled:
            return _by_factors(factors, gram, rows, cols, same, workspace)
    if col_units * num_rows < row_units * num_cols:
        return _by_units(factors, cols, rows, same, cost, workspace).T
    return _by_units(factors, rows, cols, same, cost, workspace)


def _by_factors(
    factors: LayerFactors,
    gram: FactoredGram,
    rows: SortedIndices,
    cols: SortedIndices,
    symmetric: bool,
    workspace: int,
) -> Tensor:
    """One matrix product over points and the terms of the Gram values."""
    result = factors.inputs.new_zeros(len(rows), len(cols))
    per_point = (len(rows) + len(cols)) * (gram.depth + 1) + len(cols)
    step = max(1, workspace // (2 * per_point * result.dtype.itemsize))
    scratch = Scratch(result)
    for start in range(0, factors.num_points, step):
        points = slice(start, min(start + step, factors.num_points))
        scratch.reset(per_point * (points.stop - points.start))
        inputs = factors.inputs[:, points]
        left = gram.left(rows.units, scratch.select(inputs, rows.inputs), points, scratch)
        right = left
        if not symmetric:
            right = gram.right(cols.units, scratch.select(inputs, cols.inputs), points, scratch)
        result.addmm_(left.flatten(1), right.flatten(1).T)
    for values, units in zip(result.split(_STRIP), rows.units.split(_STRIP), strict=True):
        gram.finish(values, units, cols.units)
    return result


def _by_units(
    factors: LayerFactors,
    outer: SortedIndices,
    inner: SortedIndices,
    symmetric: bool,
    gram_cost: int,
    workspace: int,
) -> Tensor:
    """X_O (g[μ, ·] ⊙ X_I)ᵀ for the rows O of each unit μ; of a symmetric block the upper half."""
    result = factors.inputs.new_zeros(len(outer), len(inner))
    outer_runs, inner_runs = outer.runs(), inner.runs()
    units, inverse = torch.unique_consecutive(inner.units, return_inverse=True)
    # Where many columns share a unit, one call for each unit beats gathering a row per column.
    long_runs = len(inner) >= 32 * units.numel()
    gram_floats = units.numel() * (gram_cost + 2)
    per_point = (2 * len(inner) + len(outer) + gram_floats) * result.dtype.itemsize
    step = min(factors.num_points, max(1, workspace // per_point))
    buffer = factors.inputs.new_empty(len(inner) * step)
    for point in range(0, factors.num_points, step):
        points = slice(point, min(point + step, factors.num_points))
        inputs = factors.inputs[:, points]
        outer_inputs = inputs.index_select(0, outer.inputs)
        inner_inputs = outer_inputs if symmetric else inputs.index_select(0, inner.inputs)
        scaled = buffer[: inner_inputs.numel()].view(inner_inputs.shape)
        for position, (unit, start, stop) in enumerate(outer_runs):
            skip, begin = (position, start) if symmetric else (0, 0)
            gram = factors.jacobian.gram(unit, units[skip:], points)
            if long_runs:
                for row, (_, left, right) in zip(gram, inner_runs[skip:], strict=True):
                    torch.mul(inner_inputs[left:right], row, out=scaled[left:right])
            else:
                torch.index_select(gram, 0, inverse[begin:] - skip, out=scaled[begin:])
                scaled[begin:].mul_(inner_inputs[begin:])
            result[start:stop, begin:].addmm_(outer_inputs[start:stop], scaled[begin:].T)
    return result


def write_within_units(
    factors: LayerFactors,
    rows: SortedIndices,
    cols: SortedIndices,
    symmetric: bool,
    result: Tensor,
    workspace: int,
) -> None:
    """Write the entries of a group of orthogonal units, which are zero between two units.

    Units with equally many rows and equally many columns are evaluated in one batched product.

    Args:
        factors: what entries are made of.
        rows: rows of the group.
        cols: columns of the group.
        symmetric: whether rows and columns are the same.
        result: the whole block; other entries than these are not touched.
        workspace: bytes of temporary memory to stay within.
    """
    col_ranges = {unit: (start, stop) for unit, start, stop in cols.runs()}
    by_shape: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for unit, start, stop in rows.runs():
        if unit in col_ranges:
            begin, end = col_ranges[unit]
            members = by_shape.setdefault((stop - start, end - begin), [])
            members.append((unit, start, begin))
    for (num_rows, num_cols), members in by_shape.items():
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
            left.mul_(factors.jacobian.gram(units, units, points)[:, None])
            values.baddbmm_(left, inputs[cols.inputs[col_index]].transpose(1, 2))
        if symmetric:
            values = (values + values.transpose(1, 2)) / 2
        result[rows.order[row_index][:, :, None], cols.order[col_index][:, None, :]] = values


def mirror(block: Tensor) -> None:
    """Copy the upper half onto the lower: symmetric blocks are symmetric to the last bit."""
    for start in range(0, block.shape[0], _STRIP):
        stop = start + _STRIP
        corner = block[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
        block[stop:, start:stop] = block[start:stop, stop:].T
