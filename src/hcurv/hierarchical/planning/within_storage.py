"""Choose what to store in a number of floats: a form, and the tolerance that it allows."""

from __future__ import annotations

import math
from collections.abc import Callable

from hcurv.hierarchical.parts.plan import Candidate, StorageCurve
from hcurv.hierarchical.planning.sampled_matrix import (
    AMPLE,
    FIRST_WIDTH,
    MAX_STEP,
    USABLE,
    SampledMatrix,
)
from hcurv.hierarchical.planning.tree_estimates import CLEAR, FIRST_COLUMNS, TreeEstimates

__all__ = ["FIRST_TOLERANCE", "StorageChoice"]

# Trees are first estimated at this tolerance, if storage is what is asked for. For a tolerance of 0
# without a choice of the global rank, they are compared at it.
FIRST_TOLERANCE = 1e-2
# The tolerance that a number of floats allows is found in at most six steps, to 10 % of the floats:
# the estimates themselves are no better.
_STEPS, _MATCH = 6, 0.1


class StorageChoice:
    """The most accurate way to store a matrix in a number of floats.

    Args:
        known: random products with the matrix, and its global part.
        estimates: what trees would take.
        choose: the best candidates for a tolerance, beside a global part of some rank or with any.

    Attributes:
        curve: how the number of floats depends on the tolerance, as far as it was seen.
    """

    def __init__(
        self,
        known: SampledMatrix,
        estimates: TreeEstimates,
        choose: Callable[[float, int | None], list[Candidate]],
    ) -> None:
        self._known, self._estimates, self._choose = known, estimates, choose
        self.curve = StorageCurve()

    def best(
        self, max_floats: int, least: float, rank: int | None
    ) -> tuple[list[Candidate], float]:
        """The most accurate way that takes no more floats, with others, and its tolerance.

        Args:
            max_floats: number of floats that are allowed.
            least: smallest tolerance that is asked for.
            rank: global rank, or None to choose.
        """
        if rank is None:
            found = self._alone(max_floats, least)
            if found is not None:
                return found
        tolerance = max(FIRST_TOLERANCE, least)
        # The tree alone shows about what is possible, and is cheaper to estimate.
        is_alone = rank is None
        fits: tuple[float, int] | None = None  # a tolerance and its floats
        too_large: tuple[float, int] | None = None
        for number in range(_STEPS):
            candidates = self._choose(tolerance, 0 if is_alone else rank)
            self.curve = self.curve.seen(tolerance, candidates[0].floats)
            ratio = candidates[0].floats / max(1, max_floats)
            is_close = abs(ratio - 1) < _MATCH or (ratio < 1 and tolerance <= least)
            if is_close and not is_alone:
                break
            if is_close or number + 1 == _STEPS // 2:
                is_alone = False
            if is_close:
                continue
            if ratio <= 1:
                fits = (tolerance, candidates[0].floats)
            else:
                too_large = (tolerance, candidates[0].floats)
            if fits is not None and too_large is not None:
                tolerance = _between(fits, too_large, max_floats)
            else:
                tolerance = min(max(tolerance * self.curve.step(max_floats), least), 1.0)
        best, known = candidates[0], self._known
        if rank is None and best.ordering == "none" and tolerance > least:
            # A global part alone may as well use all of the storage.
            rank = max(0, max_floats - self._estimates.without_tree(0).floats) // known.rows.numel()
            if rank > best.global_rank:
                known.extend(min(math.ceil(AMPLE * rank), known.max_width))
            rank = min(rank, known.rank)
            candidates[0] = self._estimates.without_tree(rank)
            tolerance = known.residual(rank)
        return candidates, tolerance

    def _alone(self, max_floats: int, least: float) -> tuple[list[Candidate], float] | None:
        """A global part alone that uses all of the storage, if no tree can be as accurate.

        Few directions show already where a global part is hopeless: exponential extrapolation of
        its error is too good, and if even then a tree takes far less, no more of them are made.
        """
        known = self._known
        rank = max(0, max_floats - self._estimates.without_tree(0).floats) // known.rows.numel()
        most = min(math.ceil(AMPLE * rank), FIRST_COLUMNS, known.max_width)
        has_room = self._estimates.first_columns <= known.affordable_pool  # for trees
        width = min(FIRST_WIDTH, most)
        while True:
            known.extend(width)
            limit = min(int(known.width / USABLE), known.rank)
            if rank == 0 or limit < 2:
                return None
            is_last = known.width >= most or known.is_exhausted
            error = known.residual(min(rank, limit))
            if rank > limit:
                error = known.likely_residual(rank, limit, is_last)
            if is_last and error <= least:
                return None
            if (has_room and error > least) or is_last:
                tree = self._estimates.best(0, error, patient=False)
                if is_last or tree.floats <= CLEAR * max_floats:
                    break
            width = min(math.ceil(MAX_STEP * known.width), most)
        if has_room:
            # If a tree is better than a global part, few directions are enough for one beside it.
            is_better = tree.floats <= CLEAR * max_floats
            useful = 0 if is_better else math.ceil(AMPLE * rank)
            known.useful_width = max(useful, FIRST_COLUMNS, known.width)
        if max_floats > CLEAR * tree.floats:
            return None
        known.extend(min(math.ceil(AMPLE * rank), known.max_width))
        rank = min(rank, known.rank)
        if known.residual(rank) <= least:
            return None
        return [self._estimates.without_tree(rank), tree], known.residual(rank)


def _between(fits: tuple[float, int], too_large: tuple[float, int], floats: int) -> float:
    """A tolerance between two that take fewer and more floats, on a line in logarithmic scale."""
    place = math.log(too_large[1] / max(1, floats)) / math.log(too_large[1] / max(1, fits[1]))
    place = min(max(place, 0.2), 0.8)
    return float(too_large[0] * (fits[0] / too_large[0]) ** place)
