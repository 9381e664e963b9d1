"""Global part and tree together, split by `hcurv.compress` itself: beside trees and low rank alone.

    make bench BENCH=format DATA=folder-with-mnist-and-cifar10
    make bench BENCH=format PARTS="targets table-4" DATA=...

Errors are ‖HX − AX‖_F/‖HX‖_F with 128 Gaussian columns, storage is every stored float over N².
"""

from __future__ import annotations

import time
from typing import Any

import torch

import hcurv
from baselines import TABLE_4
from compress import TABLE_3, TABLE_5, Rows, compress, gauss_newton
from hcurv.baselines import KFAC, LowRank
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train
from measure import describe_machine, parse_data_argument, peak_extra_bytes
from solve import MAX_ITERATIONS, largest_eigenvalue

GB = 1e9


def auto(matrix: hcurv.GaussNewton, **options: Any) -> tuple[hcurv.HMatrix, float, int]:
    """The default, its seconds, and peak bytes beyond what was there before."""
    found: list[hcurv.HMatrix] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(
        lambda: found.append(compress(matrix, **{"global_rank": "auto", **options}))
    )
    return found[0], time.perf_counter() - start, peak


def describe(result: hcurv.HMatrix) -> str:
    """What was chosen."""
    leaves = f"leaves {result.record.leaf_size}" if result.tree.num_kept else "no tree"
    return f"global rank {result.global_rank}, {leaves}, {result.tree.ordering}"


def targets(data: str | None) -> None:
    """Error and storage, with and without a global part."""
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


def table_4(data: str | None) -> None:
    """The most accurate that fits into the paper's storage, beside RSVD and K-FAC."""
    print("\nTable 4 of the paper, n = 10,000, at its storage levels: errors")
    print(f"{'':16}{'setting':8}{'storage %':>11}{'allowed':>9}{'ours':>9}{'RSVD':>9}", end="")
    print(f"{'K-FAC':>9}{'stores %':>10}{'build':>9}")
    for (name, setting), (share, _, _) in TABLE_4.items():
        matrix = gauss_newton(name, data, 10_000)
        trained = train(REFERENCE_NETWORKS[name], data)
        points = trained.inputs[:10_000].clone()
        result, seconds, _ = auto(matrix, max_storage=share / 100)
        rank = round(share / 100 * matrix.shape[0])
        low_rank = LowRank(matrix, rank, power_iterations=1).relative_error(matrix)
        kfac = KFAC(trained.model, trained.loss, points, structure="full", num_samples=None)
        print(
            f"{name:16}{setting:8}{100 * result.compression_rate:>11.3f}{share:>9.2f}"
            f"{result.relative_error(matrix):>9.1e}{low_rank:>9.1e}"
            f"{kfac.relative_error(matrix):>9.1e}{100 * kfac.compression_rate:>10.3f}"
            f"{seconds:>7.1f} s  {describe(result)}",
            flush=True,
        )


def beside_paper(rows: Rows, data: str | None, num_points: int) -> None:
    """Rows of a table of the paper, ours and theirs."""
    header = f"{'error':>10}{'paper':>9}{'storage %':>11}{'paper':>8}{'stored':>10}"
    print(f"{'':16}{'setting':8}{'N':>9}{header}{'build':>10}{'peak':>9}")
    for (name, setting), (storage, error, _) in rows.items():
        matrix = gauss_newton(name, data, num_points)
        result, seconds, peak = auto(matrix, tolerance=0.9 * error)
        print(
            f"{name:16}{setting:8}{matrix.shape[0]:>9}{result.relative_error(matrix):>10.1e}"
            f"{error:>9.1e}{100 * result.compression_rate:>11.4f}{storage:>8.3f}"
            f"{result.nbytes / GB:>7.2f} GB{seconds:>8.1f} s{peak / GB:>6.1f} GB"
            f"  {describe(result)}",
            flush=True,
        )


def table_3(data: str | None) -> None:
    """The paper's five small networks, at its errors."""
    print("\nTable 3 of the paper, n = 1000, at its errors")
    beside_paper(TABLE_3, data, 1000)


def table_5(data: str | None) -> None:
    """The paper's two large networks, at its errors."""
    print("\nTable 5 of the paper, n = 10,000, at its errors")
    beside_paper(TABLE_5, data, 10_000)


def large(data: str | None) -> None:
    """The two large networks, at errors asked for."""
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


def conjugate_gradients(data: str | None) -> None:
    """Iterations to 1e-6 beside plain ones and those with low rank of equal storage."""
    print("\nConjugate gradients to 1e-6, n = 1000, 16 right-hand sides, iterations with: nothing,")
    print(f"low rank of equal storage, ours (tolerance 1e-3); * not in {MAX_ITERATIONS}")
    powers = (2, 3, 4, 5)
    print(f"{'':16}" + "".join(f"{f'λ = 1e-{p} λ₁':>22}" for p in powers) + "  storage %")
    for name in ("AE (a)", "classifier (a)", "classifier (b)", "AE (b)"):
        trained = train(REFERENCE_NETWORKS[name], data)
        single = gauss_newton(name, data, 1000)
        inputs = trained.inputs[:1000].double()
        exact = hcurv.GaussNewton(trained.model.double(), trained.loss, inputs)
        trained.model.float()
        largest = largest_eigenvalue(single)
        generator = torch.Generator().manual_seed(0)
        rhs = torch.randn(exact.shape[0], 16, dtype=torch.float64, generator=generator)
        cells = []
        for power in powers:
            damping = 10.0**-power * largest
            ours = compress(
                single, tolerance=1e-3, global_rank="auto", positive_definite=True, damping=damping
            )
            low_rank = LowRank(single, max(1, ours.num_stored // single.shape[0]))
            counts = []
            for preconditioner in (
                None,
                lambda values, low_rank=low_rank, damping=damping: low_rank.solve(
                    values.float(), damping
                ).double(),
                ours.factorize(damping),
            ):
                result = hcurv.cg(
                    exact,
                    rhs,
                    damping=damping,
                    preconditioner=preconditioner,
                    max_iterations=MAX_ITERATIONS,
                )
                mark = "" if result.converged else "*"
                counts.append(f"{int(result.num_iterations.max())}{mark}")
            cells.append(f"{', '.join(counts):>22}")
        stored = f"{100 * ours.compression_rate:.3f}  {describe(ours)}"
        print(f"{name:16}{''.join(cells)}  {stored}", flush=True)


PARTS = {
    "targets": targets,
    "table-4": table_4,
    "table-3": table_3,
    "table-5": table_5,
    "large": large,
    "cg": conjugate_gradients,
}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
