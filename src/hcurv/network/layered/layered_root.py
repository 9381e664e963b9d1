"""The root of any model: chunks of points, and in each of them a Jacobian for each parameter.

Every quantity is a sum, or a list, over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network.group_blocks import mirror
from hcurv.network.layered.layer_jacobian import LayerJacobian
from hcurv.network.layered.layered_kernel import LayeredKernelParts
from hcurv.network.layered.layered_pairs import LayeredPairTerms
from hcurv.network.root import Root

__all__ = ["LayeredRoot"]

# Blocks are computed from columns at this many points at least, however small the workspace is.
_FEWEST_POINTS = 8
# Columns of pairs hold this many bytes at the most, which stay in the cache of the processor.
_PAIR_BYTES = 2**25


class LayeredRoot(Root):
    """S, by chunks of points.

    Args:
        chunks: the rows of some points each; one at least, none without points.
        layout: names and places of the parameters.
        orders: orders of the parameters that follow the network.
    """

    def __init__(
        self, chunks: tuple[LayerJacobian, ...], layout: ParameterLayout, orders: dict[str, Tensor]
    ) -> None:
        self.chunks, self._layout, self._orders = chunks, layout, orders

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""
        return self._layout

    @cached_property
    def num_points(self) -> int:
        """The number n of points."""
        return sum(chunk.num_points for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """The number q of rows of each point."""
        return self.chunks[0].num_rows

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self.chunks[0].tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """Where they are stored."""
        return self.chunks[0].tensors[0].device

    @cached_property
    def num_stored(self) -> int:
        """The number of floats of all Jacobians."""
        return sum(chunk.num_floats for chunk in self.chunks)

    @property
    def kernel_flops(self) -> float:
        """Those of all parameters."""
        return self.chunks[0].kernel_flops

    @property
    def has_quick_diagonal(self) -> bool:
        """Yes: multiplying out all columns takes no more flops than their backward passes."""
        return True

    def _ranges(self) -> Iterator[tuple[LayerJacobian, slice]]:
        """Each chunk, with its range of points."""
        start = 0
        for chunk in self.chunks:
            yield chunk, slice(start, start + chunk.num_points)
            start += chunk.num_points

    def product(self, rhs: Tensor, workspace: int) -> Tensor:
        """Chunk by chunk: S v, then Sᵀ times it."""
        result = torch.zeros_like(rhs)
        budget = workspace // (2 * self.dtype.itemsize)
        for chunk in self.chunks:
            ready = chunk.multiplied(rhs.shape[1], budget)
            result += ready.apply_transposed(self._apply(ready, rhs))
            del ready  # before that of the next chunk is made
        return result

    def _apply(self, chunk: LayerJacobian, rhs: Tensor) -> Tensor:
        """S times (N, k) at the points of a chunk, (b, q, k)."""
        result = rhs.new_zeros(chunk.num_points, chunk.num_rows, rhs.shape[1])
        chunk.apply(rhs, result)
        return result

    def apply(self, rhs: Tensor, workspace: int) -> Tensor:
        """S times (N, k), chunk by chunk."""
        return torch.cat([self._apply(chunk, rhs).flatten(0, 1) for chunk in self.chunks])

    def apply_transposed(self, values: Tensor, workspace: int) -> Tensor:
        """Sᵀ times (n·q, k), a sum over chunks."""
        result = values.new_zeros(self.layout.size, values.shape[1])
        by_point = values.reshape(self.num_points, self.num_rows, -1)
        for chunk, points in self._ranges():
            result += chunk.apply_transposed(by_point[points])
        return result

    def columns(self, index: Tensor) -> Tensor:
        """Columns of S, (n·q, k)."""
        parts = [
            chunk.columns(index, slice(0, chunk.num_points)).permute(2, 1, 0)
            for chunk in self.chunks
        ]
        return torch.cat(parts).flatten(0, 1)

    def diagonal(self, workspace: int) -> Tensor:
        """Sums of squares."""
        result = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        for chunk in self.chunks:
            result += chunk.square_sums()
        return result

    def _steps(self, num_columns: int, workspace: int) -> Iterator[tuple[LayerJacobian, slice]]:
        """Chunks and ranges of their points for which so many columns fit into the workspace."""
        per_point = max(1, num_columns) * self.num_rows * self.dtype.itemsize
        step = max(_FEWEST_POINTS, workspace // (2 * per_point))
        for chunk in self.chunks:
            for start in range(0, chunk.num_points, step):
                yield chunk, slice(start, min(start + step, chunk.num_points))

    def block(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Sums over chunks of products of columns."""
        symmetric = rows.numel() == cols.numel() and torch.equal(rows, cols)
        shape = (rows.numel(), cols.numel())
        result = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for chunk, points in self._steps(sum(shape), workspace):
            left = chunk.columns(rows, points).flatten(1)
            right = left if symmetric else chunk.columns(cols, points).flatten(1)
            result.addmm_(left, right.T)
            del left, right  # before those of the next points are made
        if symmetric:  # Both halves are the same to the last bit.
            mirror(result)
        return result

    def block_bytes(self, rows: Tensor, cols: Tensor, workspace: int) -> int:
        """Columns at some points, and those of one parameter before they are put into place."""
        symmetric = rows.numel() == cols.numel() and torch.equal(rows, cols)
        num_points = max(
            points.stop - points.start
            for _, points in self._steps(rows.numel() + cols.numel(), workspace)
        )
        sets = 2 * rows.numel() if symmetric else rows.numel() + 2 * cols.numel()
        return int(sets * self.num_rows * num_points * self.dtype.itemsize)

    def blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Batched products of columns."""
        num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
        same = num_rows == num_cols and torch.equal(rows, cols)
        result = torch.zeros(num_blocks, num_rows, num_cols, dtype=self.dtype, device=self.device)
        if result.numel() == 0:
            return result
        per_block = (num_rows + num_cols) * self.num_rows * _FEWEST_POINTS * self.dtype.itemsize
        step = max(1, workspace // (2 * per_block))
        for start in range(0, num_blocks, step):
            some = slice(start, min(start + step, num_blocks))
            count = some.stop - some.start
            for chunk, points in self._steps(count * (num_rows + num_cols), workspace):
                left = chunk.columns(rows[some].reshape(-1), points).view(count, num_rows, -1)
                right = left
                if not same:
                    right = chunk.columns(cols[some].reshape(-1), points)
                    right = right.view(count, num_cols, -1)
                result[some].baddbmm_(left, right.mT)
        # A block is symmetric to the last bit if its rows and columns are the same.
        if num_rows == num_cols:
            equal = (rows == cols).all(1)
            if bool(equal.any()):
                chosen = result[equal].triu()
                result[equal] = chosen + chosen.triu(1).mT
        return result

    def pairs(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Inner products of columns.

        Where columns are sums over positions, and there are more pairs than parameters, all columns
        that occur are computed at a few points at a time, each of them once. Otherwise the columns
        of a few pairs are computed at all points.
        """
        result = torch.zeros(rows.numel(), dtype=self.dtype, device=self.device)
        # An entry and its mirror image are the same to the last bit.
        first, second = torch.minimum(rows, cols), torch.maximum(rows, cols)
        budget = min(workspace, _PAIR_BYTES) // self.dtype.itemsize
        used, places = torch.cat([first, second]).unique(return_inverse=True)
        quick = all(chunk.has_quick_columns for chunk in self.chunks)
        if not quick and used.numel() < rows.numel():
            step = max(1, budget // (used.numel() * self.num_rows))
            for chunk in self.chunks:
                for start in range(0, chunk.num_points, step):
                    points = slice(start, min(start + step, chunk.num_points))
                    columns = chunk.columns(used, points).flatten(1)
                    count = max(1, budget // (2 * columns.shape[1]))
                    for some in torch.arange(rows.numel(), device=rows.device).split(count):
                        left, right = places[some], places[some + rows.numel()]
                        result[some] += torch.linalg.vecdot(columns[left], columns[right])
            return result
        step = max(1, budget // (2 * max(c.num_points for c in self.chunks) * self.num_rows))
        for some in first.argsort().split(step):  # sorted rows are read in order
            for chunk in self.chunks:
                everywhere = slice(0, chunk.num_points)
                left = chunk.columns(first[some], everywhere).flatten(1)
                right = chunk.columns(second[some], everywhere).flatten(1)
                result[some] += torch.linalg.vecdot(left, right)
        return result

    def orders(self) -> dict[str, Tensor]:
        """As they were given."""
        return self._orders

    def point_norms(self) -> Tensor:
        """‖S_i‖_F² of each point, (n,)."""
        return torch.cat([chunk.point_norms() for chunk in self.chunks])

    def point_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Random combinations of the columns of S, for each row of a point."""
        count = max(1, num_features // self.num_rows)
        mix = torch.randn(self.layout.size, count, generator=generator, dtype=torch.float64)
        found = self.apply(mix.to(self.device, self.dtype), 0)
        by_point = found.view(self.num_points, -1)
        if by_point.shape[1] > num_features:
            project = torch.randn(
                by_point.shape[1], num_features, generator=generator, dtype=torch.float64
            )
            by_point = by_point @ project.to(by_point)
        return by_point.T.contiguous()

    def select(self, points: Tensor, scale: Tensor) -> LayeredRoot:
        """Chunks of the chosen points, in the order in which they are given."""
        starts = torch.tensor([part.start for _, part in self._ranges()], device=points.device)
        owner = torch.searchsorted(starts, points.contiguous(), right=True) - 1
        numbers, counts = torch.unique_consecutive(owner, return_counts=True)
        chunks, first = [], 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            run = slice(first, first + count)
            chunks.append(self.chunks[number].select(points[run] - starts[number], scale[run]))
            first += count
        return LayeredRoot(tuple(chunks), self._layout, self._orders)

    def to(self, dtype: torch.dtype) -> LayeredRoot:
        """The same root in another precision."""
        if dtype == self.dtype:
            return self
        return LayeredRoot(
            tuple(chunk.to(dtype) for chunk in self.chunks), self._layout, self._orders
        )

    def kernel_parts(self, inverse_damping: Tensor) -> LayeredKernelParts:
        """Products of rows, parameter by parameter."""
        return LayeredKernelParts(self, inverse_damping.to(self.dtype))

    def pair_terms(self, order: Tensor | None, workspace: int) -> LayeredPairTerms:
        """Products of columns, point by point."""
        return LayeredPairTerms(self, order)
