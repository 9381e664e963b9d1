"""Write HTML by functions: elements, tables, figures, and the page around them.

Every text that is not `Html` already is escaped, so that no text can become markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["Html", "element", "figure", "page", "section", "table", "together"]


class Html(str):
    """Text that is markup already and must not be escaped."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return ``<tag attributes>children</tag>``.

    Attributes are keywords: a trailing underscore is dropped, and other underscores become hyphens.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
    )
    return Html(f"<{tag}{named}>{_join(children)}</{tag}>")


def _join(children: Iterable[object]) -> str:
    return "".join(c if isinstance(c, Html) else html.escape(str(c)) for c in children)


def together(*parts: Html) -> Html:
    """Join pieces of markup, one after the other."""
    return Html("\n".join(parts))


def section(name: str, title: str, *children: object) -> Html:
    """Return a section that can be linked to."""
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, *children, id=name, aria_labelledby=f"{name}-title")


def table(
    caption: str, header: Sequence[object], rows: Iterable[Sequence[object]], *, text: int = 0
) -> Html:
    """Return a table that scrolls by itself where it is too wide for the page.

    Args:
        caption: What the table shows.
        header: The names of the columns.
        rows: The cells of each row. The first cell names the row.
        text: How many of the last columns hold text instead of numbers.
    """
    first_text = len(header) - text

    def cell(number: int, value: object, tag: str = "td", **attributes: object) -> Html:
        if number:
            attributes["class_"] = "number" if number < first_text else "text"
        return element(tag, value, **attributes)

    head = [cell(number, name, "th", scope="col") for number, name in enumerate(header)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(cell(number, value) for number, value in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    inside = element(
        "table", element("thead", element("tr", *head)), element("tbody", *body), aria_label=caption
    )
    # Only elements that can have the focus can be scrolled by keyboard. The caption does not belong
    # to the element that scrolls, so that it stays in view.
    wide = element("div", inside, class_="wide", role="region", aria_label=caption, tabindex=0)
    return Html(element("p", caption, class_="caption") + wide)


def figure(svg: Html, caption: str, *, beside: bool = True) -> Html:
    """Return a figure with its caption below it, or beside it where the page is wide enough."""
    parts = (element("div", svg, class_="card"), element("figcaption", caption))
    return element("figure", *parts, class_="beside" if beside else "stacked")


def page(title: str, lead: Html, sections: Sequence[tuple[str, str, Html]]) -> str:
    """Return the whole page.

    Args:
        title: The title of the page.
        lead: What comes first.
        sections: The name, the title and the content of each section.
    """
    links = [element("li", element("a", name, href=f"#{key}")) for key, name, _ in sections]
    body = element(
        "main",
        element("h1", title),
        lead,
        element("nav", element("ol", *links), aria_label="Sections"),
        *(section(key, f"{n}. {name}", text) for n, (key, name, text) in enumerate(sections, 1)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The page holds all that it needs. This forbids the browser to fetch or run anything.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " style-src 'unsafe-inline'; img-src data:\">\n"
        f'<link rel="icon" href="data:,">\n{element("title", title)}\n'
        f"<style>\n{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


_CSS = """\
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1b1b1b; --soft: #555555; --line: #d0d0d0; --tint: #eef4f9;
  --link: #00588c; --bar: #0072b2; --shadow: #00000040;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181b; --text: #ececec; --soft: #b4b4b4; --line: #454a50; --tint: #20262c;
    --link: #8fcaf2; --bar: #56b4e9; --shadow: #ffffff50;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  overflow-wrap: break-word;
}
main { max-width: 58rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; }
a { color: var(--link); }
nav ol { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; list-style: none; }
nav a { display: inline-block; padding: 0.3rem 0; }
.lead { background: var(--tint); border-left: 0.3rem solid var(--bar); padding: 0.75rem 1rem; }
.lead ul { margin: 0; padding-left: 1.1rem; }
.caption { color: var(--soft); font-size: 0.9rem; margin: 1.25rem 0 0.25rem; }
/* A wide table scrolls. A shadow at an edge shows that there is more on that side. It is painted on
   the box, and covers in the colour of the page, which move with the table, hide it at the ends. */
.wide {
  overflow-x: auto; margin-bottom: 1rem; padding-bottom: 0.35rem;
  background:
    linear-gradient(to right, var(--page) 40%, transparent) left / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--page) 40%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to right, var(--shadow), transparent) left / 1.1rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shadow), transparent) right / 1.1rem 100% no-repeat scroll;
  scrollbar-width: thin;
}
a:focus-visible, .wide:focus-visible, pre:focus-visible, summary:focus-visible {
  outline: 0.15rem solid var(--link); outline-offset: 0.15rem;
}
table { border-collapse: collapse; min-width: 100%; font-size: 0.9rem; }
details { margin: 1rem 0; }
th, td { text-align: left; padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td, thead th { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { vertical-align: bottom; }
.facts td, .text { white-space: normal; }
.text:last-child { min-width: 6rem; }
.bar { display: block; height: 0.5rem; background: var(--bar); }
.track { width: 8rem; }
figure { margin: 1.25rem 0; }
.card { background: #ffffff; border: 1px solid var(--line); border-radius: 0.4rem;
  padding: 0.4rem; max-width: 32rem; }
svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.5rem; }
.pair { display: grid; gap: 0 1.5rem; grid-template-columns: minmax(0, 1fr); }
pre { overflow-x: auto; background: var(--tint); padding: 0.75rem; font-size: 0.85rem; }
dt { font-weight: 600; margin-top: 0.75rem; }
dd { margin: 0.1rem 0 0; }
@media (min-width: 48rem) {
  .pair { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
  tbody th { white-space: nowrap; }
  .beside { display: grid; gap: 1.5rem; grid-template-columns: minmax(0, 32rem) minmax(0, 1fr); }
}
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""
