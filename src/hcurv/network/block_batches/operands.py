"""The two operands of the matrix products that sub-blocks are evaluated by.

- `GramOperands`: rows of one unit μ by columns of any units, X_R (g[μ, ·] ⊙ X_C)ᵀ;
- `FactoredOperands`: any rows by any columns of two groups between which the Gram values are inner
  products, g[μ, u] = s[μ, u] Σ_r L[μ, r] R[u, r]: then it is (L ⊙ X_R) (R ⊙ X_C)ᵀ, times s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hcurv.network.block_batches.block_axes import BlockAxis, SubBlocks
from hcurv.network.block_batches.gram_values import StoredGram, evaluate_gram
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.jacobians.output_jacobian import FactoredGram
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.scratch import Scratch

__all__ = ["FactoredOperands", "GramOperands", "Operands"]

# (sub-blocks, rows, ·) and (sub-blocks, cols, ·) at some points.
MakeOperands: TypeAlias = Callable[[slice, Scratch], tuple[Tensor, Tensor]]


class Operands(Protocol):
    """A way to write sub-blocks as batched matrix products."""

    @property
    def outer(self) -> BlockAxis:
        """The axis of the rows of the sub-blocks."""

    @property
    def inner(self) -> BlockAxis:
        """The axis of their columns."""

    def work(self, sub_blocks: SubBlocks) -> Tensor:
        """The estimated cost of each sub-block, in flops per point."""

    def floats(self, sub_blocks: SubBlocks) -> int:
        """Most floats per point that the operands of a sub-block take."""

    def bind(self, rows: Tensor, cols: Tensor) -> MakeOperands:
        """What makes the operands of sub-blocks with these rows and columns, (sub-blocks, ·)."""

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """Turn the products, (sub-blocks, rows, cols), into entries."""


def _product_work(
    sub_blocks: SubBlocks, depth: int, num_points: int, tuning: BlockTuning
) -> Tensor:
    """Flops per point of products over ``depth`` terms, and of writing the results."""
    num_rows, num_cols = sub_blocks.num_rows, sub_blocks.num_cols
    size = (num_rows + tuning.small_product) * (num_cols + tuning.small_product)
    return 2.0 * depth * size + num_rows * num_cols * (tuning.write_flops / num_points)


@dataclass(frozen=True)
class GramOperands:
    """X_R and g[μ, ·] ⊙ X_C; all rows of a sub-block belong to one unit μ.

    Attributes:
        factors: what entries are made of.
        outer: the axis with one unit per sub-block.
        inner: the other axis.
        gram_cost: of the Gram values between the two groups.
        tuning: sizes and costs.
        stored: Gram values that were stored because they are shared.
    """

    factors: LayerFactors
    outer: BlockAxis
    inner: BlockAxis
    gram_cost: int
    tuning: BlockTuning
    stored: StoredGram | None = None

    @property
    def _at_hand(self) -> bool:
        """Whether Gram values need not be computed."""
        return self.stored is not None or self.gram_cost == 0

    def _num_units(self, sub_blocks: SubBlocks) -> Tensor:
        run = self.inner.run
        return run[sub_blocks.col + sub_blocks.num_cols - 1] - run[sub_blocks.col] + 1

    def work(self, sub_blocks: SubBlocks) -> Tensor:
        """Passes over inputs and Gram values, and the product."""
        num_units = self._num_units(sub_blocks)
        passes = sub_blocks.num_rows + (2 + (num_units > 1).long()) * sub_blocks.num_cols
        if not self._at_hand:
            passes += 4 * self.gram_cost * num_units
        product = _product_work(sub_blocks, 1, self.factors.num_points, self.tuning)
        return self.tuning.elementwise_flops * passes + product

    def floats(self, sub_blocks: SubBlocks) -> int:
        """Inputs of both sides, Gram values, and what these are computed from."""
        floats = int(sub_blocks.num_rows.max()) + 2 * int(sub_blocks.num_cols.max())
        return floats if self._at_hand else floats + 2 * int(self._num_units(sub_blocks).max())

    def bind(self, rows: Tensor, cols: Tensor) -> MakeOperands:
        """What makes the operands of sub-blocks with these rows and columns."""
        factors = self.factors
        row_inputs, col_inputs = self.outer.inputs[rows].view(-1), self.inner.inputs[cols].view(-1)
        same = torch.equal(row_inputs, col_inputs)
        first, second = self.outer.units[rows[:, 0]], self.inner.units[cols]
        inverse: Tensor | None = None
        if bool((second == second[:, :1]).all()):
            second = second[:, 0]  # each sub-block has one Gram value per point
        elif self._at_hand:
            first, second = first.repeat_interleave(cols.shape[1]), second.view(-1)
        else:
            number = torch.arange(len(first), device=first.device)[:, None]
            keys = (number * factors.num_units + second).view(-1)
            keys, inverse = torch.unique_consecutive(keys, return_inverse=True)
            first = first[keys.div(factors.num_units, rounding_mode="floor")]
            second = keys % factors.num_units

        def operands(points: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
            inputs = factors.inputs[:, points]
            gram = self._gram(first, second, points, scratch)
            if inverse is not None:
                gram = scratch.select(gram, inverse)
            left = scratch.select(inputs, row_inputs)
            right = scratch.take(left.shape) if same else scratch.select(inputs, col_inputs)
            shape = (len(gram), -1, gram.shape[1])
            source = left if same else right
            torch.mul(source.view(shape), gram[:, None], out=right.view(shape))
            return left.view(*rows.shape, -1), right.view(*cols.shape, -1)

        return operands

    def _gram(self, first: Tensor, second: Tensor, points: slice, scratch: Scratch) -> Tensor:
        if self.stored is not None:
            return self.stored.gram(first, second, points, scratch)
        if self.gram_cost == 0:
            return self.factors.jacobian.gram(first, second, points, scratch)
        floats = min(scratch.spare, self.tuning.gram_floats)
        return evaluate_gram(self.factors, first, second, points, self.gram_cost, floats)

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """The products are the entries."""


@dataclass(frozen=True)
class FactoredOperands:
    """L ⊙ X_R and R ⊙ X_C.

    Attributes:
        factors: what entries are made of.
        outer: the axis of the first group.
        inner: the axis of the second group.
        gram: the Gram values between the groups.
        tuning: sizes and costs.
        symmetric: whether rows and columns are the same, and so are both operands.
    """

    factors: LayerFactors
    outer: BlockAxis
    inner: BlockAxis
    gram: FactoredGram
    tuning: BlockTuning
    symmetric: bool

    def work(self, sub_blocks: SubBlocks) -> Tensor:
        """Passes over both operands, and the product."""
        num_columns = sub_blocks.num_rows
        if not self.symmetric:
            num_columns = num_columns + sub_blocks.num_cols
        passes = 3 * self.gram.depth * num_columns
        product = _product_work(sub_blocks, self.gram.depth, self.factors.num_points, self.tuning)
        return self.tuning.factored_weight * (self.tuning.elementwise_flops * passes + product)

    def floats(self, sub_blocks: SubBlocks) -> int:
        """Both operands, and what they are multiplied with."""
        num_rows, num_cols = int(sub_blocks.num_rows.max()), int(sub_blocks.num_cols.max())
        return (self.gram.depth + 1) * (num_rows + num_cols) + num_cols

    def bind(self, rows: Tensor, cols: Tensor) -> MakeOperands:
        """What makes the operands of sub-blocks with these rows and columns."""
        row_units, row_inputs = self.outer.units[rows].view(-1), self.outer.inputs[rows].view(-1)
        col_units, col_inputs = self.inner.units[cols].view(-1), self.inner.inputs[cols].view(-1)
        gram = self.gram.simplified(row_units)

        def operands(points: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
            inputs = self.factors.inputs[:, points]
            left = gram.left(row_units, scratch.select(inputs, row_inputs), points, scratch)
            right = left
            if not self.symmetric:
                right = gram.right(col_units, scratch.select(inputs, col_inputs), points, scratch)
            return left.view(*rows.shape, -1), right.view(*cols.shape, -1)

        return operands

    def finish(self, rows: Tensor, cols: Tensor, values: Tensor) -> None:
        """Multiply by the factor s that does not depend on the point."""
        row_units = self.outer.units[rows]
        self.gram.simplified(row_units).finish(values, row_units, self.inner.units[cols])
