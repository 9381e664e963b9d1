"""Preconditioners of the steps: how each is built, and how long one is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.applications.optim.systems import System
from hcurv.baselines.kfac import KFAC
from hcurv.baselines.low_rank import LowRank
from hcurv.hierarchical import HMatrix, compress

__all__ = ["PRECONDITIONERS", "Kept"]

# What building costs, in products with H. K-FAC takes about five (benchmarked on autoencoders of
# 27 thousand to 2.8 million parameters), and a low-rank sketch one for each column.
_RANK = 30
_OVERSAMPLING = 10
PRECONDITIONERS = {
    "kfac": 5,
    "low-rank": _RANK + _OVERSAMPLING,
    "hierarchical": 500,
    "diagonal": 20,
    "none": 0,
}
# Building shall take at most about this share of all products.
_SETUP_SHARE = 0.1
# One that contracts the residual at less than this share of its first rate is built anew at once.
_WORN = 0.5
# The damping may change by this factor before what was built is factorized again.
_STALE_DAMPING = 4.0
# The damped error of hierarchical matrices, as in `hcurv.gauss_newton_step`.
_ROUGH = 0.3

Solve = Callable[[Tensor], Tensor]


class Kept:
    """A preconditioner that is kept over several steps, while it serves.

    Args:
        kind: one of `PRECONDITIONERS`.
        system: the system to build it for.
        seed: the seed of K-FAC's drawn targets and of sketches.
    """

    def __init__(self, kind: str, system: System, seed: int) -> None:
        self.kind, self.size = kind, system.matrix.shape[0]
        self._built = _build(kind, system, seed)
        self._solve: Solve | None = None
        self._damping = 0.0
        self._products = 0
        self._first_rate: float | None = None
        self._rate = 0.0

    def solve_at(self, system: System) -> Solve:
        """The preconditioner for the damping of a system."""
        change = math.log(system.mean_damping) - math.log(self._damping or 1.0)
        if self._solve is None or abs(change) > math.log(_STALE_DAMPING):
            self._solve, self._damping = _factorize(self._built, system), system.mean_damping
        return self._solve

    def note(self, iterations: int, contraction: float) -> None:
        """Note how many iterations were made, and by how much they contracted the residual."""
        self._products += iterations + 1
        if iterations >= 1 and contraction > 0:
            self._rate = math.log(contraction) / iterations
            if self._first_rate is None:
                self._first_rate = self._rate

    @property
    def is_worn(self) -> bool:
        """Whether it is time to build it anew."""
        setup = PRECONDITIONERS[self.kind]
        if not setup:
            return False
        if self._products >= setup / _SETUP_SHARE:
            return True
        slow = self._first_rate is not None and self._rate > _WORN * self._first_rate
        return slow and self._products >= setup


def _build(kind: str, system: System, seed: int) -> KFAC | LowRank | HMatrix | Tensor | None:
    """What does not depend on the damping."""
    matrix = system.matrix
    if kind == "kfac":
        data = system.pairs[0] if len(system.pairs) == 1 else system.pairs
        return KFAC(system.model, system.loss, data, forward_fn=system.forward_fn, seed=seed)
    if kind == "low-rank":
        rank = min(_RANK, matrix.shape[0])
        return LowRank(matrix, rank, oversampling=_OVERSAMPLING, power_iterations=0, seed=seed)
    if kind == "hierarchical":
        least = float(system.damping.min())
        return compress(matrix, damping=least, tolerance=_ROUGH, seed=seed)
    return matrix.diagonal() if kind == "diagonal" else None


def _factorize(built: KFAC | LowRank | HMatrix | Tensor | None, system: System) -> Solve:
    """Add the damping, and invert."""
    if built is None:
        return lambda vector: vector
    if isinstance(built, Tensor):
        diagonal = built + system.damping
        return lambda vector: vector / diagonal
    if isinstance(built, KFAC):
        # K-FAC takes one damping for each layer. As a preconditioner it may take the mean.
        return built.factorize(system.mean_damping, warn=False).solve
    uniform = bool(torch.all(system.damping == system.damping[0]))
    damping = system.mean_damping if uniform else system.damping.double()
    return built.factorize(damping, warn=False).solve
