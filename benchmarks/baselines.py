"""Low rank and K-FAC: against other implementations, the paper's Table 4, measured complexities.

make bench BENCH=baselines DATA=folder-with-mnist-and-cifar10
make bench BENCH=baselines PARTS="kfac low-rank" DATA=...
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hcurv
from compress import compress, gauss_newton, seeded_mlp
from hcurv.baselines import KFAC, LowRank, MatrixFree
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train
from measure import best_time, describe_machine, parse_data_argument


def curvlinops_kfac(model: nn.Module, loss: Any, inputs: Any, labels: Any, kind: str) -> Any:
    """Their block-diagonal K-FAC, weights and biases of a layer together."""
    from curvlinops import KFACLinearOperator

    return KFACLinearOperator(
        model,
        loss,
        list(model.parameters()),
        [(inputs, labels)],
        fisher_type=kind,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )


def kfac(data: str | None) -> None:
    """The same matrix as curvlinops', and the time to build it."""
    print("\nK-FAC, block-diagonal, beside curvlinops")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        inputs = torch.rand(30, 9, dtype=torch.float64)
        labels = torch.randint(0, 5, (30,))
    loss = nn.CrossEntropyLoss()
    theirs = curvlinops_kfac(small, loss, inputs, labels, "type-2")
    ours = KFAC(small, loss, inputs, num_samples=None)
    vectors = torch.randn(ours.shape[0], 8, dtype=torch.float64)
    expected = theirs @ vectors
    difference = float((ours @ vectors - expected).norm() / expected.norm())
    print(f"exact expectation, float64: relative difference {difference:.1e}")

    trained = train(REFERENCE_NETWORKS["classifier (c)"], data)
    points = trained.inputs[:10_000].clone()
    classes = torch.randint(0, 10, (10_000,), generator=torch.Generator().manual_seed(0))
    model = trained.model
    with torch.no_grad():
        forward = best_time(lambda: model(points), 10)

    def build_theirs() -> None:
        operator = curvlinops_kfac(model, trained.loss, points, classes, "mc")
        operator @ torch.zeros(operator.shape[0])  # factors are computed when first needed

    other = best_time(build_theirs, 5)
    mine = best_time(lambda: KFAC(model, trained.loss, points), 5)
    exact = best_time(lambda: KFAC(model, trained.loss, points, num_samples=None), 3)
    print(f"classifier (c), n = 10,000, one sample a point, in forward passes of {forward:.3f} s:")
    print(f"hcurv {mine / forward:.1f} (exact expectation {exact / forward:.1f}),", end=" ")
    print(f"curvlinops {other / forward:.1f}: {other / mine:.2f}x (wanted: 1x)")


def low_rank(data: str | None) -> None:
    """Time beside that of the products, accuracy beside a truncated SVD of the dense matrix."""
    print("\nLow rank: time over that of the exact products needed (at most 1.3), and error beside")
    print("torch.svd_lowrank of the dense matrix with as many products (q iterations take 2q + 2)")
    print(f"{'':16}{'n':>7}{'rank':>6}{'products':>10}{'time':>8}{'error':>10}{'svd_lowrank':>13}")
    for name, num_points in (("classifier (a)", 10_000), ("AE (a)", 1000), ("AE (a)", 10_000)):
        matrix = gauss_newton(name, data, num_points)
        dense = matrix.to_dense()
        for rank, iterations in ((64, 0), (256, 0), (256, 1)):
            columns = torch.randn(matrix.shape[0], rank + 10)
            count = 2 * iterations + 2
            products = count * best_time(partial(matrix.__matmul__, columns), 3)
            build = partial(LowRank, matrix, rank, power_iterations=count - 1)
            seconds = best_time(build, 3)
            error = build().relative_error(dense)
            left, middle, right = torch.svd_lowrank(dense, rank + 10, niter=iterations)
            left, middle, right = left[:, :rank], middle[:rank], right[:, :rank]
            probes = torch.randn(matrix.shape[0], 128, generator=torch.Generator().manual_seed(0))
            expected = dense @ probes
            rest = expected - left @ (middle[:, None] * (right.T @ probes))
            reference = float(rest.norm() / expected.norm())
            print(
                f"{name:16}{num_points:>7}{rank:>6}{count:>10}{seconds / products:>8.2f}"
                f"{error:>10.2e}{reference:>13.2e}",
                flush=True,
            )


# Rank or samples over N in %, error of RSVD, error of K-FAC.
TABLE_4 = {
    ("AE (a)", "low"): (1.40, 4.3e-1, 1.2e-1),
    ("AE (a)", "high"): (12.14, 5.1e-3, 7.3e-2),
    ("AE (b)", "low"): (0.62, 8.4e-1, 1.7e-1),
    ("AE (b)", "high"): (4.65, 2.3e-1, 3.8e-2),
    ("AE (c)", "low"): (0.32, 9.1e-1, 1.6e-1),
    ("AE (c)", "high"): (2.38, 2.1e-1, 4.1e-2),
    ("classifier (a)", "low"): (1.40, None, None),
    ("classifier (a)", "high"): (12.14, None, None),
    ("classifier (b)", "low"): (0.62, None, None),
    ("classifier (b)", "high"): (4.65, None, None),
}
MOST_COLUMNS = 2**29  # floats of a sketch


def table_4(data: str | None) -> None:
    """RSVD and K-FAC columns."""
    print("\nTable 4 of the paper, n = 10,000: RSVD of rank r with r/N as in the paper; K-FAC,")
    print("block-tridiagonal, with 1 sample a point and with the exact expectation (the paper's")
    print("number of samples k, k/N as for RSVD, lies in between), and its true storage")
    print(f"{'':16}{'setting':9}{'r/N %':>8}{'RSVD':>9}{'paper':>9}{'K-FAC 1':>10}", end="")
    print(f"{'exact':>9}{'paper':>9}{'stored %':>10}")
    for (name, setting), (share, their_rsvd, their_kfac) in TABLE_4.items():
        matrix = gauss_newton(name, data, 10_000)
        trained = train(REFERENCE_NETWORKS[name], data)
        points = trained.inputs[:10_000].clone()
        size = matrix.shape[0]
        rank = min(round(share / 100 * size), MOST_COLUMNS // size)
        error = LowRank(matrix, rank).relative_error(matrix)
        errors = []
        for count in (1, None):
            approximation = KFAC(
                trained.model,
                trained.loss,
                points,
                structure="block-tridiagonal",
                num_samples=count,
            )
            errors.append(approximation.relative_error(matrix))
        theirs = [f"{e:.1e}" if e is not None else "–" for e in (their_rsvd, their_kfac)]
        print(
            f"{name:16}{setting:9}{100 * rank / size:>8.2f}{error:>9.1e}{theirs[0]:>9}"
            f"{errors[0]:>10.1e}{errors[1]:>9.1e}{theirs[1]:>9}"
            f"{100 * approximation.compression_rate:>10.3f}",
            flush=True,
        )


def measure_all(sizes: tuple[int, ...], num_points: int) -> dict[str, dict[str, float]]:
    """Construction, storage and solve of the four methods of Table 2 on one network."""
    inputs = torch.rand(num_points, sizes[0], generator=torch.Generator().manual_seed(0))
    model, loss = seeded_mlp(sizes), nn.CrossEntropyLoss()
    matrix = hcurv.GaussNewton(model, loss, inputs)
    damping = 1e-2 * float(hcurv.eigsh(matrix, 1, tolerance=1e-3).values[0])
    rhs = torch.randn(matrix.shape[0], 16, generator=torch.Generator().manual_seed(1))

    def hierarchical() -> hcurv.HMatrix:
        return compress(
            hcurv.GaussNewton(model, loss, inputs),
            accuracy="low",
            positive_definite=True,
            damping=damping,
        )

    builders = {
        "MF": lambda: MatrixFree(hcurv.GaussNewton(model, loss, inputs), tolerance=1e-4),
        "RSVD": lambda: LowRank(hcurv.GaussNewton(model, loss, inputs), 64),
        "K-FAC": lambda: KFAC(model, loss, inputs, structure="block-tridiagonal"),
        "HM": hierarchical,
    }
    found = {}
    for name, build in builders.items():
        operator: Any = build()
        solve = partial(operator.solve, rhs, damping) if name in ("MF", "RSVD") else None
        if solve is None:
            solve = partial(operator.factorize(damping).solve, rhs)
        found[name] = {
            "construction": best_time(build, 2, 30),
            "storage": float(operator.num_stored),
            "solve": best_time(solve, 2, 30),
        }
    return found


def table_2(data: str | None) -> None:
    """Exponents of construction, storage and solve in N and in n."""
    print("\nTable 2 of the paper, measured: exponents of N (128-w-w-10, n = 1000) and of n")
    print("(128-128-128-10); MF: conjugate gradients to 1e-4; RSVD of rank 64; K-FAC")
    print("block-tridiagonal, one sample; HM at low accuracy; λ = 1e-2 λ₁, 16 right-hand sides")
    by_size = [((128, w, w, 10), 1000) for w in (64, 128, 256, 512)]
    by_points = [((128, 128, 128, 10), n) for n in (500, 1000, 2000, 4000, 8000)]
    sweeps = {"N": by_size, "n": by_points}
    measured = {what: [measure_all(*setting) for setting in runs] for what, runs in sweeps.items()}
    axes = {
        "N": [128 * w + w + w * w + w + 10 * w + 10 for (_, w, _, _), _ in by_size],
        "n": [n for _, n in by_points],
    }
    print(f"{'':8}" + "".join(f"{f'{q} in {w}':>19}" for w in axes for q in QUANTITIES))
    for method in ("MF", "RSVD", "K-FAC", "HM"):
        cells = []
        for what, values in axes.items():
            for quantity in QUANTITIES:
                series = [run[method][quantity] for run in measured[what]]
                slope, _ = np.polyfit(np.log(values), np.log(series), 1)
                cells.append(f"{slope:>19.2f}")
        print(f"{method:8}" + "".join(cells))
    plot_complexities(axes, measured)


QUANTITIES = ("construction", "storage", "solve")


def plot_complexities(
    axes: dict[str, list[int]], measured: dict[str, list[dict[str, dict[str, float]]]]
) -> None:
    """Log-log plots beside this script's results."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(2, 3)
    for row, (what, values) in zip(grid, axes.items(), strict=True):
        for axis, quantity in zip(row, QUANTITIES, strict=True):
            for method in ("MF", "RSVD", "K-FAC", "HM"):
                series = [run[method][quantity] for run in measured[what]]
                axis.loglog(values, series, "o-", label=method)
            axis.set(xlabel=what, ylabel="floats" if quantity == "storage" else "s", title=quantity)
    grid[0, 0].legend()
    target = Path(__file__).parent / "results" / "complexities.png"
    figure.savefig(target, dpi=120)
    print(f"plotted in benchmarks/results/{target.name}")


PARTS = {"kfac": kfac, "low-rank": low_rank, "table-4": table_4, "table-2": table_2}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
