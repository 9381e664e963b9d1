"""A model, a loss and data that fit together: what every curvature matrix starts from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hcurv.layout import ParameterLayout
from hcurv.losses import Loss, as_loss
from hcurv.network.batches import Batches, Data, Survey
from hcurv.network.loss_rows import LossRows, RowChoice
from hcurv.network.model.independence import agree
from hcurv.network.model.snapshot import (
    ForwardFunction,
    ModelSnapshot,
    check_parameters,
    plain_model,
    without_hooks,
)
from hcurv.network.model_inputs import Inputs, map_inputs, num_points, tensors_of
from hcurv.network.reading import Network, read_network
from hcurv.network.shards import Shard, share_survey
from hcurv.network.tracing import UnsupportedModelError
from hcurv.ranks import OneRank

__all__ = ["Problem", "check_targets", "loss_divisor", "read_problem", "require_positive"]

# The model is tried on this many points.
NUM_TRIED = 3


@dataclass(frozen=True)
class Problem:
    """A model, a loss and data, all of them checked. Made by `read_problem`.

    Attributes:
        snapshot: a copy of the model.
        network: the model as a chain of Linear layers, if it is one.
        loss: the loss.
        batches: the data, which can be read again.
        survey: what the first pass over the data found.
        point_shape: the shape of the outputs of one point.
        scale: the number by which the sum of the points' losses is multiplied.
        choice: which rows R_i has.
        offset: the number of the first of these points among those of all ranks.
        samples: the rows of sampled targets, (n, m, t, d), if they were drawn before.
    """

    snapshot: ModelSnapshot
    network: Network | None
    loss: Loss
    batches: Batches
    survey: Survey
    point_shape: tuple[int, ...]
    scale: float
    choice: RowChoice
    offset: int = 0
    samples: Tensor | None = None

    @property
    def num_points(self) -> int:
        """The number n of data points."""
        return self.survey.num_points

    @property
    def targets(self) -> Tensor | None:
        """The targets of all points, or None if the data has none."""
        return self.survey.targets

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the trainable parameters."""
        return self.snapshot.layout

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.snapshot.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.snapshot.module.parameters()).device

    def inputs(self) -> Iterator[Inputs]:
        """Read the inputs of all batches once more, making sure that they are the same."""
        for inputs, _ in self.batches.reread(self.survey):
            yield inputs

    def loss_rows(self, outputs: Tensor, points: slice) -> LossRows:
        """The rows of R_i at a range of points, the loss's reduction included.

        Args:
            outputs: outputs at the points as the loss sees them, (b, t, d).
            points: the range of these b points in the data.

        Raises:
            ValueError: the outputs are not finite, or do not fit the loss.
        """
        if not bool(torch.isfinite(outputs).all()):
            raise ValueError(
                f"the network's outputs are NaN or infinite at points {points.start} to"
                f" {points.stop - 1}: its weights or the inputs are too large"
            )
        self.loss.check_outputs(outputs.flatten(0, 1))
        if self.samples is not None:
            return LossRows.given(self.samples[points])
        targets = None if self.targets is None else self.targets[points]
        if targets is not None:
            targets = self.loss.split_targets(targets, (len(targets), *self.point_shape))
        start = self.offset + points.start
        return LossRows(self.loss, outputs, targets, self.scale, self.choice, start)

    def loss_root(self, outputs: Tensor, points: slice) -> Tensor:
        """The square roots R_i, for a chain: (b, q, d), or (b, d) if every R_i is diagonal.

        Args:
            outputs: outputs of the network at the points, (b, d).
            points: the range of these b points in the data.
        """
        return self.loss_rows(outputs[:, None], points).root

    def first_points(self, count: int) -> Problem:
        """The same model and loss, over the first points alone."""
        inputs = map_inputs(lambda tensor: tensor[:count], self.survey.first_inputs)
        targets = self.survey.first_targets
        samples = None if self.samples is None else self.samples[: num_points(inputs)]
        return self.over(inputs, None if targets is None else targets[:count], samples)

    def over(
        self, inputs: Inputs, targets: Tensor | None, samples: Tensor | None = None
    ) -> Problem:
        """The same model and loss, over other points in memory.

        Args:
            inputs: the inputs of these points.
            targets: their targets, or None.
            samples: the rows of their sampled targets, if they were drawn before.
        """
        batch = (inputs,) if targets is None else (inputs, targets)
        batches = Batches([batch], self.dtype, self.device)  # type: ignore[list-item]
        return replace(self, batches=batches, survey=batches.survey(), samples=samples)


def read_problem(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    *,
    forward_fn: ForwardFunction | None = None,
    choice: RowChoice | None = None,
    ranks: OneRank | None = None,
) -> Problem:
    """Read a model, a loss and data, and check that they fit together.

    Args:
        model: any model that treats its points independently.
        loss: a torch loss module or a `Loss`.
        data: as for `GaussNewton`.
        forward_fn: computes the outputs from a model and the inputs of a batch.
        choice: which rows R_i has; None for the exact ones.
        ranks: the processes, each of which passes its own points, and all else alike; None if this
            is the only one.

    Raises:
        RanksError: ranks have different models, losses or choices.
        UnsupportedModelError: points influence each other, or the forward pass is random.
        TypeError, ValueError: the loss is not supported, or the data does not fit the model or
            the loss.
    """
    ranks = OneRank() if ranks is None else ranks
    choice = RowChoice() if choice is None else choice
    with torch.no_grad():
        model = plain_model(model)
        with ranks.agreed():
            # Weights of the loss may be changed later.
            known_loss = copy.deepcopy(as_loss(loss))
            dtype, device = check_parameters(model)
            batches = Batches(data, dtype, device)
            own = batches.survey_any() if ranks.size > 1 else batches.survey()
            snapshot = ModelSnapshot(model, forward_fn)
        if ranks.size > 1:
            ranks.same(**_fingerprint(snapshot, known_loss, choice))
        survey = share_survey(ranks, own, device)
        survey = replace(survey, largest=ranks.most([survey.largest])[0])
        shard = Shard(ranks, survey.num_points)
        network = None
        with ranks.agreed():
            few = map_inputs(lambda tensor: tensor[:NUM_TRIED], survey.first_inputs)
            # A model that is random must leave the user's random numbers as they were.
            # Derivatives are wanted, and some models take other ways where gradients are disabled.
            with (
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
                torch.enable_grad(),
            ):
                outputs = _try_model(snapshot, few).detach()
            shape = (survey.num_points, *outputs.shape[1:])
            if survey.num_points:
                check_targets(known_loss, shape, survey.targets, choice)
            divisor = loss_divisor(known_loss, shape, survey.targets)
            if forward_fn is None and choice.num_samples is None and outputs.ndim == 2:
                network = _read_chain(snapshot.module, few, outputs)
        total = float(ranks.sum(torch.tensor(divisor, dtype=torch.float64)))
        scale = 1.0 if known_loss.reduction == "sum" else 1.0 / require_positive(total)
    return Problem(
        snapshot, network, known_loss, batches, survey, shape[1:], scale, choice, shard.offset
    )


def _fingerprint(snapshot: ModelSnapshot, loss: Loss, choice: RowChoice) -> dict[str, object]:
    """What all ranks must have in common, by name."""
    tensors = {f"'{name}'": value for name, value in snapshot.module.state_dict().items()}
    trainable = {"the trainable parameters": list(snapshot.trainable)}
    settings: dict[str, object] = {
        f"{type(loss).__name__}.{name}": value for name, value in sorted(vars(loss).items())
    }
    return {
        "the loss": type(loss).__name__,
        **settings,
        "num_samples": choice.num_samples,
        "fisher": choice.fisher,
        "seed": choice.seed,
        "the model": str(snapshot.module),
        **trainable,
        **tensors,
    }


def _try_model(snapshot: ModelSnapshot, few: Inputs) -> Tensor:
    """The outputs of a few points; refuse models whose outputs depend on more than the point."""
    shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_of(few))
    try:
        outputs = snapshot.outputs(few)
        again = snapshot.outputs(few)
    except UnsupportedModelError:
        raise
    except Exception as error:
        flat = isinstance(few, Tensor) and few.ndim > 2 and "mat1" in str(error)
        hint = " (is an nn.Flatten missing?)" if flat else ""
        raise ValueError(
            f"the model cannot read points of shape {shapes}: {type(error).__name__}: {error}{hint}"
        ) from error
    count = num_points(few)
    if outputs.ndim < 1 or outputs.shape[0] != count:
        raise ValueError(
            "the model must return one row of outputs for each point;"
            f" it returned shape {tuple(outputs.shape)} for {count} points of shape {shapes}"
        )
    if not torch.equal(outputs, again) and bool(torch.isfinite(outputs).all()):
        raise UnsupportedModelError(
            "the forward pass is random: two passes over the same points differ.",
            "Call model.eval(), or remove what is random.",
        )
    try:
        singles = [
            snapshot.outputs(map_inputs(lambda tensor: tensor[i : i + 1], few))  # noqa: B023
            for i in range(count)
        ]
        alone = torch.cat(singles)
    except Exception as error:
        raise UnsupportedModelError(
            f"the model cannot run on a single point: {type(error).__name__}: {error}.",
            "Points must not influence each other: call model.eval(), if it has batch"
            " normalisation.",
        ) from error
    if alone.shape != outputs.shape or not bool(agree(alone, outputs).all()):
        raise UnsupportedModelError(
            f"the model's outputs on {count} points differ from those of one point at a time:"
            " points of a batch influence each other.",
            "Call model.eval(), if it has batch normalisation.",
        )
    return outputs


def _read_chain(model: nn.Module, few: Inputs, outputs: Tensor) -> Network | None:
    """The model as a chain of Linear layers; None if it is none, or has hooks and the like."""
    if not isinstance(few, Tensor) or not few.is_floating_point():
        return None
    try:
        network = read_network(without_hooks(model))
        current = network.prepare_inputs(few)
    except (UnsupportedModelError, ValueError):
        return None
    for layer in network.layers:
        current, _ = layer.propagate(current)
    same = current.shape == outputs.shape and bool(agree(current, outputs).all())
    return network if same else None


def check_targets(
    loss: Loss, shape: tuple[int, ...], targets: Tensor | None, choice: RowChoice | None = None
) -> None:
    """Refuse targets that are missing or do not fit the loss.

    Args:
        loss: the loss.
        shape: the shape of the outputs of all points.
        targets: the targets of all points, or None.
        choice: which rows R_i has.

    Raises:
        ValueError: the targets do not fit, or are missing although the Hessian depends on them.
    """
    if targets is not None:
        loss.check_targets(shape, targets)
    elif choice is not None and choice.fisher == "empirical":
        raise ValueError(
            "the empirical Fisher matrix is made of gradients at the targets: pass data as"
            " (inputs, targets) or as batches of both"
        )
    elif loss.needs_targets:
        raise ValueError(
            f"the Hessian of this {type(loss).__name__} loss depends on the targets: pass data as"
            " (inputs, targets) or as batches of both"
        )


def loss_divisor(loss: Loss, shape: tuple[int, ...], targets: Tensor | None) -> float:
    """What the mean of a loss divides by; it adds up over ranks. Of a sum, 1.

    Args:
        loss: the loss.
        shape: the shape of the outputs of these points.
        targets: the targets of these points, or None.
    """
    return 1.0 if loss.reduction == "sum" else float(loss.divisor(shape, targets))


def require_positive(divisor: float) -> float:
    """The number that the mean of a loss divides by; refuse zero."""
    if not divisor > 0:
        raise ValueError(
            "no point counts towards the mean of the loss (all are ignored or weigh nothing)"
        )
    return divisor
