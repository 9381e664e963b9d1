"""How right can matrices of K-FAC's own storage be? EKFAC, calibrated EKFAC and rivals.

make bench BENCH=kfac DATA=…

Median and 95th percentile of the errors of 64 output variances at test points, and the error of
the log-determinant, against a dense truth: of EKFAC; of EKFAC calibrated with the exact inverse on
up to 64 other outputs (`KFAC.factorize`); of the leading eigenpairs and the diagonal of the rest;
and of some training points, drawn by their leverage and stored as the inputs and derivatives of
every layer, and the diagonal of the rest. All take about as many floats as EKFAC.

The last column is a bound: no eigenvalues d ≥ λ in the basis of K-FAC, whose log-determinant is at
most that of EKFAC, make the mean of variance/true variance over these 64 outputs smaller.
"""

from __future__ import annotations

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.measure import describe_machine
from trusted import Truth, output_columns, variance_errors
from trusted_tasks import TASKS, Task

NAMES = ("diabetes", "concrete", "MNIST")
RATIOS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
NUM_JUDGED, NUM_FITTED = 64, 64


def _solve_diagonal_plus(root: Tensor, diagonal: Tensor, columns: Tensor) -> tuple[Tensor, float]:
    """Solve with diag + root rootᵀ for columns, and find its log-determinant."""
    scaled = root / diagonal[:, None]
    small = torch.eye(root.shape[1], dtype=root.dtype) + root.T @ scaled
    right = columns / diagonal[:, None]
    solved = right - scaled @ torch.linalg.solve(small, root.T @ right)
    return solved, float(diagonal.log().sum() + torch.logdet(small))


def _floats_per_point(task: Task, num_rows: int) -> int:
    """The inputs and ``num_rows`` derivatives of all layers at one point."""
    layers = [layer for layer in task.model.modules() if isinstance(layer, nn.Linear)]
    return sum(layer.in_features + 1 + num_rows * layer.out_features for layer in layers)


def _in_eigenbasis(kfac: hcurv.baselines.KFAC, columns: Tensor) -> Tensor:
    """Columns (N, k) in the basis of K-FAC's eigenvectors, in any order, (k, N)."""
    found = []
    for number, layer in enumerate(kfac.layout.layers):
        weight, bias = (kfac.layout.slices[f"{layer}.{part}"] for part in ("weight", "bias"))
        inputs = torch.linalg.eigh(kfac.moments.inputs[number, number]).eigenvectors
        gradients = torch.linalg.eigh(kfac.moments.gradients[number, number]).eigenvectors
        units = columns[bias].T[:, :, None]
        matrix = columns[weight].T.reshape(units.shape[0], units.shape[1], -1)
        found.append((gradients.T @ torch.cat([matrix, units], 2) @ inputs).flatten(1))
    return torch.cat(found, 1)


def _least_mean_ratio(weights: Tensor, damping: float, logdet: float) -> float:
    """The least Σ y_k/d_k with d ≥ λ and Σ log d ≤ logdet, which d = max(λ, c y) attains.

    It is a convex problem in 1/d, whose Lagrangian is a sum of terms of one d_k each.
    """

    def excess(scale: float) -> float:
        return float((weights * 10**scale).clamp(min=damping).log().sum()) - logdet

    best = (weights * 10 ** brentq(excess, -60, 60)).clamp(min=damping)
    return float((weights / best).sum())


def _cell(solved: Tensor, columns: Tensor, expected: Tensor, wrong: float) -> str:
    median, high = variance_errors(solved, columns, expected)
    return f"{median:7.0%}{high:8.0%}{wrong:+8.0f}"


def _run(name: str, task: Task) -> None:
    matrix, truth = task.matrix(torch.float64), Truth(task)
    columns = output_columns(task, torch.float64, NUM_JUDGED)
    rows = output_columns(task, torch.float64, NUM_FITTED, NUM_JUDGED).T.contiguous()
    data = task.data(torch.float64)
    kfac = hcurv.baselines.KFAC(task.model, task.loss, data, num_samples=None, ekfac=True)
    size, largest, diagonal = matrix.shape[0], float(truth.values[-1]), matrix.diagonal()
    rank = round(kfac.num_stored / size) - 1
    eigen = hcurv.baselines.LowRank(matrix, rank, power_iterations=4)
    eigen_root = eigen.vectors * eigen.values.sqrt()
    per_point = _floats_per_point(task, matrix.num_root_rows // matrix.num_points)
    num_points = (kfac.num_stored - size) // per_point
    squares = _in_eigenbasis(kfac, columns).square()
    print(f"\n{name}: N = {size}, {kfac.num_stored / size:.1f} floats a row")
    titles = ("EKFAC", "calibrated", f"rank {rank} + diagonal", f"{num_points} points + diagonal")
    print(f"  {'λ/λ₁':7}" + "".join(f"{title:>25}" for title in titles) + "   mean ratio at least")
    for ratio in RATIOS:
        damping = ratio * largest
        expected, logdet = truth.solve(columns, damping), truth.logdet(damping)
        plain = kfac.factorize(damping)
        reference = matrix.factorize(damping)
        cells = []
        for found in (plain, kfac.factorize(damping, reference=reference, rows=rows)):
            wrong = float(found.logdet()) - logdet
            cells.append(_cell(found.solve(columns), columns, expected, wrong))
        some = matrix.subsample(num_points, damping=damping)
        some_root = some.root_transposed(torch.eye(some.num_root_rows, dtype=torch.float64))
        for root in (eigen_root, some_root):
            rest = (diagonal - root.square().sum(1)).clamp(min=0) + damping
            solved, found_logdet = _solve_diagonal_plus(root, rest, columns)
            cells.append(_cell(solved, columns, expected, found_logdet - logdet))
        true_variances = torch.linalg.vecdot(columns, expected, dim=0)
        weights = (squares / true_variances[:, None]).mean(0)
        bound = _least_mean_ratio(weights, damping, float(plain.logdet()))
        print(f"  {ratio:<7.0e}" + "".join(f"{c:>25}" for c in cells) + f"{bound:8.2f}", flush=True)


def main() -> None:
    """Print one line for each task and damping."""
    arguments = parse_data_argument(__doc__)
    print(describe_machine())
    print("Errors of variances, median and 95 %, and of the log-determinant")
    for name, make in TASKS.items():
        if name.startswith(NAMES):
            _run(name, make(arguments.data))


if __name__ == "__main__":
    main()
