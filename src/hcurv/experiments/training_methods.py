"""The optimizers that are compared, and curves of their losses against time.

The clock counts the seconds of the processor that the process took, so that other work on the
machine does not matter; with one thread this is the wall time of a quiet machine. It stands still
while the loss over all training points is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from hcurv.applications.optim import GaussNewton
from hcurv.applications.optim.objective import Objective
from hcurv.baselines import KFAC
from hcurv.experiments.training_problems import TrainingProblem

__all__ = ["METHODS", "Curve", "run_method"]

# Seconds, and the loss over all training points at that time.
Curve = list[tuple[float, float]]
# A method yields after each of its steps.
Steps = Iterator[None]
_MOMENTUM = 0.9
# K-FAC's factors are taken from this many points, and renewed after this many steps.
_KFAC_POINTS = 1000
_KFAC_RENEWAL = 10
# A method has diverged when the loss of a minibatch is this many times the smallest one so far.
_DIVERGED = 1e6


def run_method(
    method: str,
    problem: TrainingProblem,
    options: Mapping[str, Any],
    seconds: float,
    seed: int,
    num_marks: int = 40,
) -> Curve:
    """Train for some seconds.

    Args:
        method: one of `METHODS`.
        problem: what to train; the model is changed.
        options: those of the method.
        seconds: the time that training may take.
        seed: the seed of minibatches.
        num_marks: how often the loss is measured, if the steps are short enough.

    Returns:
        The loss of the initial weights, and at least one more; if it is not finite, training ended
        there.
    """
    objective = Objective(problem.model, problem.loss, None)
    everything = [(problem.inputs, problem.targets)]
    # The first optimizer of a process makes torch import its compiler, which takes two seconds.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    curve: Curve = [(0.0, objective.value(everything))]
    steps = METHODS[method](problem, objective, options, seed)
    used, next_mark = 0.0, seconds / num_marks
    while used < seconds:
        began = time.process_time()
        finished = next(steps, "finished") == "finished"
        used += time.process_time() - began
        if used >= min(next_mark, seconds) or finished:
            curve.append((used, objective.value(everything)))
            next_mark = used + seconds / num_marks
        if finished or not math.isfinite(curve[-1][1]):
            break
    return curve


def _minibatches(problem: TrainingProblem, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled minibatches without end."""
    generator = torch.Generator().manual_seed(seed)
    count = len(problem.inputs)
    while True:
        order = torch.randperm(count, generator=generator)
        for rows in order.split(size):
            if len(rows) == min(size, count):
                yield problem.inputs[rows], problem.targets[rows]


def _first_order(
    optimizer: torch.optim.Optimizer,
    problem: TrainingProblem,
    objective: Objective,
    size: int,
    seed: int,
) -> Steps:
    parameters, limit = list(problem.model.parameters()), math.inf
    for batch in _minibatches(problem, size, seed):
        value, gradient = objective.value_and_gradient([batch], parameters)
        limit = min(limit, _DIVERGED * value)
        if not value <= limit:
            return
        _set_gradients(parameters, gradient)
        optimizer.step()
        yield


def _set_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def _adam(
    problem: TrainingProblem, objective: Objective, options: Mapping[str, Any], seed: int
) -> Steps:
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=options["lr"])
    return _first_order(optimizer, problem, objective, options["batch"], seed)


def _sgd(
    problem: TrainingProblem, objective: Objective, options: Mapping[str, Any], seed: int
) -> Steps:
    parameters = problem.model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=options["lr"], momentum=_MOMENTUM)
    return _first_order(optimizer, problem, objective, options["batch"], seed)


def _lbfgs(
    problem: TrainingProblem, objective: Objective, options: Mapping[str, Any], seed: int
) -> Steps:
    parameters = list(problem.model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, history_size=20, max_iter=options["max_iter"], line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        everything = [(problem.inputs, problem.targets)]
        value, gradient = objective.value_and_gradient(everything, parameters)
        _set_gradients(parameters, gradient)
        return value

    while True:
        before = parameters_to_vector(parameters).detach().clone()
        optimizer.step(closure)
        yield
        if torch.equal(parameters_to_vector(parameters), before):
            return  # Its line search finds no decrease any more.


def _kfac(
    problem: TrainingProblem, objective: Objective, options: Mapping[str, Any], seed: int
) -> Steps:
    """Natural gradients with a fixed damping, learning rate and momentum."""
    parameters = list(problem.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=options["lr"], momentum=_MOMENTUM)
    samples, limit = _minibatches(problem, _KFAC_POINTS, seed + 1), math.inf
    for number, batch in enumerate(_minibatches(problem, options["batch"], seed)):
        value, gradient = objective.value_and_gradient([batch], parameters)
        limit = min(limit, _DIVERGED * value)
        if not value <= limit:
            return
        if number % _KFAC_RENEWAL == 0:
            try:
                matrix = KFAC(problem.model, problem.loss, next(samples), seed=seed + number)
                inverse = matrix.factorize(options["damping"])
            except (ValueError, RuntimeError):
                return  # The weights are so large that its factors cannot be inverted.
        _set_gradients(parameters, inverse.solve(gradient))
        optimizer.step()
        yield


def _gauss_newton(
    problem: TrainingProblem, objective: Objective, options: Mapping[str, Any], seed: int
) -> Steps:
    own = {key: value for key, value in options.items() if key != "batch"}
    optimizer = GaussNewton(problem.model, problem.loss, seed=seed, **own)
    if "batch" not in options:
        while True:
            optimizer.step((problem.inputs, problem.targets))
            yield
    for batch in _minibatches(problem, options["batch"], seed):
        optimizer.step(batch)
        yield


METHODS: dict[str, Callable[[TrainingProblem, Objective, Mapping[str, Any], int], Steps]] = {
    "hcurv.optim.GaussNewton": _gauss_newton,
    "Adam": _adam,
    "SGD with momentum": _sgd,
    "L-BFGS": _lbfgs,
    "K-FAC": _kfac,
}
