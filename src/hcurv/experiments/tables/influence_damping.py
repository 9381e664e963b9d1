"""At which damping do influence scores predict best what training again gives?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.applications.damping_choice import APPROXIMATE_SHARE, EXACT_SHARE
from hcurv.applications.influence import influence
from hcurv.baselines import KFAC
from hcurv.experiments.influence_study import (
    RECIPES,
    datamodelling_scores,
    random_halves,
    read_split,
    retrained,
    train,
)
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
)
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.looks import look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

_OURS, _RIVAL = "hcurv.influence", "EKFAC"
_LOOKS = {_OURS: look_of("H.factorize"), _RIVAL: look_of(_RIVAL)}
# Seeds of the initial weights of networks that are trained again start here.
_FIRST_SEED = 1000


def rows(quick: bool) -> dict[str, Settings]:
    """One row for each problem."""
    if quick:
        return {"digits": {"problem": "digits 64-20-10", "num_halves": 6, "shares": [0.1, 10.0]}}
    shares = [0.1, 1.0, 3.0, 10.0, 30.0, 100.0]
    problems = {
        "vehicle 18-64-32-4": 100,
        "waveform 21-64-32-3": 100,
        "satellite 36-64-32-6": 100,
        "concrete 8-128-128-128-1": 100,
        "MNIST 784-128-64-10": 50,
    }
    return {
        name: {"problem": name, "num_halves": count, "shares": shares}
        for name, count in problems.items()
    }


def measure(settings: Settings, data: str | None) -> Values:
    """Linear datamodelling scores of both methods at every damping."""
    recipe = RECIPES[settings["problem"]]
    split = read_split(recipe, data)
    (model,) = train(recipe, split, torch.arange(recipe.num_train)[None], [0])
    halves = random_halves(recipe.num_train, settings["num_halves"])
    losses = retrained(recipe, split, halves, _FIRST_SEED)
    points, queries = (split.inputs, split.targets), (split.queries, split.answers)
    matrix = GaussNewton(model, split.loss, points)
    mean = matrix.trace() / matrix.shape[0]
    kfac = KFAC(model, split.loss, points, num_samples=None, ekfac=True)

    def scores(damping: float, curvature: Any) -> Tensor:
        return influence(
            model,
            split.loss,
            points,
            damping,
            curvature=curvature,
            tolerance=1e-2,
            check_damping=False,
        ).scores(queries)

    methods: dict[str, dict[str, list[float]]] = {}
    for name, curvature in ((_OURS, None), (_RIVAL, kfac)):
        found = methods[name] = {"lds": [], "error": [], "seconds": []}
        for share in settings["shares"]:
            start = time.perf_counter()
            by_query = datamodelling_scores(scores(share * mean, curvature), halves, losses)
            found["lds"].append(float(by_query.mean()))
            found["error"].append(float(by_query.std()) / len(by_query) ** 0.5)
            found["seconds"].append(time.perf_counter() - start)
    return {
        "size": matrix.shape[0],
        "num_points": recipe.num_train,
        "mean_diagonal": mean,
        "recipe_share": recipe.damping / mean,
        "methods": methods,
    }


def render(measured: Measured) -> Rendered:
    """One line for each problem and method; the best is bold."""
    shares = measured[0][0]["shares"]
    header = ["problem", "method", *(f"{share:g}" for share in shares), "of the training"]
    lines = []
    for settings, values in measured:
        for method, found in values["methods"].items():
            best = max(found["lds"])
            cells = [f"{lds:.3f}" for lds in found["lds"]]
            cells = [
                f"**{cell}**" if lds == best else cell
                for cell, lds in zip(cells, found["lds"], strict=True)
            ]
            own = f"{values['recipe_share']:.1f}"
            lines.append([settings["problem"], method, *cells, own])
    return Rendered(header, lines)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the score against the damping, one panel for each problem."""
    figure.set_size_inches(4.8, 1.2 + 1.8 * len(measured))
    panels = figure.subplots(len(measured), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (settings, values) in zip(panels, measured, strict=True):
        for method, found in values["methods"].items():
            options = _LOOKS[method].options()
            axes.plot(settings["shares"], found["lds"], label=method, **options)
        axes.set_xscale("log")
        axes.set_title(settings["problem"], fontsize=9)
        axes.set_ylabel("LDS")
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("damping over the mean diagonal entry")
    add_legend(figure)


TABLE = Table(
    name="influence-damping",
    number=None,
    title="Influence scores at several dampings against retraining",
    notes=(
        "The linear datamodelling score (see the table influence) of one network, with networks"
        " trained again on random halves of the training points (100; MNIST: 50) from other initial"
        " weights, at dampings that are multiples of the mean diagonal entry of H: the columns. The"
        " best of each line is bold. The last column is the weight decay of the training plus"
        " 1/(learning rate · steps), over the mean diagonal entry. The default of"
        f" `hcurv.influence` is {EXACT_SHARE:g}, and {APPROXIMATE_SHARE:g} if an approximation is"
        " passed as `curvature=`."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
