"""How much of the allowed error every node of a tree may make."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["ErrorBudget", "out_of_sample"]

# A level may make at least a quarter of its part of the error, whatever the levels below have made,
# so that ranks do not explode on the upper levels.
_LEAST_SHARE = 0.25
# Errors outside of the sample are estimated from the share of columns that are not used up by the
# rank. Below a quarter this share is too uncertain.
_LEAST_FREE = 0.25


class ErrorBudget:
    """A relative error, spread over the levels of a tree from the leaves up.

    Squares of errors add up, over nodes, and over rows and columns. Every level gets the same part.
    Equal parts for all nodes would spend most of it on the many small nodes, but a rank costs most
    storage in the few large ones. What a level does not use goes to those above it.

    Args:
        tolerance: relative error of the whole matrix.
        depth: number of levels below the root.

    Attributes:
        whole: half of the squared error that the whole matrix may have, over ‖H‖_F².
        spent: how much of it was made so far.
    """

    def __init__(self, tolerance: float, depth: float) -> None:
        self.whole, self._depth = tolerance**2 / 2, depth
        self.spent = 0.0

    def node_error(self, depth: float) -> float:
        """Error, over ‖H‖_F, that each of the 2^depth nodes of a level may make."""
        return math.sqrt(self._available(depth) / depth / 2**depth)

    def loosen(self, depth: float, factor: float) -> None:
        """Let each node from a level on make so many times the error."""
        self.whole = self.spent + factor**2 * self._available(depth)

    def _available(self, depth: float) -> float:
        """The squared error that the levels from this one up may make together."""
        least = _LEAST_SHARE * self.whole * depth / self._depth
        return max(self.whole - self.spent, least)

    def spend(self, squared_error: float) -> None:
        """Subtract the squared error that all nodes of a level have made, over ‖H‖_F²."""
        self.spent += squared_error


def out_of_sample(errors: Tensor, ranks: Tensor, num_columns: int) -> Tensor:
    """Errors of interpolations in all columns, not only the random ones that they were fitted to.

    Args:
        errors: errors in the columns of the sample, (B,).
        ranks: ranks of the interpolations, (B,).
        num_columns: number of columns of the sample.
    """
    free = 1 - ranks / max(1, num_columns)
    return errors.double() / free.clamp(min=_LEAST_FREE).sqrt()
