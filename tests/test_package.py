"""Versions, changelog, citation and extras agree. `make package` checks what is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hcurv

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^## \[(?P<version>[\d.]+)\] - (?P<date>unreleased|\d{4}-\d\d-\d\d)$", re.M)


def sections() -> list[tuple[str, str]]:
    return SECTION.findall((ROOT / "CHANGELOG.md").read_text())


def project() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_first_section_of_the_changelog() -> None:
    version, date = sections()[0]
    suffix = ".dev0" if date == "unreleased" else ""
    assert hcurv.__version__ == version + suffix


def test_the_citation_is_of_the_last_release() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, date = next((v, d) for v, d in sections() if d != "unreleased")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == version
    assert str(citation["date-released"]) == date
    assert {"message", "title", "authors", "license"} <= citation.keys()
    (paper,) = citation["references"]
    assert re.fullmatch(r"10\.\d{4}/\S+", paper["doi"])
    assert paper["start"] < paper["end"]


def test_the_urls_are_those_of_the_citation() -> None:
    urls = project()["urls"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert urls["Paper"].removeprefix("https://doi.org/") in citation
    assert urls["Preprint"] in citation


def test_every_extra_of_another_library_is_named_by_the_module_that_needs_it() -> None:
    extras = project()["optional-dependencies"]
    named = {
        extra
        for path in (ROOT / "src" / "hcurv" / "interop").glob("*.py")
        for extra in re.findall(r"hcurv\[([\w-]+)\]", path.read_text())
    }
    assert named == {"curvlinops", "dattri", "files", "laplace-torch", "linear-operator"}
    assert named <= extras.keys()


def test_types_are_marked_as_checked() -> None:
    assert (Path(hcurv.__file__).parent / "py.typed").is_file()
