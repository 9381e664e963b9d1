"""One step: gradient, curvature, solve, and the measurement of what it brought."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hcurv.applications.optim.damping_rules import DampingRules, expand_setting
from hcurv.applications.optim.objective import Objective, Pair
from hcurv.applications.optim.records import StepRecord, timed
from hcurv.applications.optim.solver import EXACT, StepSolver
from hcurv.applications.optim.systems import Solution, System
from hcurv.applications.optim.truncated_cg import dot
from hcurv.losses import Loss
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.model.snapshot import ForwardFunction
from hcurv.network.model_inputs import map_inputs, num_points

__all__ = ["OneStep", "Task"]

# A step by conjugate gradients that raises the loss is shortened before another is computed, which
# costs a forward pass. An exact step is computed again at once, which costs little more.
_SCALES = (1.0, 0.5, 0.25)
# So many steps are computed before the parameters are left as they are.
_MOST_SOLVES = 5
# A predicted decrease below this many units of rounding of the loss cannot be measured.
_UNITS = 8.0


@dataclass(frozen=True)
class Task:
    """What is the same for all steps of an optimizer."""

    model: nn.Module
    loss: nn.Module | Loss
    forward_fn: ForwardFunction | None
    objective: Objective
    solver: StepSolver
    curvature_points: int | None
    seed: int


@dataclass(frozen=True)
class _Taken:
    """A step that was tried.

    Attributes:
        change: the change of the parameters, (N,); None if it was rejected.
        loss: the objective after it.
        scale: the fraction of the step that was taken.
        predicted: the decrease that the model predicted for it.
        ratio: ρ of the whole step.
    """

    change: Tensor | None
    loss: float
    scale: float
    predicted: float
    ratio: float


class OneStep:
    """Makes one step.

    Args:
        task: model, loss and the rest that does not change.
        parameters: the parameters to change, in the order of the flat vector.
        groups: the parameter groups of the optimizer, whose damping is changed.
        state: the state of the optimizer, which holds the last step of each parameter.
        rules: how the damping changes.
    """

    def __init__(
        self,
        task: Task,
        parameters: list[nn.Parameter],
        groups: Sequence[dict[str, Any]],
        state: Any,
        rules: DampingRules,
    ) -> None:
        self._task, self._parameters, self._groups = task, parameters, groups
        self._state, self._rules = state, rules
        self._decay = self._setting("weight_decay")
        self._before = torch.cat([p.detach().reshape(-1) for p in parameters])

    def run(self, pairs: list[Pair], step: int, seconds: dict[str, float]) -> StepRecord:
        """Compute the step, take it if it lowers the loss, and change the damping.

        Args:
            pairs: the batch.
            step: the number of the step.
            seconds: where the time of each phase is written to.

        Raises:
            ValueError: the loss or its gradient is not finite.
        """
        task = self._task
        with timed(seconds, "curvature"):  # It comes first, because it checks the batch.
            chosen = self._curvature_pairs(pairs, step)
            data = chosen[0] if len(chosen) == 1 else chosen
            matrix = GaussNewton(task.model, task.loss, data, forward_fn=task.forward_fn)
        with timed(seconds, "gradient"):
            value, gradient = task.objective.value_and_gradient(pairs, self._parameters)
            gradient = torch.addcmul(gradient, self._decay, self._before)
        loss = value + self._penalty(self._before)
        if not (math.isfinite(loss) and bool(torch.isfinite(gradient).all())):
            raise ValueError(
                f"the loss before step {step} is {loss}, or its gradient is not finite: look at"
                " the targets, or at weights and inputs that are too large"
            )
        self._start_damping(matrix, gradient)
        dampings = [group["damping"] for group in self._groups]
        taken = _Taken(None, loss, 0.0, 0.0, math.nan)
        solutions: list[Solution] = []
        ratios: list[float] = []
        dense: dict[str, Tensor] = {}
        solves = 0
        while taken.change is None and solves < _MOST_SOLVES and bool(gradient.any()):
            if solves:
                self._rules.grow(self._groups, solves)
            solves += 1
            damping = self._setting("damping") + self._decay
            system = System(
                matrix, damping, gradient, task.model, task.loss, chosen, task.forward_fn, dense
            )
            solution = task.solver.solve(system, self._last_step(), step, seconds)
            if solution is not None:
                solutions.append(solution)
                with timed(seconds, "evaluation"):
                    taken = self._try(system, solution, pairs, loss)
                ratios.append(taken.ratio)
        if not self._rules.adapts:
            for group, before in zip(self._groups, dampings, strict=True):
                group["damping"] = before
        elif solves == 1:  # Otherwise it has been raised already.
            self._rules.follow(self._groups, taken.ratio)
        self._remember(taken.change)
        last = solutions[-1] if solutions else None
        norm = float(gradient.norm())
        return StepRecord(
            step=step,
            num_points=sum(num_points(inputs) for inputs, _ in pairs),
            loss=loss,
            loss_after=taken.loss,
            gradient_norm=norm,
            step_norm=0.0 if taken.change is None else float(taken.change.norm()),
            accepted=taken.change is not None,
            scale=taken.scale,
            predicted_decrease=taken.predicted,
            ratio=ratios[0] if ratios else math.nan,
            damping=float(dampings[0]),
            next_damping=float(self._groups[0]["damping"]),
            num_solves=solves,
            method="none" if last is None else last.method,
            iterations=sum(solution.iterations for solution in solutions),
            residual=0.0 if last is None else float(last.residual.norm()) / norm,
            rebuilt=any(solution.rebuilt for solution in solutions),
            seconds=seconds,
        )

    def _setting(self, name: str) -> Tensor:
        return expand_setting(self._groups, self._parameters, name)

    def _penalty(self, flat: Tensor) -> float:
        """½ Σ weight_decay·θ²."""
        return 0.5 * dot(self._decay * flat, flat)

    def _curvature_pairs(self, pairs: list[Pair], step: int) -> list[Pair]:
        """The points that the curvature is taken from: all, or a random choice."""
        sizes = [num_points(inputs) for inputs, _ in pairs]
        wanted = self._task.curvature_points
        if wanted is None or wanted >= sum(sizes):
            return pairs
        generator = torch.Generator().manual_seed(self._task.seed + step)
        chosen = torch.randperm(sum(sizes), generator=generator)[:wanted].sort().values
        found, first = [], 0
        for (inputs, targets), size in zip(pairs, sizes, strict=True):
            own = chosen[(chosen >= first) & (chosen < first + size)] - first
            first += size
            if own.numel():
                some = map_inputs(lambda t: t[own.to(t.device)], inputs)  # noqa: B023
                found.append((some, targets[own.to(targets.device)]))
        return found

    def _start_damping(self, matrix: GaussNewton, gradient: Tensor) -> None:
        """Choose the first damping, where it is not given."""
        if not self._rules.is_started(self._groups):
            length = dot(gradient, gradient)
            curvature = dot(gradient, matrix @ gradient) / length if length > 0 else 0.0
            self._rules.start(self._groups, curvature, gradient.dtype)

    def _last_step(self) -> Tensor | None:
        """What conjugate gradients start from: the last step, times the momentum."""
        momentum = self._setting("momentum")
        if not bool(momentum.any()) or not any(
            "direction" in self._state[p] for p in self._parameters
        ):
            return None
        parts = [
            self._state[p]["direction"] if "direction" in self._state[p] else torch.zeros_like(p)
            for p in self._parameters
        ]
        return momentum * torch.cat([part.reshape(-1) for part in parts])

    def _remember(self, change: Tensor | None) -> None:
        """Keep the step of each parameter; nothing is kept if it was rejected."""
        for parameter in self._parameters:
            self._state[parameter].pop("direction", None)
        if change is not None:
            for parameter, part in zip(self._parameters, self._split(change), strict=True):
                self._state[parameter]["direction"] = part.clone()

    def _split(self, flat: Tensor) -> list[Tensor]:
        """A flat vector as tensors in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]

    def _write(self, flat: Tensor) -> None:
        for parameter, part in zip(self._parameters, self._split(flat), strict=True):
            parameter.copy_(part)

    def _try(self, system: System, solution: Solution, pairs: list[Pair], loss: float) -> _Taken:
        """Take the step, or a part of it, if that lowers the loss; leave the parameters if not."""
        rates = self._setting("lr")
        whole = rates * solution.step
        slope = dot(system.gradient, whole)
        curvature = self._curvature(system, solution, rates, whole)
        ratio = math.nan
        rounding = _UNITS * float(torch.finfo(whole.dtype).eps) * abs(loss)
        for scale in (1.0,) if solution.method in EXACT else _SCALES:
            predicted = -(scale * slope + 0.5 * scale**2 * curvature)
            after = self._evaluate(scale * whole, pairs)
            decrease = loss - after
            if predicted <= rounding:  # The two losses cannot be told apart.
                if math.isfinite(after) and decrease >= -rounding:
                    return _Taken(scale * whole, after, scale, predicted, ratio)
            elif scale == 1:
                ratio = decrease / predicted if math.isfinite(after) else -math.inf
            if math.isfinite(after) and decrease > 0:
                return _Taken(scale * whole, after, scale, predicted, ratio)
        self._write(self._before)
        return _Taken(None, loss, 0.0, 0.0, ratio)

    def _curvature(self, system: System, solution: Solution, rates: Tensor, whole: Tensor) -> float:
        """sᵀ(H + W)s of a step s, with the weight decay W but without the damping."""
        damping = system.damping - self._decay
        if bool((rates == rates[0]).all()):  # No product is needed.
            curved = float(rates[0]) ** 2 * solution.curvature_of(system.gradient)
            return curved - dot(damping * whole, whole)
        return dot(whole, system.product(whole)) - dot(damping * whole, whole)

    def _evaluate(self, change: Tensor, pairs: list[Pair]) -> float:
        """The objective after a change, which is left in place unless computing it fails."""
        after = self._before + change
        try:
            self._write(after)
            value = self._task.objective.value(pairs)
        except BaseException:
            self._write(self._before)
            raise
        return value + self._penalty(after)
