"""EKFAC as a preconditioner of conjugate gradients, and whether it pays.

Where the curvature of a layer hardly varies from point to point, as in autoencoders and in other
regressions with many outputs, its block of H is nearly a Kronecker product. Conjugate gradients
that are preconditioned by EKFAC (George et al. 2018) then need few iterations: 20 on autoencoder
(a) at λ = 1e-4 λ₁, where a sketch of rank 256 needs 76. Classifiers are different, because softmax
switches off the points of which the network is certain. There, EKFAC makes things worse: 126
iterations on classifier (a), where no preconditioner needs 54. So it is tried out, in steps that
are cheap beside the best other way, and given up at the first one that disappoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.baselines.kfac import KFAC, even_damping, kfac_of_problem
from hcurv.damping import Damping
from hcurv.inversion.iterative import StandIn
from hcurv.inversion.sketch import GrowingSketch
from hcurv.inversion.ways import NUM_COLUMNS, CostModel, Trial
from hcurv.linalg.block_conjugate_gradients import block_cg
from hcurv.memory import InsufficientMemoryError
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.loss_rows import RowChoice
from hcurv.network.problem import Problem

__all__ = ["kronecker_stand_in", "promising_stand_in", "try_out"]

# Factors of K-FAC are made if that is predicted to take at most this share of the time of the best
# other way, and eigenvalues are measured if that takes at most this share of it.
_LOOK, _MEASURE = 0.1, 0.4
# They are measured if K-FAC's relative error on the columns of the sketch is below this. It is 0.25
# on autoencoder (a), where EKFAC pays, and 0.76 on classifier (a), where it does not.
_CLOSE = 0.5
# So many iterations with one column show how fast conjugate gradients begin. Later ones may be far
# slower (concrete at λ = 1e-6 λ₁: a dozen of them suggest 30 iterations, and 931 are needed), so
# that a trial that has not converged goes on, up to this many, as long as EKFAC still looks worth
# it.
_TRIAL_STEPS, _MORE_STEPS = 32, 64
# A block of columns needs at most about this share of the iterations of a single one (autoencoder
# (a) at λ/λ₁ = 1e-3, 1e-4, 1e-5: 16 columns need 10, 21 and 41, a single one 31, 84 and 323).
_BLOCK_SHARE = 0.3


def kronecker_stand_in(problem: Problem, damping: Damping) -> StandIn:
    """EKFAC + D, or where D differs within a layer, a damping near it.

    Args:
        problem: what H was made of.
        damping: D.

    Raises:
        InsufficientMemoryError: there is no memory for the factors.
    """
    _, measure = kfac_of_problem(problem)
    return _stand_in(measure(), damping)


def promising_stand_in(
    problem: Problem, damping: Damping, sketch: GrowingSketch, costs: CostModel, seconds: float
) -> StandIn | None:
    """EKFAC + D where it may pay, and None where it does not.

    Args:
        problem: what H was made of.
        damping: D.
        sketch: products of H that are known.
        costs: predicts times.
        seconds: the time of the best other way.
    """
    rows_are_exact = problem.choice == RowChoice(seed=problem.choice.seed)
    if problem.network is None or not rows_are_exact:
        return None
    looking, measuring = costs.kronecker_seconds(problem.network)
    if looking > _LOOK * seconds or measuring > _MEASURE * seconds:
        return None
    try:
        factors, measure = kfac_of_problem(problem)
        if not sketch.relative_error(factors) < _CLOSE:
            return None
        return _stand_in(measure(), damping)
    except InsufficientMemoryError:
        return None


def _stand_in(approximation: KFAC, damping: Damping) -> StandIn:
    even = even_damping(approximation, damping)
    factorized = approximation.factorize(even, warn=False)
    values = even.diagonal(approximation.shape[0], approximation.device)[:, None]

    def product(columns: Tensor) -> Tensor:
        return torch.addcmul(approximation @ columns, columns, values.to(columns.dtype))

    return StandIn("EKFAC", product, factorized)


def try_out(
    matrix: GaussNewton,
    damping: Damping,
    stand_in: StandIn,
    tolerance: float,
    seed: int,
    pays: Callable[[Trial], bool] = lambda trial: True,
) -> Trial:
    """Predict how many iterations solves need, from solving for one random column.

    Args:
        matrix: H.
        damping: D.
        stand_in: what is in place of H.
        tolerance: the relative error that solves aim at.
        seed: the seed of the column.
        pays: says whether EKFAC is worth more of a trial that has found this.
    """
    factorized = stand_in.factorized
    values = damping.diagonal(matrix.shape[0], matrix.device).to(matrix.dtype)[:, None]
    columns = torch.randn(
        matrix.shape[0],
        NUM_COLUMNS,
        dtype=matrix.dtype,
        generator=torch.Generator().manual_seed(seed),
    ).to(matrix.device)
    start = time.perf_counter()
    factorized @ columns
    applying = time.perf_counter() - start

    def count_after(num_steps: int) -> float:
        """The iterations that the column needs, or may need as far as these tell."""
        found = block_cg(
            lambda some: torch.addcmul(matrix @ some, some, values),
            columns[:, :1].contiguous(),
            precondition=factorized.__matmul__,
            tolerance=tolerance,
            max_iterations=num_steps,
        )
        left = float(found.errors.max())
        if left <= tolerance:
            return found.num_iterations
        rate = math.log(left) / num_steps if left < 1 else 0.0
        return max(math.log(tolerance) / rate, num_steps + 1) if rate else math.inf

    steps = _TRIAL_STEPS
    count = count_after(steps)
    while steps < min(count, _MORE_STEPS) and pays(Trial(_BLOCK_SHARE * count, applying)):
        steps *= 2
        count = count_after(steps)
    return Trial(max(1.0, _BLOCK_SHARE * count), applying)
