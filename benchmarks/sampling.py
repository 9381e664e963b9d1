"""Time and memory of Monte Carlo entries. `hcurv reproduce sampling` measures their accuracy.

make bench BENCH=sampling
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.measure import best_time, describe_machine, peak_extra_bytes
from hcurv.experiments.reference_networks import build_mlp

MB = 1e6
COUNTS = (10, 100, 1_000, 10_000)


def _network(hidden: int, outputs: int, num_points: int) -> hcurv.GaussNewton:
    inputs = torch.rand(num_points, 100, generator=torch.Generator().manual_seed(0))
    model = build_mlp((100, hidden, outputs), nn.ReLU)
    return hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)


def _some_pairs(matrix: hcurv.GaussNewton, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, cols = torch.randint(0, matrix.shape[0], (2, count), generator=generator)
    return rows, cols


def _per_entry(matrix: hcurv.GaussNewton, num_samples: int | None, count: int = 400) -> float:
    rows, cols = _some_pairs(matrix, count)
    source = matrix if num_samples is None else matrix.sample_entries(num_samples)
    return best_time(lambda: source.pairs(rows, cols), 5) / count * 1e6


def timing() -> None:
    """Measure the microseconds per entry as N, n and c grow, and find where sampling pays."""
    print("\nMicroseconds per entry ('importance'; MLP 100-h-q, cross-entropy)")
    print("against N (n = 4000, c = 100):    ", end="")
    for hidden in (20, 80, 320, 1280):
        matrix = _network(hidden, 10, 4000)
        print(f"  N = {matrix.shape[0]}: {_per_entry(matrix, 100):.0f}", end="")
    print("\nagainst n (h = 20, c = 100):      ", end="")
    for num_points in (1000, 4000, 16_000, 64_000):
        print(f"  n = {num_points}: {_per_entry(_network(20, 10, num_points), 100):.0f}", end="")
    print("\nagainst c (h = 20, n = 4000):     ", end="")
    matrix = _network(20, 10, 4000)
    for count in COUNTS:
        print(f"  c = {count}: {_per_entry(matrix, count):.0f}", end="")
    print("\n\nSampled, c = 100, against exact pairs, n = 16,000 (microseconds per entry)")
    print(f"{'outputs q':>12}{'exact':>10}{'sampled':>10}{'subset of 100':>15}")
    for outputs in (2, 10, 50, 100, 200):
        matrix = _network(20, outputs, 16_000)
        exact, sampled = _per_entry(matrix, None, 200), _per_entry(matrix, 100, 200)
        subset = _per_entry(matrix.subsample(100), None, 200)
        print(f"{outputs:>12}{exact:>10.0f}{sampled:>10.0f}{subset:>15.1f}")


def memory() -> None:
    """Compare the peak memory of a call, beyond its result, with the workspace."""
    print(
        "\nPeak memory of 2,000 pairs, n = 16,000, c = 1,000, beyond the stored factors and norms:"
    )
    inputs = torch.rand(16_000, 100, generator=torch.Generator().manual_seed(0))
    model = build_mlp((100, 20, 10), nn.ReLU)
    for workspace in (2**21, 2**23, 2**28):
        matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs, workspace=workspace)
        sampled = matrix.sample_entries(1_000)
        rows, cols = _some_pairs(matrix, 2_000)
        sampled.pairs(rows[:50], cols[:50])
        peak = peak_extra_bytes(lambda: sampled.pairs(rows, cols))  # noqa: B023
        print(f"  workspace {workspace / MB:6.1f} MB: peak {peak / MB:6.1f} MB")


if __name__ == "__main__":
    parse_data_argument(__doc__)
    print(describe_machine())
    timing()
    memory()
