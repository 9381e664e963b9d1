"""Gram values of many pairs of units, computed in steps or stored for several uses."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.network.block_batches.block_axes import distinct, mark_pairs
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.jacobians.output_jacobian import UnitGroup
from hcurv.network.layer_factors import Connections, LayerFactors
from hcurv.network.scratch import Scratch

__all__ = ["StoredGram", "evaluate_gram", "plan_gram"]


def evaluate_gram(
    factors: LayerFactors,
    first: Tensor,
    second: Tensor,
    points: slice,
    gram_cost: int,
    max_floats: int,
) -> Tensor:
    """g of pairs of units of two groups, (pairs, b).

    Some pairs are taken at a time. To take few points instead would mean to gather short rows.

    Args:
        factors: what entries are made of.
        first: units of the first group.
        second: units of the second group.
        points: the points.
        gram_cost: floats per point that g of one pair is computed from.
        max_floats: floats of temporary memory to stay within, if possible.
    """
    num_points = points.stop - points.start
    floats = 2 * max(1, gram_cost) * num_points
    step = min(first.numel(), max(1, max_floats // floats))
    scratch = Scratch(factors.inputs)
    result = factors.inputs.new_empty(first.numel(), num_points)
    for start in range(0, first.numel(), step):
        chosen = slice(start, start + step)
        scratch.reset(step * floats)
        result[chosen] = factors.jacobian.gram(first[chosen], second[chosen], points, scratch)
    return result


class StoredGram:
    """g of pairs of units of one group that many sub-blocks share.

    Args:
        factors: what entries are made of.
        group: the group.
        pairs: first and second units, counted from the start of the group, (2, pairs).
        tuning: sizes and costs.
    """

    def __init__(
        self, factors: LayerFactors, group: UnitGroup, pairs: Tensor, tuning: BlockTuning
    ) -> None:
        self._factors, self._group, self._pairs, self._tuning = factors, group, pairs, tuning
        self._values: Tensor | None = None
        size = group.stop - group.start
        self._rows = pairs.new_zeros(size, size)
        every = torch.arange(pairs.shape[1], device=pairs.device)
        self._rows[pairs[0], pairs[1]] = every
        self._rows[pairs[1], pairs[0]] = every

    @property
    def _cost(self) -> int:
        return self._factors.jacobian.gram_cost(self._group, self._group)

    @property
    def work(self) -> float:
        """Flops per point to compute all values."""
        return 4.0 * self._tuning.elementwise_flops * self._cost * self._pairs.shape[1]

    def gram(self, first: Tensor, second: Tensor, points: slice, scratch: Scratch) -> Tensor:
        """g[first, second], (pairs, b); all values are computed when the first are asked for."""
        if self._values is None:
            everywhere = slice(0, self._factors.num_points)
            units = self._pairs + self._group.start
            floats = min(scratch.spare, self._tuning.gram_floats)
            self._values = evaluate_gram(
                self._factors, units[0], units[1], everywhere, self._cost, floats
            )
        rows = self._rows[first - self._group.start, second - self._group.start]
        return scratch.select(self._values[:, points], rows)


def plan_gram(
    factors: LayerFactors,
    group: UnitGroup,
    rows: Connections,
    cols: Connections,
    max_bytes: int,
    tuning: BlockTuning,
) -> StoredGram | None:
    """Decide whether to store g of all pairs of units of a group that occur in blocks.

    Args:
        factors: what entries are made of.
        group: the group.
        rows: unit and input of the rows of the blocks, (B, m).
        cols: the same of the columns, (B, k); the same object where the blocks are symmetric.
        max_bytes: bytes that the values and their index may take.
        tuning: sizes and costs.

    Returns:
        None where the values cost nothing, are hardly shared, or take too much memory.
    """
    size = group.stop - group.start
    free = factors.jacobian.gram_cost(group, group) == 0
    if free or group.orthogonal or 20 * (size + 1) ** 2 > max_bytes:
        return None
    row_units = distinct(_within(group, rows.units))
    col_units = row_units if rows is cols else distinct(_within(group, cols.units))
    pairs = mark_pairs(size, row_units, col_units).nonzero().T
    num_uses = len(row_units) * row_units.shape[1] * col_units.shape[1]
    num_bytes = pairs.shape[1] * factors.num_points * factors.inputs.dtype.itemsize
    if tuning.gram_reuse * pairs.shape[1] > num_uses or 2 * num_bytes > max_bytes:
        return None
    return StoredGram(factors, group, pairs, tuning)


def _within(group: UnitGroup, units: Tensor) -> Tensor:
    """Units counted from the start of a group; all others get the number after its last."""
    return torch.where(group.contains(units), units - group.start, group.stop - group.start)
