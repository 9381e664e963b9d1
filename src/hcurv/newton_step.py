"""One damped Gauss-Newton step, with a record of what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hcurv.batches import Data
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import compress
from hcurv.krylov import CGResult, cg
from hcurv.losses import Loss

__all__ = ["GaussNewtonStep", "gauss_newton_step"]


@dataclass(frozen=True)
class GaussNewtonStep:
    """A step p that solves (H + damping·I) p = −g.

    Attributes:
        flat: p in the order of `torch.nn.utils.parameters_to_vector`, (N,).
        parameters: p by the names of the parameters, in their shapes.
        gradient: g, (N,).
        damping: that was used.
        predicted_decrease: −(gᵀp + ½ pᵀHp), by which the local model says that the loss falls.
        cg: how the solve went: iterations, residuals, whether it converged.
        seconds: time of each phase.
    """

    flat: Tensor
    parameters: dict[str, Tensor]
    gradient: Tensor
    damping: float
    predicted_decrease: float
    cg: CGResult
    seconds: dict[str, float]


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
    """The step p of the damped Gauss-Newton method: (H + damping·I) p = −g.

    H and g are exact, over all of the data; the model is not changed. To take the step:

        >>> step = hcurv.gauss_newton_step(model, loss, (inputs, targets), damping=1e-3)
        >>> with torch.no_grad():
        ...     for name, parameter in model.named_parameters():
        ...         if name in step.parameters:
        ...             parameter += step.parameters[name]

    Args:
        model: as for `GaussNewton`.
        loss: as for `GaussNewton`.
        data: as for `GaussNewton`, with targets.
        damping: λ > 0.
        preconditioner: "diagonal" (H's own, at hardly any cost), "hierarchical" (compress and
            factorize H first: pays for small dampings), None, or anything that `cg` takes, such as
            the factorization of an earlier step.
        compression: options of `hcurv.compress` for "hierarchical"; by default ``accuracy="low"``.
        tolerance: relative residual of the solve.
        max_iterations: most iterations of conjugate gradients.
        progress: show progress bars.

    Raises:
        ValueError: the data has no targets, or the damping is not positive.
    """
    if isinstance(data, Tensor):
        raise ValueError("the step needs targets: pass data=(inputs, targets) or a loader of both")
    if not (math.isfinite(damping) and damping > 0):
        raise ValueError(f"damping must be positive; got {damping}")
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
                options = {"accuracy": "low"} if compression is None else compression
                compressed = compress(
                    matrix, **options, positive_definite=True, damping=damping, progress=progress
                )
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
    step = result.solution
    curved = matrix @ step
    decrease = -float(gradient.double() @ step.double() + 0.5 * (step.double() @ curved.double()))
    return GaussNewtonStep(
        step, _by_name(model, step), gradient, float(damping), decrease, result, seconds
    )


def _by_name(model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Views of a flat vector in the shapes of the parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parts = flat.split([parameter.numel() for _, parameter in named])
    return {
        name: part.view(parameter.shape)
        for (name, parameter), part in zip(named, parts, strict=True)
    }


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
