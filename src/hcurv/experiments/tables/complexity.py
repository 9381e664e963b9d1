"""Table 2 of the paper, measured: how construction, storage and solve grow with N and with n."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hcurv.baselines import KFAC, LowRank, MatrixFree
from hcurv.experiments.measure import best_time
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.experiments.tables.compression import compress_quietly
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
)
from hcurv.hierarchical import HMatrix
from hcurv.linalg import eigsh
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.looks import look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

# The paper's names of the methods, and ours.
_METHODS = {
    "MF": "matrix-free",
    "RSVD": "low rank",
    "K-FAC": "K-FAC block-tridiagonal",
    "HM": "hierarchical",
}
_QUANTITIES = ("construction", "storage", "solve")
_PAPER = {
    "MF": ("–", "N n", "N n √κ"),
    "RSVD": ("N n r", "N r", "N r"),
    "K-FAC": ("N n k", "N", "N d"),
    "HM": ("N n (r₀ + d)", "N n", "N r₀"),
}


def rows(quick: bool) -> dict[str, Settings]:
    """List networks of growing width with the same points, and one network with more points."""
    inputs = 8 if quick else 128
    widths = (4, 8) if quick else (64, 128, 256, 512)
    points = (50, 100) if quick else (500, 1000, 2000, 4000, 8000)
    fixed = {"width": widths[1], "num_points": points[1], "inputs": inputs}
    found = {f"width {w}": {**fixed, "width": w, "grows": "N"} for w in widths}
    found |= {f"{n} points": {**fixed, "num_points": n, "grows": "n"} for n in points}
    common = {"rank": 8, "seed": 0, "repeats": 1} if quick else {"rank": 64, "seed": 0}
    return {name: {**settings, **common} for name, settings in found.items()}


def measure(settings: Settings, data: str | None) -> Values:
    """Measure construction, storage and solve of the four methods on one network."""
    width, inputs, seed = settings["width"], settings["inputs"], settings["seed"]
    points = torch.rand(
        settings["num_points"], inputs, generator=torch.Generator().manual_seed(seed)
    )
    model, loss = seeded_mlp((inputs, width, width, 10), seed), nn.CrossEntropyLoss()
    matrix = GaussNewton(model, loss, points)
    damping = 1e-2 * float(eigsh(matrix, 1, tolerance=1e-3).values[0])
    rhs = torch.randn(matrix.shape[0], 16, generator=torch.Generator().manual_seed(1))

    def hierarchical() -> HMatrix:
        return compress_quietly(
            GaussNewton(model, loss, points),
            accuracy="low",
            global_rank=0,
            damping=damping,
        )

    builders = {
        "MF": lambda: MatrixFree(GaussNewton(model, loss, points), tolerance=1e-4),
        "RSVD": lambda: LowRank(GaussNewton(model, loss, points), settings["rank"]),
        "K-FAC": lambda: KFAC(model, loss, points, structure="block-tridiagonal"),
        "HM": hierarchical,
    }
    repeats = settings.get("repeats", 3)
    found: Values = {"size": matrix.shape[0]}
    for name, build in builders.items():
        operator: Any = build()
        solve = partial(operator.factorize(damping).solve, rhs)
        found[name] = {
            "construction": best_time(build, repeats, 30),
            "storage": float(operator.num_stored),
            "solve": best_time(solve, repeats, 30),
        }
    return found


def _sweep(measured: Measured, what: str) -> tuple[list[float], list[Values]]:
    """Collect the values of N or n, and what was measured at each of them."""
    chosen = [(s, v) for s, v in measured if s["grows"] == what]
    sizes = [float(v["size"] if what == "N" else s["num_points"]) for s, v in chosen]
    return sizes, [v for _, v in chosen]


def render(measured: Measured) -> Rendered:
    """Show the fitted exponents beside the paper's terms."""
    header = ["method"]
    for quantity in _QUANTITIES:
        header += [f"{quantity}: paper", "exponent of N", "exponent of n"]
    lines = []
    for method in _METHODS:
        line = [method]
        for place, quantity in enumerate(_QUANTITIES):
            line.append(_PAPER[method][place])
            for what in ("N", "n"):
                sizes, values = _sweep(measured, what)
                series = [v[method][quantity] for v in values]
                if len(set(sizes)) > 1:
                    slope, _ = np.polyfit(np.log(sizes), np.log(series), 1)
                    line.append(f"{slope:.2f}")
                else:
                    line.append("–")
        lines.append(line)
    return Rendered(header, lines)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw all quantities against N and against n."""
    figure.set_size_inches(4.8, 7.6)
    grid = figure.subplots(3, 2, sharey="row", sharex="col")
    for column, what in enumerate(("N", "n")):
        sizes, values = _sweep(measured, what)
        for axes, quantity in zip(grid[:, column], _QUANTITIES, strict=True):
            for method, name in _METHODS.items():
                series = [v[method][quantity] for v in values]
                axes.plot(sizes, series, **look_of(name).options(), label=f"{method}: {name}")
            axes.set(xscale="log", yscale="log")
            if column == 0:
                unit = "floats" if quantity == "storage" else "seconds"
                axes.set_ylabel(f"{quantity}, {unit}")
            axes.set_xticks(sizes, labels=[f"{size:,.0f}" for size in sizes])
            axes.tick_params("x", labelsize=8, labelrotation=45)
            axes.minorticks_off()
        grid[-1, column].set_xlabel({"N": "parameters N", "n": "points n"}[what])
    add_legend(figure)


TABLE = Table(
    name="complexity",
    number=2,
    title="Complexities, measured",
    notes=(
        "Classifiers 128-w-w-10 on uniform random inputs: exponents of N for w = 64 … 512 with"
        " n = 1000, of n for 500 … 8000 points with w = 128. MF: conjugate gradients to 1e-4; RSVD"
        " of rank 64; K-FAC block-tridiagonal, one sample; HM at low accuracy, factorized;"
        " λ = 1e-2 λ₁, 16 right-hand sides. HM stores the compressed matrix alone; its paper's"
        " N n is the precomputation, which is no longer needed once it is built."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
