"""Factorization, solves and preconditioned conjugate gradients on the reference networks.

    make bench BENCH=solve DATA=folder-with-mnist-and-cifar10
    make bench BENCH=solve PARTS="factor growth" DATA=...
    make bench BENCH=solve PARTS="cg --only 'AE (b)'" DATA=...

Times of "factor" are in units of a dense product H·X₁₂₈ of the same size in the same run.
Conjugate gradients run in float64 on the exact matrix (in float32 no method reaches 1e-6 at small
damping), preconditioners are built and applied in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from compress import compress, gauss_newton
from hcurv.baselines import LowRank
from hcurv.experiments.measure import best_time, dense_product_seconds, describe_machine
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, seeded_mlp, train
from hcurv.hierarchical.solving.definite import make_definite

GB = 1e9
SMALL = ("AE (a)", "classifier (a)", "classifier (b)", "AE (b)", "AE (c)")
# These tolerances are those of the compression targets (benchmarks/compress.py).
TOLERANCES = {"AE (a)": 5e-4, "classifier (a)": 2.8e-3}
NUM_RIGHT_HAND_SIDES = 16
MAX_ITERATIONS = 600
# The tolerance where hcurv.compress chooses everything else.
DEFAULT_TOLERANCE = 1e-3
# Block-Jacobi is skipped if a dense block would have more rows than this.
LARGEST_BLOCK = 16_000


def largest_eigenvalue(matrix: hcurv.SymmetricOperator) -> float:
    """Compute the largest eigenvalue λ₁."""
    return float(hcurv.eigsh(matrix, 1, tolerance=1e-3).values[0])


def factor(data: str | None, only: list[str] | None = None) -> None:
    """Factorize and solve at high accuracy."""
    header = f"{'damping/λ₁':>12}{'factorize':>15}{'solve':>17}{'storage':>17}{'logdet s':>10}"
    print("\nReached (asked for), accuracy 'high', times in dense products H·X₁₂₈; storage of the")
    print("factors over that of the matrix; solve with 128 right-hand sides; error of the")
    print("matrix once it is positive definite")
    print(f"{'':16}{'n':>7}{header}{'variances s':>13}{'error':>9}")
    for num_points in (1000, 10_000):
        for name, tolerance in TOLERANCES.items():
            if only and name not in only:
                continue
            matrix = gauss_newton(name, data, num_points)
            unit = dense_product_seconds(matrix.shape[0])
            largest = largest_eigenvalue(matrix)
            plain = compress(matrix, accuracy="high", tolerance=tolerance)
            rhs = torch.randn(matrix.shape[0], 128)
            for relative in (1e-2, 1e-3, 1e-5):
                damping = relative * largest
                definite = make_definite(plain, damping)
                factorization = definite.factorize(damping)
                seconds = best_time(partial(definite.factorize, damping), 5)
                solve = best_time(partial(factorization.solve, rhs), 7)
                variances = best_time(factorization.inverse_diagonal, 3)
                logdet = best_time(factorization.logdet, 3)
                storage = factorization.num_stored / plain.num_stored
                print(
                    f"{name:16}{num_points:>7}{relative:>12.0e}"
                    f"{f'{seconds / unit:.2f} (5)':>15}{f'{solve / unit:.3f} (0.3)':>17}"
                    f"{f'{storage:.2f} (2.5)':>17}{logdet:>10.1e}{variances:>13.2f}"
                    f"{definite.relative_error(matrix):>9.1e}",
                    flush=True,
                )


def definite(data: str | None, only: list[str] | None = None) -> None:
    """Make all small networks positive definite, for six dampings."""
    print("\nrepaired, n = 1000: every matrix factorizes with its damping; error of")
    print("the plain compression, and with each damping")
    powers = range(1, 7)
    print(f"{'':16}{'setting':8}{'plain':>9}" + "".join(f"{f'1e-{p} λ₁':>10}" for p in powers))
    for name in SMALL:
        if only and name not in only:
            continue
        matrix = gauss_newton(name, data, 1000)
        largest = largest_eigenvalue(matrix)
        for setting in ("low", "high"):
            plain = compress(matrix, accuracy=setting)
            line = f"{name:16}{setting:8}{plain.relative_error(matrix):>9.1e}"
            for power in powers:
                damping = 10.0**-power * largest
                changed = make_definite(plain, damping)
                changed.factorize(damping)  # raises if it is not positive definite
                line += f"{changed.relative_error(matrix):>10.1e}"
            print(line, flush=True)


@dataclass(frozen=True)
class Method:
    """A way to make a preconditioner for a damping; it also returns the seconds that this took."""

    name: str
    make: Callable[[float], tuple[Any, float]]


def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Call a function; return its result and its seconds."""
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, time.perf_counter() - start


def methods(matrix: hcurv.GaussNewton, model: nn.Module) -> Iterator[Method]:
    """Make no preconditioner, and ours, from the float32 matrix."""
    yield Method("none", lambda damping: (None, 0.0))
    default = hcurv.compress(matrix, tolerance=DEFAULT_TOLERANCE)
    yield Method("ours, default", lambda damping: timed(lambda: default_factors(matrix, damping)))
    rank = max(1, default.num_stored // matrix.shape[0])
    low_rank, build = timed(LowRank, matrix, rank)
    yield Method("low rank", lambda damping: (LowRankSolve(low_rank, damping), build))
    leaves = f"leaves {default.record.leaf_size}" if default.tree.num_kept else "no tree"
    print(
        f"{'':25}default: {100 * default.compression_rate:.3f} % stored, global rank"
        f" {default.global_rank}, {leaves}; low rank: {rank}"
    )
    for setting in ("low", "high"):
        plain, build = timed(compress, matrix, accuracy=setting)
        yield Method(f"ours, {setting}", partial(definite_factors, plain, build))


def jacobi_methods(matrix: hcurv.GaussNewton, model: nn.Module) -> Iterator[Method]:
    """Make preconditioners that need nothing but entries."""
    yield Method("Jacobi", lambda damping: timed(lambda: matrix.diagonal() + damping))
    layers = layer_slices(model)
    most = max(part.stop - part.start for part in layers)
    if most <= LARGEST_BLOCK:
        yield Method(
            "block-Jacobi", lambda damping: timed(lambda: BlockJacobi(matrix, layers, damping))
        )
    else:
        print(f"{'':25}block-Jacobi left out: a dense block of {most} rows")


def default_factors(matrix: hcurv.GaussNewton, damping: float) -> hcurv.Factorization:
    """Make a preconditioner from the matrix that users get by default."""
    return compress(matrix, global_rank="auto", damping=damping, tolerance=0.1).factorize(damping)


def definite_factors(plain: hcurv.HMatrix, build: float, damping: float) -> tuple[Any, float]:
    """Make a preconditioner from a compressed matrix, and add the seconds of its building."""
    result, seconds = timed(lambda: make_definite(plain, damping).factorize(damping))
    return result, seconds + build


@dataclass(frozen=True)
class LowRankSolve:
    """Low rank in single precision, as the other preconditioners."""

    matrix: LowRank
    damping: float

    def solve(self, rhs: Tensor) -> Tensor:
        """Solve by the Woodbury formula."""
        return self.matrix.factorize(self.damping).solve(rhs.float()).to(rhs.dtype)


def layer_slices(model: nn.Module) -> list[slice]:
    """Find the rows of the parameters of each layer, weight and bias."""
    found, start = [], 0
    for module in model.modules():
        size = sum(p.numel() for p in module.parameters(recurse=False))
        if size:
            found.append(slice(start, start + size))
            start += size
    return found


class BlockJacobi:
    """Dense Cholesky factors of the diagonal blocks of layers."""

    def __init__(self, matrix: hcurv.GaussNewton, layers: list[slice], damping: float) -> None:
        self._layers, self._factors = layers, []
        for part in layers:
            block = matrix.block(part, part).double()
            block.diagonal().add_(damping)
            self._factors.append(torch.linalg.cholesky(block))

    def solve(self, rhs: Tensor) -> Tensor:
        """Solve block by block."""
        pairs = zip(self._layers, self._factors, strict=True)
        return torch.cat([torch.cholesky_solve(rhs[part], factor) for part, factor in pairs])


def conjugate_gradients(
    data: str | None,
    only: list[str] | None = None,
    num_points: int = 1000,
    make_methods: Callable[..., Iterator[Method]] = methods,
) -> None:
    """Print the iterations and the time to 1e-6 for every preconditioner."""
    print(
        f"\nConjugate gradients to 1e-6, {NUM_RIGHT_HAND_SIDES} right-hand sides,"
        f" n = {num_points}: iterations,"
    )
    print(f"seconds (with setting up the preconditioner); * not converged in {MAX_ITERATIONS}")
    powers = (2, 3, 4, 5) if num_points == 1000 else (2, 3, 4)  # more would take several hours
    print(f"{'':25}" + "".join(f"{f'λ = 1e-{p} λ₁':>24}" for p in powers))
    names = ("AE (a)", "classifier (a)", "classifier (b)", "AE (b)")
    for name in names if num_points == 1000 else names[:2]:
        if only and name not in only:
            continue
        trained = train(REFERENCE_NETWORKS[name], data)
        single = gauss_newton(name, data, num_points)
        inputs = trained.inputs[:num_points].double()
        exact = hcurv.GaussNewton(trained.model.double(), trained.loss, inputs)
        trained.model.float()
        largest = largest_eigenvalue(single)
        rhs = torch.randn(
            exact.shape[0],
            NUM_RIGHT_HAND_SIDES,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(0),
        )
        for method in make_methods(single, trained.model):
            cells = []
            for power in powers:
                damping = 10.0**-power * largest
                preconditioner, setup = method.make(damping)
                result, seconds = timed(
                    hcurv.cg,
                    exact,
                    rhs,
                    damping=damping,
                    preconditioner=preconditioner,
                    max_iterations=MAX_ITERATIONS,
                )
                count = int(result.num_iterations.max())
                mark = "" if result.converged else "*"
                cells.append(f"{f'{count}{mark}':>8}{seconds:>7.1f}{f'({seconds + setup:.1f})':>9}")
            print(f"{name:16}{method.name:14}" + "".join(cells), flush=True)


def conjugate_gradients_large(data: str | None, only: list[str] | None = None) -> None:
    """Run conjugate gradients over 10,000 points."""
    conjugate_gradients(data, only, 10_000)


def conjugate_gradients_jacobi(data: str | None, only: list[str] | None = None) -> None:
    """Run conjugate gradients with Jacobi's preconditioner, by entries and by layers."""
    conjugate_gradients(data, only, make_methods=jacobi_methods)


def growth(data: str | None, only: list[str] | None = None) -> None:
    """Measure the growth on the networks of the compression benchmark."""
    print("\nGrowth: 128-w-10 classifier on uniform inputs, n = 500, low accuracy, λ = 1e-2 λ₁")
    print(f"{'N':>9}{'factorize s':>13}{'solve s':>10}{'logdet s':>10}{'variances s':>13}")
    inputs = torch.rand(500, 128, generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []
    times: dict[str, list[float]] = {"factorize and logdet": [], "solve": [], "variances": []}
    for exponent in range(14, 19):
        model = seeded_mlp((128, round(2**exponent / 139), 10))
        matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
        damping = 1e-2 * largest_eigenvalue(matrix)
        compressed = compress(matrix, accuracy="low", damping=damping)
        factorization = compressed.factorize(damping)
        rhs = torch.randn(matrix.shape[0], 128)
        measured = {
            "factorize and logdet": best_time(partial(compressed.factorize, damping), 5),
            "solve": best_time(partial(factorization.solve, rhs), 5),
            "variances": best_time(factorization.inverse_diagonal, 3),
        }
        logdet = best_time(factorization.logdet, 5)
        sizes.append(matrix.shape[0])
        for what, seconds in measured.items():
            times[what].append(seconds)
        print(
            f"{matrix.shape[0]:>9}{measured['factorize and logdet']:>13.2f}"
            f"{measured['solve']:>10.3f}{logdet:>10.1e}{measured['variances']:>13.2f}",
            flush=True,
        )
    for what, values in times.items():
        slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
        print(f"fitted exponent of {what}: {slope:.2f} (at most 1.2)")
    plot_growth(sizes, times)


def plot_growth(sizes: list[int], times: dict[str, list[float]]) -> None:
    """Draw a log-log plot into the folder of results."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for what, values in times.items():
        axes.loglog(sizes, values, "o-", label=what)
    reference = times["solve"][0]
    linear = [reference * size / sizes[0] for size in sizes]
    axes.loglog(sizes, linear, "--", color="gray", label="linear in N")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("N")
    axes.set_ylabel("s")
    axes.legend()
    target = Path(__file__).parent / "results" / "solve-growth.png"
    figure.savefig(target, dpi=120)
    print(f"plotted in benchmarks/results/{target.name}")


PARTS = {
    "factor": factor,
    "definite": definite,
    "cg": conjugate_gradients,
    "cg-jacobi": conjugate_gradients_jacobi,
    "cg-10000": conjugate_gradients_large,
    "growth": growth,
}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data, arguments.only)
