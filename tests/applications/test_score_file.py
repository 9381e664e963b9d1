"""Files of influence scores: continued after an interruption, and refused if they do not fit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded
from hcurv.applications.score_file import ScoreFile

NUM_QUERIES = 11


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.applications.influence_scores._PANEL_QUERIES", 3)


def problem() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))).double()
    return model, nn.CrossEntropyLoss(), (normal(30, 5), labels(30, 3))


def queries() -> tuple[Tensor, Tensor]:
    return normal(NUM_QUERIES, 5, seed=4), labels(NUM_QUERIES, 3, seed=5)


def prepare(**changed: Any) -> hcurv.Influence:
    model, loss, data = problem()
    options = {"damping": 0.1, "check_damping": False, **changed}
    return hcurv.influence(model, loss, data, **options)


def interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Start to write scores, and stop after some panels."""
    infl = prepare()
    solve, count = infl.factorized.solve, 0

    def stopping(columns: Tensor) -> Tensor:
        nonlocal count
        if count == after:
            raise KeyboardInterrupt
        count += 1
        return solve(columns)

    monkeypatch.setattr(infl.factorized, "solve", stopping)
    with pytest.raises(KeyboardInterrupt):
        infl.scores(queries(), path=path)


def test_a_file_holds_the_scores_and_is_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "scores.safetensors"
    found = prepare().scores(queries(), path=path)
    expected = prepare().scores(queries())
    assert torch.equal(found, expected)
    assert torch.equal(load_file(path)["scores"], expected)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "hcurv influence scores"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_run_continues_to_the_same_file(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "scores"
    prepare().scores(queries(), path=whole)
    interrupted(path, monkeypatch, after)
    assert not path.exists()
    assert (tmp_path / "scores.partial").exists()
    infl = prepare()
    solve, solved = infl.factorized.solve, []

    def counting(columns: Tensor) -> Tensor:
        solved.append(columns.shape[1])
        return solve(columns)

    monkeypatch.setattr(infl.factorized, "solve", counting)
    infl.scores(queries(), path=path)
    assert sum(solved) == NUM_QUERIES - 3 * after
    assert path.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "scores.partial").exists()
    solved.clear()
    again = infl.scores(queries(), path=path)
    assert not solved
    assert torch.equal(again, load_file(whole)["scores"])


def test_rows_that_were_cut_off_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "scores"
    prepare().scores(queries(), path=whole)
    interrupted(path, monkeypatch, 2)
    partial = tmp_path / "scores.partial"
    content = bytearray(partial.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    content[start + 30 * 8 + 5] ^= 1  # in the second row
    partial.write_bytes(content)
    prepare().scores(queries(), path=path)
    assert path.read_bytes() == whole.read_bytes()


def test_groups_and_batches_of_queries_in_a_file(tmp_path: Path) -> None:
    inputs, answers = queries()
    members = torch.arange(30) % 4
    infl = prepare()
    path = tmp_path / "groups"
    found = infl.scores((inputs, answers), groups=members, path=path)
    assert torch.equal(found, infl.scores((inputs, answers), groups=members))
    # Other batches of the same points are the same queries.
    batches = [(inputs[:4], answers[:4]), (inputs[4:], answers[4:])]
    assert torch.equal(infl.scores(batches, groups=members, path=path), found)


def first_logit(outputs: Tensor, _: Tensor | None) -> Tensor:
    return outputs[:, 0]


@pytest.mark.parametrize("complete", [True, False])
def test_a_file_of_other_scores_is_refused(
    complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores"
    if complete:
        prepare().scores(queries(), path=path)
    else:
        interrupted(path, monkeypatch, 1)
    content = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    inputs, answers = queries()
    model, loss, data = problem()
    with torch.no_grad():
        model[0].bias += 1e-6
    softer = nn.CrossEntropyLoss(label_smoothing=0.1)
    original = problem()[0]
    calls = {
        "damping": lambda: prepare(damping=0.2).scores(queries(), path=path),
        "tolerance": lambda: prepare(tolerance=1e-3).scores(queries(), path=path),
        "queries": lambda: prepare().scores((inputs + 1e-3, answers), path=path),
        "measure": lambda: prepare().scores(queries(), measure=first_logit, path=path),
        "groups": lambda: prepare().scores(queries(), groups=range(30), path=path),
        "model": lambda: hcurv.influence(model, loss, data, 0.1).scores(queries(), path=path),
        "training data": lambda: hcurv.influence(
            original, loss, (data[0] * 1.001, data[1]), 0.1
        ).scores(queries(), path=path),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"made for other scores \(other .*{name}"):
            call()
    with pytest.raises(ValueError, match=r"other model\)"):
        hcurv.influence(original, softer, data, 0.1).scores(queries(), path=path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == content


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    infl = prepare()
    infl.scores(queries(), path=path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    flipped = bytearray(content)
    flipped[8 + length + 100] ^= 1
    renamed = content.replace(b'"version": "1"', b'"version": "2"')
    wide = content.replace(b"[11, 30]", b"[11, 31]")
    for damaged, message in (
        (bytes(flipped), "checksums do not match"),
        (content[:-8], "not as long"),
        (content + b"\0" * 8, "not as long"),
        (content[:5], "holds no influence scores"),
        (b"", "holds no influence scores"),
        (b"text " * 100, "holds no influence scores"),
        (struct.pack("<Q", 4) + b"null", "holds no influence scores"),
        (renamed, "another version"),
        (wide, "damaged"),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(hcurv.FileFormatError, match=message):
            infl.scores(queries(), path=path)
        assert path.read_bytes() == damaged
    save_file({"scores": torch.zeros(2)}, path)
    with pytest.raises(hcurv.FileFormatError, match="holds no influence scores"):
        infl.scores(queries(), path=path)


def test_places_that_cannot_be_written_are_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infl = prepare()
    monkeypatch.setattr(infl.factorized, "solve", None)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        infl.scores(queries(), path=tmp_path / "nowhere" / "scores")
    with pytest.raises(IsADirectoryError):
        infl.scores(queries(), path=tmp_path)


def test_a_file_is_not_finished_before_all_rows_are_there(tmp_path: Path) -> None:
    file = ScoreFile(tmp_path / "scores", {"what": "a test"}, (3, 2), torch.float32)
    file.write(slice(0, 2), torch.ones(2, 2))
    assert file.known.tolist() == [True, True, False]
    with pytest.raises(RuntimeError, match="1 rows"):
        file.finish()
    file.write(slice(2, 3), torch.zeros(1, 2))
    assert file.finish().tolist() == [[1, 1], [1, 1], [0, 0]]
    header = (tmp_path / "scores").read_bytes()[8:]
    metadata = json.JSONDecoder().raw_decode(header.decode(errors="ignore"))[0]["__metadata__"]
    assert metadata["what"] == "a test"
