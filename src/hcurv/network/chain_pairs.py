"""Single terms of entries of a chain of Linear layers, for Monte Carlo entries.

Norms are products, ‖v_k(t)‖ = ‖C_t[:, μ]‖ |x_t[ν]|, so that O(n Σ d_ℓ) numbers describe them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.memory import require_bytes
from hcurv.network.layer_factors import Connections, LayerFactors

__all__ = ["ChainPairTerms"]


class ChainPairTerms:
    """Gram values of units, times inputs.

    Args:
        factors: the inputs and the factors of all layers.
        order: the order of the points in `weights`; None for that of the data.
        workspace: bytes of temporary memory that will be used besides.

    Raises:
        InsufficientMemoryError: the norms of all columns do not fit into free memory.
    """

    def __init__(self, factors: LayerFactors, order: Tensor | None, workspace: int) -> None:
        self._factors = factors
        stored = (factors.num_units + factors.inputs.shape[0]) * factors.num_points
        require_bytes(
            stored * factors.inputs.dtype.itemsize + workspace,
            factors.inputs.device,
            f"sampling from {factors.num_points} points",
            ("use fewer data points", "use H.subsample(num_points) instead"),
        )
        norms = (factors.jacobian.column_norms(), factors.inputs.abs())
        self._tables = norms if order is None else tuple(table[:, order] for table in norms)
        # Spaces that are used again and again: fresh memory costs more than the arithmetic.
        self._space = factors.inputs.new_empty(2, 0, factors.num_points)
        self._first = self._second = factors.locate(torch.zeros(0, dtype=torch.long))

    @property
    def bytes_per_point(self) -> int:
        """Two floats."""
        return 2 * self._factors.inputs.dtype.itemsize

    def nonzero(self, rows: Tensor, cols: Tensor) -> Tensor:
        """All pairs but those of different outputs of a diagonal loss."""
        units = (self._factors.locate(index).units for index in (rows, cols))
        return ~self._factors.jacobian.orthogonal(*units)

    def prepare(self, rows: Tensor, cols: Tensor) -> None:
        """Find units and inputs."""
        self._first, self._second = self._factors.locate(rows), self._factors.locate(cols)
        if rows.numel() > self._space.shape[1]:
            shape = (2, rows.numel(), self._factors.num_points)
            self._space = self._factors.inputs.new_empty(shape)

    def weights(self) -> Tensor:
        """Products of four tables; the next call overwrites them."""
        weights, factor = self._space[:, : self._first.units.numel()]
        units, inputs = self._tables
        torch.index_select(units, 0, self._first.units, out=weights)
        for table, index in (
            (units, self._second.units),
            (inputs, self._first.inputs),
            (inputs, self._second.inputs),
        ):
            weights.mul_(torch.index_select(table, 0, index, out=factor))
        result: Tensor = weights
        return result

    def at(self, points: Tensor) -> Tensor:
        """Gram values at the points, times the inputs there."""
        factors = self._factors
        terms = factors.jacobian.gram_at(self._first.units, self._second.units, points)
        for parameters in (self._first, self._second):
            terms *= self._inputs_at(parameters, points)
        return terms

    def _inputs_at(self, parameters: Connections, points: Tensor) -> Tensor:
        index = parameters.inputs[:, None] * self._factors.num_points + points
        return self._factors.inputs.view(-1).take(index)
