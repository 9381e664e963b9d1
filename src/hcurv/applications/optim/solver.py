"""Which way the steps are computed: chosen by what pays, and kept while it serves."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from hcurv.applications.optim.preconditioners import PRECONDITIONERS, Kept
from hcurv.applications.optim.records import timed
from hcurv.applications.optim.systems import Solution, System, solve_exactly
from hcurv.applications.optim.truncated_cg import Truncated, minimise_model

__all__ = ["EXACT", "METHODS", "StepSolver"]

EXACT = ("parameters", "samples")
METHODS = ("auto", *EXACT, *PRECONDITIONERS)
# Up to the first size an exact solution is certainly cheap, and beyond the second it is not tried.
_SURELY_EXACT = 500
_MAYBE_EXACT = 1500
# Ways are compared in the first step, and again after 8, 64, 512, … steps.
_TRIAL_GROWTH = 8
# They are compared over this many iterations of conjugate gradients.
_TRIAL_ITERATIONS = 10
# Low rank, which takes as many products to build as a solve, is tried only if K-FAC is not faster
# than no preconditioner by this factor.
_CLEARLY_FASTER = 2.0
# A way that is built is expected to serve for this many steps.
_LIFETIME = 4


class StepSolver:
    """Solves the systems of the steps.

    Args:
        method: one of `METHODS`.
        tolerance: of `minimise_model`.
        max_iterations: the largest number of iterations of one solve.
        seed: the seed of preconditioners.
    """

    def __init__(self, method: str, tolerance: float, max_iterations: int, seed: int) -> None:
        self._method, self._tolerance = method, tolerance
        self._max_iterations, self._seed = max_iterations, seed
        self._choice: str | None = None if method == "auto" else method
        self._next_trial = 1 if method == "auto" else 0
        self._kept: Kept | None = None

    def state(self) -> dict[str, Any]:
        """What has been decided, in numbers and strings."""
        return {"choice": self._choice, "next_trial": self._next_trial}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with what had been decided before."""
        if self._method == "auto":
            self._choice, self._next_trial = state["choice"], int(state["next_trial"])
        self.forget()

    def forget(self) -> None:
        """Drop the preconditioner, so that the next solve builds one."""
        self._kept = None

    def solve(
        self, system: System, start: Tensor | None, step: int, seconds: dict[str, float]
    ) -> Solution | None:
        """Solve for a step.

        Args:
            system: the system.
            start: a direction to start with, or None.
            step: the number of the step.
            seconds: the time of the phases, which is added to.

        Returns:
            The solution; None if the damping is too small for an exact one.
        """
        if self._choice is None or (self._method == "auto" and step >= self._next_trial):
            with timed(seconds, "preconditioner"):
                self._choice = self._choose(system, step)
        exact = self._choice in EXACT
        if exact and self._method == "auto" and system.num_rows > _MAYBE_EXACT:
            # This batch is much larger than the one that the choice was made for.
            self._choice, exact = "kfac", False
        if exact:
            # With unequal batches the smaller space may change.
            method = self._choice if self._method != "auto" else _smaller_space(system)
            with timed(seconds, "solve"):
                return solve_exactly(system, str(method))
        return self._iterate(system, start, step, seconds)

    def _iterate(
        self, system: System, start: Tensor | None, step: int, seconds: dict[str, float]
    ) -> Solution:
        """Run conjugate gradients with the preconditioner that is kept, or a new one."""
        kind, rebuilt = str(self._choice), False
        with timed(seconds, "preconditioner"):
            kept = self._kept
            if (
                kept is None
                or kept.kind != kind
                or kept.size != len(system.damping)
                or kept.is_worn
            ):
                self._kept = None  # its memory is free before the next is built
                kept = self._kept = Kept(kind, system, self._seed + step)
                rebuilt = True
            precondition = kept.solve_at(system)
        with timed(seconds, "solve"):
            found = minimise_model(
                system.product,
                system.gradient,
                precondition,
                start,
                self._tolerance,
                self._max_iterations,
            )
        kept.note(found.iterations, _contraction(found, system.gradient))
        return Solution(found.step, found.residual, found.iterations, kind, rebuilt)

    def _choose(self, system: System, step: int) -> str:
        """Compare the ways by the time that they take."""
        self._next_trial = max(_TRIAL_GROWTH * self._next_trial, step + 1)
        if system.num_rows <= _SURELY_EXACT:
            return _smaller_space(system)
        times: dict[str, float] = {}
        trials = {kind: self._try(kind, system, step, times) for kind in ("kfac", "none")}
        spent = _times_to_target(trials, times)
        if spent["kfac"] * _CLEARLY_FASTER > spent["none"]:
            trials["low-rank"] = self._try("low-rank", system, step, times)
            spent = _times_to_target(trials, times)
        best = min(spent, key=lambda kind: spent[kind])
        if system.num_rows <= _MAYBE_EXACT:
            began = time.perf_counter()
            if solve_exactly(system, _smaller_space(system)) is not None:
                longest = self._max_iterations * trials[best].seconds + times[best] / _LIFETIME
                if time.perf_counter() - began <= longest:
                    return _smaller_space(system)
        return best

    def _try(self, kind: str, system: System, step: int, times: dict[str, float]) -> Truncated:
        """Make a few iterations with a preconditioner, and note how long it took to build."""
        began = time.perf_counter()
        precondition = Kept(kind, system, self._seed + step).solve_at(system)
        times[kind] = time.perf_counter() - began
        iterations = min(_TRIAL_ITERATIONS, self._max_iterations)
        return minimise_model(
            system.product, system.gradient, precondition, None, self._tolerance, iterations
        )


def _smaller_space(system: System) -> str:
    """The exact way that is cheaper."""
    matrix = system.matrix
    return "parameters" if matrix.shape[0] <= matrix.num_root_rows else "samples"


def _times_to_target(trials: dict[str, Truncated], setup: dict[str, float]) -> dict[str, float]:
    """How long each way takes for the decrease of the model that all of them reach."""
    target = max(trial.values[-1] for trial in trials.values())
    return {
        kind: setup[kind] / _LIFETIME
        + trial.seconds * next(i for i, value in enumerate(trial.values) if value <= target)
        for kind, trial in trials.items()
    }


def _contraction(found: Truncated, gradient: Tensor) -> float:
    """By how much the residual fell, relative to the gradient."""
    norm = float(torch.linalg.vector_norm(gradient))
    return float(torch.linalg.vector_norm(found.residual)) / norm if norm > 0 else 1.0
