"""How accurate are variances and log-determinants, for a tolerance and a damping? On digits.

make bench BENCH=damping

The Frobenius error that `hcurv.compress` is asked for is the right measure for products. Solves,
variances and log-determinants see the eigenvalues near the damping λ, which a rough compression has
lost. This benchmark measures by how much, against dense linear algebra in double precision.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.datasets import digits
from hcurv.experiments.measure import describe_machine
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.hierarchical.solving.definite import make_definite

TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
PRECONDITIONER = 1e-2  # the tolerance of the matrix that preconditions conjugate gradients
RATIOS = (1e-2, 1e-3, 1e-4, 1e-5)  # dampings over the largest eigenvalue
NUM_TRAINING, NUM_TEST = 1300, 60


def _network() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A classifier 64-20-10 in double precision, its training images and some others."""
    inputs, labels = digits()
    inputs = inputs.double()
    model = seeded_mlp((64, 20, 10), activation=nn.Tanh).double()
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(inputs[:NUM_TRAINING]), labels[:NUM_TRAINING]).backward()
        optimizer.step()
    return model, inputs[:NUM_TRAINING], inputs[-NUM_TEST:]


def _output_jacobian(model: nn.Module, points: Tensor) -> Tensor:
    """Derivatives of all outputs at the points, one column each: (N, points · outputs)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (points,))
        return result

    by_name = torch.func.jacrev(outputs)(parameters)
    return torch.cat([by_name[name].flatten(2) for name in parameters], 2).flatten(0, 1).T


def main() -> None:
    """Print one table for variances and one for log-determinants."""
    parse_data_argument(__doc__)
    torch.set_num_threads(1)
    model, inputs, test = _network()
    loss = nn.CrossEntropyLoss(reduction="sum")
    H = hcurv.GaussNewton(model, loss, inputs)
    dense = H.to_dense()
    values, vectors = torch.linalg.eigh(dense)
    values = values.clamp(min=0)
    columns = _output_jacobian(model, test).contiguous()
    coordinates = (vectors.T @ columns).square()  # of the columns, in the eigenvectors of H
    largest = float(values[-1])
    print(describe_machine())
    print(
        f"\nClassifier 64-20-10 on digits, N = {H.shape[0]}, n = {len(inputs)}, float64;"
        f" λ₁ is the largest eigenvalue of H.\nd(λ) = Σ μ/(μ + λ) counts the directions that"
        " a solve with damping λ sees:"
    )
    for ratio in RATIOS:
        effective = float((values / (values + ratio * largest)).sum())
        print(f"    λ = {ratio:.0e} λ₁: d(λ) = {effective:.0f}")

    kfac = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None)
    ekfac = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None, ekfac=True)
    exact: list[tuple[float, int]] = []
    rows: list[tuple[str, list[tuple[float, float, float, float]]]] = []
    for tolerance in TOLERANCES:
        rows.append((f"compress, tolerance {tolerance:.0e}", []))
    rows += [("K-FAC", []), ("EKFAC", [])]
    for ratio in RATIOS:
        damping = ratio * largest
        variances = (coordinates / (values + damping)[:, None]).sum(0)
        logdet = float((values + damping).log().sum())
        for place, (_, found) in enumerate(rows):
            if place < len(TOLERANCES):
                with warnings.catch_warnings():
                    # Rough matrices are too rough for small dampings, and say so.
                    warnings.simplefilter("ignore", hcurv.AccuracyWarning)
                    A: Any = make_definite(hcurv.compress(H, tolerance=TOLERANCES[place]), damping)
            else:
                A = kfac if place == len(TOLERANCES) else ekfac
            F = A.factorize(damping)
            if place == TOLERANCES.index(PRECONDITIONER):
                solved = hcurv.cg(
                    H,
                    columns,
                    damping=damping,
                    preconditioner=F,
                    tolerance=1e-4,
                    max_iterations=500,
                )
                wrong = ((columns * solved.solution).sum(0) / variances - 1).abs()
                exact.append((float(wrong.median()), int(solved.num_iterations.max())))
            wrong = ((columns * F.solve(columns)).sum(0) / variances - 1).abs()
            floats = A.num_stored / H.shape[0]
            found.append((float(wrong.median()), float(F.logdet()) - logdet, logdet, floats))
    _print_table("Median error of the output variances J (H + λI)⁻¹ Jᵀ of test images", rows, 0)
    name = f"cg to 1e-4 with tolerance {PRECONDITIONER:.0e}"
    print(f"{name:37}" + "".join(f"{_percent(wrong):>16}" for wrong, _ in exact))
    print(f"{'    its iterations':37}" + "".join(f"{count:>16}" for _, count in exact))
    _print_table("Error of the log-determinant of H + λI", rows, 1)


def _percent(value: float) -> str:
    value *= 100
    return f"{value:.0f} %" if value >= 10 else f"{value:.4f} %" if value < 1 else f"{value:.1f} %"


def _print_table(
    title: str, rows: list[tuple[str, list[tuple[float, float, float, float]]]], column: int
) -> None:
    print(f"\n{title}")
    print(f"{'':28}{'floats/N':>9}" + "".join(f"{f'λ = {r:.0e} λ₁':>16}" for r in RATIOS))
    for name, found in rows:
        cells = [_percent(row[0]) if column == 0 else f"{row[1]:+.2f}" for row in found]
        print(f"{name:28}{found[0][3]:9.1f}" + "".join(f"{cell:>16}" for cell in cells))
    if column == 1:
        print(f"{'(the log-determinant)':37}" + "".join(f"{row[2]:>16.1f}" for row in rows[0][1]))


if __name__ == "__main__":
    main()
