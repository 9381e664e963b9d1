"""The demonstration; memory as it is measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import hcurv
from hcurv.experiments import demo
from hcurv.experiments.datasets import digits
from hcurv.experiments.measure import peak_extra_bytes


def test_the_demonstration_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(tmp_path, sizes=(64, 16, 10), num_points=100)
    printed = capsys.readouterr().out
    assert "H is 1210 x 1210" in printed
    assert "agrees with automatic differentiation" in printed
    for line in demo.EXAMPLE:
        assert f">>> {line}" in printed
    assert "K-FAC block-diagonal" in printed
    for name in ("pixels.png", "block.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_the_example_is_what_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, labels = (values[:100] for values in digits())
    scope: dict[str, object] = {"hcurv": hcurv, "inputs": inputs, "labels": labels}
    scope |= {
        "model": demo.train(inputs, labels, (64, 16, 10)),
        "loss": torch.nn.CrossEntropyLoss(),
    }
    exec("\n".join(demo.EXAMPLE), scope)
    expected = capsys.readouterr().out
    demo.show_example(scope["model"], inputs, labels)  # type: ignore[arg-type]
    assert expected in capsys.readouterr().out


def test_a_measurement_of_memory_sees_those_within_it() -> None:
    within: list[int] = []

    def measure_two() -> None:
        for size in (2**26, 2**20):
            within.append(peak_extra_bytes(partial(torch.ones, size // 4)))

    peak = peak_extra_bytes(measure_two)
    if peak < 0:
        pytest.skip("needs /proc/self/clear_refs")
    assert within[0] >= 2**26 > within[1]
    assert peak >= 2**25  # that of the first, less what was given back before it began
