"""What Laplace approximations predict: ours, the dense truth, other structures, ensembles."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hcurv.applications.laplace import LaplacePosterior, Prediction, laplace
from hcurv.applications.laplace.scores import calibration
from hcurv.experiments import uncertainty
from hcurv.experiments.measure import peak_extra_bytes
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
)
from hcurv.experiments.uncertainty import Task
from hcurv.memory import format_bytes
from hcurv.report.calibration import draw_calibration
from hcurv.report.looks import BLACK, BLUE, GREEN, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

_ENSEMBLE = 5
# Each method's arguments of `hcurv.laplace` and of `tune`.
_METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "ours": ({}, "model"),
    "ours, prior per layer": ({}, "layer"),
    "last layer": ({"parameters": "last"}, "model"),
    "EKFAC": ({"structure": "ekfac"}, "model"),
    "K-FAC": ({"structure": "kfac"}, "model"),
    "diagonal": ({"structure": "diagonal"}, "model"),
}
_CURVES = {"network": (BLACK, "x"), "ours": (BLUE, "o"), "ensemble of 5": (RED, "s")}
_CURVES |= {"K-FAC": (GREEN, "^")}


def rows(quick: bool) -> dict[str, Settings]:
    """List the data sets, with the number of random splits of the small ones."""
    if quick:
        common = {"hidden": 6, "rounds": 2, "iterations": 25, "num_splits": 1, "has_truth": True}
        return {"digits": {"data": "digits", **common}}
    result: dict[str, Settings] = {}
    for name, num_splits, hidden in (
        ("glass", 5, 50),
        ("vehicle", 3, 50),
        ("waveform", 3, 50),
        ("ionosphere", 3, 50),
        ("concrete", 2, 50),
        ("satellite", 1, 20),
    ):
        result[name] = {
            "data": name,
            "hidden": hidden,
            "rounds": 3,
            "iterations": 60,
            "num_splits": num_splits,
            "has_truth": True,
        }
    result["MNIST 14x14"] = {
        "data": "mnist",
        "hidden": 12,
        "num_points": 1000,
        "num_test": 1000,
        "rounds": 2,
        "iterations": 60,
        "num_splits": 1,
        "has_truth": True,
        "variants": False,
    }
    result["MNIST, LeNet"] = {
        "data": "lenet",
        "num_points": 100,
        "num_test": 100,
        "num_steps": 150,
        "rounds": 2,
        "num_splits": 1,
        "has_truth": False,
        "variants": False,
    }
    return result


def measure(settings: Settings, data: str | None) -> Values:
    """Average every method over random splits and initial weights."""
    runs = []
    for seed in range(settings["num_splits"]):
        task = uncertainty.make_task(settings, data, seed)
        runs.append(
            _measure_split(task, seed, settings["has_truth"], settings.get("variants", True))
        )
    methods = {name: _mean([run["methods"][name] for run in runs]) for name in runs[0]["methods"]}
    shared = {
        key: runs[0][key] for key in ("size", "num_points", "num_outputs", "outside", "curves")
    }
    return {**shared, "methods": methods, "way": runs[0]["way"]}


def _mean(found: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Means over splits, and standard errors of log-likelihoods."""
    if any(values is None for values in found):
        return None
    known = [values for values in found if values is not None]
    result: dict[str, Any] = {}
    for key in known[0]:
        numbers = [values[key] for values in known if values[key] is not None]
        result[key] = statistics.fmean(numbers) if numbers else None
    spread = [values["log_likelihood"] for values in known]
    error = statistics.stdev(spread) / math.sqrt(len(spread)) if len(spread) > 1 else None
    return {**result, "standard_error": error}


def _measure_split(task: Task, seed: int, has_truth: bool, variants: bool) -> dict[str, Any]:
    """Measure all methods; ``variants`` are those of ours that take long for large networks."""
    start = time.perf_counter()
    model, trained_prior, trained_noise = uncertainty.train(task, seed)
    trained = time.perf_counter() - start
    methods: dict[str, Any] = {}
    curves: dict[str, Any] = {}

    def note(name: str, predict: Callable[[Any], Prediction], **known: Any) -> dict[str, Any]:
        prediction = predict(task.split.test_inputs)
        outside = None if task.outside is None else predict(task.outside[1])
        methods[name] = {**uncertainty.measures(task, prediction, outside), **known}
        if name in _CURVES and task.name == "classes":
            parts = calibration(prediction.mean, task.split.test_targets)
            curves[name] = [part.tolist() for part in parts]
        found: dict[str, Any] = methods[name]
        return found

    note("network", lambda x: uncertainty.plain(task, model, x), seconds=trained)
    posteriors: dict[str, LaplacePosterior] = {}
    for name, (options, grouping) in _METHODS.items():
        if variants or grouping == "model":
            posteriors[name] = _measure_laplace(
                task, model, name, options, grouping, note, variants
            )
    own = posteriors["ours"]
    prior = own.prior_precision
    assert isinstance(prior, float)
    if has_truth:
        methods["dense truth"] = None
        begun = time.perf_counter()
        truth = uncertainty.dense_truth(task, model, prior, own.noise)
        built = time.perf_counter() - begun
        note("dense truth", truth.predict, evidence=truth.evidence, seconds=built)
        found = own.predict(task.split.test_inputs).variances.double()
        expected = truth.predict(task.split.test_inputs).variances
        errors = (found / expected - 1).abs()
        methods["ours"]["variance_error"] = float(errors.median())
        methods["ours"]["largest_variance_error"] = float(errors.max())
        methods["ours"]["evidence_error"] = abs(methods["ours"]["evidence"] - truth.evidence)
    for structure in ("full", "kron"):
        if structure == "full" and not has_truth:
            continue
        methods[f"laplace-torch, {structure}"] = _measure_rival(task, model, structure, own)
    start = time.perf_counter()
    others = [
        uncertainty.train_member(task, 1000 + _ENSEMBLE * seed + k, trained_prior, trained_noise)
        for k in range(_ENSEMBLE - 1)
    ]
    models, trained = [model, *others], trained + time.perf_counter() - start
    note("ensemble of 5", lambda x: uncertainty.ensemble(task, models, x), seconds=trained)
    plan = own.factorized.plan
    return {
        "methods": methods,
        "curves": curves,
        "size": own.layout.size,
        "num_points": len(task.split.inputs),
        "num_outputs": task.split.num_outputs,
        "outside": None if task.outside is None else task.outside[0],
        "way": plan.chosen.name,
    }


def _measure_laplace(
    task: Task,
    model: nn.Module,
    name: str,
    options: dict[str, Any],
    grouping: Any,
    note: Callable[..., dict[str, Any]],
    variants: bool,
) -> LaplacePosterior:
    """Fit, tune and predict with one kind of posterior, and time it."""
    made: list[LaplacePosterior] = []

    def fit() -> None:
        data = (task.split.inputs, task.split.targets)
        posterior = laplace(model, task.loss, data, **options)
        steps = 8 if grouping == "layer" else 100  # Each step inverts the matrix again.
        made.append(posterior.tune(grouping, max_steps=steps))

    start = time.perf_counter()
    peak = peak_extra_bytes(fit)
    fitted = time.perf_counter() - start
    posterior = made[0]
    start = time.perf_counter()
    test, known = task.split.test_inputs, []
    peak = max(peak, peak_extra_bytes(lambda: known.append(posterior.predict(test))))
    predicted = time.perf_counter() - start
    found = note(
        name,
        lambda points: known[0] if points is test else posterior.predict(points),
        evidence=float(posterior.log_marginal_likelihood()),
        fit_seconds=fitted,
        predict_seconds=predicted,
        peak_bytes=peak,
        noise=posterior.noise,
    )
    if isinstance(posterior.prior_precision, float):
        found["prior"] = posterior.prior_precision
    if name == "ours" and task.name == "classes" and variants:
        for method in ("samples", "bridge"):
            note(
                f"ours, {method}",
                lambda x, method=method: posterior.predict(x, method),
            )
    return posterior


def _measure_rival(
    task: Task, model: nn.Module, structure: str, own: LaplacePosterior
) -> dict[str, Any] | None:
    """laplace-torch at our prior and noise, with its memory; None where it is missing or fails."""
    found: list[dict[str, Any] | None] = []
    prior = own.prior_precision
    assert isinstance(prior, float)
    try:
        peak = peak_extra_bytes(
            lambda: found.append(
                uncertainty.laplace_torch(task, model, structure, prior, own.noise)
            )
        )
    except RuntimeError:
        return None
    return None if found[0] is None else {**found[0], "peak_bytes": peak}


def render(measured: Measured) -> Rendered:
    """Show a line for each method of each data set."""
    header = [
        "data",
        "method",
        "test log-likelihood",
        "calibration error",
        "AUROC",
        "log marginal likelihood",
        "fit s",
        "predict s",
        "memory",
    ]
    lines = []
    for settings, values in measured:
        for name, found in values["methods"].items():
            if found is None:
                continue
            error = found.get("standard_error")
            spread = "" if error is None else f" ± {error:.3f}"
            calibrated = found["calibration_error"]
            lines.append(
                [
                    _title(settings, values),
                    name,
                    f"{found['log_likelihood']:.4f}{spread}",
                    _number(calibrated, 3) if calibrated is not None else _coverage(found),
                    _number(found["auroc"], 3),
                    _number(found.get("evidence"), 2),
                    _number(found.get("fit_seconds", found.get("seconds")), 2),
                    _number(found.get("predict_seconds"), 2),
                    format_bytes(found["peak_bytes"]) if "peak_bytes" in found else "–",
                ]
            )
    return Rendered(header, lines)


def _title(settings: Settings, values: Values) -> str:
    name = {"mnist": "MNIST 14x14", "lenet": "LeNet"}.get(settings["data"], settings["data"])
    return f"{name}, N = {values['size']}, n = {values['num_points']}"


def _coverage(found: dict[str, Any]) -> str:
    return f"coverage {found['coverage']:.3f}" if found.get("coverage") is not None else "–"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the calibration of each classifier."""
    shown = [(settings, values) for settings, values in measured if values["curves"]]
    num_rows = max(1, math.ceil(len(shown) / 2))
    figure.set_size_inches(5.6, 0.9 + 2.3 * num_rows)
    grid = figure.subplots(num_rows, 2, squeeze=False).flatten()
    for axes, (settings, values) in zip(grid, shown, strict=False):
        for name, parts in values["curves"].items():
            colour, marker = _CURVES[name]
            confidence, accuracy, counts = _tensors(parts)
            draw_calibration(axes, confidence, accuracy, counts, name, colour, marker)
        axes.set_title(_title(settings, values).partition(",")[0], fontsize=10)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    add_legend(figure)


def _tensors(parts: list[list[float | None]]) -> list[Any]:
    """Lists as tensors; JSON has None where a bin is empty."""
    import torch

    return [torch.tensor([math.nan if v is None else v for v in part]) for part in parts]


TABLE = Table(
    name="laplace",
    number=None,
    title="Laplace approximations",
    notes=(
        "Networks with one hidden layer (50 units, tanh; satellite: 20; MNIST in 14 x 14 pixels:"
        " 12, ReLU; trained by L-BFGS), and LeNet (by Adam), each trained in turns with a choice of"
        " the prior. Every Laplace approximation has the prior (and the noise) of its own largest"
        " marginal likelihood; the dense truth (`torch.func`, float64) and laplace-torch have that"
        " of ours. Probabilities by probit, if not said otherwise. Means over random splits, ± one"
        " standard error. AUROC: of the entropy, for outsiders (MNIST) or for wrong"
        " answers (the rest). Regression (concrete): shares of targets in the 95 % interval instead"
        " of calibration errors. Fit includes tuning for ours, K-FAC, EKFAC, diagonal and last"
        " layer, not for laplace-torch, whose line is missing where it failed. Memory is the peak"
        " beyond what was in use before."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
