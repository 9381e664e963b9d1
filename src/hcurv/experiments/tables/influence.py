"""Influence scores beside their rivals: against the exact answer, and against retraining."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hcurv.applications.damping_choice import rank_correlations
from hcurv.applications.influence import influence
from hcurv.applications.influence_scores import InfluenceWarning
from hcurv.baselines import KFAC
from hcurv.experiments.influence_study import (
    RECIPES,
    Recipe,
    Split,
    datamodelling_scores,
    flip_labels,
    lissa,
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
from hcurv.linalg import cg
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.looks import Look, look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

# Linear datamodelling scores of one network, published with the benchmark dattri for this network
# on MNIST (50 halves): (CG, LiSSA, Arnoldi, TRAK with one network).
_PUBLISHED = {"CG": 0.26, "LiSSA": 0.14, "Arnoldi": 0.09, "TRAK-1": 0.11}
_OURS = "hcurv.influence"
_LOOKS = {
    _OURS: "hierarchical",
    "CG, 10 ": "K-FAC block-diagonal",
    "CG": "K-FAC block-tridiagonal",
    "LiSSA": "blocks per unit",
    "gradients": "diagonal",
}
# Networks that are trained again start from initial weights of their own, with seeds from this one
# on, or from the same ones, with the seed 0. The first is what a user sees who trains again.
_STARTS = {"other": 1000, "same": 0}


def rows(quick: bool) -> dict[str, Settings]:
    """List the problems, and the search for mislabelled points."""
    shared = {"tolerance": 1e-2, "lissa_steps": 1000, "cg_iterations": 100}
    if quick:
        digits = "digits 64-20-10"
        sizes = {"num_halves": 6, "num_truth": 5, "num_samples": 20}
        return {
            digits: {
                "problem": digits,
                "kind": "scores",
                **sizes,
                **shared,
                "lissa_steps": 50,
                "default_damping": True,
            },
            "digits, mislabelled": {"problem": digits, "kind": "labels", **sizes, **shared},
        }
    concrete, classifier = "concrete 8-128-128-128-1", "MNIST 784-128-64-10"
    found: dict[str, Settings] = {
        concrete: {
            "problem": concrete,
            "kind": "scores",
            "num_halves": 100,
            "num_truth": 20,
            "default_damping": True,
            **shared,
        },
        # On MNIST, converged conjugate gradients without a preconditioner are left out, because
        # they take long.
        classifier: {
            "problem": classifier,
            "kind": "scores",
            "num_halves": 50,
            "num_truth": 20,
            "default_damping": True,
            "starts": ["other"],
            "tolerance": 1e-2,
            "lissa_steps": 200,
            "cg_iterations": None,
        },
    }
    # The default tolerance and a finer one, on the queries whose exact scores are known, without
    # retraining.
    for label, tolerance in (("default tolerance", 3e-3), ("tolerance 5e-4", 5e-4)):
        found[f"{classifier}, {label}"] = {
            **found[classifier],
            "num_halves": 0,
            "num_queries": 20,
            "starts": [],
            "tolerance": tolerance,
        }
    found["MNIST, mislabelled"] = {
        "problem": "MNIST 784-128-64-10, weight decay",
        "kind": "labels",
        "num_samples": 100,
        **shared,
    }
    return found


def measure(settings: Settings, data: str | None) -> Values:
    """Train the network of a row, and measure what all methods are worth."""
    recipe = RECIPES[settings["problem"]]
    split = read_split(recipe, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfluenceWarning)  # the table shows the sensitivity
        if settings["kind"] == "labels":
            return _mislabelled(settings, recipe, split)
        return _scores(settings, recipe, split)


def _scores(settings: Settings, recipe: Recipe, split: Split) -> Values:
    everything = torch.arange(recipe.num_train)[None]
    (model,) = train(recipe, split, everything, [0])
    asked = settings.get("num_queries", len(split.queries))
    data, queries = (split.inputs, split.targets), (split.queries[:asked], split.answers[:asked])
    damping = recipe.damping
    infl = influence(model, split.loss, data, damping)
    few = (split.queries[:4], split.answers[:4])
    values: Values = {
        "size": infl.matrix.shape[0],
        "num_points": infl.num_points,
        "num_queries": asked,
        "damping": damping,
        "sensitivity": {str(f): c for f, c in infl.damping_sensitivity(few).items()},
        "plan": str(infl.factorized.plan),
        "published": _PUBLISHED if "MNIST" in settings["problem"] and asked > 20 else {},
    }
    with torch.no_grad():
        values["train_loss"] = float(split.loss(model(split.inputs), split.targets))
        values["test_loss"] = float(split.loss(model(split.queries), split.answers))
    truth = _truth(model, split, damping, settings["num_truth"])
    halves = random_halves(recipe.num_train, settings["num_halves"])
    losses = {
        start: retrained(recipe, split, halves, _STARTS[start])
        for start in settings.get("starts", _STARTS)
    }
    methods: dict[str, dict[str, Any]] = {}
    for name, compute in _methods(settings, model, split, damping).items():
        begin = time.perf_counter()
        scores = compute(queries)
        methods[name] = {"seconds": time.perf_counter() - begin}
        found = rank_correlations(scores[: len(truth)], truth)
        methods[name] |= {"correlation": float(found.mean()), "least": float(found.min())}
        for start, measured in losses.items():
            by_query = datamodelling_scores(scores, halves, measured)
            error = float(by_query.std()) / len(by_query) ** 0.5
            methods[name][f"lds_{start}"] = float(by_query.mean())
            methods[name][f"lds_{start}_error"] = error
    return {**values, "methods": methods}


def _methods(
    settings: Settings, model: nn.Module, split: Split, damping: float
) -> dict[str, Callable[[tuple[Tensor, Tensor]], Tensor]]:
    """Functions that compute all scores of some queries, with everything that they need."""
    data, tolerance = (split.inputs, split.targets), settings["tolerance"]

    def ours(queries: tuple[Tensor, Tensor]) -> Tensor:
        return influence(model, split.loss, data, damping, tolerance=tolerance).scores(queries)

    def ekfac(queries: tuple[Tensor, Tensor]) -> Tensor:
        kfac = KFAC(model, split.loss, data, num_samples=None, ekfac=True)
        return influence(
            model, split.loss, data, damping, curvature=kfac, check_damping=False
        ).scores(queries)

    def by(solve: Callable[[GaussNewton, Tensor], Tensor]) -> Callable[..., Tensor]:
        def compute(queries: tuple[Tensor, Tensor]) -> Tensor:
            matrix = GaussNewton(model, split.loss, data)
            columns = matrix.point_gradients(queries).to_dense().T.contiguous()
            solved = solve(matrix, columns)
            return matrix.loss_scale * (matrix.point_gradients(data) @ solved).T

        return compute

    def conjugate_gradients(num: int) -> Callable[[GaussNewton, Tensor], Tensor]:
        return lambda matrix, columns: (
            cg(matrix, columns, damping=damping, tolerance=tolerance, max_iterations=num).solution
        )

    def with_default_damping(queries: tuple[Tensor, Tensor]) -> Tensor:
        return influence(model, split.loss, data, tolerance=tolerance).scores(queries)

    if "num_queries" in settings:
        return {f"{_OURS}, tolerance {tolerance:g}, {settings['num_queries']} queries": ours}
    found = {_OURS: ours}
    if settings["default_damping"]:
        found[f"{_OURS}, default damping"] = with_default_damping
    found |= {"EKFAC": ekfac, "CG, 10 iterations": by(conjugate_gradients(10))}
    most = settings["cg_iterations"]
    if most is not None:
        found[f"CG, {most} iterations at most"] = by(conjugate_gradients(most))
    return {
        **found,
        f"LiSSA, {settings['lissa_steps']} steps": by(
            lambda _, columns: lissa(
                model, split.loss, data, damping, columns, num_steps=settings["lissa_steps"]
            )
        ),
        "gradients alone": by(lambda _, columns: columns),
    }


def _truth(model: nn.Module, split: Split, damping: float, num_queries: int) -> Tensor:
    """Scores in double precision, exact in sample space or by solves to 1e-6, (queries, n)."""
    exact = copy.deepcopy(model).double()
    targets, answers = (
        values.double() if values.is_floating_point() else values
        for values in (split.targets, split.answers[:num_queries])
    )
    matrix = GaussNewton(exact, split.loss, (split.inputs.double(), targets))
    small = matrix.num_root_rows <= 3000
    factorized = matrix.factorize(damping, 1e-6, method="samples" if small else "iterations")
    columns = matrix.point_gradients(split.queries[:num_queries].double(), answers).to_dense()
    gradients = matrix.point_gradients(split.inputs.double(), targets)
    return (gradients @ factorized.solve(columns.T.contiguous())).T


def _mislabelled(settings: Settings, recipe: Recipe, split: Split) -> Values:
    """The share of wrong labels among the tenth of the points that looks the most suspicious."""
    labels = flip_labels(split.targets, 0.1, recipe.widths[-1])
    wrong = labels != split.targets
    changed = Split(split.inputs, labels, split.queries, split.answers)
    (model,) = train(recipe, changed, torch.arange(recipe.num_train)[None], [0])
    data = (split.inputs, labels)

    def self_scores(curvature: Any = None) -> Tensor:
        infl = influence(
            model,
            split.loss,
            data,
            recipe.damping,
            curvature=curvature,
            tolerance=settings["tolerance"],
        )
        count = settings["num_samples"] if curvature is None else None
        return infl.self_scores(num_samples=count)

    def losses() -> Tensor:
        with torch.no_grad():
            return split.losses(model(split.inputs), labels)

    def norms() -> Tensor:
        matrix = GaussNewton(model, split.loss, data)
        chunks = matrix.point_gradients(data).chunks(256)
        return torch.cat([chunk.to_dense().square().sum(1) for chunk in chunks])

    methods: dict[str, dict[str, float]] = {}
    for name, compute in {
        _OURS: self_scores,
        "EKFAC": lambda: self_scores(KFAC(model, split.loss, data, num_samples=None, ekfac=True)),
        "gradient norms": norms,
        "losses": losses,
    }.items():
        begin = time.perf_counter()
        order = compute().argsort(descending=True)
        seconds = time.perf_counter() - begin
        share = float(wrong[order[: int(wrong.sum())]].double().mean())
        methods[name] = {"seconds": seconds, "found": share}
    with torch.no_grad():
        fitted = float((model(split.inputs).argmax(1) == labels)[wrong].double().mean())
    return {"num_points": len(labels), "wrong_labels_learned": fitted, "methods": methods}


def render(measured: Measured) -> Rendered:
    """One line for each problem and method."""
    header = ["problem", "method", "seconds", "rank correlation with the exact answer (least)"]
    header += ["LDS, other initial weights", "LDS, same initial weights", "wrong labels found"]
    lines = []
    for settings, values in measured:
        name = settings["problem"] + (", mislabelled" if settings["kind"] == "labels" else "")
        for method, found in values["methods"].items():
            line = [name, method, f"{found['seconds']:.1f}"]
            if "correlation" in found:
                line += [f"{found['correlation']:.4f} ({found['least']:.4f})"]
                for start in _STARTS:
                    score, error = found.get(f"lds_{start}"), found.get(f"lds_{start}_error")
                    line.append("–" if score is None else f"{score:.3f} ± {error:.3f}")
                line += ["–"]
            else:
                line += ["–"] * 3 + [f"{100 * found['found']:.1f} %"]
            lines.append(line)
        for method, value in values.get("published", {}).items():
            lines.append([name, f"{method}, as published", "–", "–", f"{value:.2f}", "–", "–"])
    return Rendered(header, lines)


def _look(method: str) -> Look:
    """How a method is drawn; those that no other figure has take looks of methods not shown."""
    if method == _OURS:
        return look_of("H.factorize")
    for start, other in _LOOKS.items():
        if method.startswith(start):
            return look_of(other)
    return look_of(method)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the linear datamodelling score against the time, one panel for each problem."""
    studies = [(s, v) for s, v in measured if s["kind"] == "scores" and s["num_halves"]]
    for axes, (settings, values) in zip(
        figure.subplots(len(studies), 1, squeeze=False)[:, 0], studies, strict=True
    ):
        for method, found in values["methods"].items():
            options = {**_look(method).options(), "linestyle": "none"}
            point = (found["seconds"], found["lds_other"])
            axes.errorbar(*point, found["lds_other_error"], label=method, **options)
        for value in values["published"].values():
            axes.axhline(value, color="#bbbbbb", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_title(settings["problem"], fontsize=9)
        axes.set_ylabel("LDS")
    figure.axes[-1].set_xlabel("seconds")
    add_legend(figure)


TABLE = Table(
    name="influence",
    number=None,
    title="Influence scores against the exact answer and against retraining",
    notes=(
        "Scores of the losses of queries, from one network. The exact answer is in double"
        " precision, on 20 queries: exact in sample space (concrete), or by solves to a relative"
        " error of 1e-6 (MNIST). LDS is the linear datamodelling score: networks are trained on"
        " random halves of the training points (50 for MNIST, 100 for concrete, one training each),"
        " and the rank correlation over the halves between the sum of the scores of the points"
        " that were left out and the loss of the query is averaged over all queries (± standard"
        " error over them). Networks start from initial weights of their own, or from those of the"
        " network that is explained. The damping is the weight decay of the training plus"
        " 1/(learning rate · steps), which is what stopping early amounts to; it was not tuned, and"
        " is the same for all methods, except where the default of ten times the mean diagonal"
        " entry is named. Published figures are those of the benchmark dattri for one network of"
        " this shape on MNIST, trained with dropout; grey lines in the picture. Wrong"
        " labels: a tenth of the labels was changed before training; shown is their share among"
        " the tenth of the points with the largest self scores (ours from 100 samples)."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
