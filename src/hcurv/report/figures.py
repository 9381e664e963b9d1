"""Draw the figures of a report, as SVG to be put into HTML.

They are narrow and their text is large, so that they can be read on a phone. Legends lie below the
axes, where they hide nothing. Every method has the same colour and marker in all of them.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hcurv.hierarchical import HMatrix
from hcurv.hierarchical.matrix.plots import draw_ranks, draw_structure
from hcurv.report.findings import LayerCurvature, Spectrum
from hcurv.report.looks import BLACK, BLUE, GRAY, SKY, look_of
from hcurv.report.page import Html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hcurv.report.comparison import ComparedMethod, Comparison

__all__ = [
    "LEAST_ERROR",
    "LEVELS",
    "as_svg",
    "cg_figure",
    "error_figure",
    "house_style",
    "inverse_figure",
    "layer_figure",
    "spectrum_figure",
    "structure_figures",
]

# At 390 pixels, letters of a figure that is this many inches wide are about 11 pixels high.
_WIDTH = 4.3
# Blocks of this many levels are drawn. Those of finer levels would be too small to see.
LEVELS = 6
# Errors of variances below this are drawn there, so that the others are not pressed together.
LEAST_ERROR = 1e-5
# Names of layers are cut to this many letters, so that they leave room for the figure.
_NAME = 16
_SETTINGS = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "mathtext.default": "regular",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hcurv",  # the same figure gives the same file
}


@contextmanager
def house_style() -> Iterator[None]:
    """Use Matplotlib's default settings and ours, whatever the user has set."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def _new(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def as_svg(figure: Figure, name: str, label: str) -> Html:
    """Turn a figure into SVG that has no fixed width, has a label, and shares no id with others."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", dpi=200, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return Html(f'{head} role="img" aria-label="{html.escape(label)}">{rest}')


def error_figure(
    comparison: Comparison, curves: dict[str, list[tuple[float, float]]], label: str
) -> Html:
    """Draw the error against the storage. Methods that were measured more than once get lines."""
    with house_style():
        figure, axes = _new(4.9)
        for method in comparison.methods:
            points = [*curves.get(method.name, []), (method.storage, method.error)]
            points = [(100 * storage, error) for storage, error in points if error > 0]
            if points:
                look = {**look_of(method.name).options(), "markersize": 8, "label": method.name}
                look["linestyle"] = "-" if len(points) > 1 else "none"
                axes.plot(*zip(*points, strict=True), **look)
        axes.axvline(100 * comparison.storage, color=GRAY, linestyle=":", label="budget")
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="stored floats, % of N²", ylabel="relative error ‖H − A‖/‖H‖")
        axes.xaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=1.8)
        return as_svg(figure, "error", label)


def inverse_figure(comparison: Comparison, label: str) -> Html:
    """Draw the errors of variances against the damping, one line for each method."""
    with house_style():
        figure, axes = _new(4.9)
        for method in comparison.methods:
            points = [
                (error.damping / comparison.largest_eigenvalue, max(error.variance, LEAST_ERROR))
                for error in method.inverse_range
                if error.variance is not None
            ]
            if points:
                look = {**look_of(method.name).options(), "markersize": 6, "label": method.name}
                axes.plot(*zip(*points, strict=True), **look)
        chosen = comparison.damping / comparison.largest_eigenvalue
        axes.axvline(chosen, color=GRAY, linestyle=":", label="damping")
        axes.axhline(1.0, color=GRAY, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="damping over the largest eigenvalue, λ/λ₁")
        axes.set(ylabel="median error of variances")
        axes.invert_xaxis()
        figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=2.2)
        return as_svg(figure, "inverse", label)


def structure_figures(matrix: HMatrix, labels: tuple[str, str]) -> tuple[Html, Html]:
    """Draw the blocks with their ranks, and the ranks of each level."""
    with house_style():
        blocks, axes = _new(3.9)
        axes.grid(False)
        draw_structure(blocks, axes, matrix, LEVELS)
        ranks, axes = _new(3.9)
        draw_ranks(axes, matrix)
        return as_svg(blocks, "blocks", labels[0]), as_svg(ranks, "ranks", labels[1])


def spectrum_figure(exact: Spectrum, compressed: Spectrum, damping: float, label: str) -> Html:
    """Draw the eigenvalues, largest first."""
    with house_style():
        figure, axes = _new(3.7)
        edge = {"markersize": 5, "markeredgecolor": BLACK, "markeredgewidth": 0.6}
        looks: dict[str, tuple[Spectrum, dict[str, Any]]] = {
            "exact": (exact, {"color": "#b0b0b0", "linewidth": 5.0}),
            "hierarchical": (compressed, {"color": BLUE, "marker": "o", **edge}),
        }
        for name, (spectrum, look) in looks.items():
            places = range(1, len(spectrum.values) + 1)
            every = max(1, len(places) // 16)
            axes.plot(places, spectrum.values, label=name, markevery=every, **look)
        axes.axhline(damping, color=GRAY, linestyle="--", label="damping")
        axes.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue")
        figure.legend(loc="outside lower center", ncols=3, columnspacing=1.0, handlelength=1.8)
        return as_svg(figure, "spectrum", label)


def layer_figure(layers: Sequence[LayerCurvature], label: str) -> Html:
    """Draw a box for each layer: quartiles, median, and 1 and 99 % quantiles, on a log scale."""
    with house_style():
        figure, axes = _new(1.2 + 0.55 * len(layers))
        names = [_layer_label(layer) for layer in layers]
        for place, layer in enumerate(layers):
            if layer.quantiles is None:
                continue
            least, low, median, high, most = layer.quantiles
            axes.plot([least, most], [place, place], "|-", color=BLACK, markersize=10)
            axes.barh(place, high - low, 0.55, left=low, color=SKY, edgecolor=BLACK, zorder=3)
            axes.plot([median, median], [place - 0.27, place + 0.27], color=BLACK, lw=3, zorder=4)
        axes.set(xscale="log", xlabel="curvature of a parameter, Hₖₖ", ylabel="layer")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(False, axis="y")
        return as_svg(figure, "layers", label)


def _layer_label(layer: LayerCurvature) -> str:
    """Shorten a name so that it leaves room for the figure.

    Dollar signs are escaped, because Matplotlib reads them as the beginning of a formula.
    """
    name = layer.name if len(layer.name) <= _NAME else f"…{layer.name[1 - _NAME :]}"
    return f"{name}\n{layer.shape[0]} → {layer.shape[1]}".replace("$", r"\$")


def cg_figure(methods: Sequence[ComparedMethod], tolerance: float, label: str) -> Html:
    """Draw the residuals of conjugate gradients, with every method as preconditioner."""
    with house_style():
        figure, axes = _new(4.9)
        for method in methods:
            residuals = method.residuals[1:]
            if residuals:
                places = range(1, len(residuals) + 1)
                marks = _marks(len(residuals))
                name = "none (matrix-free)" if method.name == "matrix-free" else method.name
                look = {**look_of(method.name).options(), "markersize": 6, "markevery": marks}
                axes.plot(places, residuals, label=name, **look)
        axes.axhline(tolerance, color=GRAY, linestyle=":", label="tolerance")
        axes.set(xscale="log", yscale="log", xlabel="iteration", ylabel="relative residual")
        axes.xaxis.set_major_formatter("{x:.0f}")
        figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=2.2)
        return as_svg(figure, "convergence", label)


def _marks(count: int) -> list[int]:
    """Choose points that lie evenly on a logarithmic axis, and the last one, to be marked."""
    marks = {count - 1}
    place = 1.0
    while place < count:
        marks.add(int(place) - 1)
        place *= 2.0
    return sorted(marks)
