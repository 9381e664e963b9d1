"""``hcurv solve``: solve, sample, and get variances or the log-determinant."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_document

if TYPE_CHECKING:
    from torch import Tensor

    from hcurv.factorized import Factorized
    from hcurv.hierarchical import Factorization, HMatrix
    from hcurv.operators import SymmetricOperator

__all__ = ["EXAMPLES", "solve"]

EXAMPLES = (
    "hcurv solve A.safetensors --damping 1e-3 --rhs b.npy --out x.npy",
    "hcurv solve A.safetensors --damping 1e-3 --sample 10 --out samples.npy",
    "hcurv solve A.safetensors --damping 1e-3 --inverse-diagonal --out variances.npy",
    "hcurv solve A.safetensors --damping 1e-3 --rhs random --logdet --json",
    "hcurv solve W.safetensors --data X.npz --activation relu --loss cross-entropy --damping 1e-3"
    " --rhs b.npy --out x.npy",
)


def solve(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Compressed matrix A, or a factorization of it; or, with --data and --loss, a"
            " state dict, for the exact matrix.",
            show_default=False,
        ),
    ] = None,
    *,
    rhs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|random",
            help="Solve (A + damping I) x = b with the b of an .npy file, (N,) or (N, k), or with"
            " a random one.",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            metavar="NUM",
            min=1,
            help="Draw from the normal distribution with the inverse of A + damping I as"
            " covariance, (NUM, N).",
        ),
    ] = None,
    inverse_diagonal: Annotated[
        bool,
        typer.Option("--inverse-diagonal", help="Variances: the diagonal of this inverse, (N,)."),
    ] = False,
    logdet: Annotated[
        bool, typer.Option("--logdet", help="Also print the log-determinant of A + damping I.")
    ] = False,
    damping: Annotated[
        float | None,
        typer.Option(
            help="Added to the diagonal; by default what A was made positive definite with. A"
            " factorization has its own. The exact matrix needs one."
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative error of solves with the exact matrix, 1e-2 by default.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the solution, samples or variances, .npy.")
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
    """Solve, sample, get variances or the log-determinant.

    All of these belong to the matrix A + damping I, where A is compressed, or exact if there are
    weights and data. The exact matrix is inverted in the way that is predicted to be the fastest.
    """
    num_wanted = (rhs is not None) + (sample is not None) + inverse_diagonal
    if num_wanted > 1:
        raise typer.BadParameter("choose one of --rhs, --sample and --inverse-diagonal")
    if not num_wanted and not logdet:
        raise typer.BadParameter("one of --rhs, --sample, --inverse-diagonal or --logdet is needed")
    if not num_wanted and out is not None:
        raise typer.BadParameter("--out is for --rhs, --sample or --inverse-diagonal")
    given = None
    if data is not None and loss is not None:
        if damping is None:
            raise typer.BadParameter("the exact matrix needs --damping")
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
    elif tolerance is not None:
        raise typer.BadParameter("--tolerance is for the exact matrix, with --data and --loss")
    target = check_out(out, file, rhs, data, suffixes=(".npy",))
    import torch

    from hcurv.cli.arrays import write_array

    start = time.perf_counter()
    matrix, factors = _read(given, file, damping, 1e-2 if tolerance is None else tolerance, seed)
    factorized = time.perf_counter()
    right = None if rhs is None else _right_hand_side(rhs, factors, seed)
    begun = time.perf_counter()
    document: dict[str, Any] = {"size": factors.shape[0], "damping": factors.damping}
    if factors.plan is not None:
        document["exact"] = True
        document["way"] = factors.plan.chosen.description
        document["effective_dimension"] = factors.plan.spectrum.effective_dimension
    result = None
    if right is not None:
        result = factors.solve(right)
        document["num_columns"] = 1 if right.ndim == 1 else right.shape[1]
    elif sample is not None:
        result = factors.sample(sample, torch.Generator().manual_seed(seed))
        document["num_samples"] = sample
    elif inverse_diagonal:
        result = factors.inverse_diagonal()
        document["variances"] = {
            name: float(getattr(result, name)()) for name in ("min", "median", "max")
        }
    solved = time.perf_counter()
    if right is not None and result is not None:
        document["relative_residual"] = _residual(matrix, factors.damping, right, result)
    if logdet:
        document["log_determinant"] = float(factors.logdet())
        # The log-determinant of an iterative inverse may be an estimate.
        document["standard_error"] = getattr(factors, "logdet_error", None) or None
    document["factorization_seconds"] = None if matrix is None else factorized - start
    document["solve_seconds"] = None if result is None else solved - begun
    if target is not None and result is not None:
        write_array(target, result)
    print_document({**document, "file": target}, as_json)


def _read(
    given: options.Given | None,
    file: Path | None,
    damping: float | None,
    tolerance: float,
    seed: int,
) -> tuple[SymmetricOperator | None, Factorized]:
    """Read a matrix, exact or compressed, and factorize it; None for a stored factorization."""
    if given is not None:
        from hcurv.cli.problem import read_problem
        from hcurv.network.gauss_newton import GaussNewton

        assert damping is not None
        problem = read_problem(given)
        exact = GaussNewton(problem.model, problem.loss, problem.data)
        return exact, exact.factorize(damping, tolerance, seed=seed)
    from hcurv.hierarchical import FileFormatError, HMatrix, load

    assert file is not None
    try:
        stored = load(file)
    except FileFormatError as error:
        raise FileFormatError(f"{error}; a state dict needs --data and --loss") from error
    if isinstance(stored, HMatrix):
        return stored, _factorize(stored, damping, file)
    number = stored.damping if isinstance(stored.damping, float) else None
    if damping is not None and damping != number:
        shown = "for each row" if number is None else f"{number:g}"
        raise ValueError(f"{file} is a factorization with damping {shown}: leave --damping out")
    return None, stored


def _factorize(matrix: HMatrix, damping: float | None, file: Path) -> Factorization:
    if damping is None:
        damping = matrix.record.damping
    if damping is None:
        raise ValueError(f"{file} was compressed without a damping: give one with --damping")
    return matrix.factorize(damping)


def _right_hand_side(rhs: str, factors: Factorized, seed: int) -> Tensor:
    import torch

    from hcurv.cli.arrays import read_array

    size = factors.shape[0]
    if rhs == "random":
        return torch.randn(size, dtype=factors.dtype, generator=torch.Generator().manual_seed(seed))
    values = read_array(Path(rhs))
    if values.ndim not in (1, 2) or values.shape[0] != size:
        raise ValueError(
            f"{rhs} must have shape ({size},) or ({size}, k); got {tuple(values.shape)}"
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{rhs} has NaN or infinite values")
    return values.to(factors.dtype)


def _residual(
    matrix: SymmetricOperator | None, damping: float | Tensor, right: Tensor, solution: Tensor
) -> float | None:
    """Compute ‖b − (A + D) x‖ / ‖b‖, or None where A is not known or b is zero.

    ``damping`` is D, a number or a tensor.
    """
    norm = float(right.double().norm())
    if matrix is None or norm == 0:
        return None
    return float((right - matrix @ solution - damping * solution).double().norm()) / norm
