"""``hcurv compare``: compare all methods on one network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_document, print_json, shows_progress

__all__ = ["EXAMPLES", "compare"]

EXAMPLES = (
    "hcurv compare W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --storage 0.02 --report report.html",
    "hcurv compare W.safetensors --data digits --activation relu --loss cross-entropy --json",
)


def compare(
    weights: options.Weights = None,
    *,
    data: options.Data,
    loss: options.Loss,
    activation: options.Activation = None,
    output_activation: options.OutputActivation = None,
    model: options.Factory = None,
    dtype: options.Dtype = None,
    data_dir: options.DataFolder = None,
    num_points: options.NumPoints = None,
    storage: Annotated[float, typer.Option(help="Budget, stored floats over N².")] = 0.02,
    damping: Annotated[
        float | None,
        typer.Option(
            help="The damping of all solves; by default 1e-3 times the largest eigenvalue."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with figures.")] = None,
    seed: options.Seed = 0,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Compare with low rank, K-FAC and diagonals.

    All methods get the same network and the same storage budget. The first table shows errors of
    the matrices, the others errors of their inverses: variances, solves, log-determinants.
    """
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
    target = check_out(report, *given.files)
    if target is not None and find_spec("matplotlib") is None:
        raise ImportError("reports need matplotlib: pip install 'hcurv[plots]'")
    from hcurv.cli.problem import read_problem
    from hcurv.report.compare_methods import compare as compare_methods

    problem = read_problem(given)
    comparison = compare_methods(
        problem.model,
        problem.loss,
        problem.data,
        storage=storage,
        damping=damping,
        seed=seed,
        progress=shows_progress(progress),
    )
    if target is not None:
        comparison.save_report(target)
    document = {**comparison.to_dict(), "report": target}
    if as_json:
        print_json(document)
        return
    print(f"{comparison}\n")
    print_document({name: v for name, v in document.items() if name != "methods"}, as_json)
