"""How accurate are variances and log-determinants, for a tolerance and a damping?

make bench BENCH=damping

The Frobenius error that `hcurv.compress` is asked for is the right measure for products. Solves,
variances and log-determinants see the eigenvalues near the damping λ, which a rough compression has
lost. This benchmark measures by how much, for all ways to an inverse, on a classifier of
scikit-learn's digits and on a regression of its diabetes data, against dense linear algebra in
double precision.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.datasets import digits
from hcurv.experiments.measure import describe_machine
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.factorized import Factorized
from hcurv.hierarchical.solving.definite import make_definite
from hcurv.losses import HalfSquaredError, Loss

TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
PRECONDITIONER = 1e-2  # the tolerance of the matrix that preconditions conjugate gradients
RANK = 30
RATIOS = (1e-2, 1e-3, 1e-4, 1e-5)  # dampings over the largest eigenvalue
NUM_TRAINING, NUM_TEST = 1300, 60  # images of digits
NUM_PATIENTS = 330  # of 442, to train with


@dataclass(frozen=True)
class Problem:
    """A trained network in double precision, the inputs of H, and others to test with."""

    title: str
    model: nn.Sequential
    loss: nn.Module | Loss
    inputs: Tensor
    test: Tensor


@dataclass
class Row:
    """One way to an inverse, and what was measured at each damping."""

    name: str
    make: Callable[[float], tuple[Factorized, float]]  # the inverse, and floats per row of H
    floats: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)  # 95 % quantiles
    logdets: list[float] = field(default_factory=list)


def classifier() -> Problem:
    """A classifier 64-20-10 of digits."""
    inputs, labels = digits()
    inputs = inputs.double()
    model = seeded_mlp((64, 20, 10), activation=nn.Tanh).double()
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(inputs[:NUM_TRAINING]), labels[:NUM_TRAINING]).backward()
        optimizer.step()
    loss = nn.CrossEntropyLoss(reduction="sum")
    training, test = inputs[:NUM_TRAINING], inputs[-NUM_TEST:]
    return Problem("Classifier 64-20-10 on digits", model, loss, training, test)


def regression() -> Problem:
    """A regression 10-50-50-1 of scikit-learn's diabetes data, standardised."""
    table = load_diabetes()
    inputs, targets = torch.tensor(table.data), torch.tensor(table.target)[:, None]
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    targets = (targets - targets.mean()) / targets.std()
    training, test = inputs[:NUM_PATIENTS], inputs[NUM_PATIENTS:]
    model = seeded_mlp((10, 50, 50, 1), activation=nn.Tanh).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, weight_decay=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        (model(training) - targets[:NUM_PATIENTS]).square().mean().backward()
        optimizer.step()
    loss = HalfSquaredError(reduction="sum")
    return Problem("Regression 10-50-50-1 on diabetes", model, loss, training, test)


def output_jacobian(model: nn.Module, points: Tensor) -> Tensor:
    """Derivatives of all outputs at the points, one column each: (N, points · outputs)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (points,))
        return result

    by_name = torch.func.jacrev(outputs)(parameters)
    rows = torch.cat([by_name[name].flatten(2) for name in parameters], 2).flatten(0, 1)
    return rows.T.contiguous()


def ways(problem: Problem, H: hcurv.GaussNewton) -> list[Row]:
    """All ways to an inverse. Each builds everything that it needs."""
    size = H.shape[0]

    def compressed(tolerance: float) -> Callable[[float], tuple[Factorized, float]]:
        def make(damping: float) -> tuple[Factorized, float]:
            A = make_definite(hcurv.compress(H, tolerance=tolerance), damping)
            return A.factorize(damping), A.num_stored / size

        return make

    def for_damping(damping: float) -> tuple[Factorized, float]:
        A = hcurv.compress(H, damping=damping, tolerance=1e-2)
        return A.factorize(damping), A.num_stored / size

    def low_rank(damping: float) -> tuple[Factorized, float]:
        A = hcurv.baselines.LowRank(H, RANK)
        return A.factorize(damping), RANK

    def low_rank_and_diagonal(damping: float) -> tuple[Factorized, float]:
        A = hcurv.baselines.LowRank(H, RANK)
        rest = (H.diagonal() - A.diagonal()).clamp(min=0)
        return A.factorize(rest + damping), RANK + 1

    def kfac(ekfac: bool) -> Callable[[float], tuple[Factorized, float]]:
        def make(damping: float) -> tuple[Factorized, float]:
            A = hcurv.baselines.KFAC(
                problem.model, problem.loss, problem.inputs, num_samples=None, ekfac=ekfac
            )
            return A.factorize(damping), A.num_stored / size

        return make

    def exact(method: str) -> Callable[[float], tuple[Factorized, float]]:
        def make(damping: float) -> tuple[Factorized, float]:
            F = H.factorize(damping, method=method)  # type: ignore[arg-type]
            return F, F.num_stored / size

        return make

    rows = [Row(f"compress, tolerance {t:.0e}", compressed(t)) for t in TOLERANCES]
    rows.append(Row("compress, damping=λ, tolerance 1e-02", for_damping))
    rows.append(Row(f"low rank {RANK}", low_rank))
    rows.append(Row(f"low rank {RANK} and diagonal of the rest", low_rank_and_diagonal))
    rows += [Row("K-FAC", kfac(False)), Row("EKFAC", kfac(True))]
    rows.append(Row("H.factorize", exact("auto")))
    rows.append(Row("H.factorize, iterations to 1e-02", exact("iterations")))
    return rows


def measure(problem: Problem) -> None:
    """Print the tables of one problem."""
    H = hcurv.GaussNewton(problem.model, problem.loss, problem.inputs)
    values, vectors = torch.linalg.eigh(H.to_dense())
    values = values.clamp(min=0)
    columns = output_jacobian(problem.model, problem.test)
    coordinates = (vectors.T @ columns).square()  # of the columns, in the eigenvectors of H
    largest = float(values[-1])
    print(
        f"\n{problem.title}, N = {H.shape[0]}, n = {H.num_points}, n·q = {H.num_root_rows},"
        " float64; λ₁ is the largest eigenvalue of H.\nd(λ) = Σ μ/(μ + λ) counts the directions"
        " that a solve with damping λ sees:"
    )
    rows, iterations, logdets = ways(problem, H), [], []
    for ratio in RATIOS:
        damping = ratio * largest
        effective = float((values / (values + damping)).sum())
        print(f"    λ = {ratio:.0e} λ₁: d(λ) = {effective:.0f}")
        variances = (coordinates / (values + damping)[:, None]).sum(0)
        logdets.append(float((values + damping).log().sum()))
        for row in rows:
            with warnings.catch_warnings():
                # Rough matrices are too rough for small dampings, and say so.
                warnings.simplefilter("ignore", hcurv.AccuracyWarning)
                start = time.perf_counter()
                F, floats = row.make(damping)
                solved = F.solve(columns)
                row.seconds.append(time.perf_counter() - start)
            wrong = ((columns * solved).sum(0) / variances - 1).abs()
            row.medians.append(float(wrong.median()))
            row.worst.append(float(wrong.quantile(0.95)))
            row.floats.append(floats)
            row.logdets.append(float(F.logdet()) - logdets[-1])
            if row.name == f"compress, tolerance {PRECONDITIONER:.0e}":
                result = hcurv.cg(
                    H,
                    columns,
                    damping=damping,
                    preconditioner=F,
                    tolerance=1e-4,
                    max_iterations=500,
                )
                found = ((columns * result.solution).sum(0) / variances - 1).abs()
                iterations.append((float(found.median()), int(result.num_iterations.max())))
    title = "Median error of the output variances J (H + λI)⁻¹ Jᵀ of test points"
    print_table(title, rows, lambda row: [percent(value) for value in row.medians])
    name = f"cg to 1e-4 with tolerance {PRECONDITIONER:.0e}"
    print_row(name, [percent(wrong) for wrong, _ in iterations])
    print_row("    its iterations", [str(count) for _, count in iterations])
    title = "95 % of the errors of these variances are below"
    print_table(title, rows, lambda row: [percent(value) for value in row.worst])
    title = "Error of the log-determinant of H + λI"
    print_table(title, rows, lambda row: [f"{value:+.2f}" for value in row.logdets])
    print_row("(the log-determinant)", [f"{value:.1f}" for value in logdets])
    title = "Stored floats per parameter"
    print_table(title, rows, lambda row: [f"{value:.1f}" for value in row.floats])
    title = f"Seconds to build, factorize and solve for {columns.shape[1]} columns"
    print_table(title, rows, lambda row: [f"{value:.2f}" for value in row.seconds])


def percent(value: float) -> str:
    """An error in percent, with four digits where it is small."""
    value *= 100
    return f"{value:.0f} %" if value >= 10 else f"{value:.4f} %" if value < 1 else f"{value:.1f} %"


def print_row(name: str, cells: list[str]) -> None:
    """Print one line of a table."""
    print(f"{name:40}" + "".join(f"{cell:>15}" for cell in cells))


def print_table(title: str, rows: list[Row], cells: Callable[[Row], list[str]]) -> None:
    """Print a table with a column for each damping."""
    print(f"\n{title}")
    print_row("", [f"λ = {ratio:.0e} λ₁" for ratio in RATIOS])
    for row in rows:
        print_row(row.name, cells(row))


def main() -> None:
    """Print the tables of both problems."""
    parse_data_argument(__doc__)
    torch.set_num_threads(1)
    print(describe_machine())
    for problem in (classifier(), regression()):
        measure(problem)


if __name__ == "__main__":
    main()
