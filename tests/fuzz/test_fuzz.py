"""Some hundred fuzzed cases with a fixed seed, and cases that hypothesis chooses."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hcurv
from fuzz.damaged_files import file_case
from fuzz.known import KNOWN, is_known
from fuzz.outcomes import Refused, WrongError, refusals
from fuzz.problems import ambient, draw_problem, make
from fuzz.run import Tally, run_case

# The seed of the cases here; `make fuzz` runs others.
SEED = 20
NUM = 120
SECONDS = 25.0


@pytest.mark.filterwarnings("ignore")
def test_cases_are_right_or_refused_with_a_sentence() -> None:
    tally, end = Tally(), time.monotonic() + SECONDS
    for number in range(NUM):
        run_case(SEED, number, tally)
        if time.monotonic() > end:
            break
    unknown = [str(failure) for failure in tally.failures if not is_known(failure)]
    assert not unknown, "\n".join(unknown)
    assert tally.right.total() > 20
    seen = {tag for failure in tally.failures for tag in failure.tags}
    assert KNOWN.keys() <= seen, "these are mended, remove them from known.py"


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=12, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_matrices_are_right_or_refused(rng: random.Random) -> None:
    # Hypothesis makes the case smaller if it fails.
    problem = draw_problem(rng)
    try:
        with ambient(problem.ambient):
            make(problem)
    except Refused:
        pass
    except Exception:
        if not problem.tags & KNOWN.keys():
            raise


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=30, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_changed_files_are_refused_or_work(rng: random.Random) -> None:
    _, run = file_case(rng)
    with suppress(Refused):
        run()


def test_a_wrong_matrix_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fuzzer itself can fail: a matrix that is off by a fifth is no right case.
    dense = hcurv.GaussNewton.to_dense
    monkeypatch.setattr(hcurv.GaussNewton, "to_dense", lambda self: 1.2 * dense(self))
    tally = Tally()
    for number in range(6):
        run_case(1, number, tally)
    assert any("dense matrix" in failure.message for failure in tally.failures)
    assert not tally.right["matrix"]


def test_a_raw_error_is_no_refusal() -> None:
    with pytest.raises(ZeroDivisionError), refusals():
        _ = 1 / 0
    with pytest.raises(ValueError, match="ours"), refusals():
        raise ValueError("not ours: raised outside of the package")
    with pytest.raises(Refused), refusals():
        hcurv.load("no such file")
    assert issubclass(WrongError, AssertionError)
