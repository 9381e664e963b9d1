"""Compression of Gauss-Newton Hessians: targets, error against storage, growth.

    make bench BENCH=compress DATA=folder-with-mnist-and-cifar10
    make bench BENCH=compress PARTS="targets curve" DATA=...

Errors are ‖HX − AX‖_F/‖HX‖_F with 128 Gaussian columns, storage is every stored float over N²,
build is end to end from the `GaussNewton` object, and times are in units of a dense product H·X₁₂₈
of the same size in the same run. All of it is without global parts; for these see format.py.
The paper's tables: `hcurv reproduce cost-accuracy` and others.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.measure import (
    best_time,
    dense_product_seconds,
    describe_machine,
    peak_extra_bytes,
)
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, seeded_mlp, train

GB = 1e9


class Target(NamedTuple):
    """The error, storage and time that one row must reach."""

    tolerance: float
    error: float
    storage: float
    build: float
    product: float


TARGETS = {
    ("AE (a)", "low"): Target(5e-2, 5e-2, 0.45, 4, 0.15),
    ("AE (a)", "high"): Target(5e-4, 5e-4, 6.6, 10, 0.2),
    ("classifier (a)", "low"): Target(1e-1, 1.2e-1, 0.9, 4, 0.12),
    ("classifier (a)", "high"): Target(2.8e-3, 3.5e-3, 12.0, 10, 0.25),
}
CURVES = {
    "low": (3e-1, 1e-1, 5e-2, 2e-2, 1e-2),
    "high": (1e-2, 3e-3, 1e-3, 5e-4),
}


def gauss_newton(name: str, data: str | None, num_points: int) -> hcurv.GaussNewton:
    """Make the matrix of a reference network over the first training images."""
    trained = train(REFERENCE_NETWORKS[name], data)
    return hcurv.GaussNewton(trained.model, trained.loss, trained.inputs[:num_points].clone())


def compress(matrix: hcurv.EntrySource | Tensor, **options: Any) -> hcurv.HMatrix:
    """Compress to a tree alone, without warnings about the error, which is printed anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hcurv.CompressionWarning)
        return hcurv.compress(matrix, **{"global_rank": 0, **options})


class Measured(NamedTuple):
    """A compressed matrix, with the time and the memory that it took."""

    matrix: hcurv.HMatrix
    build: float  # seconds
    product: float  # seconds, 128 columns
    peak: int  # bytes beyond what was there before


def measure(matrix: hcurv.GaussNewton, repeats: int, **options: Any) -> Measured:
    """Compress several times, and keep the best time."""
    found: list[hcurv.HMatrix] = []

    def build() -> None:
        found[:] = [compress(matrix, **options)]

    times: list[float] = []
    peak = peak_extra_bytes(lambda: times.append(best_time(build, repeats, 60)))
    columns = torch.randn(matrix.shape[0], 128)
    product = best_time(lambda: found[0] @ columns, 10, 10)
    return Measured(found[0], times[0], product, peak)


def targets(data: str | None) -> None:
    """Measure the four rows that have targets."""
    print("\nReached (asked for), n = 1000, times in dense products H·X₁₂₈")
    header = f"{'error':>20}{'storage %':>18}{'build':>16}{'product':>18}"
    print(f"{'':16}{'setting':8}{'tolerance':>10}{header}  ordering")
    for (name, setting), target in TARGETS.items():
        matrix = gauss_newton(name, data, 1000)
        unit = dense_product_seconds(matrix.shape[0])
        result, build, product, _ = measure(matrix, 4, accuracy=setting, tolerance=target.tolerance)
        error, storage = result.relative_error(matrix), 100 * result.compression_rate
        print(
            f"{name:16}{setting:8}{target.tolerance:>10.1e}"
            f"{f'{error:.1e} ({target.error:.1e})':>20}{f'{storage:.2f} ({target.storage})':>18}"
            f"{f'{build / unit:.1f} ({target.build})':>16}"
            f"{f'{product / unit:.3f} ({target.product})':>18}  {result.tree.ordering}",
            flush=True,
        )
        phases = ", ".join(f"{k} {v:.2f}" for k, v in result.record.seconds.items())
        print(f"{'':16}unit {unit:.2f} s; build {build:.2f} s: {phases}")


def curve(data: str | None) -> None:
    """Print the error against the storage."""
    print("\nError against storage, n = 1000")
    print(f"{'':16}{'setting':8}{'tolerance':>10}{'error':>10}{'estimated':>11}{'storage %':>11}")
    for name in ("AE (a)", "classifier (a)"):
        matrix = gauss_newton(name, data, 1000)
        for setting, tolerances in CURVES.items():
            for tolerance in tolerances:
                result = compress(matrix, accuracy=setting, tolerance=tolerance)
                print(
                    f"{name:16}{setting:8}{tolerance:>10.0e}"
                    f"{result.relative_error(matrix):>10.1e}{result.estimated_error:>11.1e}"
                    f"{100 * result.compression_rate:>11.3f}",
                    flush=True,
                )


def growth(data: str | None) -> None:
    """Measure two-layer networks of growing width on 500 random inputs."""
    print("\nGrowth: 128-w-10 classifier on uniform inputs, n = 500, low accuracy")
    print(f"{'N':>9}{'build s':>10}{'product s':>11}{'stored floats':>15}{'error':>10}")
    inputs = torch.rand(500, 128, generator=torch.Generator().manual_seed(0))
    sizes, builds, stored = [], [], []
    for exponent in range(14, 19):
        model = seeded_mlp((128, round(2**exponent / 139), 10))
        matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
        result, build, product, _ = measure(matrix, 3, accuracy="low")
        print(
            f"{matrix.shape[0]:>9}{build:>10.2f}{product:>11.3f}{result.num_stored:>15}"
            f"{result.relative_error(matrix):>10.1e}",
            flush=True,
        )
        sizes.append(matrix.shape[0])
        builds.append(build)
        stored.append(result.num_stored)
    for what, values, most in (
        ("storage", np.array(stored, dtype=float), 1.15),
        ("build time", np.array(builds), 1.25),
    ):
        slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
        print(f"fitted exponent of {what}: {slope:.2f} (at most {most})")
    plot_growth(sizes, builds, stored)


def plot_growth(sizes: list[int], builds: list[float], stored: list[int]) -> None:
    """Draw a log-log plot into the folder of results."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    measured: list[tuple[str, list[float]]] = [
        ("build in s", builds),
        ("stored floats", [float(number) for number in stored]),
    ]
    for axes, (label, values) in zip(figure.subplots(1, 2), measured, strict=True):
        axes.loglog(sizes, values, "o-", label="measured")
        linear = [values[0] * size / sizes[0] for size in sizes]
        axes.loglog(sizes, linear, "--", color="gray", label="linear in N")
        axes.set_xlabel("N")
        axes.set_ylabel(label)
        axes.legend()
    target = Path(__file__).parent / "results" / "growth.png"
    figure.savefig(target, dpi=120)
    print(f"plotted in benchmarks/results/{target.name}")


PARTS = {
    "targets": targets,
    "growth": growth,
    "curve": curve,
}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
