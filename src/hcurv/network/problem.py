"""A network, a loss and data that fit together: what every curvature matrix starts from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hcurv.losses import Loss, as_loss
from hcurv.network.batches import Batches, Data, Survey
from hcurv.network.reading import Network, check_reading, read_network

__all__ = ["Problem", "check_targets", "loss_scale", "read_problem"]


@dataclass(frozen=True)
class Problem:
    """A network, a loss and data, all of them checked. Made by `read_problem`.

    Attributes:
        network: the network as it was read, a snapshot.
        loss: the loss.
        batches: the data, which can be read again.
        survey: what the first pass over the data found.
        scale: the number by which the sum of the points' losses is multiplied.
    """

    network: Network
    loss: Loss
    batches: Batches
    survey: Survey
    scale: float

    @property
    def num_points(self) -> int:
        """The number n of data points."""
        return self.survey.num_points

    @property
    def targets(self) -> Tensor | None:
        """The targets of all points, or None if the data has none."""
        return self.survey.targets

    def inputs(self) -> Iterator[Tensor]:
        """Read the inputs of all batches once more, making sure that they are the same."""
        for inputs, _ in self.batches.reread(self.survey):
            yield inputs

    def loss_root(self, outputs: Tensor, points: slice) -> Tensor:
        """Evaluate the square roots R_i of the loss's Hessian, with its reduction included.

        Args:
            outputs: outputs of the network at the points, (b, d).
            points: the range of these b points in the data.

        Returns:
            (b, q, d), or (b, d) if every R_i is diagonal.

        Raises:
            ValueError: the loss returned another shape, or values that are not finite.
        """
        targets = None if self.targets is None else self.targets[points]
        root = self.loss.hessian_sqrt(outputs, targets)
        num_points, num_outputs = outputs.shape
        shape, name = tuple(root.shape), type(self.loss).__name__
        if shape != (num_points, num_outputs) and (
            root.ndim != 3 or (shape[0], shape[2]) != (num_points, num_outputs)
        ):
            raise ValueError(
                f"{name}.hessian_sqrt must return ({num_points}, {num_outputs}) for a diagonal or"
                f" ({num_points}, q, {num_outputs}) for a dense square root; got {shape}"
            )
        if not bool(torch.isfinite(root).all()):
            raise ValueError(f"{name}.hessian_sqrt has NaN or infinite values: is the loss convex?")
        return root * math.sqrt(self.scale)


def read_problem(model: nn.Module, loss: nn.Module | Loss, data: Data) -> Problem:
    """Read a model, a loss and data, and check that they fit together.

    Args:
        model: a chain of Linear layers and elementwise activations.
        loss: a torch loss module or a `Loss`.
        data: as for `GaussNewton`.

    Raises:
        UnsupportedModelError: the model is not such a chain.
        TypeError, ValueError: the loss is not supported, or the data does not fit the model or
            the loss.
    """
    known_loss = as_loss(loss)
    network = read_network(model)
    with torch.no_grad():
        batches = Batches(data, network.dtype, network.device)
        survey = batches.survey()
        check_reading(network, model, survey.first_inputs)
        shape = (survey.num_points, network.num_outputs)
        check_targets(known_loss, *shape, survey.targets)
        scale = loss_scale(known_loss, *shape, survey.targets)
    return Problem(network, known_loss, batches, survey, scale)


def check_targets(loss: Loss, num_points: int, num_outputs: int, targets: Tensor | None) -> None:
    """Refuse targets that are missing or do not fit the loss.

    Args:
        loss: the loss.
        num_points: n.
        num_outputs: the number of outputs of the network.
        targets: the targets of all points, or None.

    Raises:
        ValueError: the targets do not fit, or are missing although the Hessian depends on them.
    """
    if targets is not None:
        loss.check_targets((num_points, num_outputs), targets)
    elif loss.needs_targets:
        raise ValueError(
            f"the Hessian of this {type(loss).__name__} loss depends on the targets: pass data as"
            " (inputs, targets) or as batches of both"
        )


def loss_scale(loss: Loss, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
    """Find the number by which the loss multiplies the sum over points: 1, or 1 over its divisor.

    Args:
        loss: the loss.
        num_points: n.
        num_outputs: the number of outputs of the network.
        targets: the targets of all points, or None.

    Raises:
        ValueError: the divisor is zero, because no point counts.
    """
    if loss.reduction == "sum":
        return 1.0
    divisor = loss.divisor((num_points, num_outputs), targets)
    if not divisor > 0:
        raise ValueError(
            "no point counts towards the mean of the loss (all are ignored or weigh nothing)"
        )
    return 1.0 / divisor
