"""What the README shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "(387, 387)" in printed
    assert "torch.Size([10, 387])" in printed
    assert scope["v"].shape == (387,)  # type: ignore[attr-defined]
    assert scope["A"].estimated_error <= 2e-2  # type: ignore[attr-defined]


def test_the_two_commands_are_named_and_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert f"\n{target}:" in makefile


FIGURES = ("entries", "compress", "format", "solve", "baselines")


@pytest.mark.parametrize("name", [f"{name}.txt" for name in FIGURES])
def test_published_figures_are_those_of_the_committed_run(name: str) -> None:
    results = (ROOT / "benchmarks" / "results" / name).read_text()
    (shown,) = re.findall(rf"<!-- {name} -->\n```\n(.*?)```\n<!-- end -->", README, re.DOTALL)
    assert shown.strip() in results
