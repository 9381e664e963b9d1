"""Builds until a matrix fits into a number of floats: what is given up, and what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import hcurv
from hcurv.hierarchical.building import size_forecast
from hcurv.hierarchical.building.size_forecast import TooLargeError
from hcurv.hierarchical.building.storage_fit import fit_storage
from hcurv.hierarchical.parts.plan import RankProfile, StorageCurve, tree_floats
from matrices import kernel_matrix


class Builds:
    """Builds that take tolerance^-0.5 · 100 floats, and are given up if that is far too much."""

    def __init__(self, given_up: bool = True) -> None:
        self.given_up = given_up
        self.tried: list[tuple[float, bool]] = []

    def __call__(self, tolerance: float, max_floats: int | None) -> Any:
        floats = round(100 * tolerance**-0.5)
        is_given_up = max_floats is not None and floats > 1.5 * max_floats and self.given_up
        self.tried.append((tolerance, is_given_up))
        if is_given_up:
            raise TooLargeError(floats)
        return SimpleNamespace(matrix=SimpleNamespace(num_stored=floats))


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize("start", [1e-8, 1e-4, 1e-1])
def test_the_result_fits_and_makes_use_of_the_storage(start: float, given_up: bool) -> None:
    builds = Builds(given_up)
    found = fit_storage(builds, start, 5000, 1e-9, 10_000, StorageCurve())
    assert 0.6 * 5000 <= found.matrix.num_stored <= 5000
    assert any(was for _, was in builds.tried) == (given_up and start < 1e-3)


def test_what_is_too_small_is_refused_with_the_smallest_that_was_built() -> None:
    """Where nothing fits, the last builds are complete, so that the message names a true size."""
    builds = Builds()
    with pytest.raises(ValueError, match="the smallest matrix that was built stores 100 floats"):
        fit_storage(builds, 1e-3, 50, 1e-9, 1000, StorageCurve())
    assert builds.tried[-1] == (1.0, False)


def test_a_build_far_beyond_the_storage_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = kernel_matrix("inverse multiquadric", 600, 2, width=0.2)
    large = hcurv.compress(dense, tolerance=1e-6, leaf_size=16, global_rank=0, ordering="angle")
    given_up: list[int] = []

    class NotedError(TooLargeError):
        def __init__(self, floats: int) -> None:
            super().__init__(floats)
            given_up.append(floats)

    monkeypatch.setattr(size_forecast, "TooLargeError", NotedError)
    # A plan for too small a tolerance, as uncertain estimates may give one.
    monkeypatch.setattr(
        "hcurv.hierarchical.planning.within_storage.StorageChoice.best",
        lambda self, max_floats, least, rank: (self._choose(1e-6, rank), 1e-6),
    )
    allowed = 0.3 * large.compression_rate
    small = hcurv.compress(
        dense, max_storage=allowed, leaf_size=16, global_rank=0, ordering="angle"
    )
    assert given_up
    assert 0.4 * allowed < small.compression_rate <= allowed
    # What would have been built is foretold.
    assert given_up[0] == pytest.approx(large.num_stored, rel=0.5)


def test_floats_are_foretold_from_the_lowest_levels() -> None:
    dense = kernel_matrix("inverse multiquadric", 1024, 2, width=0.2)
    matrix = hcurv.compress(dense, tolerance=1e-3, leaf_size=16, global_rank=0, ordering="angle")
    ranks = [level.ranks for level in matrix.levels]
    whole = RankProfile.of_levels(1024, matrix.tree.depth, ranks)
    assert whole.lengths == tuple(1024 // len(r) for r in ranks)
    assert tree_floats(1024, matrix.tree.depth, whole) == pytest.approx(matrix.num_stored, rel=0.3)
    few = RankProfile.of_levels(1024, matrix.tree.depth, ranks[:3])
    least = tree_floats(1024, matrix.tree.depth, few.without_growth())
    most = tree_floats(1024, matrix.tree.depth, few)
    assert least < 1.3 * matrix.num_stored
    assert most > 0.7 * matrix.num_stored
