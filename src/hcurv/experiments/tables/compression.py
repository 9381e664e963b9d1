"""What Tables 3 and 5 have in common: rows of networks at two accuracies, in two formats."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from hcurv.experiments.measure import best_time, peak_extra_bytes
from hcurv.experiments.tables.table import Measured, Settings, Values, add_legend
from hcurv.hierarchical import CompressionWarning, HMatrix, compress
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.looks import BLUE, GRAY, GREEN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compress_quietly", "draw_errors", "measure_formats", "row_settings"]

# Products are timed with this many columns, as in the paper.
_NUM_COLUMNS = 128


def row_settings(
    network: str, accuracy: str, num_points: int, paper: tuple[float, float] | None, **options: Any
) -> Settings:
    """Make the settings of one row.

    Args:
        network: the name of a reference network.
        accuracy: the preset of `hcurv.compress` for the tree alone.
        num_points: the number of training images.
        paper: the storage, as a share of N², and the error in the paper, if the row is there.
        options: further options of the tree alone.
    """
    storage, error = (None, None) if paper is None else paper
    return {
        "network": network,
        "accuracy": accuracy,
        "num_points": num_points,
        "paper_storage": storage,
        "paper_error": error,
        "options": options,
    }


def compress_quietly(matrix: Any, **options: Any) -> HMatrix:
    """Compress without warnings about the error, which is measured anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressionWarning)
        return compress(matrix, **options)


def measure_formats(matrix: GaussNewton, settings: Settings) -> Values:
    """Measure the tree alone, with the paper's leaf size and rank cap, and the default format.

    The default gets a tolerance just below the paper's error.
    """
    tolerance = 0.9 * settings["paper_error"] if settings["paper_error"] else 1e-2
    formats = {
        "tree": {"accuracy": settings["accuracy"], "global_rank": 0, **settings["options"]},
        "default": {"tolerance": tolerance},
    }
    return {name: _measure(matrix, options) for name, options in formats.items()}


def _measure(matrix: GaussNewton, options: dict[str, Any]) -> Values:
    found: list[HMatrix] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(lambda: found.append(compress_quietly(matrix, **options)))
    seconds = time.perf_counter() - start
    result = found[0]
    columns = torch.randn(
        matrix.shape[0], _NUM_COLUMNS, generator=torch.Generator().manual_seed(1)
    ).to(matrix.dtype)
    return {
        "error": result.relative_error(matrix),
        "estimated_error": result.estimated_error,
        "storage": result.compression_rate,
        "bytes": result.nbytes,
        "build_seconds": seconds,
        "product_seconds": best_time(lambda: result @ columns, 5, 5),
        "peak_bytes": peak,
        "global_rank": result.global_rank,
        "leaf_size": result.record.leaf_size,
        "ordering": result.tree.ordering,
        "tolerance": result.record.tolerance,
        "max_rank": result.record.max_rank,
    }


def draw_errors(figure: Figure, measured: Measured) -> None:
    """Draw the storage and the error of each row: the paper's, the tree alone, the default."""
    figure.set_size_inches(4.8, 1.8 + 0.3 * len(measured))
    panels = figure.subplots(1, 2, sharey=True)
    places = range(len(measured))
    kinds = {
        "the paper": [(s["paper_storage"], s["paper_error"]) for s, _ in measured],
        "tree alone": [(v["tree"]["storage"], v["tree"]["error"]) for _, v in measured],
        "default": [(v["default"]["storage"], v["default"]["error"]) for _, v in measured],
    }
    looks: dict[str, dict[str, Any]] = {
        "the paper": {"color": GRAY, "marker": "x"},
        "tree alone": {"color": GREEN, "marker": "^"},
        "default": {"color": BLUE, "marker": "o"},
    }
    for name, points in kinds.items():
        for column, axes in enumerate(panels):
            known = [
                ((100 if column == 0 else 1) * point[column], place)
                for place, point in zip(places, points, strict=True)
                if point[column] is not None
            ]
            if known:
                values, rows = zip(*known, strict=True)
                axes.plot(values, rows, linestyle="none", label=name, **looks[name])
    labels = [f"{s['network']} {s['accuracy']}" for s, _ in measured]
    panels[0].set_yticks(places, labels, fontsize=8)
    panels[0].set(xlabel="stored floats, % of N²", ylim=(len(measured) - 0.4, -0.6))
    panels[1].set(xlabel="relative error")
    for axes in panels:
        axes.set(xscale="log")
        axes.grid(color="#e4e4e4")
        axes.set_axisbelow(True)
    add_legend(figure, 3)
