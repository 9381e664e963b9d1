"""``hcurv diagonal``: compute the curvature of every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_document, print_json, print_table, shows_progress

if TYPE_CHECKING:
    from torch import Tensor

    from hcurv.layout import ParameterLayout

__all__ = ["EXAMPLES", "diagonal"]

EXAMPLES = (
    "hcurv diagonal W.safetensors --data X.npz --activation relu --loss cross-entropy --out d.npy",
)


def diagonal(
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
    out: Annotated[
        Path | None, typer.Option(help="Write the diagonal, (N,), to an .npy file.")
    ] = None,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Compute the exact diagonal, the curvature of every weight."""
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
    target = check_out(out, *given.files, suffixes=(".npy",))
    from hcurv.cli.arrays import write_array
    from hcurv.cli.problem import read_problem
    from hcurv.network.gauss_newton import GaussNewton

    problem = read_problem(given)
    matrix = GaussNewton(
        problem.model, problem.loss, problem.data, progress=shows_progress(progress)
    )
    values = matrix.diagonal()
    layers = [_summary(name, matrix.layout, values) for name in matrix.layout.layers]
    if target is not None:
        write_array(target, values)
    document = {
        "size": matrix.shape[0],
        "num_points": matrix.num_points,
        "trace": float(values.double().sum()),
        "file": target,
    }
    if as_json:
        print_json({**document, "layers": layers})
        return
    rows = [
        (
            f"{layer['name']} ({layer['in_features']} to {layer['out_features']})",
            *(f"{layer[name]:.3e}" for name in ("min", "median", "max")),
            f"{layer['zeros']:.1%}",
            f"{layer['sum']:.6g}",
        )
        for layer in layers
    ]
    print_table(("layer", "min", "median", "max", "zeros", "sum"), rows)
    print_document(document, as_json)


def _summary(name: str, layout: ParameterLayout, diagonal: Tensor) -> dict[str, Any]:
    values = diagonal[layout.select(*layout.layers[name])].double()
    num_inputs, num_units = layout.layer_shape(name)
    return {
        "name": name,
        "in_features": num_inputs,
        "out_features": num_units,
        "min": float(values.min()),
        "median": float(values.median()),
        "max": float(values.max()),
        "zeros": float((values == 0).double().mean()),
        "sum": float(values.sum()),
    }
