"""Are solves, variances, log-determinants and influence scores right, and how fast are they?

make bench BENCH=trusted DATA=…  [PARTS="--only diabetes --ratios 1e-2 1e-4"]

For each task and damping λ = ratio · λ₁, ``H.factorize(λ)`` as it is by default solves for the
output Jacobians of 16 test outputs, set-up included, and so do its rivals: plain conjugate
gradients, conjugate gradients with a Nyström preconditioner of the rank that turns out best, and a
dense Cholesky factorization. Iterative rivals stop at a relative residual of 3e-3, at which the
default aims too. Then every other way that ``method=`` can force, to see whether the choice was
good. Errors are those against a dense truth in double precision, where there is one, and else
against solves to 3e-4, whose variances are right to 1e-7. A rival is stopped when it has taken
``--patience`` times as long as the default, and "> 3" then stands for its ratio. It "fails" if it
ends without reaching the residual, because its preconditioner is not definite. What takes less
than five seconds runs twice, what takes less than one second five times, and the shortest time
counts.

``--double`` takes double precision for all dampings, and not for the smallest ones alone.

``--influence`` measures something else: the time, set-up included, until influence scores of 16
test points have a rank correlation of 0.99 with the truth, at λ = 1e-4 λ₁. The default way and
conjugate gradients run with looser and looser tolerances, down to the loosest that is enough.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import scipy.stats
import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.measure import describe_machine
from hcurv.inversion.iterative import IterativeFactorization
from hcurv.inversion.ways import WayName
from hcurv.linalg import lanczos
from trusted_tasks import TASKS, Task

RATIOS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
RANKS = (16, 30, 60, 100, 300, 1000)
NUM_COLUMNS, NUM_CHECKED = 16, 64
# Influence scores at this ratio are wanted with this rank correlation. Tolerances of ours and
# relative residuals of conjugate gradients that may be enough for it.
INFLUENCE_RATIO, INFLUENCE_CORRELATION = 1e-4, 0.99
INFLUENCE_TOLERANCES = (3e-2, 5e-2, 7e-2, 1e-1, 0.15, 0.2, 0.3, 0.45, 0.6)
INFLUENCE_RESIDUALS = (3e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 7e-2, 1e-1)
# A dense truth in double precision is made of matrices up to this size.
DENSE_SIZE = 5200
# A rival is stopped when it has taken so many times as long as the default, but not before this
# many seconds. Ways that are predicted to take so many times as long are left out.
PATIENCE, LEAST_SECONDS, WORTH_TRYING = 3.0, 5.0, 4.0
# What takes less than this is timed more often.
SHORT_SECONDS = 1.0
# The relative residual of rivals: that at which the default aims with its tolerance of 1e-2.
RIVAL_TOLERANCE = 3e-3
# Solves to this relative residual and error stand for the truth where none is dense.
TRUTH_TOLERANCE = 3e-4
# Where no truth is dense and the default takes longer than this, in seconds, it runs once, and
# only the columns that it has solved for are checked.
LONG = 20.0
# In single precision, dampings below this share of the largest eigenvalue are left to float64.
SINGLE_RATIO = 1.9e-6


class Truth:
    """Variances, solves and log-determinants of H + λI from dense eigenpairs in float64."""

    def __init__(self, task: Task) -> None:
        matrix = task.matrix(torch.float64)
        self.size = matrix.shape[0]
        if self.size <= matrix.num_root_rows:
            values, self._vectors = torch.linalg.eigh(matrix.to_dense())
        else:  # the eigenvectors of SSᵀ give those of SᵀS
            values, left = torch.linalg.eigh(matrix.kernel().to_dense())
            keep = values > 1e-13 * values[-1]
            values, left = values[keep], left[:, keep]
            self._vectors = matrix.root_transposed(left) / values.sqrt()
        self.values = values.clamp(min=0)

    def solve(self, columns: Tensor, damping: float) -> Tensor:
        """(H + λI)⁻¹ times columns."""
        mixed = self._vectors.T @ columns.double()
        change = 1 / (self.values + damping) - 1 / damping
        result: Tensor = columns.double() / damping + self._vectors @ (change[:, None] * mixed)
        return result

    def logdet(self, damping: float) -> float:
        """log|H + λI|."""
        rest = self.size - self.values.numel()
        return float((self.values + damping).log().sum() + rest * math.log(damping))

    def evidence_damping(self, squared_norm: float) -> float:
        """The λ of largest marginal likelihood: of ½(N log λ − log|H + λI| − λ‖θ‖²)."""
        grid = [10 ** (k / 50) * float(self.values[-1]) for k in range(-400, 51)]
        return max(grid, key=lambda x: self.size * math.log(x) - self.logdet(x) - x * squared_norm)


class _LateError(Exception):
    """A rival took too long."""


class _FailedError(Exception):
    """A rival ended without a solution: its preconditioner was not definite in this precision."""


class _Limited(hcurv.SymmetricOperator):
    """A matrix whose products are refused after a time."""

    def __init__(self, matrix: hcurv.GaussNewton, seconds: float) -> None:
        self._matrix, self._end = matrix, time.perf_counter() + seconds

    shape = property(lambda self: self._matrix.shape)
    dtype = property(lambda self: self._matrix.dtype)
    device = property(lambda self: self._matrix.device)
    num_stored = property(lambda self: self._matrix.num_stored)

    def diagonal(self) -> Tensor:
        return self._matrix.diagonal()

    def _matmat(self, rhs: Tensor) -> Tensor:
        if time.perf_counter() > self._end:
            raise _LateError
        return self._matrix @ rhs


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def _timed_often(run: Callable[[], Any]) -> tuple[float, Any]:
    """The shortest of some times, of more if they are short."""
    best, result = _timed(run)
    repeats = 0 if best > LEAST_SECONDS else 1 if best > SHORT_SECONDS else 4
    for _ in range(repeats):
        seconds, result = _timed(run)
        best = min(best, seconds)
    return best, result


def output_columns(task: Task, dtype: torch.dtype, count: int, skip: int = 0) -> Tensor:
    """Jacobians of random outputs at test points, (N, count), after the first ``skip``."""
    rows = task.output_rows(task.tests, dtype)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(rows.num_root_rows, generator=generator)
    chosen = chosen[skip : skip + count]
    units = torch.zeros(rows.num_root_rows, chosen.numel(), dtype=dtype)
    units[chosen, torch.arange(chosen.numel())] = 1.0
    return rows.root_transposed(units)


def _influence(task: Task, solved: Tensor) -> Tensor:
    """Scores of all training points for solved test gradients (N, k): (n, k)."""
    dtype = solved.dtype
    rows = task.output_rows(task.inputs, dtype)
    x, y = task.data(dtype)
    with torch.no_grad():
        outputs = task.model.to(dtype)(x)
        if isinstance(task.loss, nn.CrossEntropyLoss):
            slopes = outputs.softmax(1)
            slopes[torch.arange(len(y)), y] -= 1
        else:
            slopes = outputs - y
    products = rows.root_product(solved).view(len(x), -1, solved.shape[1])
    return torch.einsum("nqk,nq->nk", products, slopes)


def _test_gradients(task: Task, dtype: torch.dtype) -> Tensor:
    """Gradients of the loss at some test points, (N, 16)."""
    found = []
    model = task.model.to(dtype)
    for place in range(NUM_COLUMNS):
        x = task.tests[place : place + 1].to(dtype)
        y = task.test_targets[place : place + 1]
        y = y.to(dtype) if y.is_floating_point() else y
        if isinstance(task.loss, nn.CrossEntropyLoss):
            value = task.loss(model(x), y)
        else:
            value = (model(x) - y).square().sum() / 2
        gradients = torch.autograd.grad(value, list(model.parameters()))
        found.append(torch.cat([part.flatten() for part in gradients]))
    return torch.stack(found, 1).detach()


def variance_errors(solved: Tensor, columns: Tensor, expected: Tensor) -> tuple[float, float]:
    """Median and 95th percentile of the relative errors of variances."""
    found = (solved.double() * columns.double()).sum(0)
    wrong = (found / (expected * columns.double()).sum(0) - 1).abs()
    return float(wrong.median()), float(wrong.quantile(0.95))


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    """The smallest of the rank correlations of corresponding columns."""
    pairs = zip(first.double().T.numpy(), second.double().T.numpy(), strict=True)
    return min(float(scipy.stats.spearmanr(a, b).statistic) for a, b in pairs)


class Bench:
    """One task."""

    def __init__(
        self,
        name: str,
        task: Task,
        ways: bool,
        ranks: tuple[int, ...],
        patience: float,
        double: bool,
    ) -> None:
        self._task, self._ways, self._ranks, self._patience = task, ways, ranks, patience
        self._single_ratio = math.inf if double else SINGLE_RATIO
        self._matrices: dict[torch.dtype, hcurv.GaussNewton] = {}
        matrix = self._matrix(torch.float32)
        values, _, residuals = lanczos(
            matrix.__matmul__, matrix.shape[0], 20, matrix.dtype, matrix.device
        )
        self._largest = float(values[-1] + residuals[-1])
        small = min(matrix.shape[0], matrix.num_root_rows) <= DENSE_SIZE
        if small:  # what a process does once shall not count for the first damping
            matrix.factorize(0.1 * self._largest).solve(output_columns(task, matrix.dtype, 1))
        self._truth = Truth(task) if small else None
        print(
            f"\n{name}: N = {matrix.shape[0]}, n·q = {matrix.num_root_rows}, λ₁ ="
            f" {self._largest:.3g}, truth {'dense' if small else 'by solves to 3e-4'}",
            flush=True,
        )

    def _matrix(self, dtype: torch.dtype) -> hcurv.GaussNewton:
        if dtype not in self._matrices:
            self._matrices[dtype] = self._task.matrix(dtype)
        return self._matrices[dtype]

    def ratios(self, wanted: tuple[float, ...]) -> list[tuple[str, float]]:
        """The dampings over λ₁, with that of the largest evidence where it can be known."""
        found = [(f"{ratio:.0e}", ratio) for ratio in wanted]
        if self._truth is not None:
            weights = torch.cat([p.detach().flatten() for p in self._task.model.parameters()])
            best = self._truth.evidence_damping(float(weights.double().square().sum()))
            found.append((f"evidence {best / self._largest:.1e}", best / self._largest))
        return found

    def cell(self, label: str, ratio: float) -> None:
        """Measure one damping."""
        task, damping = self._task, ratio * self._largest
        dtype = torch.float32 if ratio > self._single_ratio else torch.float64
        matrix = self._matrix(dtype)
        checked = output_columns(task, dtype, NUM_CHECKED)
        columns = checked[:, :NUM_COLUMNS].contiguous()

        def default() -> tuple[Any, Tensor]:
            factorized = matrix.factorize(damping)
            return factorized, factorized.solve(columns)

        seconds, (factorized, solved) = _timed(default)
        is_long = seconds > LONG and self._truth is None
        if is_long:
            checked = columns
        else:
            again, _ = _timed_often(default)
            seconds = min(seconds, again)
        chosen = factorized.plan.chosen.description
        if self._truth is not None:
            expected = self._truth.solve(checked, damping)
        elif is_long and isinstance(factorized, IterativeFactorization):  # go on from the solution
            expected = factorized.iterate(checked, TRUTH_TOLERANCE, solved).solution.double()
        else:
            expected = matrix.factorize(damping, tolerance=1e-3).solve(checked).double()
        found = solved if is_long else factorized.solve(checked)
        median, high = variance_errors(found, checked, expected)
        residual = matrix @ solved + damping * solved - columns
        worst = float((residual.norm(dim=0) / columns.norm(dim=0)).max())
        line = f"  {label:17} {str(dtype)[6:]} {chosen:23}{seconds:8.2f} s"
        line += f"  variances {_percent(median)}, {_percent(high)}; residual {worst:.0e}"
        if self._truth is not None:
            took, logdet = _timed(lambda: float(factorized.logdet()))
            wrong = logdet - self._truth.logdet(damping)
            line += f"; logdet {wrong:+.2g} ({wrong / matrix.shape[0]:+.1e} N, {took:.2f} s)"
            gradients = _test_gradients(task, dtype)
            scores = _influence(task, factorized.solve(gradients))
            truth = _influence(task, self._truth.solve(gradients, damping).to(dtype))
            line += f"; influence {_rank_correlation(scores, truth):.5f}"
        print(line, flush=True)
        self._print_rivals(matrix, columns, damping, seconds, expected[:, :NUM_COLUMNS])
        if self._ways:
            self._print_ways(matrix, columns, damping, seconds)

    def _print_rivals(
        self,
        matrix: hcurv.GaussNewton,
        columns: Tensor,
        damping: float,
        seconds: float,
        expected: Tensor,
    ) -> None:
        patience = max(LEAST_SECONDS, self._patience * seconds)

        def by_cg(preconditioner: Any = None, limited: Any = None) -> Any:
            result = hcurv.cg(
                _Limited(matrix, patience) if limited is None else limited,
                columns,
                damping=damping,
                preconditioner=preconditioner,
                tolerance=RIVAL_TOLERANCE,
                max_iterations=5000,
            )
            if not result.converged:
                raise _FailedError(f"residual {float(result.residuals.max()):.0e}")
            return result.solution

        def nystrom(rank: int) -> Any:
            limited = _Limited(matrix, patience)
            low = hcurv.baselines.LowRank(limited, rank, power_iterations=0)
            return by_cg(low.factorize(damping, warn=False), limited)

        def dense() -> Any:
            block = matrix.to_dense()
            block.diagonal().add_(damping)
            return torch.cholesky_solve(columns, torch.linalg.cholesky(block))

        rivals: dict[str, Callable[[], Any]] = {"CG": by_cg}
        for rank in self._ranks:
            if rank < matrix.shape[0] / 4:
                rivals[f"Nyström {rank}"] = partial(nystrom, rank)
        if matrix.shape[0] <= 17_000:
            rivals["Cholesky"] = dense
        cells = []
        for name, run in rivals.items():
            try:
                taken, solved = _timed_often(run)
            except _LateError:
                cells.append(f"{name} > {patience:.0f} s (> {patience / seconds:.1f})")
                continue
            except _FailedError as error:
                cells.append(f"{name} fails ({error})")
                continue
            wrong = variance_errors(solved, columns, expected)[0]
            cells.append(f"{name} {taken:.2f} s ({taken / seconds:.2f}, {_percent(wrong)})")
        print("      " + "; ".join(cells), flush=True)

    def _print_ways(
        self, matrix: hcurv.GaussNewton, columns: Tensor, damping: float, seconds: float
    ) -> None:
        cells = []
        plan = matrix.factorize(damping).plan
        for name in get_args(WayName):
            try:
                predicted = next((way for way in plan.ways if way.name == name), None)
                if predicted is None:  # "auto" did not try it
                    predicted = matrix.factorize(damping, method=name).plan.chosen
                if not predicted.fits or predicted.seconds > max(
                    LEAST_SECONDS, WORTH_TRYING * seconds
                ):
                    cells.append(f"{name} - (predicted {predicted.seconds:.0f} s)")
                    continue
                taken, factorized = _timed_often(partial(self._run, matrix, columns, damping, name))
            except (hcurv.InsufficientMemoryError, ValueError) as error:
                cells.append(f"{name}: {type(error).__name__}")
                continue
            predicted = factorized.plan.chosen
            note = ""
            if isinstance(factorized, IterativeFactorization):
                note = f", {factorized.iterate(columns).num_iterations} iterations"
            cells.append(
                f"{predicted.description} {taken:.2f} s ({taken / seconds:.2f}; predicted"
                f" {predicted.seconds:.2f}{note})"
            )
        print("      ways: " + "; ".join(cells), flush=True)

    def influence(self) -> None:
        """Measure how long scores of a rank correlation of 0.99 take, by default and by CG."""
        task, damping, dtype = self._task, INFLUENCE_RATIO * self._largest, torch.float32
        matrix, gradients = self._matrix(dtype), _test_gradients(task, dtype)
        if self._truth is not None:
            expected = self._truth.solve(gradients, damping).to(dtype)
        else:
            expected = matrix.factorize(damping, tolerance=1e-3).solve(gradients)
        truth = _influence(task, expected)

        def ours(tolerance: float) -> Tensor:
            return matrix.factorize(damping, tolerance=tolerance).solve(gradients)

        def by_cg(tolerance: float) -> Tensor:
            return hcurv.cg(
                matrix, gradients, damping=damping, tolerance=tolerance, max_iterations=5000
            ).solution

        found = []
        for name, run, choices in (
            ("default", ours, INFLUENCE_TOLERANCES),
            ("CG", by_cg, INFLUENCE_RESIDUALS),
        ):
            best = (math.inf, 0.0, 0.0)
            for tolerance in choices:
                seconds, solved = _timed_often(partial(run, tolerance))
                correlation = _rank_correlation(_influence(task, solved), truth)
                if correlation < INFLUENCE_CORRELATION:
                    break
                best = min(best, (seconds, tolerance, correlation))
            found.append(best[0])
            print(f"  {name:8}{best[0]:8.3f} s at {best[1]:g}: {best[2]:.4f}", flush=True)
        print(f"  ratio {found[1] / found[0]:.2f}", flush=True)

    @staticmethod
    def _run(matrix: hcurv.GaussNewton, columns: Tensor, damping: float, name: Any) -> Any:
        factorized = matrix.factorize(damping, method=name)
        factorized.solve(columns)
        return factorized


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def main() -> None:
    """Print all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with mnist/, cifar10/ and uci/")
    parser.add_argument("--only", action="append", help="tasks whose names contain this")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="λ over λ₁")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="of the rivals")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="with rivals")
    parser.add_argument("--no-ways", action="store_true", help="leave out the other ways")
    parser.add_argument("--double", action="store_true", help="models in double precision")
    parser.add_argument("--influence", action="store_true", help="see above")
    arguments = parser.parse_args()
    print(describe_machine())
    print(f"{torch.get_num_threads()} threads; a number in brackets after a time is its ratio")
    print("to that of the default. Rivals: median error of variances.")
    for name, make in TASKS.items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        ranks = tuple(arguments.ranks)
        bench = Bench(
            name,
            make(arguments.data),
            not arguments.no_ways,
            ranks,
            arguments.patience,
            arguments.double,
        )
        if arguments.influence:
            bench.influence()
            continue
        for label, ratio in bench.ratios(tuple(arguments.ratios)):
            with warnings.catch_warnings():
                warnings.simplefilter("default", hcurv.AccuracyWarning)
                bench.cell(label, ratio)


if __name__ == "__main__":
    main()
