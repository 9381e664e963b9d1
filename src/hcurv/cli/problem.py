"""Read the model, the loss and the data that a command was given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hcurv.cli.arrays import pick_data, read_arrays
from hcurv.cli.models import LOSSES, make_model
from hcurv.cli.options import Given
from hcurv.losses import Loss

__all__ = ["BUILT_IN", "Problem", "read_problem"]

BUILT_IN = ("digits", "mnist", "fashion-mnist", "cifar10")


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of `hcurv.GaussNewton` and `hcurv.compare`.

    Attributes:
        model: the network, in evaluation mode.
        loss: the loss, averaged over the data.
        data: the inputs, (n, features), with the targets if there are any.
    """

    model: nn.Module
    loss: nn.Module | Loss
    data: Tensor | tuple[Tensor, Tensor]


def read_problem(given: Given) -> Problem:
    """Read the model and the data.

    Raises:
        ValueError, TypeError, ImportError, FileNotFoundError: they cannot be read; the message says
            why.
    """
    model = make_model(
        given.weights, given.model, given.activation, given.output_activation, given.dtype
    )
    inputs, targets = _read_data(given)
    if inputs.ndim == 0 or not len(inputs):
        raise ValueError(f"{given.data} has no points: inputs of shape {tuple(inputs.shape)}")
    if targets is not None and targets.shape[:1] != inputs.shape[:1]:
        raise ValueError(
            f"{given.data} has {len(inputs)} inputs, but targets of shape {tuple(targets.shape)}"
        )
    if given.num_points is not None:
        if given.num_points > len(inputs):
            raise ValueError(
                f"--num-points {given.num_points} is more than {given.data} has, {len(inputs)}"
            )
        inputs = inputs[: given.num_points]
        targets = None if targets is None else targets[: given.num_points]
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    inputs = inputs.flatten(1).to(dtype) if inputs.ndim > 1 else inputs[:, None].to(dtype)
    loss = LOSSES[given.loss]()
    if targets is None:
        return Problem(model, loss, inputs)
    return Problem(model, loss, (inputs, _convert_targets(targets, given.loss, dtype)))


def _read_data(given: Given) -> tuple[Tensor, Tensor | None]:
    if given.data not in BUILT_IN:
        path = Path(given.data)
        if not path.suffix and not path.exists():
            raise FileNotFoundError(
                f"no such file: {path}, and no such data set: those are {', '.join(BUILT_IN)}"
            )
        return pick_data(read_arrays(path), path)
    from hcurv.experiments import datasets

    readers = {
        "mnist": datasets.mnist,
        "fashion-mnist": datasets.fashion_mnist,
        "cifar10": datasets.cifar10,
    }
    try:
        if given.data == "digits":
            inputs, labels = datasets.digits()
        else:
            inputs, labels = readers[given.data](given.data_dir)
    except FileNotFoundError as error:  # the message names the option of another program
        raise FileNotFoundError(str(error).replace("--data", "--data-dir")) from error
    # Labels are targets only for a loss whose outputs are classes.
    return inputs, labels if given.loss == "cross-entropy" else None


def _convert_targets(targets: Tensor, loss: str, dtype: torch.dtype) -> Tensor:
    """Keep labels as they are, and give all other targets the shape of the outputs."""
    if loss == "cross-entropy" and not targets.is_floating_point():
        return targets.long()
    if loss == "cross-entropy":
        return targets.to(dtype)
    return (targets.flatten(1) if targets.ndim > 1 else targets[:, None]).to(dtype)
