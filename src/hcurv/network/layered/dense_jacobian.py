"""Columns of S, multiplied out: q floats for each parameter and point."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hcurv.network.layered.layer_jacobian import LayerJacobian, Panel, transposed_product

__all__ = ["DenseJacobian"]

_CACHED_FLOATS = 2**17


class DenseJacobian(LayerJacobian):
    """v_k(i) as they are.

    Entries are read fastest where the points of a column follow each other in memory, and columns
    are made fastest where the parameters of a point do. Both give the same results.

    Args:
        values: (p, q, b), contiguous, or a view of a contiguous (b, q, p).
    """

    form = "dense"

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return self._values.shape[0]

    @property
    def num_rows(self) -> int:
        """The number of rows of each point."""
        return self._values.shape[1]

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._values.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The columns."""
        return (self._values,)

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Some of them."""
        return self._values[:, :, points].index_select(0, index.to(self._values.device))

    def panels(self, points: slice) -> Iterator[Panel]:
        """All of them, as a view."""
        yield Panel(torch.arange(self.num_parameters), self._values[:, :, points])

    @property
    def _rows(self) -> Tensor | None:
        """The rows of S, (b·q, p), if the parameters of a point follow each other in memory."""
        by_point = self._values.permute(2, 1, 0)
        return by_point.flatten(0, 1) if by_point.is_contiguous() else None

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """One matrix product."""
        if (rows := self._rows) is not None:
            result += (rows @ flat).view_as(result)
            return
        outputs = transposed_product(self._values.flatten(1), flat)
        result += outputs.view(self.num_rows, self.num_points, -1).transpose(0, 1)

    def apply_transposed(self, values: Tensor) -> Tensor:
        """One matrix product."""
        if (rows := self._rows) is not None:
            return transposed_product(rows, values.flatten(0, 1))
        outputs = values.transpose(0, 1).reshape(-1, values.shape[2])
        return transposed_product(self._values.flatten(1).T, outputs)

    def square_sums(self) -> Tensor:
        """Row by row."""
        if (rows := self._rows) is not None:
            # Squares of a few rows stay in the cache of the processor.
            step = max(1, _CACHED_FLOATS // max(1, self.num_parameters))
            return torch.stack([some.square().sum(0) for some in rows.split(step)]).sum(0)
        norms: Tensor = torch.linalg.vector_norm(self._values, dim=(1, 2))
        return norms.square()

    def select(self, points: Tensor, scale: Tensor) -> DenseJacobian:
        """Columns at some points."""
        return DenseJacobian(self._values[:, :, points] * scale)

    def for_entries(self) -> DenseJacobian:
        """Columns whose points follow each other."""
        return DenseJacobian(self._values.contiguous())

    def to(self, dtype: torch.dtype) -> DenseJacobian:
        """Columns of another type."""
        return DenseJacobian(self._values.to(dtype))
