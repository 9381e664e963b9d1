"""The documentation: what it shows is what runs, and what it links to is there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hcurv

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = {str(path.relative_to(ROOT)): path for path in (*TOP, *DOCS.rglob("*.md"))}
TUTORIALS = sorted(name for name in PAGES if name.startswith("docs/tutorials/"))
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>output[^>]*) -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#[^)\s]*)?\)")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``mark`` is that of an output to compare, or None."""

    kind: str
    text: str
    mark: str | None
    line: int


def blocks(page: str) -> list[Block]:
    content = PAGES[page].read_text()
    return [
        Block(
            found["kind"],
            found["text"],
            found["mark"],
            content[: found.start("text")].count("\n"),
        )
        for found in BLOCK.finditer(content)
    ]


def with_snippets() -> list[str]:
    """All pages but the README, whose snippets `test_readme.py` runs."""
    pages = PAGES.keys() - {"README.md"}
    return sorted(page for page in pages if any(b.kind == "python" for b in blocks(page)))


def run_python(block: Block, page: str, scope: dict[str, object]) -> None:
    # Empty lines before it: errors then tell the line of the page.
    exec(compile("\n" * block.line + block.text, page, "exec"), scope)


def run_shell(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    from hcurv.cli.app import main

    for command in block.text.replace("\\\n", " ").splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code, command


def check_output(block: Block, printed: str) -> None:
    """The same; for ``output, about`` numbers may differ by a factor of two."""
    assert block.mark in ("output", "output, about")
    if block.mark == "output":
        assert printed.rstrip().splitlines() == block.text.rstrip().splitlines()
        return
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", block.text).split()
    for found, shown in zip(NUMBER.findall(printed), NUMBER.findall(block.text), strict=True):
        assert float(found) == pytest.approx(float(shown), rel=0.5, abs=1e-12), (found, shown)


@pytest.mark.parametrize("page", with_snippets())
def test_snippets_run_and_print_what_is_shown(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    has_commands = page == "docs/tutorials/command-line.md"
    if has_commands and find_spec("hcurv.cli") is None:
        pytest.skip("there is no command line")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "snippets"}
    printed = ""
    with torch.random.fork_rng(devices=[]):
        for block in blocks(page):
            if block.kind == "python":
                run_python(block, page, scope)
                printed = capsys.readouterr().out
            elif block.kind == "sh" and has_commands:
                run_shell(block, monkeypatch)
                printed = capsys.readouterr().out
            elif block.mark is not None:
                check_output(block, printed)


@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorials_have_snippets_with_outputs(page: str) -> None:
    found = blocks(page)
    assert any(block.kind == "python" for block in found)
    assert any(block.mark is not None for block in found)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_and_pictures_exist(page: str) -> None:
    text = BLOCK.sub("", PAGES[page].read_text())
    for target in LINK.findall(text):
        if target:
            assert (PAGES[page].parent / target).is_file(), target


def test_all_pictures_are_shown_and_made_by_the_script() -> None:
    shown = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    script = (DOCS / "pictures.py").read_text()
    for picture in (DOCS / "pictures").iterdir():
        assert f"pictures/{picture.name})" in shown
        assert f'"{picture.name}"' in script


def test_the_reference_has_every_public_name() -> None:
    reference = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^::: hcurv\.(?:\w+\.)*(\w+)$", reference, re.M)
    wanted = {*hcurv.__all__, *hcurv.baselines.__all__} - {"baselines"}
    assert wanted <= set(documented)
    assert len(documented) == len(set(documented))


def test_all_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in DOCS.rglob("*.md"):
        assert f" {path.relative_to(DOCS)}\n" in navigation


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (DOCS / "architecture.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.\w+)?)`", text))
    folders = [ROOT, ROOT / "src" / "hcurv"]
    missing = [
        name
        for name in named - {"site/", "demo/"}
        if not any((folder / name).exists() for folder in folders)
    ]
    assert not missing


def test_the_architecture_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text()
    package = ROOT / "src" / "hcurv"
    for folder in package.iterdir():
        if (folder / "__init__.py").is_file():
            assert f"`{folder.name}/" in text, folder.name
    for file in package.glob("*.py"):
        if not file.name.startswith("__"):
            assert f"`{file.name}`" in text, file.name


def notebooks() -> ModuleType:
    spec = spec_from_file_location("notebooks", DOCS / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["uncertainty", "influence", "pruning", "training"])
def test_notebooks_are_those_of_the_pages(name: str) -> None:
    """The code of the pages is run above; a notebook has the same code and outputs."""
    page = f"docs/tutorials/{name}.md"
    text = (DOCS / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == notebooks().notebook(PAGES[page].read_text(encoding="utf-8"))
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in cells] == [
        block.text.rstrip("\n") for block in blocks(page) if block.kind == "python"
    ]
    shown = ["".join(cell["outputs"][0]["text"]) for cell in cells if cell["outputs"]]
    assert shown == [block.text for block in blocks(page) if block.mark is not None]
