"""Comparison.save_report: one page, complete, escaped, and as a browser shows it."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import hcurv
from cases import normal, seeded
from hcurv.report.inverse_errors import percent

pytest.importorskip("matplotlib")

SECTIONS = ["computed", "methods", "inverse", "structure", "spectrum"]
SECTIONS += ["layers", "convergence", "settings", "reading"]
FIGURES = ["error", "inverse", "blocks", "ranks", "spectrum", "layers", "convergence"]
EVIL = '<script>alert("1")</script>'
VOID = {"meta", "link", "br", "img"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page(HTMLParser):
    """Elements with their attributes; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


class _OddLoss(hcurv.losses.HalfSquaredError):
    """Gets a name that is markup."""


_OddLoss.__name__ = EVIL


@pytest.fixture(scope="module")
def comparison() -> hcurv.Comparison:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(9, 6), nn.Tanh())
        model.add_module("<b>$1$", nn.Linear(6, 4))
        return model

    inputs = normal(40, 9).float() * (torch.arange(9) > 0)
    return hcurv.compare(seeded(build), _OddLoss(), inputs, storage=0.4)


@pytest.fixture(scope="module")
def path(comparison: hcurv.Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    comparison.save_report(path)
    return path


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(path: Path, page: Page) -> None:
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", path.read_text(encoding="utf-8"))
    assert not re.search(r"https?://|//\w|@import", text)
    for _, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert str(value).startswith(("#", "data:"))
    assert page.all("script") == []


def test_every_section_and_figure_is_there_with_a_label(page: Page) -> None:
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS
    assert [name for name, _ in page.elements if re.fullmatch("h[1-6]", name)] == [
        "h1",
        *["h2"] * len(SECTIONS),
    ]
    pictures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(pictures) == len(page.all("figure")) == len(page.all("figcaption")) == len(FIGURES)
    for name, picture in zip(FIGURES, pictures, strict=True):
        assert len(str(picture["aria-label"])) > 20, name
        assert "viewbox" in picture
        assert "width" not in picture
    assert page.all("html") == [{"lang": "en"}]
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))


def test_ids_are_unique_and_links_have_targets(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("href", "xlink:href", "aria-labelledby"):
            if not (target := attributes.get(name) or "").startswith("data:") and target:
                assert target.removeprefix("#") in ids


def test_names_cannot_become_markup(path: Path, page: Page) -> None:
    assert EVIL not in path.read_text(encoding="utf-8")
    assert page.all("b") == []
    cells = [cell for row in page.rows for cell in row]
    assert f"{EVIL}, reduction mean" in cells
    assert "<b>$1$" in cells
    assert any("<b>$1$" in word for word in page.words if "6 → 4" not in word)


def test_numbers_are_those_of_the_comparison(comparison: hcurv.Comparison, page: Page) -> None:
    rows = {row[0]: row[1:] for row in page.rows}
    matrices = {row[0]: row[1:] for row in page.rows if len(row) == 8}
    inverses = [tuple(row[:2]) for row in page.rows if len(row) == 4]
    for method in comparison.methods:
        row = matrices[method.name]
        assert row[0] == f"{method.error:.1e}"
        assert row[1] == f"{method.storage:.3%}"
        assert row[5] == ("–" if method.num_iterations is None else str(method.num_iterations))
        if method.inverse is not None and method.inverse.variance is not None:
            assert (method.name, percent(method.inverse.variance)) in inverses
    assert rows["Parameters, N"] == [f"{comparison.size:,}"]
    assert rows["Data points, n"] == [str(comparison.num_points)]
    # The last share of a budget is all of it, and curves end in the points of the table.
    text = " ".join(page.words)
    assert f"damping={comparison.damping!r}," in text
    assert f"{comparison.methods[1].num_iterations} iterations with it" in text


def test_zeros_and_ranks_are_told_in_words(comparison: hcurv.Comparison, page: Page) -> None:
    assert comparison.details is not None
    zeros = int((comparison.details.matrix.diagonal() == 0).sum())
    assert zeros == 6  # of the input that is always zero
    text = " ".join(page.words)
    assert f"{zeros} of {comparison.size} ({zeros / comparison.size:.1%})" in text
    assert f"a global part of rank {comparison.details.compressed.global_rank}" in text


def test_the_blocks_of_a_tree_are_its_own(comparison: hcurv.Comparison, tmp_path: Path) -> None:
    details = comparison.details
    assert details is not None
    tree = hcurv.compress(details.matrix, global_rank=0, leaf_size=16, tolerance=0.1)
    other = dataclasses.replace(details, compressed=tree)
    path = tmp_path / "tree.html"
    dataclasses.replace(comparison, details=other).save_report(path, curves=False)
    found = Page(path.read_text(encoding="utf-8"))
    text = " ".join(found.words)
    assert f"The hierarchical matrix is a tree of {tree.tree.depth} levels" in text
    assert "compressed once more" not in text
    assert "curves=False" in text
    parts = {row[0]: row[1] for row in found.rows if len(row) == 3}
    counts = [parts[name] for name in ("global part", "leaf blocks", "bases", "couplings")]
    assert sum(int(count.replace(",", "")) for count in counts) == tree.num_stored


def test_the_same_comparison_gives_the_same_page(
    comparison: hcurv.Comparison, path: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.html"
    comparison.save_report(str(again))
    assert again.read_bytes() == path.read_bytes()
    assert os.listdir(tmp_path) == ["again.html"]


def test_a_failing_write_leaves_the_old_page(
    comparison: hcurv.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hcurv.report.save.all_sections", lambda *_: [])
    monkeypatch.setattr("hcurv.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        comparison.save_report(path, curves=False)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_what_cannot_be_written_is_refused_before_any_work(
    comparison: hcurv.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr("hcurv.report.save.find", work)
    with pytest.raises(FileNotFoundError, match=r"no such folder: .*absent"):
        comparison.save_report(tmp_path / "absent" / "report.html")
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        comparison.save_report(tmp_path)
    with pytest.raises(ValueError, match="use a comparison that"):
        dataclasses.replace(comparison, details=None).save_report(tmp_path / "report.html")
    monkeypatch.setattr("hcurv.files.os.access", lambda *_: False)
    with pytest.raises(PermissionError, match="no permission to write in the folder"):
        comparison.save_report(tmp_path / "report.html")
    monkeypatch.undo()
    monkeypatch.setattr("hcurv.report.save.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"hcurv\[plots\]"):
        comparison.save_report(tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


# A frame is as wide as it is told to be, unlike a window, which is at least 500 pixels wide.
HARNESS = """<!DOCTYPE html><body style="margin: 0">
<iframe width="{width}" height="{height}" style="border: 0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const {{contentWindow: frame, contentDocument: page}} = document.querySelector("iframe");
  const root = page.documentElement;
  const box = e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height];
  const small = [...page.querySelectorAll("svg text")].map(e => box(e)[1]).filter(h => h > 0);
  document.getElementById("found").textContent = JSON.stringify({{
    view: frame.innerWidth, scroll: root.scrollWidth, client: root.clientWidth,
    figures: [...page.querySelectorAll("figure svg")].map(box),
    tables: [...page.querySelectorAll(".wide")].map(e => box(e)[0]),
    labels: small.length,
    requests: frame.performance.getEntriesByType("resource").map(e => e.name),
  }});
}});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser ({', '.join(BROWSERS)}): the report was not looked at in one")
    return found


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_a_browser_shows_it(
    browser: str, path: Path, tmp_path: Path, width: int, height: int
) -> None:
    text = html.escape(path.read_text(encoding="utf-8"))
    harness = tmp_path / "harness.html"
    harness.write_text(HARNESS.format(width=width, height=height, page=text), encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},{height}",
        "--dump-dom",
    ]
    done = subprocess.run(
        [browser, *options, harness.as_uri()], capture_output=True, text=True, timeout=60
    )
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    seen = json.loads(html.unescape(found))
    assert seen["view"] == width
    assert seen["scroll"] <= seen["client"]
    assert len(seen["figures"]) == len(FIGURES)
    for figure_width, figure_height in seen["figures"]:
        assert min(300, 0.8 * width) <= figure_width <= width
        assert figure_height > 100
    assert max(seen["tables"]) <= width
    assert seen["labels"] > 50
    assert seen["requests"] == []
    assert "CONSOLE" not in done.stderr
