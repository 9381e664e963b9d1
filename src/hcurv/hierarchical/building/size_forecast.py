"""Foresee how many floats a tree will take, while it is being built."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hcurv.hierarchical.parts.plan import RankProfile, tree_floats

__all__ = ["TooLargeError", "require_small"]

# A build is given up if it is likely to take so many times the floats that are allowed. Ranks of at
# least so many levels have to be known, and of nodes with a sixteenth of all rows. Those of higher
# levels may go on growing as they did, or not at all: on autoencoders and classifiers, the truth
# was then within 30 % of the geometric mean.
_TOO_LARGE, _LEAST_LEVELS, _MOST_NODES = 1.05, 3, 16


class TooLargeError(Exception):
    """A build was given up, because the matrix would be too large.

    Args:
        floats: about how many floats it would take.
    """

    def __init__(self, floats: int) -> None:
        super().__init__(f"the matrix would take about {floats} floats")
        self.floats = floats


def require_small(num_rows: int, depth: int, ranks: Sequence[Tensor], max_floats: int) -> None:
    """Raise `TooLargeError` if a tree is likely to take more floats than are allowed.

    Args:
        num_rows: number of rows of the tree.
        depth: its depth.
        ranks: ranks of the nodes of each level that was built, from the leaves up.
        max_floats: number of floats that are allowed.
    """
    if len(ranks) < _LEAST_LEVELS or ranks[-1].numel() > _MOST_NODES:
        return
    profile = RankProfile.of_levels(num_rows, depth, ranks)
    least = tree_floats(num_rows, depth, profile.without_growth())
    most = tree_floats(num_rows, depth, profile)
    if math.sqrt(least * most) > _TOO_LARGE * max_floats:
        raise TooLargeError(round(most))
