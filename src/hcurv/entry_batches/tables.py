"""Entries of many blocks at once from one table, unit pairs x input pairs.

H_km = Σ_i g_i[μ, μ'] · x_i[ν] x_i[ν'] (paper, Eqs. 3.2 and 3.5): the first factor depends on the
pair of units alone, the second on the pair of inputs alone. So with G, (unit pairs, n), and
Z, (input pairs, n), one matrix product T = G Zᵀ holds every entry of every block whose rows and
columns are made of these units and inputs. It pays where many entries share a pair. Both pairs are
unordered, which makes symmetric blocks symmetric to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.entry_batches.parts import PASS, Places, distinct, evaluate_gram, mark_pairs
from hcurv.layer_factors import LayerFactors

__all__ = ["EntryTable", "plan_table"]

_LOOK_UP = 500  # flops of a matrix product in the time that it takes to look up an entry
_LOOK_UP_TAIL = 150  # most entries are zero there
_TILE = 2048  # most pairs of units and of inputs in one matrix product
_POINTS = 128  # fewest points
_CACHE_FLOATS = 2**20  # of the operands of one
_GROUP = 2**17  # entries looked up at a time


@dataclass(frozen=True)
class _Group:
    """The part of the table between two layers, or within one; it begins at ``offset``."""

    unit_pairs: Tensor  # (2, u)
    input_pairs: Tensor  # (2, z)
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.unit_pairs.shape[1], self.input_pairs.shape[1])


@dataclass(frozen=True)
class EntryTable:
    """The table holds an entry at unit_slots[μ, μ'] + input_slots[ν, ν'].

    Attributes:
        tail: whether it is of units of the tail, or of hidden ones.
        groups: its parts, one for each pair of layers.
        size: number of its floats; it begins with zeros for pairs of units that are not in it.
        unit_ranks: compact numbers of units; the last stands for all that are not in the table.
        input_ranks: compact numbers of inputs, likewise.
        unit_slots: by two compact numbers, or by one in the tail, where only equal units count.
        input_slots: by two compact numbers.
    """

    tail: bool
    groups: tuple[_Group, ...]
    size: int
    unit_ranks: Tensor
    input_ranks: Tensor
    unit_slots: Tensor
    input_slots: Tensor

    def work(self, factors: LayerFactors, num_entries: int) -> float:
        """Flops per point, everything else counted in flops, to look up so many entries."""
        passes = 4 * max(1, factors.jacobian.gram_cost)
        work = (_LOOK_UP_TAIL if self.tail else _LOOK_UP) * num_entries / factors.num_points
        for units, inputs in (group.shape for group in self.groups):
            work += 2.0 * units * inputs + PASS * (passes * units + 3.0 * inputs)
        return work

    def evaluate(self, factors: LayerFactors, workspace: int) -> Tensor:
        """T, flat."""
        result = factors.inputs.new_zeros(self.size)
        budget = min(_CACHE_FLOATS, workspace // factors.inputs.dtype.itemsize)
        tile = min(_TILE, max(1, budget // (4 * _POINTS)))
        for group in self.groups:
            num_units, num_inputs = group.shape
            table = result[group.offset :][: num_units * num_inputs].view(num_units, num_inputs)
            for top in range(0, num_units, tile):
                rows = slice(top, min(top + tile, num_units))
                _fill(factors, group.unit_pairs[:, rows], group.input_pairs, table[rows], budget)
        return result

    def add_entries(
        self, table: Tensor, rows: Places, cols: Places, blocks: Tensor, result: Tensor
    ) -> None:
        """Add entries of some of the blocks to ``result``, (B, m, k)."""
        _, num_rows, num_cols = result.shape
        step = min(blocks.numel(), max(1, _GROUP // (num_rows * num_cols)))
        shape = (step, num_rows, num_cols)
        # Reused buffers: fresh pages for every call would cost more than the look-up.
        buffers = [blocks.new_empty(shape) for _ in range(0 if self.tail else 3)]
        values = result.new_empty(shape)
        for part in blocks.split(step):
            units = [self.unit_ranks[side.units[part]] for side in (rows, cols)]
            inputs = [self.input_ranks[side.inputs[part]] for side in (rows, cols)]
            found = values[: len(part)]
            if self.tail:
                block, row, col = (units[0][:, :, None] == units[1][:, None, :]).nonzero().T
                place = self.unit_slots[units[0][block, row]]
                place += self.input_slots[inputs[0][block, row], inputs[1][block, col]]
                found.zero_()[block, row, col] = table[place]
            else:
                key, place, other = (buffer[: len(part)] for buffer in buffers)
                _look_up(self.unit_slots, units[0], units[1], key, place)
                _look_up(self.input_slots, inputs[0], inputs[1], key, other)
                torch.index_select(table, 0, place.add_(other).view(-1), out=found.view(-1))
            result.index_add_(0, part, found)


def _look_up(square: Tensor, rows: Tensor, cols: Tensor, key: Tensor, result: Tensor) -> None:
    torch.add((rows * square.shape[1])[:, :, None], cols[:, None, :], out=key)
    torch.index_select(square.view(-1), 0, key.view(-1), out=result.view(-1))


def _fill(
    factors: LayerFactors, unit_pairs: Tensor, input_pairs: Tensor, table: Tensor, budget: int
) -> None:
    """Add up G Zᵀ over the points."""
    num_units, num_inputs = table.shape
    columns = min(_TILE, num_inputs, max(1, budget // (8 * _POINTS)))
    step = min(factors.num_points, max(1, budget // (2 * (num_units + 2 * columns))))
    for start in range(0, factors.num_points, step):
        points = slice(start, min(start + step, factors.num_points))
        gram = evaluate_gram(factors, unit_pairs[0], unit_pairs[1], points, budget // 2)
        inputs = factors.inputs[:, points]
        for left in range(0, num_inputs, columns):
            part = slice(left, left + columns)
            first, second = input_pairs[:, part]
            products = inputs.index_select(0, first).mul_(inputs.index_select(0, second))
            table[:, part].addmm_(gram, products.T)


def plan_table(
    factors: LayerFactors, rows: Places, cols: Places, tail: bool, max_bytes: int
) -> EntryTable | None:
    """A table for the entries of blocks between hidden units, or between units of the tail.

    Args:
        factors: what entries are made of.
        rows: of the blocks, (B, m).
        cols: of the blocks, (B, k).
        tail: which units.
        max_bytes: of the table together with its slots.

    Returns:
        None where the blocks share too little, or the table would be too large.
    """
    num_hidden = factors.jacobian.num_hidden
    slots = [slot for slot in factors.slots if (slot.units.start >= num_hidden) == tail]
    unit_range = slice(slots[0].units.start, slots[-1].units.stop)
    input_range = slice(slots[0].inputs.start, slots[-1].inputs.stop)
    unit_ranks, units = _compact(factors.num_units, unit_range, rows.units, cols.units, common=tail)
    input_ranks, inputs = _compact(factors.inputs.shape[0], input_range, rows.inputs, cols.inputs)
    num_slots = (inputs.numel() + 1) ** 2 + (units.numel() + 1) ** (1 if tail else 2)
    if 2 * 20 * num_slots > max_bytes:
        return None
    row_inputs = distinct(input_ranks[rows.inputs])
    col_inputs = row_inputs if rows is cols else distinct(input_ranks[cols.inputs])
    if 4 * row_inputs.shape[1] * col_inputs.shape[1] > rows.units.shape[1] * cols.units.shape[1]:
        return None
    input_marks = mark_pairs(inputs.numel(), row_inputs, col_inputs)
    input_slots = torch.zeros_like(input_marks, dtype=torch.long)
    if tail:
        every = torch.arange(units.numel(), device=units.device)
        found = [(torch.stack([every, every]), input_marks.nonzero().T)]
        unit_slots = input_slots.new_zeros(units.numel() + 1)
    else:
        row_units = distinct(unit_ranks[rows.units])
        col_units = row_units if rows is cols else distinct(unit_ranks[cols.units])
        unit_marks = mark_pairs(units.numel(), row_units, col_units)
        unit_slots = torch.zeros_like(unit_marks, dtype=torch.long)
        unit_ends = _ends(units, [slot.units.stop for slot in slots])
        input_ends = _ends(inputs, [slot.inputs.stop for slot in slots])
        pairs = (_rectangles(unit_marks, unit_ends), _rectangles(input_marks, input_ends))
        found = list(zip(*pairs, strict=True))
    groups: list[_Group] = []
    size = max(pairs.shape[1] for _, pairs in found)  # zeros
    for unit_pairs, input_pairs in found:
        num_units, num_inputs = unit_pairs.shape[1], input_pairs.shape[1]
        if num_units and num_inputs:
            places = size + num_inputs * torch.arange(num_units, device=units.device)
            if tail:
                unit_slots[:num_units] = places
            else:
                _put(unit_slots, unit_pairs, places)
            _put(input_slots, input_pairs, torch.arange(num_inputs, device=units.device))
            groups.append(_Group(units[unit_pairs], inputs[input_pairs], size))
            size += num_units * num_inputs
    if 2 * size * factors.inputs.dtype.itemsize > max_bytes:
        return None
    return EntryTable(tail, tuple(groups), size, unit_ranks, input_ranks, unit_slots, input_slots)


def _compact(
    size: int, chosen: slice, rows: Tensor, cols: Tensor, common: bool = False
) -> tuple[Tensor, Tensor]:
    """Number the chosen values that occur, or occur on both sides; all others come last."""
    present = torch.zeros(2, size, dtype=torch.bool, device=rows.device)
    for marks, index in zip(present, (rows, cols), strict=True):
        marks[index.reshape(-1)] = True
    kept = present.all(0) if common else present.any(0)
    kept[: chosen.start] = False
    kept[chosen.stop :] = False
    values = kept.nonzero().squeeze(1)
    ranks = torch.full((size,), values.numel(), device=rows.device)
    ranks[values] = torch.arange(values.numel(), device=rows.device)
    return ranks, values


def _ends(values: Tensor, stops: list[int]) -> list[int]:
    """How many of the values lie below each stop, with 0 before."""
    return [0, *torch.searchsorted(values, values.new_tensor(stops)).tolist()]


def _rectangles(marks: Tensor, ends: list[int]) -> Iterator[Tensor]:
    """The marked pairs between any two ranges, (2, pairs), and within each."""
    ranges = list(itertools.pairwise(ends))
    for (top, bottom), (left, right) in itertools.combinations_with_replacement(ranges, 2):
        pairs = marks[top:bottom, left:right].nonzero().T
        yield pairs + pairs.new_tensor([[top], [left]])


def _put(slots: Tensor, pairs: Tensor, values: Tensor) -> None:
    """Set slots of unordered pairs."""
    slots[pairs[0], pairs[1]] = values
    slots[pairs[1], pairs[0]] = values
