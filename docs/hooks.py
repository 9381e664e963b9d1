"""What building these pages needs beyond the theme.

Formulas, $…$ within a line and $$…$$ by themselves, become MathML when the pages are built, which
browsers draw without any script; and a page that would load anything from the network is an error.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.exceptions import PluginError

_DISPLAY, _INLINE = r"\$\$(.+?)\$\$", r"\$([^$]+)\$"
_PRIORITY = 185  # after code in backticks, before backslashes
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
)


class _Formula(InlineProcessor):  # type: ignore[misc]
    def __init__(self, pattern: str, md: Markdown, display: bool) -> None:
        super().__init__(pattern, md)
        self._display = display

    def handleMatch(self, match: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        formula = convert(match.group(1).strip(), display="block" if self._display else "inline")
        if self._display:
            formula = f'<span class="formula">{formula}</span>'
        return self.md.htmlStash.store(formula), match.start(), match.end()


class _Formulas(Extension):  # type: ignore[misc]
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(_Formula(_DISPLAY, md, True), "display formula", _PRIORITY + 1)
        md.inlinePatterns.register(_Formula(_INLINE, md, False), "formula", _PRIORITY)


def on_config(config: Any) -> Any:
    """Add formulas to Markdown."""
    config.markdown_extensions.append(_Formulas())
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Make sure that the page can be read without a network."""
    found = _LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_path} loads from the network: {found.group()}")
    return output
