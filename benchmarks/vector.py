"""One vector through compressed matrices, against the time to read their floats from memory.

    make bench BENCH=vector DATA=folder-with-mnist

Read bandwidth is that of the sum of a large tensor, measured in the same run. A product is compared
with reading the stored floats (`num_stored`) once, a solve with reading them twice. The first
product or solve also makes what later ones use, so its time stands apart. The last column is the
time of 128 columns. Times are the best of many repeats.
"""

from __future__ import annotations

import time
import warnings

import torch

import hcurv
from arguments import parse_data_argument
from compress import gauss_newton
from hcurv.experiments.measure import best_time, describe_machine

MATRICES = (
    ("classifier (a)", 1e-2),  # a global part alone
    ("AE (a)", 5e-2),  # a tree of small blocks
    ("AE (a)", 1e-3),  # a tree with large blocks
)
_REPEATS = 200


def read_bandwidth() -> float:
    """Measure how many bytes are read from memory in a second."""
    numbers = torch.ones(2**26)
    return numbers.nbytes / best_time(lambda: numbers.sum(), 20)


def report(name: str, what: str, matrix: hcurv.SymmetricOperator, reads: int, rate: float) -> None:
    """Print the times of one vector."""
    size, dtype = matrix.shape[0], matrix.dtype
    vector, columns = torch.randn(size, dtype=dtype), torch.randn(size, 128, dtype=dtype)
    start = time.perf_counter()
    matrix @ vector
    first = time.perf_counter() - start
    seconds = best_time(lambda: matrix @ vector, _REPEATS, 5.0)
    many = best_time(lambda: matrix @ columns, 10, 5.0)
    floats = matrix.num_stored * dtype.itemsize
    reading = reads * floats / rate
    print(
        f"{name:22}{what:>8}{floats / 1e6:>8.2f} MB{1e3 * reading:>9.3f} ms"
        f"{1e3 * seconds:>9.3f} ms{seconds / reading:>7.1f}{1e3 * first:>9.1f} ms"
        f"{1e3 * many:>9.1f} ms",
        flush=True,
    )


def run(data: str | None) -> None:
    """Print one line for each product and each solve."""
    rate = read_bandwidth()
    print(f"read bandwidth {rate / 1e9:.1f} GB/s")
    print(
        f"{'':22}{'':8}{'floats':>11}{'reading':>12}{'vector':>12}{'ratio':>7}{'first':>12}"
        f"{'columns':>12}"
    )
    for name, tolerance in MATRICES:
        source = gauss_newton(name, data, 1000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matrix = hcurv.compress(source, tolerance=tolerance)
            damping = 0.1 * float(matrix.diagonal().max())
            factors = matrix.factorize(damping)
        report(f"{name}, {tolerance:g}", "A @ v", matrix, 1, rate)
        report("", "F.solve", factors, 2, rate)
    source = gauss_newton("classifier (a)", data, 1000)
    low_rank = hcurv.baselines.LowRank(source, rank=330)
    report("LowRank, rank 330", "L @ v", low_rank, 1, rate)
    report("", "F.solve", low_rank.factorize(1e-2), 2, rate)


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__)
    print(describe_machine())
    run(arguments.data)
