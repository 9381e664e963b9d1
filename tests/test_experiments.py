"""The demonstration."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcurv.experiments import demo


def test_the_demonstration_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(tmp_path)
    printed = capsys.readouterr().out
    assert "H is 6570 x 6570" in printed
    assert "agrees with automatic differentiation" in printed
    for name in ("diagonal", "pixels", "block"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
