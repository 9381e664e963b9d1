"""The global part and tree that `hcurv.compress` chooses, against trees and low rank alone.

    make bench BENCH=format DATA=folder-with-mnist-and-cifar10
    make bench BENCH=format PARTS="targets large" DATA=...

Errors are ‖HX − AX‖_F/‖HX‖_F with 128 Gaussian columns, storage is every stored float over N².
"""

from __future__ import annotations

import time
from typing import Any

import torch

import hcurv
from arguments import parse_data_argument
from compress import compress, gauss_newton
from hcurv.experiments.measure import describe_machine, peak_extra_bytes

GB = 1e9


def auto(matrix: hcurv.GaussNewton, **options: Any) -> tuple[hcurv.HMatrix, float, int]:
    """Compress by default; return the matrix, its seconds, and its peak of additional bytes."""
    found: list[hcurv.HMatrix] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(
        lambda: found.append(compress(matrix, **{"global_rank": "auto", **options}))
    )
    return found[0], time.perf_counter() - start, peak


def describe(result: hcurv.HMatrix) -> str:
    """Describe the format that was chosen."""
    leaves = f"leaves {result.record.leaf_size}" if result.tree.num_kept else "no tree"
    return f"global rank {result.global_rank}, {leaves}, {result.tree.ordering}"


def targets(data: str | None) -> None:
    """Print error and storage, with and without a global part."""
    print("\nReached (asked for), n = 1000")
    print(f"{'':16}{'tolerance':>10}{'error':>20}{'storage %':>16}{'build':>9}{'plan':>8}")
    for name, tolerance, error, storage in (
        ("classifier (a)", 3.2e-3, 3.5e-3, 4.5),
        ("classifier (a)", 1.2e-2, 1.3e-2, 2.0),
        ("AE (a)", 5e-2, None, None),
        ("AE (a)", 5e-4, None, None),
    ):
        matrix = gauss_newton(name, data, 1000)
        plain = compress(matrix, tolerance=tolerance, global_rank=0)
        result, seconds, _ = auto(matrix, tolerance=tolerance)
        error = error or plain.relative_error(matrix)
        storage = storage or 100 * plain.compression_rate
        reached = f"{result.relative_error(matrix):.1e} ({error:.1e})"
        stored = f"{100 * result.compression_rate:.2f} ({storage:.2f})"
        plan = result.record.seconds["planning"]
        print(
            f"{name:16}{tolerance:>10.1e}{reached:>20}{stored:>16}{seconds:>7.1f} s{plan:>6.1f} s"
            f"  {describe(result)}; tree alone {100 * plain.compression_rate:.2f} %",
            flush=True,
        )


def large(data: str | None) -> None:
    """Compress the two large networks to given errors."""
    print("\nReached (asked for), n = 10,000")
    for name, tolerance, error, storage in (
        ("classifier (c)", 4e-2, 4.2e-2, 0.1),
        ("classifier (d)", 1.9e-2, 2e-2, 0.0047),
    ):
        matrix = gauss_newton(name, data, 10_000)
        result, seconds, peak = auto(matrix, tolerance=tolerance)
        print(
            f"{name:16} error {result.relative_error(matrix):.1e} ({error:.1e}), storage"
            f" {100 * result.compression_rate:.4f} % ({storage}), {result.nbytes / GB:.2f} GB,"
            f" {seconds:.0f} s, peak {peak / GB:.1f} GB; {describe(result)}",
            flush=True,
        )


def near_field(data: str | None) -> None:
    """Print ranks with near blocks, on a kernel matrix with many neighbours and on networks."""
    print("\nNear field: tolerance 1e-3, leaves of 64; a share of the leaves near to every leaf")
    print(f"{'':22}{'near':>6}{'error':>10}{'storage %':>11}{'mean rank':>11}{'largest':>9}")
    points = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    sources: dict[str, Any] = {
        "inverse multiquadric": (1 + 400 * torch.cdist(points, points) ** 2) ** -0.5
    }
    for name in ("AE (a)", "classifier (a)"):
        sources[name] = gauss_newton(name, data, 1000)
    for name, source in sources.items():
        for budget in (0.0, 0.05, 0.1):
            result = compress(source, tolerance=1e-3, leaf_size=64, near_budget=budget)
            ranks = torch.cat([ranks.double() for ranks in result.ranks])
            print(
                f"{name:22}{budget:>6.2f}{result.relative_error(source):>10.1e}"
                f"{100 * result.compression_rate:>11.2f}{ranks.mean():>11.1f}"
                f"{int(ranks.max()):>9}",
                flush=True,
            )


PARTS = {
    "targets": targets,
    "large": large,
    "near-field": near_field,
}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
