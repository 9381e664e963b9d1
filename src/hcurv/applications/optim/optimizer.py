"""A `torch.optim.Optimizer` that takes damped Gauss-Newton steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hcurv.applications.optim.damping_rules import DampingRules, check_group
from hcurv.applications.optim.objective import Objective, read_batch
from hcurv.applications.optim.one_step import OneStep, Task
from hcurv.applications.optim.records import StepRecord, timed
from hcurv.applications.optim.solver import METHODS, StepSolver
from hcurv.arguments import check_callable
from hcurv.indexing import check_count, check_seed
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.model.snapshot import ForwardFunction, check_parameters
from hcurv.precision import full_precision

__all__ = ["GaussNewton"]


class GaussNewton(Optimizer):
    """Train by damped Gauss-Newton steps: (H + λI + W) p = −g.

    H is the Gauss-Newton Hessian of the batch, g the gradient of its loss, W the weight decay and λ
    a damping that follows the rules of Levenberg and Marquardt. A step is measured on its own
    batch: with ρ, the true decrease of the loss divided by the decrease that the quadratic model
    predicted, λ is divided by ``damping_factor`` if ρ > 3/4 and multiplied by it if ρ < 1/4. A step
    that raises the loss is not taken; it is shortened, or computed again with a larger λ.

    Small systems are solved exactly, in parameter or in sample space. Others are solved by
    conjugate gradients that start from the last step and stop when they no longer pay, with a
    preconditioner that is kept over several steps.

    It is used like any optimizer of torch, except that `step` takes the batch, because curvature
    cannot be computed from a scalar loss. ``backward()`` and ``zero_grad()`` are not needed, and
    ``.grad`` is neither read nor written. Learning rates, weight decay, momentum and damping are
    those of the parameter groups, so that schedulers work. The model must treat its points
    independently: call ``model.eval()`` if it has dropout or batch normalisation.

    Args:
        model: the model, as for `hcurv.GaussNewton`. Its parameters are what `step` changes.
        loss: the loss, as for `hcurv.GaussNewton`: a torch module, or a `Loss` with a ``value``.
        params: parameters or groups of them, as for any optimizer, or named groups; together all
            parameters of the model with ``requires_grad``. None for one group of all.
        lr: what steps are multiplied by.
        damping: the first λ. None for the curvature gᵀHg/gᵀg along the first gradient. Groups may
            have dampings of their own, which are multiplied by the same factors.
        weight_decay: the loss is that of the batch and ½ Σ weight_decay·θ². It is part of g and
            of the matrix.
        momentum: conjugate gradients start from the last step, times this number at the most. It
            does nothing where systems are solved exactly. 0 to start from zero.
        method: "auto" compares ways by the time that they take. It does so in the first step and
            again after 8, 64, … steps. To get the same numbers in every run, name a method:
            "parameters" and "samples" solve exactly, "kfac", "low-rank", "hierarchical",
            "diagonal" and "none" are preconditioners of conjugate gradients.
        tolerance: conjugate gradients stop when an iteration lowers the quadratic model by less
            than this share of its decrease so far.
        max_iterations: the largest number of their iterations for one step.
        curvature_points: the number of points of each batch from which the curvature is taken;
            the gradient is that of all. None for all.
        adapt_damping: whether λ follows the rules. Steps that raise the loss are refused anyway.
        damping_factor: what λ is multiplied or divided by.
        forward_fn: as for `hcurv.GaussNewton`.
        seed: the seed of K-FAC's drawn targets, of sketches and of ``curvature_points``.

    Attributes:
        log: a `StepRecord` for each step that was made.

    Raises:
        TypeError, ValueError: an argument does not fit; the message says what to do.

    Examples:
        >>> opt = hcurv.optim.GaussNewton(model, loss)
        >>> for _ in range(5):
        ...     record = opt.step((inputs, targets))
        >>> record.loss_after < opt.log[0].loss / 2, len(opt.log)
        (True, 5)

        Schedulers and groups work as usual:

        >>> groups = [
        ...     {"params": model[0].parameters(), "weight_decay": 1e-3},
        ...     {"params": model[2].parameters(), "lr": 0.5},
        ... ]
        >>> opt = hcurv.optim.GaussNewton(model, loss, groups, method="kfac")
        >>> scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        >>> record = opt.step((inputs, targets))
        >>> scheduler.step()
        >>> [group["lr"] for group in opt.param_groups]
        [0.5, 0.25]
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        damping: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        method: str = "auto",
        tolerance: float = 5e-3,
        max_iterations: int = 50,
        curvature_points: int | None = None,
        adapt_damping: bool = True,
        damping_factor: float = 3.0,
        forward_fn: ForwardFunction | None = None,
        seed: int = 0,
    ) -> None:
        check_parameters(model)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
            raise ValueError(f"tolerance must be a number in [0, 1); got {tolerance!r}")
        seed, max_iterations = check_seed(seed), check_count(max_iterations, "max_iterations")
        check_callable(forward_fn, "forward_fn")
        objective = Objective(model, loss, forward_fn)
        if curvature_points is not None:
            curvature_points = check_count(curvature_points, "curvature_points")
            if not objective.is_mean:
                raise ValueError(
                    "curvature_points estimates a mean over points: use a loss with"
                    " reduction='mean'"
                )
        self._model = model
        self._solver = StepSolver(method, float(tolerance), max_iterations, seed)
        self._task = Task(model, loss, forward_fn, objective, self._solver, curvature_points, seed)
        self._rules = DampingRules(damping_factor, adapt_damping)
        self._num_steps = 0
        self.log: list[StepRecord] = []
        defaults = {
            "lr": lr,
            "damping": damping,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
        check_group(defaults)
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(chosen, defaults)
        self._trainable()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, such as a layer that was frozen so far.

        Args:
            param_group: "params", and settings that differ from the defaults.

        Raises:
            ValueError: a setting is out of range.

        Examples:
            >>> _ = model[0].requires_grad_(False)
            >>> opt = hcurv.optim.GaussNewton(model, loss)
            >>> _ = model[0].requires_grad_(True)
            >>> opt.add_param_group({"params": model[0].parameters(), "lr": 0.1})
            >>> len(opt.param_groups)
            2
        """
        check_group(param_group)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later: tensors, numbers and strings, no other objects.

        The preconditioner is not stored. This optimizer drops it, too, so that both it and the one
        that loads the state build one in their next step, and go on alike. The log is not stored.

        Examples:
            >>> opt = hcurv.optim.GaussNewton(model, loss)
            >>> record = opt.step((inputs, targets))
            >>> torch.save(opt.state_dict(), "state.pt")
            >>> again = hcurv.optim.GaussNewton(model, loss)
            >>> again.load_state_dict(torch.load("state.pt", weights_only=True))
            >>> again.step((inputs, targets)).step
            2
        """
        self._solver.forget()
        own = {"num_steps": self._num_steps, "least_damping": self._rules.least}
        return {**super().state_dict(), "gauss_newton": {**own, **self._solver.state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another optimizer of the same model and groups was.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            ValueError: it is the state of another kind of optimizer, or of other groups.

        Examples:
            >>> opt = hcurv.optim.GaussNewton(model, loss)
            >>> opt.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
            Traceback (most recent call last):
            ValueError: this is not the state of a hcurv.optim.GaussNewton: it has no 'gauss_newton'
        """
        if "gauss_newton" not in state_dict:
            raise ValueError(
                "this is not the state of a hcurv.optim.GaussNewton: it has no 'gauss_newton'"
            )
        super().load_state_dict(state_dict)
        own = state_dict["gauss_newton"]
        self._num_steps = int(own["num_steps"])
        self._rules.least = float(own["least_damping"])
        self._solver.load(own)

    @full_precision
    def step(self, batch: Data | Callable[[], Data]) -> StepRecord:  # type: ignore[override]
        """Take a step, and say what it did.

        Args:
            batch: (inputs, targets); an iterable of such pairs that together are one batch, such as
                a DataLoader of all data; or a closure, a function without arguments that returns
                one of these. (A closure that returns a loss, as for other optimizers, is refused.)

        Returns:
            The record of the step, which is also the last of `log`.

        Raises:
            UnsupportedModelError: as for `hcurv.GaussNewton`.
            TypeError, ValueError: the batch does not fit, or its loss is not finite.

        Examples:
            >>> opt = hcurv.optim.GaussNewton(model, loss)
            >>> record = opt.step(lambda: (inputs, targets))
            >>> record.accepted, record.method
            (True, 'parameters')
        """
        seconds = dict.fromkeys(
            ("gradient", "curvature", "preconditioner", "solve", "evaluation"), 0.0
        )
        with timed(seconds, "total"), torch.no_grad():
            pairs = read_batch(batch)
            parameters = self._trainable()
            self._num_steps += 1
            step = OneStep(self._task, parameters, self.param_groups, self.state, self._rules)
            record = step.run(pairs, self._num_steps, seconds)
        self.log.append(record)
        return record

    def _trainable(self) -> list[nn.Parameter]:
        """The parameters with ``requires_grad``, in the order of the flat vector.

        Raises:
            ValueError: one of them is in no group, or a group has one that is not the model's.
        """
        known = {id(p) for group in self.param_groups for p in group["params"]}
        names = {id(p): name for name, p in self._model.named_parameters()}
        missing = [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and id(p) not in known
        ]
        if missing:
            raise ValueError(
                f"'{missing[0]}' requires gradients but is in no parameter group: add it to one, or"
                " freeze it with requires_grad_(False)"
            )
        if not known <= names.keys():
            raise ValueError("a parameter group has a parameter that is not the model's")
        found = [p for p in self._model.parameters() if p.requires_grad]
        if not found:
            raise ValueError("the model has no parameter with requires_grad=True: nothing to do")
        return found
