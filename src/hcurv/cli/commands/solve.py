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

    from hcurv.hierarchical import Factorization, HMatrix

__all__ = ["EXAMPLES", "solve"]

EXAMPLES = (
    "hcurv solve A.safetensors --damping 1e-3 --rhs b.npy --out x.npy",
    "hcurv solve A.safetensors --damping 1e-3 --sample 10 --out samples.npy",
    "hcurv solve A.safetensors --damping 1e-3 --inverse-diagonal --out variances.npy",
    "hcurv solve A.safetensors --damping 1e-3 --rhs random --logdet --json",
)


def solve(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Compressed matrix A, or a factorization of it.")
    ],
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
            " factorization has its own."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the solution, samples or variances, .npy.")
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Solve, sample, get variances or the log-determinant.

    All of these belong to the matrix A + damping I, where A is compressed.
    """
    num_wanted = (rhs is not None) + (sample is not None) + inverse_diagonal
    if num_wanted > 1:
        raise typer.BadParameter("choose one of --rhs, --sample and --inverse-diagonal")
    if not num_wanted and not logdet:
        raise typer.BadParameter("one of --rhs, --sample, --inverse-diagonal or --logdet is needed")
    if not num_wanted and out is not None:
        raise typer.BadParameter("--out is for --rhs, --sample or --inverse-diagonal")
    target = check_out(out, file, rhs, suffixes=(".npy",))
    import torch

    from hcurv.cli.arrays import write_array
    from hcurv.hierarchical import HMatrix, load

    stored = load(file)
    matrix = stored if isinstance(stored, HMatrix) else None
    right = None if rhs is None else _right_hand_side(rhs, stored, seed)
    start = time.perf_counter()
    factors = _factorize(stored, damping, file)
    factorized = time.perf_counter()
    document: dict[str, Any] = {"size": factors.shape[0], "damping": factors.damping}
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
    document["factorization_seconds"] = None if matrix is None else factorized - start
    document["solve_seconds"] = None if result is None else solved - factorized
    if target is not None and result is not None:
        write_array(target, result)
    print_document({**document, "file": target}, as_json)


def _factorize(stored: HMatrix | Factorization, damping: float | None, file: Path) -> Factorization:
    from hcurv.hierarchical import HMatrix

    if not isinstance(stored, HMatrix):
        number = stored.damping if isinstance(stored.damping, float) else None
        if damping is not None and damping != number:
            given = "for each row" if number is None else f"{number:g}"
            raise ValueError(f"{file} is a factorization with damping {given}: leave --damping out")
        return stored
    if damping is None:
        damping = stored.record.damping
    if damping is None:
        raise ValueError(f"{file} was compressed without a damping: give one with --damping")
    return stored.factorize(damping)


def _right_hand_side(rhs: str, stored: HMatrix | Factorization, seed: int) -> Tensor:
    import torch

    from hcurv.cli.arrays import read_array

    size = stored.shape[0]
    if rhs == "random":
        return torch.randn(size, dtype=stored.dtype, generator=torch.Generator().manual_seed(seed))
    values = read_array(Path(rhs))
    if values.ndim not in (1, 2) or values.shape[0] != size:
        raise ValueError(
            f"{rhs} must have shape ({size},) or ({size}, k); got {tuple(values.shape)}"
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{rhs} has NaN or infinite values")
    return values.to(stored.dtype)


def _residual(
    matrix: HMatrix | None, damping: float | Tensor, right: Tensor, solution: Tensor
) -> float | None:
    """Compute ‖b − (A + D) x‖ / ‖b‖, or None where A is not known or b is zero.

    ``damping`` is D, a number or a tensor.
    """
    norm = float(right.double().norm())
    if matrix is None or norm == 0:
        return None
    return float((right - matrix @ solution - damping * solution).double().norm()) / norm
