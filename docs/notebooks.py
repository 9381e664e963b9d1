"""Write tutorials as notebooks, by `python docs/notebooks.py`.

A notebook has the text, the code and the outputs of its page. The tests run the code of every page,
compare what it prints with what is shown, and make sure that the notebooks are those of the pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
NAMES = ("uncertainty", "influence", "pruning", "training")
_FENCE = re.compile(
    r"^(?P<mark><!-- output[^>]* -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```$\n?", re.M | re.S
)
# The line of a page that leads to its notebook.
_LINK = re.compile(r"^\[This page as a notebook\]\([\w.-]+\)\n+", re.M)


def _pieces(page: str) -> Iterator[tuple[str, str]]:
    """The page in order: ("markdown" | "code" | "output", text)."""
    start = 0
    for found in _FENCE.finditer(page):
        is_code, is_output = found["kind"] == "python", found["mark"] is not None
        if not (is_code or is_output):
            continue
        yield "markdown", page[start : found.start()].strip("\n")
        yield "code" if is_code else "output", found["text"].rstrip("\n")
        start = found.end()
    yield "markdown", page[start:].strip("\n")


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(page: str) -> str:
    """The notebook of a page, as JSON."""
    cells: list[dict[str, Any]] = []
    for kind, text in _pieces(_LINK.sub("", page)):
        if not text:
            continue
        if kind == "output":
            stream = {"name": "stdout", "output_type": "stream", "text": _lines(text + "\n")}
            code = next(cell for cell in reversed(cells) if cell["cell_type"] == "code")
            code["outputs"] = [stream]
            continue
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append({**cell, "source": _lines(text)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in NAMES:
        page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
        (TUTORIALS / f"{name}.ipynb").write_text(notebook(page), encoding="utf-8")
