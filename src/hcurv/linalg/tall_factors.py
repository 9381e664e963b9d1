"""The order in which the floats of a tall factor lie in memory."""

from __future__ import annotations

from torch import Tensor

__all__ = ["by_columns"]


def by_columns(factor: Tensor) -> Tensor:
    """Return a tall matrix (N, r) with each of its columns contiguous, copied only if need be.

    Its transpose is then a contiguous tensor (r, N). One vector is multiplied by such a factor, and
    by its transpose, at the speed at which memory is read, which is three to four times as fast as
    with contiguous rows (benchmarks/vector.py). For many columns the layout does not matter.
    """
    return factor.T.contiguous().T
