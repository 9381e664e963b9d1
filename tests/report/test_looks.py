"""One colour per method, also for methods that nobody has foreseen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from torch import nn

import hcurv
from cases import normal, seeded
from hcurv.report.looks import look_of

pytest.importorskip("matplotlib")

METHODS = (
    "matrix-free",
    "hierarchical",
    "low rank",
    "K-FAC block-diagonal",
    "K-FAC block-tridiagonal",
    "K-FAC full",
    "EKFAC",
    "diagonal",
    "blocks per unit",
    "H.factorize",
)


@pytest.fixture(scope="module")
def comparison() -> hcurv.Comparison:
    model = seeded(lambda: nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 4)))
    found = hcurv.compare(model, nn.CrossEntropyLoss(), normal(40, 9).float(), storage=0.4)
    other = dataclasses.replace(found.methods[2], name="a method of tomorrow")
    return dataclasses.replace(found, methods=(*found.methods, other))


def test_every_method_of_a_comparison_has_a_colour_and_a_marker_of_its_own() -> None:
    looks = [look_of(name) for name in METHODS]
    assert len({look.colour for look in looks}) == len(METHODS)
    assert len({look.marker for look in looks}) == len(METHODS)


def test_an_unknown_method_looks_the_same_every_time_and_unlike_the_known_ones() -> None:
    look = look_of("a method of tomorrow")
    assert look == look_of("a method of tomorrow")
    assert look.colour not in {look_of(name).colour for name in METHODS}
    assert look != look_of("another method of tomorrow")


def test_a_report_can_show_a_method_that_it_does_not_know(
    comparison: hcurv.Comparison, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    comparison.save_report(path, curves=False)
    assert "a method of tomorrow" in path.read_text(encoding="utf-8")


def test_the_plot_and_the_report_use_the_same_colours(
    comparison: hcurv.Comparison, tmp_path: Path
) -> None:
    (axes,) = comparison.plot().axes
    drawn = {line.get_label(): line.get_color() for line in axes.get_lines()}
    path = tmp_path / "report.html"
    comparison.save_report(path, curves=False)
    text = path.read_text(encoding="utf-8")
    for method in comparison.methods:
        if method.error > 0:
            assert drawn[method.name] == look_of(method.name).colour
            assert re.search(look_of(method.name).colour, text, re.I)
