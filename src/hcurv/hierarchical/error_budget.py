"""How much of the error that was asked for every node of a tree may make."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["ErrorBudget", "out_of_sample"]

_LEAST_SHARE = 0.25  # of a level's part, whatever levels below have made


class ErrorBudget:
    """A relative error, spread over the levels of a tree from the leaves up.

    Squares of errors add up, over nodes, and over rows and columns. Every level gets the same part:
    equal parts for all nodes would spend most of it on the many small ones, while it is the few
    large ones that take most storage per rank. What a level does not use, those above get.

    Args:
        tolerance: relative error of the whole.
        depth: levels below the root.
    """

    def __init__(self, tolerance: float, depth: float) -> None:
        self._whole, self._depth = tolerance**2 / 2, depth
        self._spent = 0.0

    def node_error(self, depth: float) -> float:
        """Error, over ‖H‖_F, that each of the 2^depth nodes of a level may make."""
        least = _LEAST_SHARE * self._whole * depth / self._depth
        left = max(self._whole - self._spent, least)
        return math.sqrt(left / depth / 2**depth)

    def spend(self, squared_error: float) -> None:
        """Take off what all nodes of a level have made, over ‖H‖_F²."""
        self._spent += squared_error


def out_of_sample(errors: Tensor, ranks: Tensor, num_columns: int) -> Tensor:
    """Errors of interpolations beyond the random columns that they were fitted to."""
    share = 1 - ranks / max(1, num_columns)
    return errors.double() / share.clamp(min=_LEAST_SHARE).sqrt()
