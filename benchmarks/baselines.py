"""Low rank and K-FAC against other implementations.

make bench BENCH=baselines DATA=folder-with-mnist-and-cifar10

The paper's comparison and complexities: `hcurv reproduce comparison`, `hcurv reproduce complexity`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from arguments import parse_data_argument
from compress import gauss_newton
from hcurv.baselines import KFAC, LowRank
from hcurv.experiments.measure import best_time, best_times, describe_machine
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train


def curvlinops_kfac(model: nn.Module, loss: Any, inputs: Any, labels: Any, kind: str) -> Any:
    """Make curvlinops' block-diagonal K-FAC, with the weights and biases of a layer together."""
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
    """Check that the matrix is that of curvlinops, and compare the times to build it."""
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
        operator @ torch.zeros(
            operator.shape[0]
        )  # curvlinops computes its factors at the first product

    build_ours = partial(KFAC, model, trained.loss, points)
    other, mine = best_times([build_theirs, build_ours], 7)
    exact = best_time(lambda: KFAC(model, trained.loss, points, num_samples=None), 3)
    print(f"classifier (c), n = 10,000, one sample a point, in forward passes of {forward:.3f} s:")
    print(f"hcurv {mine / forward:.1f} (exact expectation {exact / forward:.1f}),", end=" ")
    print(f"curvlinops {other / forward:.1f}: {other / mine:.2f}x (wanted: 1x)")


def low_rank(data: str | None) -> None:
    """Compare the time with that of the products, and the error with that of a truncated SVD."""
    print("\nLow rank: time over that of the exact products needed (at most 1.3), and error beside")
    print("torch.svd_lowrank of the dense matrix with as many products (q iterations take 2q + 2)")
    print(f"{'':16}{'n':>7}{'rank':>6}{'products':>10}{'time':>8}{'error':>10}{'svd_lowrank':>13}")
    for name, num_points in (("classifier (a)", 10_000), ("AE (a)", 1000), ("AE (a)", 10_000)):
        matrix = gauss_newton(name, data, num_points)
        dense = matrix.to_dense()
        for rank, iterations in ((64, 0), (256, 0), (256, 1)):
            columns = torch.randn(matrix.shape[0], rank + 10)
            count = 2 * iterations + 2
            build = partial(LowRank, matrix, rank, power_iterations=count - 1)
            product, seconds = best_times([partial(matrix.__matmul__, columns), build], 7, 60)
            error = build().relative_error(dense)
            left, middle, right = torch.svd_lowrank(dense, rank + 10, niter=iterations)
            left, middle, right = left[:, :rank], middle[:rank], right[:, :rank]
            probes = torch.randn(matrix.shape[0], 128, generator=torch.Generator().manual_seed(0))
            expected = dense @ probes
            rest = expected - left @ (middle[:, None] * (right.T @ probes))
            reference = float(rest.norm() / expected.norm())
            print(
                f"{name:16}{num_points:>7}{rank:>6}{count:>10}{seconds / (count * product):>8.2f}"
                f"{error:>10.2e}{reference:>13.2e}",
                flush=True,
            )


PARTS = {"kfac": kfac, "low-rank": low_rank}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
