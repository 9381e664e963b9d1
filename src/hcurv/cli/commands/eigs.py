"""``hcurv eigs``: find a few eigenpairs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_document, print_json, print_table

if TYPE_CHECKING:
    from hcurv.hierarchical import Factorization
    from hcurv.operators import SymmetricOperator

__all__ = ["EXAMPLES", "eigs"]

EXAMPLES = (
    "hcurv eigs A.safetensors -k 10",
    "hcurv eigs A.safetensors -k 4 --near 0.1 --out pairs.npz",
    "hcurv eigs W.safetensors --data X.npz --activation relu --loss cross-entropy -k 10",
)


def eigs(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Compressed matrix; or, with --data and --loss, a state dict, for the exact one.",
            show_default=False,
        ),
    ] = None,
    *,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of eigenpairs.")] = 6,
    which: Annotated[
        Literal["largest", "smallest"], typer.Option(help="Which end of the spectrum.")
    ] = "largest",
    near: Annotated[
        float | None,
        typer.Option(help="Those nearest to this number instead; of compressed matrices only."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Of the eigenvalues, relative; 0 for the precision of the matrix.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Write values, vectors and residuals, .npz.")
    ] = None,
    data: options.OptionalData = None,
    loss: options.OptionalLoss = None,
    activation: options.Activation = None,
    output_activation: options.OutputActivation = None,
    model: options.Factory = None,
    dtype: options.Dtype = None,
    data_dir: options.DataFolder = None,
    num_points: options.NumPoints = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find a few eigenvalues and eigenvectors.

    The matrix is a compressed one, or the exact one if there are weights and data.
    """
    given = None
    if data is not None and loss is not None:
        given = options.Given(
            file,
            model,
            activation,
            output_activation,
            dtype,
            loss,
            data,
            data_dir,
            num_points,
        )
    elif data is not None or loss is not None or model is not None:
        raise typer.BadParameter("the exact matrix needs --data and --loss")
    elif file is None:
        raise typer.BadParameter("a compressed matrix is needed, or --data, --loss and a model")
    target = check_out(out, file, data, suffixes=(".npz",))
    from hcurv.cli.arrays import write_arrays
    from hcurv.linalg import eigsh

    operator = _operator(given, file)
    start = time.perf_counter()
    factors = _factorization(operator) if which == "smallest" and near is None else None
    found = eigsh(
        operator,
        k,
        which=which,
        near=near,
        factorization=factors,
        tolerance=tolerance,
        seed=seed,
    )
    seconds = time.perf_counter() - start
    if target is not None:
        parts = {name: getattr(found, name) for name in ("values", "vectors", "residuals")}
        write_arrays(target, parts)
    document = {
        "size": operator.shape[0],
        "exact": given is not None,
        "seconds": seconds,
        "file": target,
    }
    if as_json:
        pairs = {"values": found.values, "residuals": found.residuals}
        print_json({**document, "which": which if near is None else "near", "near": near, **pairs})
        return
    numbers = zip(found.values.tolist(), found.residuals.tolist(), strict=True)
    rows = [(str(n), f"{value:.8g}", f"{left:.1e}") for n, (value, left) in enumerate(numbers, 1)]
    print_table(("", "eigenvalue", "residual"), rows)
    print_document(document, as_json)


def _factorization(operator: SymmetricOperator) -> Factorization | None:
    """Factorize a matrix that is known to be positive definite; return None for any other.

    With the factorization, the smallest eigenvalues converge in a few steps.
    """
    from hcurv.hierarchical import HMatrix

    if not isinstance(operator, HMatrix) or operator.record.damping is None:
        return None
    return operator.factorize(operator.record.damping)


def _operator(given: options.Given | None, file: Path | None) -> SymmetricOperator:
    from hcurv.cli.describe import load_matrix
    from hcurv.cli.problem import read_problem
    from hcurv.hierarchical import FileFormatError
    from hcurv.network.gauss_newton import GaussNewton

    if given is not None:
        problem = read_problem(given)
        return GaussNewton(problem.model, problem.loss, problem.data)
    assert file is not None
    try:
        return load_matrix(file)
    except FileFormatError as error:
        raise FileFormatError(f"{error}; a state dict needs --data and --loss") from error
