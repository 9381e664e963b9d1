"""One colour per method, also for methods that nobody has foreseen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import hcurv
from hcurv.report.looks import look_of

pytest.importorskip("matplotlib")

UNKNOWN = "a method of tomorrow"


def test_every_method_of_a_comparison_has_a_colour_and_a_marker_of_its_own(
    comparison: hcurv.Comparison,
) -> None:
    looks = [look_of(method.name) for method in comparison.methods]
    assert len({look.colour for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)


def test_an_unknown_method_looks_the_same_every_time_and_unlike_the_known_ones(
    comparison: hcurv.Comparison,
) -> None:
    look = look_of(UNKNOWN)
    assert look == look_of(UNKNOWN)
    assert look.colour not in {look_of(method.name).colour for method in comparison.methods}
    assert look != look_of("another method of tomorrow")


def test_the_plot_and_the_report_use_the_same_colours_also_for_an_unknown_method(
    comparison: hcurv.Comparison, tmp_path: Path
) -> None:
    other = dataclasses.replace(comparison.methods[2], name=UNKNOWN)
    extended = dataclasses.replace(comparison, methods=(*comparison.methods, other))
    (axes,) = extended.plot().axes
    drawn = {line.get_label(): line.get_color() for line in axes.get_lines()}
    path = tmp_path / "report.html"
    extended.save_report(path, curves=False)
    text = path.read_text(encoding="utf-8")
    assert UNKNOWN in text
    for method in extended.methods:
        if method.error > 0:
            assert drawn[method.name] == look_of(method.name).colour
            assert re.search(look_of(method.name).colour, text, re.I)
