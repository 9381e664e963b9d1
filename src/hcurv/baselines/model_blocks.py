"""Which parameters of any model form Kronecker blocks, and which get a diagonal one.

The uses of each parameter are known from the graph that autograd recorded. Where every use of a
weight is a product z = W x, the weight is a block, or several blocks, if its uses see separate
parts of it: the groups of a convolution, or the heads of a batched product. A bias belongs to a
block if it is held by the same module, and if its derivative is the sum of those of z over all
positions: then it is the weight of an input that is one everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout, layer_of
from hcurv.network.model.contributions import DirectUse, LinearUse
from hcurv.network.model.graph_batch import BatchUses
from hcurv.network.model.ordered_uses import Gradients, OrderedUse, by_point

__all__ = ["DiagonalBlock", "EntryMatrix", "LinearBlock", "find_blocks", "linear_groups"]

Key: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class EntryMatrix:
    """Parameters anywhere in the flat vector, as a matrix.

    Attributes:
        index: their flat indices, (units, columns).
    """

    index: Tensor

    @property
    def num_units(self) -> int:
        """The number of rows."""
        return self.index.shape[0]

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return self.index.shape[1]

    def rows(self) -> Tensor:
        """The flat indices of all of these parameters."""
        return self.index.reshape(-1)

    def read(self, flat: Tensor) -> Tensor:
        """Read these parameters from flat vectors, (N, k), as matrices (k, units, columns)."""
        return flat[self.index.to(flat.device)].permute(2, 0, 1)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Write matrices (k, units, columns) into flat vectors, (N, k)."""
        flat[self.index.to(flat.device)] = values.permute(1, 2, 0).to(flat)


@dataclass(frozen=True)
class LinearBlock:
    """A matrix W, or a part of one, of which every use is z = W x.

    Attributes:
        parameter: the name of the parameter that W is, or is a part of.
        key: tells the uses of W from those of other parts.
        matrix: W and, if it has one, its bias as the last column.
        has_bias: whether it has one.
    """

    parameter: str
    key: Key
    matrix: EntryMatrix
    has_bias: bool = False

    def inputs(self, uses: list[OrderedUse], num_points: int) -> Tensor:
        """The inputs of all positions of all uses, (b, columns, T), with ones for the bias."""
        found = [by_point(o, _linear(o).inputs, num_points) for o in uses]
        joined = torch.cat(found, 2)
        if not self.has_bias:
            return joined
        return torch.cat([joined, torch.ones_like(joined[:, :1])], 1)

    def factors(self, uses: list[OrderedUse], gradients: Gradients, num_points: int) -> Tensor:
        """The derivatives with respect to z at all positions of all uses, (b, units, T)."""
        found = []
        for ordered in uses:
            use = _linear(ordered)
            gradient = gradients(use.node)
            if gradient is None:
                shape = (use.num_rows, use.entries.shape[0], use.inputs.shape[2])
                factors = use.inputs.new_zeros(shape)
            else:
                factors = use.factors(gradient)
            found.append(by_point(ordered, factors, num_points))
        return torch.cat(found, 2)


@dataclass(frozen=True)
class DiagonalBlock:
    """A parameter with a diagonal block.

    Attributes:
        parameter: its name.
        matrix: its entries, (p, 1).
    """

    parameter: str
    matrix: EntryMatrix


def _linear(ordered: OrderedUse) -> LinearUse:
    assert isinstance(ordered.use, LinearUse)
    return ordered.use


def linear_groups(uses: list[OrderedUse]) -> dict[Key, list[OrderedUse]] | None:
    """The uses of a parameter by the part that they see; None if they are not all z = W x."""
    result: dict[Key, list[OrderedUse]] = {}
    for ordered in uses:
        if not isinstance(ordered.use, LinearUse):
            return None
        entries = ordered.use.entries
        key = (int(entries[0, 0]), int(entries[-1, -1]), *entries.shape)
        members = result.setdefault(key, [])
        if members and not torch.equal(_linear(members[0]).entries, entries):
            return None
        members.append(ordered)
    return result


def find_blocks(
    batch: BatchUses, layout: ParameterLayout
) -> tuple[list[LinearBlock], list[DiagonalBlock]]:
    """Divide all parameters into Kronecker blocks and diagonal ones.

    Args:
        batch: the uses of all parameters at some points.
        layout: places of the parameters in the flat vector.
    """
    blocks: list[LinearBlock] = []
    groups: list[list[OrderedUse]] = []
    alone: list[str] = []
    for name in layout.names:
        found = linear_groups(batch.known.get(name, []))
        size = layout.shapes[name].numel()
        if not found or not _is_partition(found, size):
            alone.append(name)
            continue
        for key, uses in found.items():
            index = layout.slices[name].start + _linear(uses[0]).entries
            blocks.append(LinearBlock(name, key, EntryMatrix(index)))
            groups.append(uses)
    joined = _join_biases(batch, layout, blocks, groups, alone)
    diagonals = [
        DiagonalBlock(name, EntryMatrix(torch.arange(place.start, place.stop)[:, None]))
        for name, place in layout.slices.items()
        if name in alone and name not in joined and place.stop > place.start
    ]
    return blocks, diagonals


def _is_partition(groups: Mapping[Key, list[OrderedUse]], size: int) -> bool:
    """Whether each entry belongs to exactly one group."""
    entries = torch.cat([_linear(uses[0]).entries.reshape(-1) for uses in groups.values()])
    return bool(entries.numel() == size == entries.unique().numel())


def _join_biases(
    batch: BatchUses,
    layout: ParameterLayout,
    blocks: list[LinearBlock],
    groups: list[list[OrderedUse]],
    alone: list[str],
) -> set[str]:
    """Add biases to the blocks that they belong to, in place; their names are returned."""
    count = batch.shape.num_points
    shape = (count, batch.rows.num_rows)
    mix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = batch.gradients(batch.rows.combine(mix.to(batch.shape.like)))
    factors = [
        block.factors(uses, gradients, count) for block, uses in zip(blocks, groups, strict=True)
    ]
    joined: set[str] = set()
    for name in alone:
        uses = batch.known.get(name, [])
        if not uses or not all(isinstance(ordered.use, DirectUse) for ordered in uses):
            continue
        size, start = layout.shapes[name].numel(), layout.slices[name].start
        bias = _column_sums(size, uses, gradients, batch)
        nodes = {ordered.use.node for ordered in uses}
        starts = {int(ordered.use.entries.min()) for ordered in uses}
        places: dict[int, int] = {}  # the block that each part of the bias belongs to
        covered = torch.zeros(size)
        for number, block in enumerate(blocks):
            units = block.matrix.num_units
            if layer_of(block.parameter) != layer_of(name) or block.has_bias:
                continue
            same_node = {ordered.use.node for ordered in groups[number]} <= nodes
            for first in sorted({*starts, *range(0, size, units)}):
                if first + units > size:
                    break
                part = bias[:, first : first + units]
                if first not in places and _agree(part, factors[number], same_node):
                    places[first] = number
                    covered[first : first + units] += 1
                    break
        if not bool((covered == 1).all()):
            continue
        for first, number in places.items():
            old = blocks[number].matrix
            column = torch.arange(start + first, start + first + old.num_units)[:, None]
            matrix = EntryMatrix(torch.cat([old.index, column], 1))
            blocks[number] = replace(blocks[number], matrix=matrix, has_bias=True)
        joined.add(name)
    return joined


def _column_sums(
    size: int, uses: list[OrderedUse], gradients: Gradients, batch: BatchUses
) -> Tensor:
    """The derivative at each point with respect to a parameter with direct uses alone, (b, p)."""
    count = batch.shape.num_points
    result = batch.shape.like.new_zeros(count, size)
    for use, order in uses:
        gradient = gradients(use.node)
        if isinstance(use, DirectUse) and gradient is not None:
            by_row = order.by_point(use.gradients(gradient), count)
            result.index_add_(1, use.entries.to(result.device), by_row.sum(1))
    return result


def _agree(bias: Tensor, factors: Tensor, same_node: bool) -> bool:
    """Whether the derivative with respect to a bias is the sum over positions of that of z.

    Args:
        bias: the first, (b, units).
        factors: the second, (b, units, T).
        same_node: whether one function made both. If not, zeros say nothing.
    """
    # The sum may cancel, as for the keys of attention, so the scale is that of its terms.
    scale = float(factors.abs().sum(2).norm())
    tolerance = torch.finfo(factors.dtype).eps ** 0.5
    close = float((bias - factors.sum(2)).norm()) <= tolerance * scale
    return close and (scale > 0 or same_node)
