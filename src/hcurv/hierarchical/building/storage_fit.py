"""Build until a matrix fits into a number of floats, and makes use of them."""

from __future__ import annotations

import math
from typing import Protocol

from hcurv.hierarchical.building.construct import Construction
from hcurv.hierarchical.building.size_forecast import MisfitError, WantedFloats
from hcurv.hierarchical.parts.plan import StorageCurve

__all__ = ["fit_storage", "max_floats"]

# A complete build that uses this share of max_storage is good enough, the first, the second and any
# later one. More builds take more time, and gain less and less accuracy.
_WELL_USED = (0.65, 0.6, 0.0)
# At most so many builds are made until one fits.
_MAX_BUILDS = 12
# At most so many builds are given up before they are complete. That takes little time.
_MAX_GIVEN_UP = 5
# A build that is likely to use less than this share of max_storage is given up.
_LEAST_USED = 0.75
# Another build aims at this share of max_storage, because its size is known to a few per cent only,
# or to ten per cent as long as no build is complete.
_AIM, _FIRST_AIM = 0.92, 0.87
# After a build that was given up, the tolerance falls by no more than this factor. What is foretold
# for far smaller ones is uncertain, and they make builds long.
_FINER = 0.25
# A tolerance within this factor of the smallest one is not worth another build.
_CLOSE = 1.1


def max_floats(
    size: int, num_rows: int, max_storage: float, global_rank: int | None, num_diagonal: int
) -> int:
    """The number of floats that may be stored; refused if nothing can be that small.

    Args:
        size: N.
        num_rows: number of rows that are not zero.
        max_storage: largest number of floats over N².
        global_rank: number of columns of the global part; None to choose.
        num_diagonal: floats of a diagonal that has to be stored, too.
    """
    allowed = int(max_storage * size**2)
    rank = global_rank or (0 if num_diagonal else 1)
    least = rank * num_rows + num_diagonal
    if least <= allowed:
        return allowed
    smallest = _share_for(least, size)
    if global_rank:
        fitting = max(0, allowed - num_diagonal) // num_rows
        raise ValueError(
            f"global_rank={rank} takes {least} floats, more than the {allowed} of N²"
            f" = {size**2} that max_storage={max_storage:g} allows. Use global_rank="
            f"{fitting} or less, or max_storage={smallest:g} or more"
        )
    padded = "" if num_diagonal <= num_rows else f", padded to {num_diagonal} of them"
    raise ValueError(
        f"max_storage={max_storage:g} allows {allowed} of N² = {size**2} floats, but"
        f" the smallest compressed matrix has one float for each of {num_rows} nonzero"
        f" rows{padded}. Use max_storage={smallest:g} or more"
    )


def _share_for(num_floats: int, size: int) -> float:
    """The smallest ``max_storage`` with three digits that allows so many floats."""
    share = num_floats / size**2
    unit = 10.0 ** (math.floor(math.log10(share)) - 2)
    steps = math.floor(share / unit)
    while int((rounded := float(f"{steps * unit:.3g}")) * size**2) < num_floats:
        steps += 1
    return rounded


class Build(Protocol):
    """Builds a matrix."""

    def __call__(self, tolerance: float, wanted: WantedFloats | None) -> Construction:
        """Build with a tolerance; raise `MisfitError` if other numbers of floats are likely."""


def fit_storage(
    build: Build, tolerance: float, allowed: int, least: float, size: int, curve: StorageCurve
) -> Construction:
    """Build until the result fits into what is allowed, and makes use of it.

    Plans are estimates, so that a first build may be too large or needlessly inaccurate.

    Args:
        build: builds with some tolerance.
        tolerance: that of the first build.
        allowed: number of floats that are allowed.
        least: smallest tolerance that is worth a build.
        size: N.
        curve: how the number of floats depends on the tolerance, as far as it is known.

    Raises:
        ValueError: no build was small enough.
    """
    best: Construction | None = None
    smallest = size**2
    num_built = num_given_up = num_too_large = 0
    for _ in range(_MAX_BUILDS):
        wanted = None
        # The last builds show what is possible.
        if num_given_up < _MAX_GIVEN_UP and tolerance < 1.0:
            has_room = tolerance > _CLOSE * least and best is None
            wanted = WantedFloats(_LEAST_USED * allowed if has_room else 0.0, allowed)
        try:
            result = build(tolerance, wanted)
        except MisfitError as error:
            floats = error.floats
            num_given_up += 1
        else:
            stored = floats = result.matrix.num_stored
            smallest = min(smallest, stored)
            fits = stored <= allowed
            if fits and (best is None or _error(result) < _error(best)):
                best = result
            well_used = _WELL_USED[min(num_built, len(_WELL_USED) - 1)] * allowed
            num_built += 1
            if fits and (stored >= well_used or tolerance <= _CLOSE * least):
                break
            if best is not None and best.matrix.num_stored >= well_used:
                break
        if tolerance >= 1:
            break
        curve = curve.seen(tolerance, floats)
        is_too_large = floats > allowed
        num_too_large += int(is_too_large)
        step = curve.step(int((_AIM if num_built else _FIRST_AIM) * allowed))
        if not num_built:
            step = max(step, _FINER)
        if best is None and is_too_large:
            step = max(step, 1 + (num_too_large - 1) / 4)  # small steps may never get there
        tolerance = min(max(tolerance * step, least), 1.0)
    if best is None:
        raise ValueError(
            f"max_storage={allowed / size**2:.3g} is too small for these options: the smallest"
            f" matrix that was built stores {smallest} floats. Use max_storage="
            f"{_share_for(smallest, size):g} or more, a smaller leaf_size or global_rank, or"
            ' leave them to be chosen (leaf_size=None, global_rank="auto")'
        )
    return best


def _error(built: Construction) -> float:
    return built.matrix.estimated_error
