"""Convolutions, residual networks and transformers: the matrix side by side with curvlinops.

make bench BENCH=general DATA=…  [PARTS="products --only LeNet --points 100"]

For each reference model: the precomputation, with its peak of memory and what the plan said about
it; products, entries and a block beside curvlinops' products, in one run and alternating; then the
compressed matrix, and solves with the exact one at a damping of 1e-3 λ₁. The ratio in a row is
curvlinops' time over that of hcurv, so that below 1 hcurv is behind. It leaves the precomputation
out, which curvlinops does not have: the last line says how many products pay for it. The language
model has sampled rows, beside curvlinops' sampled Fisher matrix with as many samples. Those are
drawn in another way there (for each character by itself), so that the two matrices are not the
same.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import matmul
from typing import Any

import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.measure import best_time, best_times, describe_machine, peak_extra_bytes
from hcurv.experiments.reference_models import REFERENCE_MODELS, TrainedModel, train
from hcurv.linalg import lanczos

MB = 1e6
PARTS = ("products", "compress", "solve")
NUM_COLUMNS, NUM_PAIRS, BLOCK = 16, 100_000, 64
DAMPING_RATIO, TOLERANCE = 1e-3, 1e-2
LANCZOS_STEPS = 20
# curvlinops is given its points in batches of one of these sizes, or in one batch, whichever is
# the fastest. Small batches suit many columns, which it multiplies at once.
BATCH_SIZES = (5, 10, 25)


@dataclass(frozen=True)
class Case:
    """One matrix.

    Attributes:
        model: the name of the reference model.
        num_points: n, unless the command line says otherwise.
        num_samples: sampled targets a point; None for the exact matrix.
    """

    model: str
    num_points: int
    num_samples: int | None = None

    @property
    def name(self) -> str:
        """The model, with its samples."""
        return self.model if self.num_samples is None else f"{self.model}, m = {self.num_samples}"


CASES = (
    Case("LeNet", 1000),
    Case("ResNet-8", 1000),
    Case("ViT-tiny", 1000),
    Case("GPT-tiny", 200, 1),
    Case("GPT-tiny", 200, 4),
)


class Task:
    """A trained model and the first of its training points."""

    def __init__(self, case: Case, trained: TrainedModel, num_points: int) -> None:
        self._case, self._trained = case, trained
        self.data = trained.inputs[:num_points].clone(), trained.targets[:num_points].clone()

    def ours(self, num_points: int | None = None) -> hcurv.GaussNewton:
        """hcurv's matrix, over all points or the first of them."""
        return hcurv.GaussNewton(
            self._trained.model,
            nn.CrossEntropyLoss(),
            (self.data[0][:num_points], self.data[1][:num_points]),
            num_samples=self._case.num_samples,
            forward_fn=self._trained.forward_fn,
        )

    def theirs(self, batch_size: int) -> Any:
        """curvlinops' matrix, which is given the points in batches."""
        from curvlinops import FisherMCLinearOperator, GGNLinearOperator

        model = self._trained.model
        if self._trained.forward_fn is not None:
            model = _Called(model, self._trained.forward_fn)
        batches = list(zip(*(part.split(batch_size) for part in self.data), strict=True))
        arguments = (model, nn.CrossEntropyLoss(), list(model.parameters()), batches)
        if self._case.num_samples is None:
            return GGNLinearOperator(*arguments, check_deterministic=False)
        return FisherMCLinearOperator(
            *arguments, check_deterministic=False, mc_samples=self._case.num_samples
        )


class _Called(nn.Module):
    """A model behind a function that calls it, for libraries that want a module."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, inputs: Tensor) -> Tensor:
        return self._function(self.model, inputs)


def precomputation(
    case: Case, task: Task, arguments: argparse.Namespace
) -> tuple[hcurv.GaussNewton, float]:
    """Print what the precomputation takes, and return the matrix and the seconds."""
    seconds = best_time(task.ours, 3)
    matrix = task.ours()
    plan = matrix.memory_plan()
    peak = _peak_in_a_process(case, arguments)
    print(
        f"\n{case.name}: N = {matrix.shape[0]}, n = {matrix.num_points},"
        f" n·q = {matrix.num_root_rows}"
    )
    print(
        f"  precomputation {seconds:.2f} s; stored {matrix.nbytes / MB:.0f} MB; peak"
        f" {peak / MB:.0f} MB, planned {plan.peak_bytes / MB:.0f} MB"
        f" (measured / planned {peak / plan.peak_bytes:.2f})",
        flush=True,
    )
    return matrix, seconds


def products(case: Case, task: Task, matrix: hcurv.GaussNewton, precomputed: float) -> None:
    """Print products, entries and a block beside products of curvlinops."""
    generator = torch.Generator().manual_seed(0)
    size = matrix.shape[0]
    columns = torch.randn(size, NUM_COLUMNS, generator=generator)
    vector = columns[:, 0].contiguous()
    theirs, batch_size = _fastest(task, vector)
    if case.num_samples is None:
        expected = theirs @ vector
        difference = float((matrix @ vector - expected).norm() / expected.norm())
        print(f"  relative difference of the two products: {difference:.1e}")
    print(f"  {'':30}{'hcurv':>15}{'curvlinops':>15}{'ratio':>11}")

    def row(name: str, mine: float, other: float) -> None:
        ratio = f"{other / mine:.3g}x"
        print(f"  {name:30}{mine * 1e3:12.4g} ms{other * 1e3:12.4g} ms{ratio:>11}", flush=True)

    both = [partial(matmul, operator, vector) for operator in (matrix, theirs)]
    mine, one_product = best_times(both, 7, 60)
    row("H @ v", mine, one_product)
    saved = one_product - mine
    theirs, batch_of_columns = _fastest(task, columns)
    both = [partial(matmul, operator, columns) for operator in (matrix, theirs)]
    mine, other = best_times(both, 3, 60)
    row(f"H @ V, {NUM_COLUMNS} columns", mine, min(other, NUM_COLUMNS * one_product))
    rows, cols = torch.randint(0, size, (2, NUM_PAIRS), generator=generator)
    entry = best_time(lambda: matrix.pairs(rows, cols), 3) / NUM_PAIRS
    row(f"one entry of {NUM_PAIRS:,} pairs", entry, one_product)
    few_rows, few_cols = torch.randint(0, size, (2, BLOCK), generator=generator)
    block = best_time(lambda: matrix[few_rows, few_cols], 10)
    row(f"{BLOCK} x {BLOCK} block, {BLOCK} products", block, BLOCK * one_product)
    print(
        f"  (curvlinops in batches of {batch_size} for one vector, {batch_of_columns} for more;"
        f" the precomputation pays after {precomputed / saved:.0f} products H @ v)"
        if saved > 0
        else "  (no product pays for the precomputation)"
    )


def _fastest(task: Task, columns: Tensor) -> tuple[Any, int]:
    """curvlinops' matrix in the batches that suit these columns best, and their size."""
    num_points = len(task.data[0])
    sizes = sorted({min(size, num_points) for size in (*BATCH_SIZES, num_points)})
    operators = [task.theirs(size) for size in sizes]
    seconds = best_times([partial(matmul, operator, columns) for operator in operators], 1)
    best = seconds.index(min(seconds))
    return operators[best], sizes[best]


def compress(matrix: hcurv.GaussNewton) -> None:
    """Print what the compressed matrix takes."""
    start = time.perf_counter()
    compressed = hcurv.compress(matrix, tolerance=TOLERANCE)
    seconds = time.perf_counter() - start
    error = compressed.relative_error(matrix)
    print(
        f"  compress to {TOLERANCE:.0e}: {seconds:.1f} s,"
        f" {compressed.nbytes / MB:.0f} MB ({compressed.compression_rate:.3%} of N²,"
        f" {compressed.nbytes / matrix.nbytes:.2f} of the factors), error {error:.1e}",
        flush=True,
    )


def solve(matrix: hcurv.GaussNewton) -> None:
    """Print what solves with the exact matrix take."""
    size = matrix.shape[0]
    values, _, residuals = lanczos(
        matrix.__matmul__, size, LANCZOS_STEPS, matrix.dtype, matrix.device
    )
    largest = float(values[-1] + residuals[-1])
    columns = torch.randn(size, NUM_COLUMNS, generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    factorized = matrix.factorize(DAMPING_RATIO * largest)
    solved = factorized.solve(columns)
    seconds = time.perf_counter() - start
    residual = matrix @ solved + DAMPING_RATIO * largest * solved - columns
    worst = float((residual.norm(dim=0) / columns.norm(dim=0)).max())
    chosen: Any = factorized.plan
    print(
        f"  {NUM_COLUMNS} solves at {DAMPING_RATIO:.0e} λ₁, λ₁ = {largest:.3g}:"
        f" {chosen.chosen.description}, {seconds:.2f} s (planned {chosen.chosen.seconds:.2f}),"
        f" residual {worst:.0e}",
        flush=True,
    )
    start = time.perf_counter()
    lines = str(factorized.accuracy).splitlines()
    print("\n".join(f"    {line}" for line in lines))
    print(f"    (estimated in {time.perf_counter() - start:.1f} s)", flush=True)


def _peak_in_a_process(case: Case, arguments: argparse.Namespace) -> int:
    """The peak of memory, in bytes, in a process that has done nothing else."""
    command = [sys.executable, __file__, "--peak", case.name]
    if arguments.data:
        command += ["--data", arguments.data]
    if arguments.points:
        command += ["--points", str(arguments.points)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(found.stdout)


def _print_peak(task: Task) -> None:
    task.ours(4)  # What the first call loads is not counted.
    print(peak_extra_bytes(task.ours))


def main() -> None:
    """Print all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--data", help="folder with mnist/ and cifar10/")
    parser.add_argument("--only", action="append", help="cases whose names contain this")
    parser.add_argument("--points", type=int, help="n; the language model has a fifth of it")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if not arguments.peak:
        print(describe_machine())
    for case in CASES:
        if arguments.peak and case.name != arguments.peak:
            continue
        if arguments.only and not any(part in case.name for part in arguments.only):
            continue
        num_points = case.num_points
        if arguments.points:
            num_points = max(1, arguments.points * case.num_points // 1000)
        trained = train(REFERENCE_MODELS[case.model], arguments.data)
        task = Task(case, trained, num_points)
        del trained
        if arguments.peak:
            _print_peak(task)
            continue
        matrix, seconds = precomputation(case, task, arguments)
        if "products" in parts:
            products(case, task, matrix, seconds)
        if "compress" in parts:
            compress(matrix)
        if "solve" in parts:
            solve(matrix)
        del matrix, task
        gc.collect()


if __name__ == "__main__":
    main()
