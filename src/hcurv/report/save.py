"""Measure what a report needs, draw it, and write the page."""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from hcurv.files import check_target, write_atomically
from hcurv.report.findings import find
from hcurv.report.page import page
from hcurv.report.sections import all_sections, headline

if TYPE_CHECKING:
    from hcurv.report.comparison import Comparison

__all__ = ["save_report"]


def save_report(comparison: Comparison, path: str | PathLike[str], *, curves: bool = True) -> None:
    """Write a comparison as one HTML page. See `Comparison.save_report`."""
    target = check_target(path)
    if find_spec("matplotlib") is None:
        raise ImportError(
            "reports need matplotlib, which is not installed: pip install 'hcurv[plots]'"
        )
    if comparison.details is None:
        raise ValueError(
            "a report needs the matrices themselves, which this comparison does not have: use a"
            " comparison that hcurv.compare returned"
        )
    findings = find(comparison, comparison.details, curves)
    title = f"Curvature of a network with {comparison.size:,} parameters"
    sections = all_sections(comparison, comparison.details, findings)
    text = page(title, headline(comparison), sections)
    write_atomically(target, lambda name: Path(name).write_text(text, encoding="utf-8"))
