"""``hcurv compress``: compress the matrix of a network into a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_facts, print_json, shows_progress

__all__ = ["EXAMPLES", "compress"]

EXAMPLES = (
    "hcurv compress W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --tolerance 1e-3 --out A.safetensors",
    "hcurv compress W.safetensors --data digits --activation relu --loss cross-entropy"
    " --damping 1e-3 --out A.safetensors",
    "hcurv compress W.safetensors --model nets:build --data X.npz --loss mse --max-storage 0.01"
    " --out A.safetensors --json",
)


def compress(
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
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.", show_default=False)],
    tolerance: Annotated[
        float | None, typer.Option(help="Relative error to aim at; 5e-2 by default.")
    ] = None,
    accuracy: Annotated[
        Literal["low", "high"] | None,
        typer.Option(help="Preset of tolerance, leaf size and largest rank: the paper's settings."),
    ] = None,
    max_storage: Annotated[
        float | None, typer.Option(help="Most floats to store, as a share of N².")
    ] = None,
    leaf_size: Annotated[
        int | None, typer.Option(min=1, help="Most rows of a leaf; chosen by default.")
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=0, help="Largest rank; unlimited by default.")
    ] = None,
    global_rank: Annotated[
        str, typer.Option(metavar="N|auto", help="Columns of the global part of low rank.")
    ] = "auto",
    ordering: Annotated[
        str,
        typer.Option(
            help="Order of the rows: auto, natural, angle, gram, layer-output-input or"
            " layer-input-output."
        ),
    ] = "auto",
    damping: Annotated[
        float | None,
        typer.Option(
            help="Compress for solves with this damping: the tolerance is then the error of the"
            " inverse."
        ),
    ] = None,
    seed: options.Seed = 0,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Compress the Gauss-Newton Hessian of a network into a file.

    Rows are numbered layer by layer: the weight, row by row, then the bias.
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
    rank = _global_rank(global_rank)
    target = check_out(out, *given.files)
    assert target is not None
    from hcurv.cli.describe import describe, facts_of
    from hcurv.cli.problem import read_problem
    from hcurv.hierarchical import compress as compress_matrix
    from hcurv.network.gauss_newton import GaussNewton

    bars = shows_progress(progress)
    problem = read_problem(given)
    start = time.perf_counter()
    matrix = GaussNewton(problem.model, problem.loss, problem.data, progress=bars)
    precomputation = time.perf_counter() - start
    start = time.perf_counter()
    compressed = compress_matrix(
        matrix,
        accuracy=accuracy,
        tolerance=tolerance,
        leaf_size=leaf_size,
        max_rank=max_rank,
        global_rank=rank,
        max_storage=max_storage,
        ordering=ordering,
        damping=damping,
        seed=seed,
        progress=bars,
    )
    compression = time.perf_counter() - start
    compressed.save(target)
    if as_json:
        print_json(
            {
                **describe(compressed),
                "num_points": matrix.num_points,
                "precomputation_seconds": precomputation,
                "compression_seconds": compression,
                "file": target,
            }
        )
        return
    times = f"{precomputation:.2f} s precomputation, {compression:.2f} s compression"
    print_facts(
        [
            *facts_of(compressed),
            ("data", f"{matrix.num_points} points"),
            ("time", times),
            ("file", str(target)),
        ]
    )
    if compressed.plan is not None:
        print(f"\n{compressed.plan}")


def _global_rank(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise typer.BadParameter(
            f"a number or auto is expected; got {text!r}", param_hint="--global-rank"
        )
    return int(text)
