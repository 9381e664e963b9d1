"""The tangent kernel of any model: sums over parameters of products of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.network.layered.layer_jacobian import TILE_POINTS, LayerJacobian

if TYPE_CHECKING:
    from hcurv.network.layered.layered_root import LayeredRoot

__all__ = ["LayeredKernelParts"]


class LayeredKernelParts:
    """K = S D⁻¹ Sᵀ from the Jacobians of all parameters.

    Args:
        root: S.
        inverse_damping: 1/D, (N,), in the precision of S.
    """

    def __init__(self, root: LayeredRoot, inverse_damping: Tensor) -> None:
        self._root, self._weights = root, inverse_damping

    @property
    def tile_points(self) -> int:
        """The number of points of a tile."""
        return TILE_POINTS

    def diagonal(self) -> Tensor:
        """Sums of weighted squares."""
        root = self._root
        result = torch.zeros(root.num_points, root.num_rows, dtype=root.dtype, device=root.device)
        start = 0
        for chunk in root.chunks:
            everywhere = slice(0, chunk.num_points)
            own = result[start : start + chunk.num_points]
            for index, columns in chunk.panels(everywhere):
                own += torch.einsum("mqb,m->bq", columns.square(), self._weights[index])
            start += chunk.num_points
        return result.reshape(-1)

    def _pieces(self, points: slice) -> Iterator[tuple[LayerJacobian, slice, slice]]:
        """The chunks that hold a range of points: the chunk, its points, their places in it."""
        start = 0
        for chunk in self._root.chunks:
            stop = start + chunk.num_points
            first, last = max(points.start, start), min(points.stop, stop)
            if first < last:
                own = slice(first - start, last - start)
                yield chunk, own, slice(first - points.start, last - points.start)
            start = stop

    def _between(
        self,
        first: LayerJacobian,
        left: slice,
        second: LayerJacobian,
        right: slice,
        space: Tensor | None = None,
    ) -> Tensor:
        """K between points of two chunks, (points, q, points, q); in ``space`` if it is given."""
        q = self._root.num_rows
        shape = (q * (left.stop - left.start), q * (right.stop - right.start))
        if space is None:
            sums = self._weights.new_zeros(shape)
        else:
            sums = space.view(-1)[: shape[0] * shape[1]].view(shape).zero_()
        first.gram(left, second, right, self._weights, sums)
        return sums.view(q, -1, q, right.stop - right.start).permute(1, 0, 3, 2)

    def tile(self, first: slice, second: slice, out: Tensor, space: Tensor) -> None:
        """Write K between all rows of some points and all rows of others."""
        q = self._root.num_rows
        by_point = out.view(first.stop - first.start, q, second.stop - second.start, q)
        for upper, left, above in self._pieces(first):
            for lower, right, beside in self._pieces(second):
                by_point[above, :, beside] = self._between(upper, left, lower, right, space)

    def batch_floats(self, num_rows: int, num_cols: int) -> int:
        """Blocks are computed one after the other."""
        return 2 * num_rows * num_cols * self._root.num_rows**2

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """One block after the other, from the points that it needs."""
        q, root = self._root.num_rows, self._root
        result = torch.zeros(*rows.shape, cols.shape[1], dtype=root.dtype, device=root.device)
        for block, row, col in zip(result, rows, cols, strict=True):
            upper, above = (row // q).unique(return_inverse=True)
            lower, beside = (col // q).unique(return_inverse=True)
            first = root.select(upper, torch.ones(len(upper), dtype=root.dtype).to(root.device))
            second = root.select(lower, torch.ones(len(lower), dtype=root.dtype).to(root.device))
            found = self._of_selected(first, second)
            block.copy_(found[above[:, None], (row % q)[:, None], beside, col % q])
        return result

    def _of_selected(self, first: LayeredRoot, second: LayeredRoot) -> Tensor:
        """K between all points of two roots, (points, q, points, q)."""
        everything = [
            [
                self._between(up, slice(0, up.num_points), low, slice(0, low.num_points))
                for low in second.chunks
            ]
            for up in first.chunks
        ]
        return torch.cat([torch.cat(row, 2) for row in everything])
