"""How fast is the tangent kernel formed and factorized?

make bench BENCH=kernel  [PARTS="--rows 10000"]

For random networks: the flops of a dense kernel (inner products of units and of inputs, of the
lower half) for each second, over those of a large product of matrices in the same run, and over
those of one product C Cᵀ with as many rows, and as many columns as there are units behind the
inputs: for few units, such a product is bound by writing its result. Then the time of an exact
factorization in sample space, the forming included, over that of `torch.linalg.cholesky` for a
matrix of the same size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.measure import describe_machine
from hcurv.experiments.reference_networks import seeded_mlp

NETWORKS = ((784, 20, 10), (784, 512, 10), (784, 256, 64, 32, 10), (8, 128, 128, 128, 1))
REPEATS = 2
PANEL = 1024


def _best(run: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _thin_speed(num_columns: int, out: Tensor) -> float:
    """Flops per second of C Cᵀ, written to ``out`` in panels of rows."""
    factor = torch.randn(len(out), num_columns)
    panels = list(zip(factor.split(PANEL), out.split(PANEL), strict=True))

    def run() -> None:
        for rows, place in panels:
            torch.mm(rows, factor.T, out=place)

    return 2 * len(out) ** 2 * num_columns / _best(run)


def main() -> None:
    """Print one line for each network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="not needed")
    parser.add_argument("--rows", type=int, default=20_000, help="n·q")
    rows = parser.parse_args().rows
    print(describe_machine())
    square = torch.randn(4096, 4096)
    speed = 2 * 4096**3 / _best(lambda: square @ square)
    print(f"a product of two 4096 x 4096 matrices: {speed / 1e9:.0f} Gflop/s")
    # Small entries off the diagonal keep it positive definite: a factorization that fails is fast.
    definite = torch.full((rows, rows), 0.1 / rows)
    definite.fill_diagonal_(1.0)
    cholesky = _best(lambda: torch.linalg.cholesky(definite))
    print(f"torch.linalg.cholesky of {rows} x {rows}: {cholesky:.2f} s")
    for sizes in NETWORKS:
        outputs = sizes[-1]
        count = rows // outputs
        loss: nn.Module = nn.CrossEntropyLoss(reduction="sum")
        if outputs == 1:
            loss = nn.MSELoss(reduction="sum")
        inputs = torch.rand(count, sizes[0], generator=torch.Generator().manual_seed(0))
        matrix = hcurv.GaussNewton(seeded_mlp(sizes), loss, inputs)
        kernel = matrix.kernel(1.0)
        kernel.block([0], [0])  # rows of the factors are put in order once
        forming = _best(lambda: kernel.fill(definite, lower=True))  # noqa: B023
        flops = rows**2 * (sum(sizes[1:]) + (sum(sizes[:-1]) + len(sizes) - 1) / outputs**2)
        thin = _thin_speed(sum(sizes[1:]), definite)
        whole = _best(lambda: matrix.factorize(1.0, method="samples"))  # noqa: B023
        print(
            f"{'-'.join(map(str, sizes)):22} forming {forming:6.2f} s,"
            f" {flops / forming / speed:5.0%} of the speed of a product,"
            f" {flops / forming / thin:4.0%} of C Cᵀ with {sum(sizes[1:])} columns;"
            f" exact factorization {whole:6.2f} s, {whole / cholesky:.2f} x cholesky",
            flush=True,
        )


if __name__ == "__main__":
    main()
