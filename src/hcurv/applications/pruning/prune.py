"""Remove weights step by step, and move those that stay to make up for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from tqdm import tqdm

from hcurv.applications.pruning.points import Points
from hcurv.applications.pruning.quadratic import QuadraticModel
from hcurv.applications.pruning.result import Pruning, PruningStep
from hcurv.applications.pruning.saliency import Saliency, resolve_saliency, select_active
from hcurv.applications.pruning.structures import (
    UNIT_KINDS,
    Groups,
    Scope,
    Structure,
    make_structure,
    parse_pattern,
)
from hcurv.arguments import check_callable, check_number
from hcurv.indexing import check_count, check_seed
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.model.snapshot import ForwardFunction, unwrapped
from hcurv.precision import full_precision

__all__ = ["prune"]

_DEFAULT_SPARSITY = 0.95
# Without a damping of the user's, λ is this share of the mean of H's diagonal.
_DAMPING = 0.2
# A correction that makes the loss larger is halved up to so many times, and then left out.
_HALVINGS = 4
# Further corrections at the same mask end when one lowers the loss by less than this share of it.
_LEAST = 1e-3


@full_precision
def prune(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    sparsity: float | None = None,
    *,
    structure: str = "weights",
    scope: Scope = "model",
    bias: bool = False,
    leave_out: Sequence[str] = (),
    schedule: int | Sequence[float] = 8,
    saliency: Saliency = "auto",
    stages: int = 1,
    corrections: int = 1,
    gradient: bool = False,
    damping: float | None = None,
    num_points: int | None = None,
    evaluate: Callable[[nn.Module], SupportsFloat] | None = None,
    forward_fn: ForwardFunction | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Pruning:
    """Make a copy of a model in which most weights are zero and the others make up for it.

    Every step computes the exact Gauss-Newton matrix H at the present weights θ, chooses the
    weights P that go, and moves the weights K that stay by the δ_K that minimises the quadratic
    model of the loss: (H_KK + λI) δ_K = H_KP θ_P − g_K, where g is zero in the first correction
    and the gradient in later ones. A move that makes the loss larger is halved.

    Args:
        model: any model that `GaussNewton` reads. It is not changed.
        loss: the loss, as for `GaussNewton`.
        data: the data, as for `GaussNewton`, best with targets. It is held in memory.
        sparsity: the share of weights to remove, of those that may be removed; or the share of
            units or channels. None for the end of the schedule, for what an "N:M" structure says,
            or else for 0.95.
        structure: "weights" removes single weights; "units" units of Linear layers, with all
            weights that lead to them and their biases; "channels" filters of convolutions with
            their biases; "units+channels" both. "N:M", such as "2:4", keeps N of every M inputs of
            a row; in convolutions these are channels at the same place of the kernel. Units of the
            layer that is called last are the outputs, and stay.
        scope: "model" reaches the sparsity over the whole model, "layer" in every layer.
        bias: whether vectors, such as biases, may be removed. For "weights" only.
        leave_out: names of parameters or layers, or patterns such as "*.bias", that are not
            removed. They are corrected all the same; freeze what must not change at all.
        schedule: the number of steps; what is kept falls by the same factor in each. Or the
            sparsities of the steps, which do not fall and end with ``sparsity``.
        saliency: "magnitude" removes the weights with the smallest θ_k², "diagonal" those with the
            smallest θ_k² H_kk, and "inverse" those with the smallest θ_k²/[(H + λI)⁻¹]_kk, the cost
            if the others follow. For groups the costs are added, or for "inverse" taken jointly
            where the matrix is small. "auto" is "inverse" where that takes seconds, else
            "diagonal".
        stages: the number of selections in a step, each followed by a minimisation of the same
            quadratic model. More than one helps if there are few steps.
        corrections: the number of corrections in a step. Zero leaves the kept weights as they are.
            The first one keeps the outputs of the model as they are, as far as it can. Each further
            one takes H and the gradient at the new weights, and goes on training: it needs targets,
            and enough data for the weights that are left. Targets may be the outputs of the model
            itself, which needs no labels.
        gradient: whether the first correction, too, goes down the gradient of the loss.
        damping: λ > 0; None for a fifth of the mean of H's diagonal. If a correction makes the loss
            larger, the damping of later ones grows for a while.
        num_points: the number of points that H is made of, drawn anew for every H. None for all.
            Losses and gradients are over all of the data.
        evaluate: a function of the pruned model, such as its test accuracy, for the record.
        forward_fn: as for `GaussNewton`.
        seed: the seed of the draws of points.
        progress: whether to show a progress bar.

    Raises:
        ValueError, TypeError, KeyError: an argument does not fit; the message says what to do.

    Examples:
        >>> thin = hcurv.prune(model, loss, (inputs, targets), sparsity=0.5)
        >>> int((thin.model[0].weight == 0).sum() + (thin.model[2].weight == 0).sum())
        21
        >>> pattern = hcurv.prune(model, loss, (inputs, targets), structure="2:4", schedule=1)
        >>> pattern.masks["0.weight"].sum(1)
        tensor([2, 2, 2, 2, 2, 2])
        >>> smaller = hcurv.prune(model, loss, (inputs, targets), 0.5, structure="units")
        >>> int(smaller.masks["0.bias"].sum())
        3
    """
    options = _Options(
        saliency=saliency,
        stages=check_count(stages, "stages"),
        corrections=check_count(corrections, "corrections", least=0),
        gradient=gradient,
        damping=damping,
        num_points=num_points,
    )
    if sparsity is None and isinstance(schedule, Sequence) and schedule:
        sparsity = schedule[-1]
    wanted = _check(options, structure, scope, bias, sparsity)
    check_callable(evaluate, "evaluate")
    if isinstance(leave_out, str) or not isinstance(leave_out, Sequence):
        raise TypeError(
            f'leave_out must be a list of names or patterns, such as ["*.bias"]; got {leave_out!r}'
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if torch_prune.is_pruned(unwrapped(model)):
        raise ValueError(
            "the model has masks of torch.nn.utils.prune: make them permanent first, with"
            " torch.nn.utils.prune.remove(module, name)"
        )
    points = Points(model, loss, data, forward_fn)
    options.check_data(points)
    kinds = UNIT_KINDS.get(structure)
    chosen = make_structure(
        structure,
        points.snapshot.module,
        points.snapshot.layout,
        points.weights.device,
        scope=scope,
        bias=bias,
        leave_out=leave_out,
        output_layer=None if kinds is None else points.last_module(UNIT_KINDS["units+channels"]),
    )
    sparsities = _sparsities(chosen, schedule, wanted)
    run = _Run(points, chosen, options, evaluate, check_seed(seed))
    for share in tqdm(sparsities, unit="step", disable=not progress):
        run.step(share)
    return run.result()


@dataclass(frozen=True)
class _Options:
    """How a step is made; see `prune`."""

    saliency: Saliency
    stages: int
    corrections: int
    gradient: bool
    damping: float | None
    num_points: int | None

    def check_data(self, points: Points) -> None:
        """Refuse what the data does not allow."""
        if points.targets is None:
            needed = "gradient=True" if self.gradient else None
            needed = f"corrections={self.corrections}" if self.corrections > 1 else needed
            if needed is not None:
                raise ValueError(
                    f"{needed} needs the gradient of the loss: pass data=(inputs, targets) or a"
                    " loader of both"
                )
        if self.num_points is not None:
            check_count(self.num_points, "num_points", most=points.count)


class _Run:
    """The weights and the mask on their way to the last sparsity."""

    def __init__(
        self,
        points: Points,
        structure: Structure,
        options: _Options,
        evaluate: Callable[[nn.Module], SupportsFloat] | None,
        seed: int,
    ) -> None:
        self._points, self._structure, self._options = points, structure, options
        self._evaluate = evaluate
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = points.weights
        self._active = torch.ones_like(self._weights, dtype=torch.bool)
        self._record: list[PruningStep] = []
        # The damping of corrections after the first one, in units of the user's.
        self._caution = 1.0
        self._note(time.perf_counter(), None, None, None)

    def step(self, sparsity: float) -> None:
        """Remove weights until the sparsity is reached, and correct the others."""
        start = time.perf_counter()
        quadratic = self._quadratic(self._options.gradient)
        active, saliency, moved = self._select(quadratic, sparsity)
        damping = quadratic.damping
        del quadratic  # Its factors may be large, and the next ones are made below.
        self._active = active
        self._weights = torch.where(active, self._weights, 0.0)
        zeroed = value = self._points.measure(self._weights)[0]
        if self._options.corrections:
            value, _ = self._move(moved, value)
        for _ in range(self._options.corrections - 1):
            before = value
            again = self._quadratic(True, self._caution)
            value, halvings = self._move(again.minimiser(active), value)
            # The rule of Levenberg and Marquardt: short steps make the next one more careful.
            self._caution = max(1.0, self._caution * (0.5 if halvings == 0 else 2.0**halvings))
            if halvings == 0 and _is_small(before, value):
                break
        self._note(start, zeroed, saliency, damping)

    def _quadratic(self, with_gradient: bool, caution: float = 1.0) -> QuadraticModel:
        """The quadratic model at the present weights, over points that are drawn anew.

        Args:
            with_gradient: whether it knows the gradient, which is that over all points.
            caution: what the damping is multiplied by.
        """
        points, chosen = self._points, None
        if self._options.num_points is not None:
            order = torch.randperm(points.count, generator=self._generator)
            chosen = order[: self._options.num_points]
        points.set_weights(self._weights)
        matrix = points.gauss_newton(chosen)
        damping = self._options.damping
        if damping is None:
            damping = _DAMPING * float(matrix.diagonal().double().mean())
            damping = damping if damping > 0 else 1.0  # A matrix of zeros: nothing moves.
        gradient = points.gradient(matrix.num_points) if with_gradient else None
        return QuadraticModel(matrix, self._weights, gradient, caution * damping)

    def _select(self, quadratic: QuadraticModel, sparsity: float) -> tuple[Tensor, str, Tensor]:
        """Choose the weights that stay, in stages.

        Returns:
            Which weights stay; how they were chosen; where the quadratic model moves them.
        """
        active, weights = self._active, self._weights
        first = self._structure.sparsity(active)
        saliency = self._options.saliency
        for stage in range(1, self._options.stages + 1):
            share = sparsity
            if stage < self._options.stages:
                fraction = stage / self._options.stages
                share = 1 - (1 - first) ** (1 - fraction) * (1 - sparsity) ** fraction
            saliency = resolve_saliency(self._options.saliency, quadratic, active)
            active = select_active(saliency, quadratic, weights, active, self._structure, share)
            if self._options.corrections:
                weights = quadratic.minimiser(active)
        return active, saliency, weights

    def _move(self, moved: Tensor, value: float | None) -> tuple[float | None, int]:
        """Go to the corrected weights, or part of the way if the loss would grow.

        Args:
            moved: where to go.
            value: the loss at the present weights.

        Returns:
            The loss at the new weights, and how often the step was halved.
        """
        step = moved - self._weights
        for halvings in range(_HALVINGS + 1):
            found = self._points.measure(self._weights + step)[0]
            if found is None or value is None or found <= value:
                self._weights = self._weights + step
                return found, halvings
            step = step / 2
        return value, _HALVINGS + 1

    def _note(
        self, start: float, zeroed: float | None, saliency: str | None, damping: float | None
    ) -> None:
        value, accuracy = self._points.measure(self._weights)
        seconds = time.perf_counter() - start
        model = self._points.snapshot.module
        self._record.append(
            PruningStep(
                sparsity=self._structure.sparsity(self._active),
                num_kept=int((self._structure.prunable & self._active).sum()),
                zeroed_loss=zeroed,
                loss=value,
                accuracy=accuracy,
                evaluation=None if self._evaluate is None else float(self._evaluate(model)),
                saliency=saliency,
                damping=damping,
                seconds=seconds,
            )
        )

    def result(self) -> Pruning:
        """The model with its masks."""
        self._points.set_weights(self._weights)
        layout = self._points.snapshot.layout
        possible = layout.unflatten(self._structure.prunable)
        masks = {
            name: mask.clone()
            for name, mask in layout.unflatten(self._active).items()
            if bool(possible[name].any())
        }
        return Pruning(self._points.snapshot.module, masks, tuple(self._record))


def _is_small(before: float | None, after: float | None) -> bool:
    """Whether a correction that was made in full hardly changed the loss."""
    return before is not None and after is not None and before - after < _LEAST * before


def _check(
    options: _Options, structure: str, scope: str, bias: bool, sparsity: float | None
) -> float:
    """Check what needs no data, and return the sparsity to reach."""
    if not isinstance(structure, str):
        raise TypeError(f"structure must be a string; got {type(structure).__name__}")
    if scope not in get_args(Scope):
        raise ValueError(f'scope must be "model" or "layer"; got {scope!r}')
    if options.saliency not in get_args(Saliency):
        known = ", ".join(f'"{name}"' for name in get_args(Saliency))
        raise ValueError(f"saliency must be one of {known}; got {options.saliency!r}")
    if bias and structure != "weights":
        raise ValueError(
            f'bias=True is for structure="weights"; got {structure!r} (units and channels go with'
            " their biases)"
        )
    if options.damping is not None:
        check_number(options.damping, "damping", above=0)
    pattern = parse_pattern(structure)
    if pattern is not None:
        follows = 1 - pattern[0] / pattern[1]
        if sparsity is not None and abs(sparsity - follows) > 1e-9:
            raise ValueError(
                f'structure="{structure}" has a sparsity of {follows}: leave sparsity out;'
                f" got {sparsity}"
            )
        return follows
    sparsity = _DEFAULT_SPARSITY if sparsity is None else sparsity
    if not (isinstance(sparsity, int | float) and 0 <= sparsity < 1):
        raise ValueError(f"sparsity must be at least 0 and less than 1; got {sparsity!r}")
    return float(sparsity)


def _sparsities(structure: Structure, schedule: int | Sequence[float], last: float) -> list[float]:
    """The sparsity of every step."""
    if isinstance(structure, Groups):
        structure.check(last)
    if isinstance(schedule, str) or not isinstance(schedule, Sequence):
        return structure.schedule(last, check_count(schedule, "schedule"))
    shares = [check_number(share, "schedule", least=0, below=1) for share in schedule]
    rising = all(low <= high for low, high in zip([0.0, *shares], shares, strict=False))
    if not shares or not rising or abs(shares[-1] - last) > 1e-9:
        raise ValueError(
            "schedule must be a number of steps, or sparsities that do not fall and end with"
            f" sparsity={last}; got {list(schedule)}"
        )
    return shares
