"""Builds until a matrix fits into a number of floats: what is given up, and what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hcurv
from hcurv.hierarchical.building import build, size_forecast
from hcurv.hierarchical.building.error_budget import ErrorBudget
from hcurv.hierarchical.building.size_forecast import (
    MisfitError,
    WantedFloats,
    floats_of_ranks,
    likely_ranks,
)
from hcurv.hierarchical.building.storage_fit import fit_storage
from hcurv.hierarchical.parts.plan import RankProfile, StorageCurve, tree_floats
from matrices import kernel_matrix


class Builds:
    """Builds that take tolerance^-0.5 · 100 floats, and are given up if these are not wanted."""

    def __init__(self, given_up: bool = True) -> None:
        self.given_up = given_up
        self.tried: list[tuple[float, bool]] = []

    def __call__(self, tolerance: float, wanted: WantedFloats | None) -> Any:
        floats = round(100 * tolerance**-0.5)
        is_given_up = wanted is not None and self.given_up
        is_given_up = is_given_up and not wanted.least <= floats <= wanted.most
        self.tried.append((tolerance, is_given_up))
        if is_given_up:
            raise MisfitError(floats)
        return SimpleNamespace(matrix=SimpleNamespace(num_stored=floats, estimated_error=tolerance))


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize("start", [1e-8, 1e-4, 1e-1])
def test_the_result_fits_and_makes_use_of_the_storage(start: float, given_up: bool) -> None:
    builds = Builds(given_up)
    found = fit_storage(builds, start, 5000, 1e-9, 10_000, StorageCurve())
    assert 0.6 * 5000 <= found.matrix.num_stored <= 5000
    assert any(was for _, was in builds.tried) == given_up
    # Builds that are given up take little time, others do not.
    if given_up:
        assert sum(not was for _, was in builds.tried) <= (1 if start > 1e-8 else 2)


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

    class NotedError(MisfitError):
        def __init__(self, floats: int) -> None:
            super().__init__(floats)
            given_up.append(floats)

    monkeypatch.setattr(size_forecast, "MisfitError", NotedError)
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


def test_floats_follow_from_ranks() -> None:
    dense = kernel_matrix("inverse multiquadric", 1024, 2, width=0.2)
    matrix = hcurv.compress(dense, tolerance=1e-3, leaf_size=16, global_rank=0, ordering="angle")
    sizes = matrix.tree.bounds(matrix.tree.depth).diff()
    floats = floats_of_ranks(sizes, [level.ranks for level in matrix.levels])
    assert floats <= matrix.num_stored <= 1.1 * floats  # padding


def test_ranks_below_the_cap_are_taken_as_they_are() -> None:
    ranks = [torch.tensor([3, 4, 5, 0]), torch.tensor([6, 2])]
    found = likely_ranks(torch.tensor([8, 8, 8, 8]), ranks, 7, max_rank=100)
    assert all(torch.equal(a.long(), b) for a, b in zip(found, ranks, strict=True))


@pytest.mark.parametrize("share", [0.6, 0.8, 0.9])
def test_ranks_that_are_cut_off_go_on_growing(share: float) -> None:
    """Ranks that keep the same share on each level are foretold, but for the last level."""
    sizes, true, rows = torch.full((64,), 32), [], torch.full((64,), 32.0).double()
    for _ in range(6):
        true.append((share * rows).round())
        rows = true[-1].view(-1, 2).sum(1)
    cap = int(true[2][0]) + 1
    cut = [level.clamp(max=cap).long() for level in true]
    found = likely_ranks(sizes, cut, cap, max_rank=10**6)
    for few, whole in zip(found[:-1], true[:-1], strict=True):
        assert few == pytest.approx(whole, rel=0.02)
    assert bool((cap <= found[-1]).all() & (found[-1] <= true[-1]).all())
    capped = likely_ranks(sizes, cut, cap, max_rank=cap)
    assert all(torch.equal(few, same.double()) for few, same in zip(capped, cut, strict=True))


def _foretold(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What looks at all levels foretell from now on."""
    found: list[float] = []
    require = WantedFloats.require

    def noted(self: WantedFloats, floats: float) -> None:
        found.append(floats)
        require(self, floats)

    monkeypatch.setattr(WantedFloats, "require", noted)
    return found


def test_a_look_at_all_levels_foretells_the_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds that fit are those that were foretold, and what was looked at changes nothing."""
    monkeypatch.setattr(build, "_LEAST_ROWS", 0)
    dense = kernel_matrix("inverse multiquadric", 1200, 2, width=0.1)
    options = {"leaf_size": 16, "global_rank": 0, "ordering": "angle"}
    foretold = _foretold(monkeypatch)
    matrix = hcurv.compress(dense, max_storage=0.2, **options)
    assert foretold
    assert foretold[-1] == pytest.approx(matrix.num_stored, rel=0.4)
    assert 0.6 * 0.2 <= matrix.compression_rate <= 0.2


def test_a_look_at_all_levels_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = kernel_matrix("inverse multiquadric", 1200, 2, width=0.1)
    looks: list[float] = []
    monkeypatch.setattr(WantedFloats, "require", lambda self, floats: looks.append(floats))
    found = []
    for least_rows in (0, 10**6):
        monkeypatch.setattr(build, "_LEAST_ROWS", least_rows)
        matrix = hcurv.compress(
            dense, max_storage=0.2, leaf_size=16, global_rank=0, ordering="angle"
        )
        found.append(matrix.to_dense())
        assert looks
    assert torch.equal(*found)


def test_a_build_that_would_be_a_little_too_large_makes_larger_errors_at_its_end() -> None:
    dense = kernel_matrix("inverse multiquadric", 1024, 2, width=0.1)
    matrix = hcurv.compress(dense, tolerance=1e-3, leaf_size=16, global_rank=0, ordering="angle")
    depth, ranks = matrix.tree.depth, [level.ranks for level in matrix.levels]
    sizes = matrix.tree.bounds(depth).diff()
    whole = floats_of_ranks(sizes, ranks)
    few = next(count for count in range(3, depth) if len(ranks[count - 1]) <= 16)
    reliefs = []
    for share in (1.4, 0.95, 0.9):
        wanted = WantedFloats(0.0, share * whole)
        reliefs.append(wanted.relief(sizes, depth, ranks[:few]))
        assert wanted.relief(sizes, depth, ranks[: few - 1]) == 1.0  # too early to say
    assert 1.0 == reliefs[0] < reliefs[1] < reliefs[2] < 10
    with pytest.raises(MisfitError):
        WantedFloats(0.0, 0.5 * whole).relief(sizes, depth, ranks[:few])


def test_a_looser_budget_allows_just_as_much_more_on_the_levels_that_are_left() -> None:
    for spent in (0.0, 2e-7, 6e-7):  # nothing, a part of it, more than all
        budget, loose = ErrorBudget(1e-3, 5), ErrorBudget(1e-3, 5)
        for each in (budget, loose):
            each.spend(spent)
        loose.loosen(3, 2.0)
        assert loose.node_error(3) == pytest.approx(2 * budget.node_error(3))
        assert loose.spent == budget.spent
