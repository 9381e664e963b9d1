"""EKFAC, plain and calibrated by 50 samples of the posterior, against a dense truth.

make bench BENCH=kfac DATA=…

Median and 95th percentile of the errors of output variances, and the error of the log-determinant,
at K-FAC's own storage.
"""

from __future__ import annotations

import torch

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.measure import describe_machine
from trusted import Truth, output_columns, variance_errors
from trusted_tasks import TASKS

NAMES = ("diabetes", "concrete", "MNIST")
RATIOS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
NUM_SAMPLES = 50


def main() -> None:
    """Print one line for each task and damping."""
    arguments = parse_data_argument(__doc__)
    print(describe_machine())
    for name, make in TASKS.items():
        if not name.startswith(NAMES):
            continue
        task = make(arguments.data)
        matrix, truth = task.matrix(torch.float64), Truth(task)
        columns = output_columns(task, torch.float64, 64)
        data = task.data(torch.float64)
        kfac = hcurv.baselines.KFAC(task.model, task.loss, data, num_samples=None, ekfac=True)
        size, largest = matrix.shape[0], float(truth.values[-1])
        print(f"\n{name}: N = {size}, {kfac.num_stored / size:.1f} floats a row")
        for ratio in RATIOS:
            damping = ratio * largest
            expected, logdet = truth.solve(columns, damping), truth.logdet(damping)
            generator = torch.Generator().manual_seed(0)
            samples = matrix.factorize(damping).sample(NUM_SAMPLES, generator)
            cells = []
            for found in (kfac.factorize(damping), kfac.factorize(damping, samples=samples)):
                median, high = variance_errors(found.solve(columns), columns, expected)
                wrong = float(found.logdet()) - logdet
                cells.append(f"variances {median:6.0%} {high:6.0%}  logdet {wrong:+7.0f}")
            print(f"  λ = {ratio:.0e} λ₁   EKFAC {cells[0]}   calibrated {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
