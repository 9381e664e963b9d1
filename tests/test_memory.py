"""Memory is known before it is taken, and temporary memory stays within the workspace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hcurv
from cases import CASES, labels, normal, seeded
from hcurv.memory import available_bytes, format_bytes
from peak_memory import peak_beyond_result

MB = 2**20


def test_too_little_memory_is_said_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 300 * 10**6)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    inputs = torch.zeros(10_000, 1000)
    with pytest.raises(hcurv.InsufficientMemoryError, match=r"10000 points.*0.300 GB|300 MB") as e:
        hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs, factors="memory")
    message = str(e.value)
    batch = 512 * (3 * 10 * 1000 + 4 * 1010) * 4  # temporary memory
    needed = 10_000 * (10 * 1010 + 1001 + 1001) * 4 + batch
    assert f"needs {format_bytes(needed)}, but only 300 MB is free on cpu" in message
    for way_out in ("fewer data points", "float32", "freeze layers", "smaller workspace="):
        assert way_out in message


def test_a_block_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = CASES["classifier"].operator()
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 79**2 * 8 + 1)
    with pytest.raises(hcurv.InsufficientMemoryError, match="dense block of 79 x 79 entries"):
        operator.to_dense()


def test_workspace_has_a_lower_limit() -> None:
    with pytest.raises(ValueError, match="workspace must be at least 65536 bytes; got 10"):
        CASES["classifier"].operator(workspace=10)


def test_free_memory_is_found() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 0
    assert available_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (1.9e6, "1.9 MB"), (191e6, "191 MB"), (1.08e13, "10.8 TB")]
)
def test_bytes_are_written_for_people(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_temporary_memory_stays_within_the_workspace(wide: bool) -> None:
    sizes = (300, 16, 600) if wide else (300, 400, 20)
    model = seeded(lambda: nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])))
    loss = nn.MSELoss() if wide else nn.CrossEntropyLoss()
    workspace = 4 * MB
    operator = hcurv.GaussNewton(model, loss, normal(1500, 300).float(), workspace=workspace)
    size = operator.shape[0]
    rows, cols = labels(1200, size, seed=1), labels(1200, size, seed=2)
    few, many = normal(size, 2).float(), normal(size, 64).float()
    importance = operator.sample_entries(500, "importance")
    stratified = operator.sample_entries(500, "stratified")
    # Each would take from 10 to 150 MB if it were done at once.
    for name, function in {
        "few columns": lambda: operator @ few,
        "many columns": lambda: operator @ many,
        "scattered block": lambda: operator[rows, cols],
        "contiguous block": lambda: operator[:1200, :1200],
        "pairs": lambda: operator.pairs(rows, cols),
        "diagonal": operator.diagonal,
        "importance": lambda: importance.pairs(rows, cols),
        "stratified": lambda: stratified.pairs(rows, cols),
    }.items():
        peak = peak_beyond_result(function)
        indices = 40 * rows.numel() * 8  # a few index tensors as long as what was asked for
        assert peak <= 1.1 * workspace + indices, f"{name}: {peak / MB:.1f} MB"
