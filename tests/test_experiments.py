"""The demonstration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hcurv
from hcurv.experiments import demo
from hcurv.experiments.datasets import digits


def test_the_demonstration_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SIZES", (64, 16, 10))
    images, labels = digits()
    monkeypatch.setattr(demo, "digits", lambda: (images[:300], labels[:300]))
    demo.main(tmp_path)
    printed = capsys.readouterr().out
    assert "H is 1210 x 1210" in printed
    assert "agrees with automatic differentiation" in printed
    for line in demo.EXAMPLE:
        assert f">>> {line}" in printed
    assert "K-FAC block-diagonal" in printed
    for name in ("pixels.png", "block.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_the_example_is_what_is_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SIZES", (64, 16, 10))
    inputs, labels = demo.digits()
    scope: dict[str, object] = {"hcurv": hcurv, "inputs": inputs, "labels": labels}
    scope |= {"model": demo.train(inputs, labels), "loss": torch.nn.CrossEntropyLoss()}
    exec("\n".join(demo.EXAMPLE), scope)
    expected = capsys.readouterr().out
    demo.show_example(scope["model"], inputs, labels)  # type: ignore[arg-type]
    assert expected in capsys.readouterr().out
