"""The linear system of a step, (H + D) p = −g, and the exact ways to solve it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hcurv.applications.optim.objective import Pair
from hcurv.applications.optim.truncated_cg import dot
from hcurv.damping import Damping
from hcurv.factorized import Factorized
from hcurv.inversion.dense import DenseFactorization
from hcurv.inversion.sample_space import SampleSpaceFactorization
from hcurv.losses import Loss
from hcurv.memory import require_bytes
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.model.snapshot import ForwardFunction

__all__ = ["Solution", "System", "solve_exactly"]

# An exact solution is refined once if its relative residual is above this.
_REFINED = 1e-8


@dataclass(frozen=True)
class System:
    """(H + D) p = −g.

    Attributes:
        matrix: H, over the points that the curvature is taken from.
        damping: D, the damping and the weight decay of every parameter, (N,).
        gradient: g, over all points of the batch, with that of the weight decay, (N,).
        model: the model, as it was when H was made.
        loss: the loss.
        pairs: the points that H is taken over.
        forward_fn: as for `hcurv.GaussNewton`.
        dense: dense matrices that were formed for H, by the way that needs them. Systems with the
            same H and another damping share them.
    """

    matrix: GaussNewton
    damping: Tensor
    gradient: Tensor
    model: nn.Module
    loss: nn.Module | Loss
    pairs: list[Pair]
    forward_fn: ForwardFunction | None
    dense: dict[str, Tensor] = field(default_factory=dict)

    def product(self, vector: Tensor) -> Tensor:
        """(H + D) times a vector."""
        return torch.addcmul(self.matrix @ vector, vector, self.damping)

    @property
    def num_rows(self) -> int:
        """The size of the smaller space: N, or n·q."""
        return min(self.matrix.shape[0], self.matrix.num_root_rows)

    @property
    def mean_damping(self) -> float:
        """The geometric mean of D."""
        return float(self.damping.double().log().mean().exp())


@dataclass(frozen=True)
class Solution:
    """A step, and how it was found.

    Attributes:
        step: p, (N,).
        residual: −g − (H + D) p, (N,).
        iterations: the iterations of conjugate gradients; 0 for exact ways.
        method: the way.
        rebuilt: whether a preconditioner was built for it.
    """

    step: Tensor
    residual: Tensor
    iterations: int
    method: str
    rebuilt: bool = False

    def curvature_of(self, gradient: Tensor) -> float:
        """pᵀ(H + D)p, which is −pᵀ(g + r)."""
        return -dot(self.step, gradient) - dot(self.step, self.residual)


def solve_exactly(system: System, method: str) -> Solution | None:
    """Solve by a dense factorization in double precision.

    Args:
        system: the system.
        method: "parameters" or "samples".

    Returns:
        The solution; None if the damping is too small for double precision.
    """
    try:
        inverse = _factorize(system, method)
    except ValueError:
        return None
    step = inverse.solve(-system.gradient)
    residual = -system.gradient - system.product(step)
    if float(residual.norm()) > _REFINED * float(system.gradient.norm()):
        finer = step + inverse.solve(residual)
        left = -system.gradient - system.product(finer)
        if float(left.norm()) < float(residual.norm()):
            step, residual = finer, left
    return Solution(step, residual, 0, method)


def _factorize(system: System, method: str) -> Factorized:
    matrix, damping = system.matrix, Damping(system.damping.double())
    precise = matrix.in_precision(torch.float64)
    if method == "parameters":
        rows = torch.arange(matrix.shape[0], device=matrix.device)
        if method not in system.dense:
            _require_memory(len(rows), matrix.device)
            system.dense[method] = precise.block(rows, rows)
        block = system.dense[method].clone()
        return DenseFactorization.of(block, rows, damping, matrix.shape[0], matrix.dtype)
    if not bool((system.damping == system.damping[0]).all()):
        return SampleSpaceFactorization.of(precise, damping, matrix.dtype)
    # S D⁻¹ Sᵀ is a multiple of SSᵀ, which another damping can use again.
    one = Damping(torch.ones((), dtype=torch.float64))
    size = matrix.num_root_rows
    if method not in system.dense:
        _require_memory(size, matrix.device)
        lower = torch.zeros(size, size, dtype=torch.float64, device=matrix.device)
        system.dense[method] = precise.kernel(one).fill(lower, lower=True)
    kernel = system.dense[method] / float(system.damping[0])
    rows = torch.arange(size, device=matrix.device)
    inner = DenseFactorization.of(kernel, rows, one, size, torch.float64)
    return SampleSpaceFactorization(precise, inner, damping, matrix.dtype)


def _require_memory(size: int, device: torch.device) -> None:
    require_bytes(
        3 * 8 * size**2,
        device,
        f"an exact step, which takes a dense matrix of {size} x {size} entries",
        ('use method="kfac"', "use smaller batches"),
    )
