"""Single terms of entries of any model, for Monte Carlo entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hcurv.network.layered.layered_root import LayeredRoot

__all__ = ["LayeredPairTerms"]


class LayeredPairTerms:
    """Products of columns, point by point.

    There is no short description of the norms of all columns, as chains of Linear layers have it.
    So sampling an entry costs as much as computing it; it serves to compare.

    Args:
        root: S.
        order: the order of the points in `weights`; None for that of the data.
    """

    def __init__(self, root: LayeredRoot, order: Tensor | None) -> None:
        self._root, self._order = root, order
        self._terms = self._norms = torch.zeros(0, root.num_points, dtype=root.dtype)

    @property
    def bytes_per_point(self) -> int:
        """Two columns, their norms and their products."""
        return (2 * self._root.num_rows + 3) * self._root.dtype.itemsize

    def nonzero(self, rows: Tensor, cols: Tensor) -> Tensor:
        """No pair is known to be zero."""
        return torch.ones_like(rows, dtype=torch.bool)

    def prepare(self, rows: Tensor, cols: Tensor) -> None:
        """Compute all terms, and the norms."""
        terms, norms = [], []
        for chunk in self._root.chunks:
            points = slice(0, chunk.num_points)
            left, right = chunk.columns(rows, points), chunk.columns(cols, points)
            terms.append((left * right).sum(1))
            norms.append(left.norm(dim=1) * right.norm(dim=1))
        self._terms, self._norms = torch.cat(terms, 1), torch.cat(norms, 1)

    def weights(self) -> Tensor:
        """‖v_k(t)‖ ‖v_m(t)‖, in the order of drawing."""
        return self._norms if self._order is None else self._norms[:, self._order]

    def at(self, points: Tensor) -> Tensor:
        """The terms at the points."""
        return self._terms.gather(1, points)
