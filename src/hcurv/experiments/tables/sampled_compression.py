"""Table 7 of the paper: compression of sampled entries, on whole training sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hcurv.experiments.tables.compression import compress_quietly
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
    gauss_newton,
    scientific,
    share,
)
from hcurv.report.looks import BLUE, GREEN, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from hcurv.network.sampling import SampledEntries

__all__ = ["TABLE"]

_COUNTS = (10, 100, 1_000, 10_000)
# The colour of each way to compress samples. Markers tell the accuracies apart.
_COLOURS = {"subset": GREEN, "subset entries": BLUE, "entries": RED}
_PAPER = {
    ("AE (a)", "low"): (2.8e-1, 1.3e-1, 1.4e-1, 6.1e-2),
    ("AE (a)", "high"): (2.2e-2, 9.5e-3, 2.7e-3, 9.6e-4),
    ("classifier (b)", "low"): (9.7e-1, 5.3e-1, 4.1e-1, 4.3e-1),
    ("classifier (b)", "high"): (9.7e-1, 3.6e-1, 1.9e-1, 7.3e-2),
}
_NUM_POINTS = {"AE (a)": 60_000, "classifier (b)": 50_000}
_NUM_DIGITS = 1_797


def _settings(
    network: str, num_points: int, way: str, accuracy: str, counts: tuple[int, ...], **options: Any
) -> Settings:
    return {
        "network": network,
        "num_points": num_points,
        "way": way,
        "accuracy": accuracy,
        "counts": list(counts),
        "options": options,
        "seed": 0,
        "paper": list(_PAPER.get((network, accuracy), ())),
    }


def rows(quick: bool) -> dict[str, Settings]:
    """List two networks at two accuracies, with one subset for all entries or the paper's way."""
    if quick:
        options = {"leaf_size": 32, "tolerance": 2e-2}
        return {
            f"{network} {way}": _settings(network, 100, way, "low", counts, **options)
            for network, way, counts in (
                ("AE (digits)", "subset", (5, 50)),
                ("AE (digits)", "subset entries", (5,)),
                ("AE (digits)", "entries", (5,)),
                ("classifier (digits)", "subset", (5, 50)),
            )
        }
    found = {}
    for network, num_points in _NUM_POINTS.items():
        for accuracy in ("low", "high"):
            found[f"{network} subset {accuracy}"] = _settings(
                network, num_points, "subset", accuracy, _COUNTS
            )
    for network, num_points in _NUM_POINTS.items():
        way = "subset entries"
        found[f"{network} {way} low"] = _settings(network, num_points, way, "low", _COUNTS)
    found["AE (digits) entries high"] = _settings(
        "AE (digits)", _NUM_DIGITS, "entries", "high", _COUNTS[:3], leaf_size=128, max_rank=128
    )
    return found


def measure(settings: Settings, data: str | None) -> Values:
    """Measure the errors against the exact matrix of all points."""
    matrix = gauss_newton(settings, data)
    found: Values = {"size": matrix.shape[0], "errors": [], "storage": [], "seconds": []}
    for count in settings["counts"]:
        start = time.perf_counter()
        if settings["way"] == "entries":
            entries = matrix.sample_entries(count, "importance", seed=settings["seed"])
            sampled: Any = _all_entries(entries)
        else:
            sampled = matrix.subsample(count, seed=settings["seed"])
        result = compress_quietly(
            sampled,
            accuracy=settings["accuracy"],
            method="sketch" if settings["way"] == "subset" else "neighbors",
            global_rank=0,
            **settings["options"],
        )
        found["seconds"].append(time.perf_counter() - start)
        found["errors"].append(result.relative_error(matrix))
        found["storage"].append(result.compression_rate)
    return found


def _all_entries(sampled: SampledEntries) -> Tensor:
    """Evaluate every entry once, which its indices determine, and keep them as a dense matrix."""
    rows, cols = torch.triu_indices(*sampled.shape)
    values = sampled.pairs(rows, cols)
    result = values.new_empty(sampled.shape)
    result[rows, cols] = values
    result[cols, rows] = values
    return result


def render(measured: Measured) -> Rendered:
    """Show a line for each way, with the paper's below it."""
    counts = max((settings["counts"] for settings, _ in measured), key=len)
    header = ["network", "accuracy", "way", *(f"c = {count}: ε at %K" for count in counts)]
    lines = []
    for settings, values in measured:
        start = [settings["network"], settings["accuracy"]]
        pairs = zip(values["errors"], values["storage"], strict=True)
        cells = [f"{scientific(error)} at {share(storage, 3)}" for error, storage in pairs]
        lines.append([*start, settings["way"], *cells, *["–"] * (len(counts) - len(cells))])
        if settings["paper"] and settings["way"] == "subset":
            lines.append([*start, "paper", *map(scientific, settings["paper"])])
    return Rendered(header, lines)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the errors against the number of samples."""
    networks = list(dict.fromkeys(settings["network"] for settings, _ in measured))
    figure.set_size_inches(4.8, 3.0 * len(networks) + 1.6)
    grid = figure.subplots(len(networks), 1, squeeze=False)
    for axes, network in zip(grid[:, 0], networks, strict=True):
        own = [(s, v) for s, v in measured if s["network"] == network]
        for settings, values in own:
            options = {
                "color": _COLOURS[settings["way"]],
                "marker": "o" if settings["accuracy"] == "low" else "s",
            }
            label = f"{settings['way']}, {settings['accuracy']}"
            axes.loglog(settings["counts"], values["errors"], label=label, **options)
            if settings["paper"] and settings["way"] == "subset":
                axes.loglog(
                    _COUNTS,
                    settings["paper"],
                    linestyle="--",
                    fillstyle="none",
                    label=f"paper, {settings['accuracy']}",
                    **options,
                )
        axes.set(title=network, xlabel="samples c", ylabel="relative error")
    add_legend(figure)


TABLE = Table(
    name="sampled-compression",
    number=7,
    title="Compression of sampled entries",
    notes=(
        "Errors against the exact matrix over the whole training set, trees alone, leaf size and"
        " rank cap as in the paper. `subset`: `hcurv.compress(H.subsample(c))`, one weighted subset"
        " of c points for all entries, which is cheap for any c. `subset entries`: its entries"
        ' alone, method="neighbors", as in the paper. `entries`: the paper\'s way throughout,'
        ' `hcurv.compress(H.sample_entries(c), method="neighbors")`, samples of its own for every'
        " entry, whose probabilities alone take O(n) work for every entry: on scikit-learn's digits"
        " (1797 points; leaves and rank cap of 128)."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
