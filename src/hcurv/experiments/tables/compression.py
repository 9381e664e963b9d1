"""What Tables 3 and 5 have in common: rows of networks at two accuracies, in two formats."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from hcurv.experiments.measure import best_time, peak_extra_bytes
from hcurv.experiments.tables.table import COLOURS, Measured, Settings, Values
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import CompressionWarning, HMatrix, compress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compress_quietly", "draw_errors", "measure_formats", "row_settings"]

_NUM_COLUMNS = 128  # of products


def row_settings(
    network: str, accuracy: str, num_points: int, paper: tuple[float, float] | None, **options: Any
) -> Settings:
    """One row: options are those of the tree alone; the paper's are storage (share) and error."""
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
    """Without the warnings about rank caps: errors are measured anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressionWarning)
        return compress(matrix, **options)


def measure_formats(matrix: GaussNewton, settings: Settings) -> Values:
    """The tree alone with the paper's leaf size and rank cap; and the default at its error."""
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
    """Error against storage: the paper's, the tree alone, the default."""
    axes = figure.subplots()
    kinds = {
        "the paper": [(s["paper_storage"], s["paper_error"]) for s, _ in measured],
        "tree alone": [(v["tree"]["storage"], v["tree"]["error"]) for _, v in measured],
        "default": [(v["default"]["storage"], v["default"]["error"]) for _, v in measured],
    }
    for number, (name, points) in enumerate(kinds.items()):
        known = [(100 * x, y) for x, y in points if x is not None and y is not None]
        if known:
            axes.loglog(*zip(*known, strict=True), "os^"[number], color=COLOURS[number], label=name)
    for settings, values in measured:
        ends = [(values[kind]["storage"], values[kind]["error"]) for kind in ("tree", "default")]
        if settings["paper_error"] is not None:
            ends.insert(0, (settings["paper_storage"], settings["paper_error"]))
        line = [(100 * x, y) for x, y in ends]
        axes.loglog(*zip(*line, strict=True), ":", color="gray", linewidth=0.8)
        label = f"{settings['network']} {settings['accuracy']}"
        # To the left of its line, where there is room.
        place: dict[str, Any] = {"xytext": (-6, -2.5), "textcoords": "offset points"}
        axes.annotate(label, line[-1], ha="right", fontsize=7, color="0.25", **place)
    axes.margins(x=0.18)
    axes.set(xlabel="stored floats, % of N²", ylabel="relative error ε_F")
    axes.legend()
