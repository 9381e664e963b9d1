"""Write a picture to a file: by itself, or in a page with the results that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hcurv.files import write_atomically
from hcurv.report.figures import as_svg, house_style
from hcurv.report.page import element, page, table
from hcurv.report.page import figure as figure_element

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

__all__ = ["PICTURE_ENDINGS", "ResultPage", "save_picture"]

PICTURE_ENDINGS = (".png", ".svg", ".pdf", ".html")
_DPI = 180


@dataclass(frozen=True)
class ResultPage:
    """What a page says beside its picture.

    Attributes:
        title: the title.
        lead: what was found, in a sentence.
        caption: what the picture shows.
        facts: names and values.
        columns: the names of the columns of a table.
        rows: its rows; the first cell names the row.
        text: how many of the last columns hold text instead of numbers.
    """

    title: str
    lead: str
    caption: str
    facts: Sequence[tuple[str, str]]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text: int = 0


def save_picture(path: Path, draw: Callable[[], Figure], words: ResultPage) -> None:
    """Write the picture, or a page with it if the name of the file ends with .html."""
    ending = path.suffix.lower().removeprefix(".")
    with house_style():
        figure = draw()
        if ending != "html":
            write_atomically(path, lambda name: figure.savefig(name, dpi=_DPI, format=ending))
            return
        drawn = as_svg(figure, "picture", words.caption)
    sections = [("picture", "Picture", figure_element(drawn, words.caption, beside=False))]
    if words.rows:
        rows = table(words.caption, words.columns, words.rows, text=words.text)
        sections.append(("numbers", "In numbers", rows))
    facts = table("What was asked for, and found", ("", "value"), words.facts, text=1)
    sections.append(("results", "Results", facts))
    text = page(words.title, element("p", words.lead, class_="lead"), sections)
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"))
