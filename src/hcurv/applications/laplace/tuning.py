"""Choose the prior and the noise by the marginal likelihood."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from hcurv.damping import DampingLike, as_damping
from hcurv.layout import ParameterLayout

__all__ = ["Grouping", "Tuning", "maximise"]

Grouping: TypeAlias = Literal["model", "layer", "parameter"]
# Precisions and noises stay within these bounds: a precision can tend to infinity, where a weight
# is zero and the data does not want it to be anything else.
_PRIOR_BOUNDS = (1e-8, 1e10)
_NOISE_BOUNDS = (1e-8, 1e8)
_Evidence = Callable[[DampingLike, Tensor], Tensor]


@dataclass(frozen=True)
class Tuning:
    """The record of `LaplacePosterior.tune`.

    Attributes:
        evidence: the log marginal likelihood before the first and after each step; it only rises.
        num_evaluations: how many marginal likelihoods, with gradients, were computed.
        converged: whether the steps ended at a maximum, and not because there were too many.
        grouping: what has a precision of its own: "model", "layer" or "parameter".
        tuned_noise: whether the noise was tuned, too.
        seconds: the time that it took.

    Examples:
        >>> post = hcurv.laplace(model, loss, (inputs, targets)).tune()
        >>> post.tuning.converged, post.tuning.evidence[-1] > post.tuning.evidence[0]
        (True, True)
    """

    evidence: tuple[float, ...]
    num_evaluations: int
    converged: bool
    grouping: Grouping
    tuned_noise: bool
    seconds: float


class _Groups:
    """Which number of a vector of logarithms is the precision of which parameters."""

    def __init__(self, layout: ParameterLayout, grouping: Grouping) -> None:
        if grouping not in ("model", "layer", "parameter"):
            raise ValueError(
                f'prior must be tuned by "model", "layer" or "parameter"; got {grouping!r}'
            )
        self._layout, self._grouping = layout, grouping

    def start(self, prior: DampingLike) -> Tensor:
        """Logarithms of the precisions to begin with: geometric means over each group."""
        values = as_damping(prior, self._layout.size, self._layout).tensor.detach().double()
        logs = values.log().expand(self._layout.size)
        if self._grouping == "model":
            return logs.mean()[None]
        if self._grouping == "layer":
            names = self._layout.layers.values()
            return torch.stack([logs[self._layout.select(*own)].mean() for own in names])
        return logs.clone()

    def prior(self, logs: Tensor) -> DampingLike:
        """The precisions of these logarithms, with their gradients."""
        if self._grouping == "model":
            return logs.exp()[0]
        if self._grouping == "layer":
            layers = self._layout.layers.items()
            return {
                name: value.exp()
                for (_, names), value in zip(layers, logs, strict=True)
                for name in names
            }
        return logs.exp()


def maximise(
    evidence: _Evidence,
    layout: ParameterLayout,
    prior: DampingLike,
    noise: float,
    *,
    grouping: Grouping,
    tunes_noise: bool,
    max_steps: int,
    tolerance: float,
    progress: bool,
) -> tuple[DampingLike, float, Tuning]:
    """Maximise the evidence over logarithms of precisions, and of the noise, by L-BFGS.

    Returns:
        The prior, the noise, and a record.
    """
    begun = time.perf_counter()
    groups = _Groups(layout, grouping)
    first = groups.start(prior)
    count = first.numel()
    if tunes_noise:
        first = torch.cat([first, torch.tensor([noise], dtype=torch.float64).log()])

    def split(logs: Tensor) -> tuple[DampingLike, Tensor]:
        chosen = logs[-1].exp() if tunes_noise else torch.tensor(noise, dtype=torch.float64)
        return groups.prior(logs[:count]), chosen

    values: dict[int, float] = {}

    def objective(point: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        logs = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = evidence(*split(logs))
        (slope,) = torch.autograd.grad(value, logs)
        values[hash(point.tobytes())] = float(value.detach())
        return -float(value.detach()), -slope.numpy()

    start = first.numpy()
    steps = [-objective(start)[0]]
    best = start.copy()
    with tqdm(total=max_steps, unit="steps", disable=not progress) as bar:

        def record(point: np.ndarray[Any, Any]) -> None:
            nonlocal best
            value = values.get(hash(point.tobytes()), -np.inf)
            bar.update(1)
            # An estimated log-determinant can make a step fall, which is then not taken.
            if value > steps[-1]:
                steps.append(value)
                best = point.copy()

        bounds = [tuple(np.log(_PRIOR_BOUNDS))] * count
        bounds += [tuple(np.log(_NOISE_BOUNDS))] * tunes_noise
        found = minimize(
            objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            callback=record,
            options={"maxiter": max_steps, "ftol": tolerance, "gtol": 1e-4},
        )
    chosen_prior, chosen_noise = split(torch.tensor(best))
    record_of = Tuning(
        tuple(steps),
        1 + int(found.nfev),
        bool(found.success),
        grouping,
        tunes_noise,
        time.perf_counter() - begun,
    )
    plain = _without_gradients(chosen_prior)
    return plain, float(chosen_noise), record_of


def _without_gradients(prior: DampingLike) -> DampingLike:
    """Numbers instead of tensors of one number."""
    if isinstance(prior, dict):
        return {name: float(value) for name, value in prior.items()}
    assert isinstance(prior, Tensor)
    return float(prior) if prior.ndim == 0 else prior.detach()
