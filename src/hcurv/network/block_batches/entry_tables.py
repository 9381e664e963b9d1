"""Entries of many blocks at once from one table, unit pairs x input pairs.

H_km = Σ_i g_i[μ, μ'] · x_i[ν] x_i[ν'] (paper, Eqs. 3.2 and 3.5): the first factor depends on the
pair of units alone, the second on the pair of inputs alone. So with G, (unit pairs, n), and
Z, (input pairs, n), one matrix product T = G Zᵀ holds every entry of every block whose rows and
columns join these units and inputs. It pays where many entries share a pair. Both pairs are
unordered, which makes symmetric blocks symmetric to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.network.block_batches.block_axes import distinct, mark_pairs
from hcurv.network.block_batches.gram_values import evaluate_gram
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.jacobians.output_jacobian import UnitGroup
from hcurv.network.layer_factors import Connections, LayerFactors

__all__ = ["EntryTable", "plan_table"]


@dataclass(frozen=True)
class _LayerPair:
    """The rows and columns of the table between two layers, or within one.

    Attributes:
        unit_pairs: (2, u).
        input_pairs: (2, z).
        offset: where its u · z floats begin in the table.
    """

    unit_pairs: Tensor
    input_pairs: Tensor
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.unit_pairs.shape[1], self.input_pairs.shape[1])


@dataclass(frozen=True)
class EntryTable:
    """The table holds an entry at unit_offsets[μ, μ'] + input_offsets[ν, ν'].

    Attributes:
        group: the group of units whose entries it holds.
        gram_cost: of the Gram values within the group.
        layer_pairs: its parts, one for each pair of layers.
        size: number of its floats. It begins with zeros, for pairs of units that are not in it.
        unit_ranks: compact numbers of units; the last stands for all that are not in the table.
        input_ranks: compact numbers of inputs, likewise.
        unit_offsets: by two compact numbers; by one if units are orthogonal, because then only
            pairs of equal units are in the table.
        input_offsets: by two compact numbers.
        tuning: sizes and costs.
    """

    group: UnitGroup
    gram_cost: int
    layer_pairs: tuple[_LayerPair, ...]
    size: int
    unit_ranks: Tensor
    input_ranks: Tensor
    unit_offsets: Tensor
    input_offsets: Tensor
    tuning: BlockTuning

    def work(self, num_points: int, num_entries: int) -> float:
        """The estimated cost of the table and of looking up entries, in flops per point."""
        tuning = self.tuning
        look_up = tuning.look_up_zero_flops if self.group.orthogonal else tuning.look_up_flops
        passes = 4 * max(1, self.gram_cost)
        work = look_up * num_entries / num_points
        for units, inputs in (pair.shape for pair in self.layer_pairs):
            work += 2.0 * units * inputs
            work += tuning.elementwise_flops * (passes * units + 3.0 * inputs)
        return work

    def evaluate(self, factors: LayerFactors, workspace: int) -> Tensor:
        """The floats of the table, (size,)."""
        tuning, result = self.tuning, factors.inputs.new_zeros(self.size)
        budget = min(tuning.table_floats, workspace // factors.inputs.dtype.itemsize)
        tile = min(tuning.table_tile, max(1, budget // (4 * tuning.table_points)))
        for pair in self.layer_pairs:
            num_units, num_inputs = pair.shape
            table = result[pair.offset :][: num_units * num_inputs].view(num_units, num_inputs)
            for top in range(0, num_units, tile):
                rows = slice(top, min(top + tile, num_units))
                self._fill(factors, pair.unit_pairs[:, rows], pair.input_pairs, table[rows], budget)
        return result

    def _fill(
        self,
        factors: LayerFactors,
        unit_pairs: Tensor,
        input_pairs: Tensor,
        table: Tensor,
        budget: int,
    ) -> None:
        """Sum G Zᵀ over the points."""
        tuning, (num_units, num_inputs) = self.tuning, table.shape
        columns = min(tuning.table_tile, num_inputs, max(1, budget // (8 * tuning.table_points)))
        step = min(factors.num_points, max(1, budget // (2 * (num_units + 2 * columns))))
        gram_floats = min(budget // 2, tuning.gram_floats)
        first_units, second_units = unit_pairs
        for start in range(0, factors.num_points, step):
            points = slice(start, min(start + step, factors.num_points))
            gram = evaluate_gram(
                factors, first_units, second_units, points, self.gram_cost, gram_floats
            )
            inputs = factors.inputs[:, points]
            for left in range(0, num_inputs, columns):
                chosen = slice(left, left + columns)
                first, second = input_pairs[:, chosen]
                products = inputs.index_select(0, first).mul_(inputs.index_select(0, second))
                table[:, chosen].addmm_(gram, products.T)

    def add_entries(
        self, table: Tensor, rows: Connections, cols: Connections, blocks: Tensor, result: Tensor
    ) -> None:
        """Add the entries of some of the blocks to ``result``, (B, m, k)."""
        _, num_rows, num_cols = result.shape
        step = max(1, self.tuning.look_up_entries // (num_rows * num_cols))
        shape = (min(blocks.numel(), step), num_rows, num_cols)
        # The buffers are reused: fresh pages for every step would cost more than the look-up.
        buffers = [blocks.new_empty(shape) for _ in range(0 if self.group.orthogonal else 3)]
        values = result.new_empty(shape)
        for chosen in blocks.split(step):
            units = [self.unit_ranks[axis.units[chosen]] for axis in (rows, cols)]
            inputs = [self.input_ranks[axis.inputs[chosen]] for axis in (rows, cols)]
            entries = values[: len(chosen)]
            if self.group.orthogonal:
                block, row, col = (units[0][:, :, None] == units[1][:, None, :]).nonzero().T
                place = self.unit_offsets[units[0][block, row]]
                place += self.input_offsets[inputs[0][block, row], inputs[1][block, col]]
                entries.zero_()[block, row, col] = table[place]
            else:
                key, place, other = (buffer[: len(chosen)] for buffer in buffers)
                _look_up(self.unit_offsets, units[0], units[1], key, place)
                _look_up(self.input_offsets, inputs[0], inputs[1], key, other)
                torch.index_select(table, 0, place.add_(other).view(-1), out=entries.view(-1))
            result.index_add_(0, chosen, entries)


def _look_up(square: Tensor, rows: Tensor, cols: Tensor, key: Tensor, result: Tensor) -> None:
    """square[rows[b, i], cols[b, j]] for all b, i and j, by way of the buffer ``key``."""
    torch.add((rows * square.shape[1])[:, :, None], cols[:, None, :], out=key)
    torch.index_select(square.view(-1), 0, key.view(-1), out=result.view(-1))


def plan_table(
    factors: LayerFactors,
    group: UnitGroup,
    rows: Connections,
    cols: Connections,
    max_bytes: int,
    tuning: BlockTuning,
) -> EntryTable | None:
    """A table for the entries of blocks between units of one group.

    Args:
        factors: what entries are made of.
        group: the group.
        rows: unit and input of the rows of the blocks, (B, m).
        cols: the same of the columns, (B, k); the same object where the blocks are symmetric.
        max_bytes: bytes that the table and its offsets may take.
        tuning: sizes and costs.

    Returns:
        None where the blocks share too little, or the table would be too large.
    """
    layers = [x for x in factors.layers if group.start <= x.units.start < group.stop]
    unit_range = slice(layers[0].units.start, layers[-1].units.stop)
    input_range = slice(layers[0].inputs.start, layers[-1].inputs.stop)
    unit_ranks, units = _compact(
        factors.num_units, unit_range, rows.units, cols.units, common=group.orthogonal
    )
    input_ranks, inputs = _compact(factors.inputs.shape[0], input_range, rows.inputs, cols.inputs)
    num_offsets = (inputs.numel() + 1) ** 2
    num_offsets += (units.numel() + 1) ** (1 if group.orthogonal else 2)
    if 2 * 20 * num_offsets > max_bytes:
        return None
    row_inputs = distinct(input_ranks[rows.inputs])
    col_inputs = row_inputs if rows is cols else distinct(input_ranks[cols.inputs])
    if 4 * row_inputs.shape[1] * col_inputs.shape[1] > rows.units.shape[1] * cols.units.shape[1]:
        return None
    input_marks = mark_pairs(inputs.numel(), row_inputs, col_inputs)
    input_offsets = torch.zeros_like(input_marks, dtype=torch.long)
    if group.orthogonal:
        every = torch.arange(units.numel(), device=units.device)
        compact_pairs = [(torch.stack([every, every]), input_marks.nonzero().T)]
        unit_offsets = input_offsets.new_zeros(units.numel() + 1)
    else:
        row_units = distinct(unit_ranks[rows.units])
        col_units = row_units if rows is cols else distinct(unit_ranks[cols.units])
        unit_marks = mark_pairs(units.numel(), row_units, col_units)
        unit_offsets = torch.zeros_like(unit_marks, dtype=torch.long)
        unit_ends = _ends(units, [layer.units.stop for layer in layers])
        input_ends = _ends(inputs, [layer.inputs.stop for layer in layers])
        rectangles = (_rectangles(unit_marks, unit_ends), _rectangles(input_marks, input_ends))
        compact_pairs = list(zip(*rectangles, strict=True))
    layer_pairs: list[_LayerPair] = []
    size = max(pairs.shape[1] for _, pairs in compact_pairs)  # the zeros at the beginning
    for unit_pairs, input_pairs in compact_pairs:
        num_units, num_inputs = unit_pairs.shape[1], input_pairs.shape[1]
        if num_units and num_inputs:
            offsets = size + num_inputs * torch.arange(num_units, device=units.device)
            if group.orthogonal:
                unit_offsets[:num_units] = offsets
            else:
                _put(unit_offsets, unit_pairs, offsets)
            _put(input_offsets, input_pairs, torch.arange(num_inputs, device=units.device))
            layer_pairs.append(_LayerPair(units[unit_pairs], inputs[input_pairs], size))
            size += num_units * num_inputs
    if 2 * size * factors.inputs.dtype.itemsize > max_bytes:
        return None
    return EntryTable(
        group,
        factors.jacobian.gram_cost(group, group),
        tuple(layer_pairs),
        size,
        unit_ranks,
        input_ranks,
        unit_offsets,
        input_offsets,
        tuning,
    )


def _compact(
    size: int, chosen: slice, rows: Tensor, cols: Tensor, common: bool = False
) -> tuple[Tensor, Tensor]:
    """Number the chosen values that occur in rows or columns, or in both if ``common``.

    Returns:
        The compact number of every value below ``size``, and the values that are numbered. All
        others share the number after the last.
    """
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
    """How many of the values lie below each stop; the list begins with 0."""
    return [0, *torch.searchsorted(values, values.new_tensor(stops)).tolist()]


def _rectangles(marks: Tensor, ends: list[int]) -> Iterator[Tensor]:
    """The marked pairs within each range and between any two ranges, (2, pairs) each."""
    ranges = list(itertools.pairwise(ends))
    for (top, bottom), (left, right) in itertools.combinations_with_replacement(ranges, 2):
        pairs = marks[top:bottom, left:right].nonzero().T
        yield pairs + pairs.new_tensor([[top], [left]])


def _put(square: Tensor, pairs: Tensor, values: Tensor) -> None:
    """Set the values of unordered pairs."""
    square[pairs[0], pairs[1]] = values
    square[pairs[1], pairs[0]] = values
