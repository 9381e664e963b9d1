"""``hcurv laplace``: how sure a network is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, facts_of, print_document, shows_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from hcurv.applications.laplace import LaplacePosterior, Prediction

__all__ = ["EXAMPLES", "laplace"]

EXAMPLES = (
    "hcurv laplace W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --test T.npz --plot calibration.png",
    "hcurv laplace W.safetensors --data X.npz --activation tanh --loss mse --test T.npz"
    " --out predictions.npz",
    "hcurv laplace W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --tune layer --parameters last --json",
)
Grouping: TypeAlias = Literal["model", "layer", "parameter", "none"]
Structure: TypeAlias = Literal["exact", "kfac", "ekfac", "diagonal"]
Method: TypeAlias = Literal["probit", "samples", "bridge"]


def laplace(
    weights: options.Weights = None,
    *,
    data: options.Data,
    loss: options.Loss,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Points to predict, like --data; with targets they are scored."
        ),
    ] = None,
    prior_precision: Annotated[
        float, typer.Option(min=1e-12, help="Precision of the prior, before it is tuned.")
    ] = 1.0,
    noise: Annotated[
        float | None,
        typer.Option(
            min=1e-12,
            help="Standard deviation of a regression's noise, before it is tuned; by default that"
            " of the residuals.",
        ),
    ] = None,
    tune: Annotated[
        Grouping,
        typer.Option(help="What gets a prior of its own, chosen by the marginal likelihood."),
    ] = "model",
    parameters: Annotated[
        str,
        typer.Option(
            metavar="all|last|NAMES",
            help="Which parameters are uncertain: names of parameters or layers, with commas.",
        ),
    ] = "all",
    structure: Annotated[
        Structure, typer.Option(help="The matrix: exact, or an approximation to compare with.")
    ] = "exact",
    method: Annotated[
        Method, typer.Option(help="How probabilities of classes are averaged.")
    ] = "probit",
    activation: options.Activation = None,
    output_activation: options.OutputActivation = None,
    model: options.Factory = None,
    dtype: options.Dtype = None,
    data_dir: options.DataFolder = None,
    num_points: options.NumPoints = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write outputs, variances and mean of the test points, .npz."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw calibration, or errors of a regression, of the test points: .png, .svg or"
            " .pdf; .html for a page with all results."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the posterior, .safetensors.")] = None,
    seed: options.Seed = 0,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Get the uncertainty of predictions by a Laplace approximation.

    The weights are those of a trained network, and the data is what it was trained with. The prior
    (and the noise of a regression) is chosen by the marginal likelihood.
    """
    if test is None and (out is not None or plot is not None):
        raise typer.BadParameter("--out and --plot are for the points of --test")
    given = options.Given(
        weights,
        model,
        activation,
        output_activation,
        dtype,
        loss,
        data,
        data_dir,
        num_points,
    )
    target = check_out(out, *given.files, test, suffixes=(".npz",))
    from hcurv.report.picture import PICTURE_ENDINGS

    picture = check_out(plot, *given.files, test, suffixes=PICTURE_ENDINGS)
    posterior_file = check_out(save, *given.files, test, suffixes=(".safetensors",))
    from hcurv.applications.laplace import laplace as approximate
    from hcurv.cli.problem import read_problem

    problem = read_problem(given)
    if not isinstance(problem.data, tuple):
        raise ValueError(f"{data} has no targets, which the posterior needs")
    start = time.perf_counter()
    chosen = parameters if parameters in ("all", "last") else parameters.split(",")
    posterior = approximate(
        problem.model,
        problem.loss,
        problem.data,
        prior_precision,
        noise=noise,
        parameters=chosen,
        structure=structure,
        seed=seed,
        progress=shows_progress(progress),
    )
    if tune != "none":
        posterior.tune(tune, progress=shows_progress(progress))
    document = {**_description(posterior), "seconds": time.perf_counter() - start}
    if test is not None:
        points = read_problem(_at(given, test)).data
        _predict(document, posterior, points, method, seed, target, picture)
    if posterior_file is not None:
        posterior.save(posterior_file)
    print_document(
        {**document, "file": target, "picture": picture, "saved": posterior_file}, as_json
    )


def _at(given: options.Given, test: str) -> options.Given:
    """The same options, with other data."""
    from dataclasses import replace

    return replace(given, data=test, num_points=None)


def _description(posterior: LaplacePosterior) -> dict[str, Any]:
    """What is known without other points."""
    from torch import Tensor

    prior = posterior.prior_precision
    if isinstance(prior, Tensor):
        prior = {name: float(getattr(prior, name)()) for name in ("min", "median", "max")}
    tuning, plan = posterior.tuning, posterior.factorized.plan
    return {
        "size": posterior.layout.size,
        "structure": posterior.structure,
        "way": None if plan is None else plan.chosen.description,
        "prior_precision": prior,
        "noise": posterior.noise,
        "log_marginal_likelihood": float(posterior.log_marginal_likelihood()),
        "tuning_evaluations": None if tuning is None else tuning.num_evaluations,
    }


def _predict(
    document: dict[str, Any],
    posterior: LaplacePosterior,
    points: Tensor | tuple[Tensor, Tensor],
    method: Method,
    seed: int,
    target: Path | None,
    picture: Path | None,
) -> None:
    """Predict the test points, score them if they have targets, and write files."""
    from dataclasses import asdict

    inputs, targets = points if isinstance(points, tuple) else (points, None)
    prediction = posterior.predict(inputs, method, seed=seed)
    if target is not None:
        _write(target, prediction)
    found: dict[str, Any] = {
        "num_points": len(inputs),
        "mean_variance": float(prediction.variances.mean()),
    }
    if targets is not None:
        found |= asdict(posterior.score((inputs, targets), method, seed=seed))
    document["test"] = found
    if picture is not None:
        if targets is None:
            raise ValueError("--plot needs targets of the test points")
        _draw(picture, prediction, targets, document)


def _write(path: Path, prediction: Prediction) -> None:
    import numpy as np

    from hcurv.files import replacing

    names = ("outputs", "variances", "mean", "target_variances")
    arrays = {name: getattr(prediction, name) for name in names}
    known = {name: value.cpu().numpy() for name, value in arrays.items() if value is not None}
    with replacing(path) as temporary:
        np.savez(temporary, **known)


def _draw(path: Path, prediction: Prediction, targets: Tensor, document: dict[str, Any]) -> None:
    from hcurv.report.picture import ResultPage, save_picture

    is_regression = prediction.target_variances is not None
    words = ResultPage(
        "How sure is the network?",
        f"The log marginal likelihood is {document['log_marginal_likelihood']:.6g}. Test points"
        f" have a mean log-likelihood of {document['test']['log_likelihood']:.4g}.",
        "Targets of the test points in the order of their predictions, with a band that shall hold"
        " 95 % of them."
        if is_regression
        else "Share of right answers against confidence; on the diagonal, confidence can be taken"
        " at its word.",
        facts_of(document),
    )
    save_picture(path, lambda: _figure(prediction, targets), words)


def _figure(prediction: Prediction, targets: Tensor) -> Figure:
    import torch
    from matplotlib.figure import Figure

    from hcurv.applications.laplace.scores import calibration
    from hcurv.report.calibration import draw_calibration, draw_errors

    figure = Figure(figsize=(4.8, 4.0), layout="constrained")
    axes = figure.subplots()
    if prediction.target_variances is not None:
        first = (prediction.mean, prediction.standard_deviations, targets)
        draw_errors(axes, *(values[:, 0].cpu() for values in first))
    else:
        before = torch.softmax(prediction.outputs, 1)
        chances, labels = prediction.mean, targets
        if targets.is_floating_point():  # Labels that are 0 or 1, each by itself.
            pairs = (torch.sigmoid(prediction.outputs), prediction.mean)
            before, chances = (torch.stack([1 - p, p], -1).flatten(0, -2) for p in pairs)
            labels = (targets > 0.5).long().flatten()
        draw_calibration(axes, *calibration(before, labels), "plain", "#6b6b6b", "x")
        draw_calibration(axes, *calibration(chances, labels), "Laplace")
    axes.legend(frameon=False)
    return figure
