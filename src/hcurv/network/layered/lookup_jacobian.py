"""Columns of a table whose rows are looked up: `torch.nn.Embedding`."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.network.layered.layer_jacobian import PANEL_FLOATS, LayerJacobian

__all__ = ["LookupJacobian"]


class LookupJacobian(LayerJacobian):
    """C_{i,t} and the rows that were looked up, for z_{i,t} = W[row_{i,t}].

    The entry W[ν, μ] has the column v_k(i) = Σ_t C_{i,t}[:, μ] over the positions with row ν.

    Args:
        factors: C_{i,t}, (b, q, T, d).
        rows: (b, T), integers.
        num_table_rows: the number of rows of W.
    """

    form = "look-up"

    def __init__(self, factors: Tensor, rows: Tensor, num_table_rows: int) -> None:
        self._factors, self._rows, self._num_table_rows = factors, rows, num_table_rows

    @property
    def num_parameters(self) -> int:
        """The number of entries of W."""
        return self._num_table_rows * self._factors.shape[3]

    @property
    def num_rows(self) -> int:
        """The number of rows of each point."""
        return self._factors.shape[1]

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._rows.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """C, and the rows."""
        return (self._factors, self._rows)

    @property
    def has_quick_columns(self) -> bool:
        """No: a column is a sum over positions."""
        return False

    def columns(self, index: Tensor, points: slice) -> Tensor:
        """Sums over the positions of each row."""
        factors, rows = self._factors[points], self._rows[points]
        width = factors.shape[3]
        parts = []
        for some in index.to(rows.device).split(
            max(1, PANEL_FLOATS // max(1, factors[..., 0].numel()))
        ):
            chosen = factors.index_select(3, some % width)
            wanted = some.div(width, rounding_mode="floor")
            chosen.mul_((rows[:, None, :, None] == wanted).to(chosen.dtype))
            parts.append(chosen.sum(2).permute(2, 1, 0))
        return torch.cat(parts) if parts else factors.new_zeros(0, self.num_rows, len(rows))

    def apply(self, flat: Tensor, result: Tensor) -> None:
        """Look up, then multiply by C."""
        table = flat.reshape(self._num_table_rows, -1)  # (rows, d·k)
        values = table[self._rows].view(self.num_points, -1, flat.shape[1])
        result.baddbmm_(self._factors.flatten(2), values)

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Multiply by Cᵀ, then add to the rows."""
        found = torch.bmm(self._factors.flatten(2).mT, values)  # (b, T·d, k)
        result = values.new_zeros(self._num_table_rows, found.numel() // self._rows.numel())
        result.index_add_(0, self._rows.reshape(-1), found.reshape(-1, result.shape[1]))
        return result.view(self.num_parameters, -1)

    def select(self, points: Tensor, scale: Tensor) -> LookupJacobian:
        """Factors of some points."""
        factors = self._factors[points] * scale[:, None, None, None]
        return LookupJacobian(factors, self._rows[points], self._num_table_rows)

    def to(self, dtype: torch.dtype) -> LookupJacobian:
        """Factors of another type."""
        return LookupJacobian(self._factors.to(dtype), self._rows, self._num_table_rows)
