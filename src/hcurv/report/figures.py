"""The figures of a report, as SVG to be put into HTML.

They are narrow and their text is large, so that they can be read on a phone. Colours are those of
Okabe and Ito, which colour-blind readers can tell apart; markers and dashes differ as well.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hcurv.hierarchical import HMatrix
from hcurv.hierarchical.plots import draw_ranks, draw_structure
from hcurv.report.findings import LayerCurvature, Spectrum
from hcurv.report.page import Html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hcurv.comparison import ComparedMethod, Comparison

__all__ = [
    "LEVELS",
    "cg_figure",
    "error_figure",
    "layer_figure",
    "spectrum_figure",
    "structure_figures",
]

_WIDTH = 4.3  # inches
LEVELS = 6  # of blocks that are drawn
_NAME = 16  # letters of the name of a layer
_BLACK, _GRAY, _BLUE, _RED = "#000000", "#6b6b6b", "#0072B2", "#D55E00"
_STYLES = {  # colour, marker, dashes
    "matrix-free": (_BLACK, "x", "-"),
    "hierarchical": (_BLUE, "o", "-"),
    "low rank": (_RED, "s", "-"),
    "K-FAC block-diagonal": ("#009E73", "^", "--"),
    "K-FAC block-tridiagonal": ("#CC79A7", "v", "--"),
    "K-FAC full": ("#F0E442", "P", "--"),
    "EKFAC": ("#E69F00", "D", "-."),
    "diagonal": (_GRAY, "<", ":"),
    "blocks per unit": ("#56B4E9", ">", "-."),
}
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
def _style() -> Iterator[None]:
    """Matplotlib's own settings and ours, whatever the user has set."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def _new(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, name: str, label: str) -> Html:
    """The figure for HTML: of any width, with a label, and with ids of its own."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", dpi=200, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return Html(f'{head} role="img" aria-label="{html.escape(label)}">{rest}')


def _look(method: str) -> dict[str, Any]:
    colour, marker, dashes = _STYLES[method]
    edge = colour if marker == "x" else _BLACK
    return {
        "color": colour,
        "marker": marker,
        "linestyle": dashes,
        "markeredgecolor": edge,
        "markeredgewidth": 1.5 if marker == "x" else 0.6,
    }


def error_figure(
    comparison: Comparison, curves: dict[str, list[tuple[float, float]]], label: str
) -> Html:
    """Error against storage; methods with curves as lines."""
    with _style():
        figure, axes = _new(4.9)
        for method in comparison.methods:
            points = [*curves.get(method.name, []), (method.storage, method.error)]
            points = [(100 * storage, error) for storage, error in points if error > 0]
            if points:
                look = {**_look(method.name), "markersize": 8, "label": method.name}
                look["linestyle"] = "-" if len(points) > 1 else "none"
                axes.plot(*zip(*points, strict=True), **look)
        axes.axvline(100 * comparison.storage, color=_GRAY, linestyle=":", label="budget")
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="stored numbers, % of N²", ylabel="relative error")
        axes.xaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=1.8)
        return _svg(figure, "error", label)


def structure_figures(matrix: HMatrix, labels: tuple[str, str]) -> tuple[Html, Html]:
    """Blocks with their ranks; ranks of each level."""
    with _style():
        blocks, axes = _new(3.9)
        axes.grid(False)
        draw_structure(blocks, axes, matrix, LEVELS)
        ranks, axes = _new(3.9)
        draw_ranks(axes, matrix)
        return _svg(blocks, "blocks", labels[0]), _svg(ranks, "ranks", labels[1])


def spectrum_figure(exact: Spectrum, compressed: Spectrum, damping: float, label: str) -> Html:
    """Eigenvalues in descending order."""
    with _style():
        figure, axes = _new(3.7)
        edge = {"markersize": 5, "markeredgecolor": _BLACK, "markeredgewidth": 0.6}
        looks: dict[str, tuple[Spectrum, dict[str, Any]]] = {
            "exact": (exact, {"color": _BLACK, "linewidth": 3.0}),
            "hierarchical": (compressed, {"color": "#56B4E9", "marker": "o", **edge}),
        }
        for name, (spectrum, look) in looks.items():
            places = range(1, len(spectrum.values) + 1)
            every = max(1, len(places) // 16)
            axes.plot(places, spectrum.values, label=name, markevery=every, **look)
        axes.axhline(damping, color=_RED, linestyle="--", label="damping")
        axes.set(yscale="log", xlabel="number of the eigenvalue", ylabel="eigenvalue")
        figure.legend(loc="outside lower center", ncols=3, columnspacing=1.0, handlelength=1.8)
        return _svg(figure, "spectrum", label)


def layer_figure(layers: Sequence[LayerCurvature], label: str) -> Html:
    """A box for each layer, on a logarithmic scale."""
    with _style():
        figure, axes = _new(1.2 + 0.55 * len(layers))
        names = [_layer_label(layer) for layer in layers]
        for place, layer in enumerate(layers):
            if layer.quantiles is None:
                continue
            least, low, median, high, most = layer.quantiles
            axes.plot([least, most], [place, place], "|-", color=_BLACK, markersize=10)
            axes.barh(
                place, high - low, 0.55, left=low, color="#56B4E9", edgecolor=_BLACK, zorder=3
            )
            axes.plot([median, median], [place - 0.27, place + 0.27], color=_BLACK, lw=3, zorder=4)
        axes.set(xscale="log", xlabel="curvature of a parameter", ylabel="layer")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(False, axis="y")
        return _svg(figure, "layers", label)


def _layer_label(layer: LayerCurvature) -> str:
    """A name that leaves room for the figure; $ would begin a formula."""
    name = layer.name if len(layer.name) <= _NAME else f"…{layer.name[1 - _NAME :]}"
    return f"{name}\n{layer.shape[0]} → {layer.shape[1]}".replace("$", r"\$")


def cg_figure(methods: Sequence[ComparedMethod], tolerance: float, label: str) -> Html:
    """Residuals of conjugate gradients with every preconditioner."""
    with _style():
        figure, axes = _new(4.9)
        for method in methods:
            residuals = method.residuals[1:]
            if residuals:
                places = range(1, len(residuals) + 1)
                marks = _marks(len(residuals))
                name = "none (matrix-free)" if method.name == "matrix-free" else method.name
                look = {**_look(method.name), "markersize": 6, "markevery": marks}
                axes.plot(places, residuals, label=name, **look)
        axes.axhline(tolerance, color=_GRAY, linestyle=":", label="tolerance")
        axes.set(xscale="log", yscale="log", xlabel="iteration", ylabel="relative residual")
        axes.xaxis.set_major_formatter("{x:.0f}")
        figure.legend(loc="outside lower center", ncols=2, columnspacing=1.0, handlelength=2.2)
        return _svg(figure, "convergence", label)


def _marks(count: int) -> list[int]:
    """Points to mark on a logarithmic axis, the last among them."""
    marks = {count - 1}
    place = 1.0
    while place < count:
        marks.add(int(place) - 1)
        place *= 2.0
    return sorted(marks)
