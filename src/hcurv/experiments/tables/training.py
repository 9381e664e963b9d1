"""Training: the loss against time, of `hcurv.optim.GaussNewton` and of other optimizers."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
)
from hcurv.experiments.training_methods import METHODS, Curve, run_method
from hcurv.experiments.training_problems import make_problem
from hcurv.report.looks import BLACK, BLUE, GREEN, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

_OURS = "hcurv.optim.GaussNewton"
_COLOURS = {
    _OURS: BLUE,
    "Adam": RED,
    "SGD with momentum": ORANGE,
    "L-BFGS": BLACK,
    "K-FAC": GREEN,
}
# Every choice of options is tried for this share of the time, and the best one is run in full.
_TUNING_SHARE = 1 / 8
_ADAM = (3e-4, 1e-3, 3e-3, 1e-2)


def _problem(
    num_points: int,
    seconds: float,
    batch: int,
    sgd: list[float],
    kfac: list[tuple[float, float]],
    ours: dict[str, Any] | None = None,
    iterations: int = 20,
) -> Settings:
    """The settings of one problem, and the options among which each method chooses."""
    choices = {
        _OURS: [ours or {}],
        "Adam": [{"lr": lr, "batch": batch} for lr in _ADAM],
        "SGD with momentum": [{"lr": lr, "batch": batch} for lr in sgd],
        "L-BFGS": [{"max_iter": iterations}],
        "K-FAC": [{"lr": lr, "damping": damping, "batch": batch} for lr, damping in kfac],
    }
    return {"num_points": num_points, "seconds": seconds, "choices": choices}


_KFAC_GRID = list(product((0.03, 0.3), (1e-2, 1e-1)))
_FULL = {
    "196-64-16-64-196 autoencoder": _problem(
        5000, 40, 250, [0.01, 0.03, 0.1, 0.3], _KFAC_GRID, {"curvature_points": 1000}
    ),
    "784-250-30-250-784 autoencoder": _problem(
        5000,
        20,
        250,
        [3e-3, 0.01, 0.03, 0.1],
        _KFAC_GRID,
        {"method": "kfac", "batch": 1000, "curvature_points": 500, "max_iterations": 12},
    ),
    "784-1000-500-250-30 autoencoder": _problem(
        5000,
        30,
        250,
        [0.3, 1.0, 3.0, 10.0],
        list(product((0.03, 0.3), (1e-4, 1e-3))),
        {"method": "kfac", "batch": 1000, "curvature_points": 250, "max_iterations": 5},
        5,
    ),
    "concrete": _problem(
        1029,
        15,
        128,
        [0.03, 0.1, 0.3, 1.0],
        list(product((0.01, 0.1), (0.1, 1.0))),
    ),
    "physics-informed": _problem(
        500,
        20,
        500,
        [1e-5, 1e-4, 1e-3, 1e-2],
        list(product((0.03, 0.3), (1.0, 10.0))),
    ),
}
_QUICK = {
    "digits autoencoder": _problem(500, 0.2, 100, [0.1], [(0.1, 0.1)]),
    "physics-informed (quick)": _problem(60, 0.2, 60, [1e-6], [(0.01, 1.0)]),
}


def rows(quick: bool) -> dict[str, Settings]:
    """List every method on every problem."""
    return {
        f"{problem}, {method}": {
            "problem": problem,
            "method": method,
            "num_points": settings["num_points"],
            "seconds": settings["seconds"],
            "choices": settings["choices"][method],
            "seed": 0,
        }
        for problem, settings in (_QUICK if quick else _FULL).items()
        for method in METHODS
    }


def measure(settings: Settings, data: str | None) -> Values:
    """Choose the options in short runs, and draw the curve of the best."""

    def run(options: dict[str, Any], seconds: float, num_marks: int) -> tuple[int, Curve]:
        problem = make_problem(settings["problem"], settings["num_points"], data, settings["seed"])
        size = sum(p.numel() for p in problem.model.parameters())
        method, seed = settings["method"], settings["seed"]
        return size, run_method(method, problem, options, seconds, seed, num_marks)

    choices = settings["choices"]
    ends = [math.nan] * len(choices)
    if len(choices) > 1:
        short = _TUNING_SHARE * settings["seconds"]
        ends = [run(options, short, 1)[1][-1][1] for options in choices]
    finite = [end if math.isfinite(end) else math.inf for end in ends]
    best = choices[finite.index(min(finite))]
    size, curve = run(best, settings["seconds"], 40)
    return {"size": size, "options": best, "tuning": ends, "curve": curve, "loss": curve[-1][1]}


def _by_problem(measured: Measured) -> dict[str, dict[str, tuple[Settings, Values]]]:
    found: dict[str, dict[str, tuple[Settings, Values]]] = {}
    for settings, values in measured:
        found.setdefault(settings["problem"], {})[settings["method"]] = (settings, values)
    return found


def _cell(value: float | None, is_best: bool) -> str:
    if value is None:
        return "diverged"
    return f"**{value:.3g}**" if is_best else f"{value:.3g}"


def render(measured: Measured) -> Rendered:
    """Show the loss of every method at the end, the smallest in bold."""
    header = ["problem", "N", "n", "seconds", *METHODS]
    lines = []
    for problem, methods in _by_problem(measured).items():
        settings, values = next(iter(methods.values()))
        ends = {method: found["loss"] for method, (_, found) in methods.items()}
        known = [end for end in ends.values() if end is not None and math.isfinite(end)]
        cells = [_cell(ends.get(m), m in ends and ends[m] == min(known)) for m in METHODS]
        size, count = f"{values['size']:,}", f"{settings['num_points']:,}"
        lines.append([problem, size, count, f"{settings['seconds']:g}", *cells])
    return Rendered(header, lines)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the loss against time, one picture for each problem."""
    found = _by_problem(measured)
    figure.set_size_inches(4.8, 1.2 + 2.2 * len(found))
    grid = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (problem, methods) in zip(grid, found.items(), strict=True):
        lowest, first = math.inf, math.inf
        for method, (_, values) in methods.items():
            points = [(s, v) for s, v in values["curve"] if v is not None and math.isfinite(v)]
            dashes = "-" if method == _OURS else "--"
            axes.plot(*zip(*points, strict=True), dashes, color=_COLOURS[method], label=method)
            lowest, first = min(lowest, *(v for _, v in points)), points[0][1]
        axes.set(yscale="log", ylabel="training loss", ylim=(lowest / 1.3, 1.3 * first))
        axes.set_title(problem, fontsize=10)
        axes.grid(alpha=0.3)
    grid[-1].set_xlabel("seconds")
    add_legend(figure)


TABLE = Table(
    name="training",
    number=None,
    title="Training loss against time",
    notes=(
        "The loss over all n training points at the end of the time; the smallest is bold. Seconds"
        " are those of one processor core, without the time in which losses were measured. All"
        " methods start from the same weights. Images are the first n of MNIST. `GaussNewton` has"
        " default options and takes all points in each step, with these exceptions, which were"
        " found in a few short trials: the curvature of the first autoencoder comes from 1,000"
        " points of each step; on the second one it takes minibatches of 1,000 points, the"
        ' curvature of 500 of them, `method="kfac"` and at most 12 iterations; on the third one'
        ' minibatches of 1,000, the curvature of 250, `method="kfac"` and at most 5 iterations.'
        " L-BFGS takes all points (history 20, strong Wolfe line search). Adam, SGD (momentum 0.9)"
        " and K-FAC (fixed damping, momentum 0.9, factors of 1,000 points renewed every 10 steps)"
        " take minibatches of 250 images, 128 rows of concrete, or all points (physics-informed)."
        " Their learning rates, and K-FAC's damping, are the best of four choices, each tried for"
        " an eighth of the time, which is not counted. The first two autoencoders have half squared"
        " errors, summed over outputs. The third one has cross-entropies, averaged over outputs,"
        " and its decoder mirrors its encoder."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
