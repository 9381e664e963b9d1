"""Is anything slower with two threads than with one?

make bench BENCH=threads DATA=…

For classifier (a) and AE (a) with 1,000 points, every operation is timed with one and with two
threads in turns, in one process. A ratio above 1 is the gain of the second thread; one below 1 is a
loss. Numbers of threads are looked at after each operation: they must be as they were.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

import hcurv
from arguments import parse_data_argument
from compress import gauss_newton
from hcurv.experiments.measure import describe_machine

NETWORKS = ("classifier (a)", "AE (a)")
THREADS = (1, 2)
REPEATS = 5
# Operations are repeated until they have taken so many seconds, at least `REPEATS` times.
LEAST_SECONDS = 0.2


def best(run: Callable[[], object]) -> dict[int, float]:
    """The best time with each number of threads, in turns."""
    found = dict.fromkeys(THREADS, float("inf"))
    start, count = time.perf_counter(), 0
    run()
    while count < REPEATS or time.perf_counter() - start < LEAST_SECONDS:
        for threads in THREADS:
            torch.set_num_threads(threads)
            gc.collect()
            begun = time.perf_counter()
            run()
            found[threads] = min(found[threads], time.perf_counter() - begun)
            if torch.get_num_threads() != threads:
                raise RuntimeError(f"{torch.get_num_threads()} threads were left, not {threads}")
        count += 1
    return found


def operations(name: str, data: str | None) -> dict[str, Callable[[], object]]:
    """What is timed."""
    H = gauss_newton(name, data, 1000)
    size = H.shape[0]
    vector, wide = torch.randn(size), torch.randn(size, 128)
    index = torch.randint(size, (256,))
    pairs = torch.randint(size, (2, 100_000))
    A = hcurv.compress(H, tolerance=1e-2)
    damping = 1e-2 * float(hcurv.eigsh(H, 1).values[0])
    F, G = A.factorize(damping, warn=False), H.factorize(damping)
    L = hcurv.baselines.LowRank(H, 64)
    return {
        "H.kernel().diagonal()": lambda: H.kernel().diagonal(),
        "H @ v": lambda: H @ vector,
        "H @ V, 128 columns": lambda: H @ wide,
        "H.pairs, 100,000": lambda: H.pairs(*pairs),
        "H.block, 256 x 256": lambda: H.block(index, index),
        "compress, 1e-1": lambda: hcurv.compress(H, tolerance=1e-1),
        "compress, 1e-2": lambda: hcurv.compress(H, tolerance=1e-2),
        "A @ v": lambda: A @ vector,
        "A @ V, 128 columns": lambda: A @ wide,
        "A.block, 256 x 256": lambda: A.block(index, index),
        "A.factorize": lambda: A.factorize(damping, warn=False),
        "F.solve(v)": lambda: F.solve(vector),
        "F.solve(V), 128 columns": lambda: F.solve(wide),
        "F.sample(10)": lambda: F.sample(10),
        "F.inverse_diagonal()": lambda: F.inverse_diagonal(),
        "H.factorize": lambda: H.factorize(damping),
        "its solve, 128 columns": lambda: G.solve(wide),
        "LowRank, rank 64": lambda: hcurv.baselines.LowRank(H, 64),
        "its factorize and solve": lambda: L.factorize(damping).solve(vector),
    }


def main() -> None:
    """Print one line for each operation."""
    data = parse_data_argument(__doc__).data
    print(describe_machine())
    for name in NETWORKS:
        print(f"\n{name}, n = 1000{'':16}one thread   two threads   gain")
        for what, run in operations(name, data).items():
            one, two = best(run).values()
            note = "   slower" if two > 1.1 * one else ""
            print(
                f"  {what:<28}{1e3 * one:>9.2f} ms {1e3 * two:>10.2f} ms {one / two:>6.2f}{note}",
                flush=True,
            )


if __name__ == "__main__":
    main()
