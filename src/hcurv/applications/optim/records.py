"""What one step of the optimizer did, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["StepRecord", "timed"]


@dataclass(frozen=True)
class StepRecord:
    """What one step did, and what it cost.

    Losses are those of the objective over the batch of the step, with the weight decay
    ½ Σ weight_decay·θ² in it.

    Attributes:
        step: the number of the step, from 1.
        num_points: the number of points of the batch.
        loss: the objective before the step.
        loss_after: the objective after it; the same as ``loss`` if the step was rejected.
        gradient_norm: the norm of the gradient of the objective before the step.
        step_norm: the norm of the change of the parameters; 0 if the step was rejected.
        accepted: whether the parameters were changed.
        scale: 1, or the fraction of the step that was taken, because all of it raised the loss.
        predicted_decrease: by how much the quadratic model of the objective falls along the step.
        ratio: ρ, the decrease of the first step that was tried, divided by the decrease that the
            model predicted for it; NaN if there was no step to take.
        damping: λ of the first group that the step was computed with.
        next_damping: λ of the first group after the step, as the rules of Levenberg and Marquardt
            changed it.
        num_solves: how many steps were computed. More than one means that steps were rejected, and
            λ was raised.
        method: how the last of them was computed, as for `GaussNewton`.
        iterations: the iterations of conjugate gradients of all solves; 0 for exact ways.
        residual: the relative residual of the last solve.
        rebuilt: whether a preconditioner was built in this step.
        seconds: the time of each phase by its name: "gradient", "curvature", "preconditioner",
            "solve", "evaluation" and, for all of it, "total".

    Examples:
        >>> record = hcurv.optim.GaussNewton(model, loss).step((inputs, targets))
        >>> record.step, record.num_points, record.accepted, record.loss_after < record.loss
        (1, 20, True, True)
        >>> sorted(record.seconds)
        ['curvature', 'evaluation', 'gradient', 'preconditioner', 'solve', 'total']
    """

    step: int
    num_points: int
    loss: float
    loss_after: float
    gradient_norm: float
    step_norm: float
    accepted: bool
    scale: float
    predicted_decrease: float
    ratio: float
    damping: float
    next_damping: float
    num_solves: int
    method: str
    iterations: int
    residual: float
    rebuilt: bool
    seconds: dict[str, float]


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the time that the block takes to that of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
