"""One step of the damped Gauss-Newton method, with a record of what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hcurv.arguments import check_number
from hcurv.hierarchical import compress
from hcurv.linalg import CGResult, ConvergenceWarning, cg
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.precision import full_precision
from hcurv.user_warnings import warn_user

__all__ = ["GaussNewtonStep", "gauss_newton_step"]

# The damped error of a preconditioner. A smaller one saves few iterations, and takes longer to
# build.
_ROUGH = 0.3


@dataclass(frozen=True)
class GaussNewtonStep:
    """A step p that solves (H + damping·I) p = −g.

    Attributes:
        flat: p in the order of `torch.nn.utils.parameters_to_vector`, (N,).
        parameters: p by the names of the trainable parameters, in their shapes.
        gradient: g, the gradient of the loss over all of the data, (N,).
        damping: the damping that was used.
        predicted_decrease: −(gᵀp + ½ pᵀHp), the amount by which the quadratic model of the loss
            falls along the step.
        cg: the record of the solve: its iterations, its residuals and whether it converged.
        seconds: the time that each phase took, by its name.

    Examples:
        >>> step = hcurv.gauss_newton_step(model, loss, (inputs, targets), damping=1.0)
        >>> step.flat.shape, step.parameters["0.weight"].shape
        (torch.Size([51]), torch.Size([6, 4]))
        >>> step.cg.converged, step.predicted_decrease > 0
        (True, True)
    """

    flat: Tensor
    parameters: dict[str, Tensor]
    gradient: Tensor
    damping: float
    predicted_decrease: float
    cg: CGResult
    seconds: dict[str, float]


@full_precision
def gauss_newton_step(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    damping: float,
    *,
    preconditioner: Any = "diagonal",
    compression: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    progress: bool = False,
) -> GaussNewtonStep:
    """Compute the step p of the damped Gauss-Newton method: (H + damping·I) p = −g.

    H and g are exact, over all of the data. The system is solved by conjugate gradients. The model
    is not changed; the example shows how to take the step.

    Args:
        model: the network, as for `GaussNewton`.
        loss: the loss, as for `GaussNewton`.
        data: the data with targets, as for `GaussNewton`.
        damping: λ > 0.
        preconditioner: "diagonal" divides by the diagonal of H + λI, which costs next to nothing.
            "hierarchical" compresses and factorizes H first, which pays for small dampings. None
            uses no preconditioner. Anything else that `cg` takes also works, such as the
            factorization of an earlier step.
        compression: options of `hcurv.compress` for "hierarchical"; ``tolerance=0.3`` if None.
        tolerance: the relative residual at which the solve ends.
        max_iterations: the largest number of iterations of conjugate gradients.
        progress: whether to show progress bars.

    Raises:
        ValueError: the data has no targets, or the damping is not positive.

    Warns:
        ConvergenceWarning: the solve did not reach the tolerance. The step is the best that was
            found; ``step.cg`` holds its residual.

    Examples:
        >>> step = hcurv.gauss_newton_step(model, loss, (inputs, targets), damping=1.0)
        >>> before = float(loss(model(inputs), targets).detach())
        >>> with torch.no_grad():
        ...     for name, parameter in model.named_parameters():
        ...         if name in step.parameters:
        ...             parameter += step.parameters[name]
        >>> float(loss(model(inputs), targets).detach()) < before
        True
    """
    if isinstance(data, Tensor):
        raise ValueError("the step needs targets: pass data=(inputs, targets) or a loader of both")
    damping = check_number(damping, "damping", above=0)
    check_number(tolerance, "tolerance", above=0)
    if isinstance(preconditioner, str) and preconditioner not in ("diagonal", "hierarchical"):
        raise ValueError(
            'preconditioner must be "diagonal", "hierarchical", None or what hcurv.cg takes;'
            f" got {preconditioner!r}"
        )
    if compression is not None and preconditioner != "hierarchical":
        raise ValueError('compression is for preconditioner="hierarchical" only')
    seconds: dict[str, float] = {}
    with _timed(seconds, "precomputation"):
        matrix = GaussNewton(model, loss, data, progress=progress)
    with _timed(seconds, "gradient"):
        gradient = matrix.gradient()
    with _timed(seconds, "preconditioner"):
        if isinstance(preconditioner, str):
            if preconditioner == "diagonal":
                preconditioner = matrix.diagonal() + damping
            else:
                options = {"tolerance": _ROUGH} if compression is None else compression
                compressed = compress(matrix, **options, damping=damping, progress=progress)
                preconditioner = compressed.factorize(damping)
    with _timed(seconds, "conjugate gradients"):
        result = cg(
            matrix,
            -gradient,
            damping=damping,
            preconditioner=preconditioner,
            tolerance=tolerance,
            max_iterations=max_iterations,
            progress=progress,
        )
    if not result.converged:
        _warn(result, tolerance)
    step = result.solution
    curved = matrix @ step
    decrease = -float(gradient.double() @ step.double() + 0.5 * (step.double() @ curved.double()))
    return GaussNewtonStep(
        step,
        matrix.layout.unflatten(step),
        gradient,
        float(damping),
        decrease,
        result,
        seconds,
    )


def _warn(result: CGResult, tolerance: float) -> None:
    """Say that the step is not the solution, how far off it is, and what to do."""
    warn_user(
        f"the Gauss-Newton step has a relative residual of {float(result.residuals.max()):.1e},"
        f" above the tolerance of {tolerance:.1e}, after {int(result.num_iterations.max())}"
        " iterations. Use a larger damping, preconditioner='hierarchical', more max_iterations,"
        " a larger tolerance, or a model and data in float64.",
        ConvergenceWarning,
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Write into ``seconds`` how long the block took."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
