"""Faults leave nothing half-written and nothing behind, and a later call is right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import hcurv
from faults.broken_writes import (
    Matrices,
    check_file,
    kill_while_saving,
    save_on_a_full_disk,
    two_matrices,
    two_writers,
)
from faults.calls import Calls
from faults.interruptions import Interruptions
from faults.soak import growth


@pytest.fixture(scope="module")
def matrices() -> Matrices:
    return two_matrices()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_calls_leave_nothing_behind() -> None:
    rng, interruptions = random.Random(3), Interruptions()
    for name in interruptions.names:
        interruptions.once(name, rng)
    assert interruptions.problems == []
    assert interruptions.num > len(interruptions.names) // 2


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path, matrices: Matrices) -> None:
    rng = random.Random(4)
    found = [kill_while_saving(tmp_path, matrices, rng) for _ in range(8)]
    assert found == [None] * 8


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, matrices: Matrices) -> None:
    message, left = save_on_a_full_disk(tmp_path, matrices)
    assert message.startswith("OSError: ")
    assert left == ["A.safetensors"]


def test_two_writers_never_mix(tmp_path: Path, matrices: Matrices) -> None:
    count, problems = two_writers(tmp_path, matrices, 1.0)
    assert count > 1
    assert problems == []


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path, matrices: Matrices) -> None:
    target = tmp_path / "file" / "A.safetensors"
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="folder"):
        matrices[0].save(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_file_that_is_read_while_it_is_replaced(tmp_path: Path, matrices: Matrices) -> None:
    path = tmp_path / "A.safetensors"
    matrices[0].save(path)
    loaded = hcurv.load(path)
    matrices[1].save(path)  # what is loaded does not depend on the file any more
    assert bool((loaded.to_dense() == matrices[0].to_dense()).all())
    assert check_file(path, matrices) is None


def test_growth_is_measured() -> None:
    flat = [(float(i), 10 * i, 1000) for i in range(30)]
    assert growth(flat) == (0, 0.0)
    leaking = [(float(i), 10 * i, 1000 + 100 * i) for i in range(30)]
    assert growth(leaking)[0] == 2000


def test_the_calls_of_the_soak_repeat_themselves() -> None:
    assert len(Calls().functions) > 10
