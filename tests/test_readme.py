"""What the README shows is what runs, and its figures are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    example, uses = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "(387, 387)" in printed
    assert "torch.Size([10, 387])" in printed
    assert scope["v"].shape == (387,)  # type: ignore[attr-defined]
    assert scope["A"].estimated_error <= 2e-2  # type: ignore[attr-defined]
    exec(compile(uses, "README.md", "exec"), scope)
    assert "0.7989" in capsys.readouterr().out  # the sparsity: 74 of 368 weights stay


def test_the_two_commands_are_named_and_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert f"\n{target}:" in makefile


def test_a_newcomer_can_read_it_in_a_minute() -> None:
    assert len(README.splitlines()) <= 150
    for word in ("uncertainty", "influence", "pruning", "training"):
        assert word in README


FIGURES = tuple(path.stem for path in sorted((ROOT / "benchmarks" / "results").glob("*.txt")))


@pytest.mark.parametrize("name", [f"{name}.txt" for name in FIGURES])
def test_published_figures_are_those_of_the_committed_run(name: str) -> None:
    results = (ROOT / "benchmarks" / "results" / name).read_text()
    (shown,) = re.findall(rf"<!-- {name} -->\n```\n(.*?)```\n<!-- end -->", BENCHMARKS, re.DOTALL)
    assert shown.strip()
    assert shown.strip() in results


def rows_of_figures() -> list[list[str]]:
    """Cells of the README's table of figures."""
    (table,) = re.findall(r"<!-- figures -->\n(.*?)<!-- end -->", README, re.DOTALL)
    lines = table.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def is_rounded(shown: str, exact: float) -> bool:
    """Whether a number could be the exact one, rounded to as many digits as are shown."""
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    last = 10.0 ** (int(exponent or 0) - digits)
    return abs(float(shown) - exact) <= 0.5000001 * last


@pytest.mark.parametrize("row", rows_of_figures(), ids=lambda row: row[0])
def test_each_figure_of_the_table_is_in_the_file_that_it_links_to(row: list[str]) -> None:
    _, ours, others, source = row
    (path,) = re.findall(r"\]\((.*?)\)", source)
    known = [float(number) for number in NUMBER.findall((ROOT / path).read_text())]
    for number in NUMBER.findall(f"{ours} {others}"):
        assert any(is_rounded(number, value) for value in known), number


def test_every_command_of_the_table_exists() -> None:
    for *_, source in rows_of_figures():
        kind, name = re.findall(r"`(make bench BENCH=|hcurv reproduce )([\w-]+)`", source)[0]
        folder = "benchmarks" if kind.startswith("make") else "src/hcurv/experiments/tables"
        assert (ROOT / folder / f"{name.replace('-', '_')}.py").is_file()


TABLE = re.compile(r"<!-- ([\w-]+\.txt): [\w -]+ -->\n(.*?)<!-- end -->", re.DOTALL)


def test_tables_of_the_pages_are_lines_of_the_committed_run() -> None:
    found = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for name, table in TABLE.findall(page.read_text()):
            lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
            known = {tuple(line.split()) for line in lines}
            for row in table.strip().splitlines()[2:]:
                cells = [cell for cell in row.strip("| ").split(" | ") if cell != "–"]
                assert tuple(" ".join(cells).split()) in known, row
                found += 1
    assert found > 0
