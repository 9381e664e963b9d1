"""Fingerprints of models and data, to recognise a file that was made from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hcurv.losses import Loss
from hcurv.network.batches import Batches, Data
from hcurv.network.model_inputs import tensors_of
from hcurv.ranks import OneRank

__all__ = ["Ingredients", "digest", "digest_of_data", "digest_of_model", "require_same_data"]


@dataclass(frozen=True)
class Ingredients:
    """What scores are made of.

    Attributes:
        model: the fingerprint of the model and the loss.
        train_data: the training points of this rank.
        tolerance: relative error of solves.
    """

    model: str
    train_data: Data
    tolerance: float

    def describe(
        self,
        damping: float | Tensor,
        curvature: object,
        dtype: torch.dtype,
        queries: Data,
        measure: Callable[..., Tensor] | None,
        members: Tensor | None,
        ranks: OneRank,
    ) -> dict[str, str]:
        """What recognises the scores of some queries in a file, the same on all ranks."""
        with ranks.agreed():
            own, asked = digest_of_data(self.train_data, dtype), digest_of_data(queries, dtype)
        shards = ranks.gather_texts(own)
        values = torch.as_tensor(damping, dtype=torch.float64)
        which = "loss"
        if measure is not None:
            name = getattr(measure, "__qualname__", type(measure).__qualname__)
            which = f"{getattr(measure, '__module__', '')}.{name}"
        return {
            "model": self.model,
            "training data": own if ranks.size == 1 else digest(*shards),
            "queries": asked,
            "measure": which,
            "groups": "none" if members is None else digest(members),
            "damping": digest(values) if values.ndim else repr(float(values)),
            "tolerance": repr(self.tolerance),
            "curvature": type(curvature).__name__,
        }


def digest(*parts: Tensor | str) -> str:
    """A fingerprint of tensors and texts."""
    result = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            result.update(f"{part.dtype}{tuple(part.shape)}".encode())
            result.update(_bytes(part))
        else:
            result.update(part.encode())
    return result.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of_model(model: nn.Module, loss: nn.Module | Loss) -> str:
    """A fingerprint of a model, its weights, and a loss with its settings."""
    parts: list[Tensor | str] = [repr(model), type(loss).__qualname__]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts += [name, str(tensor.requires_grad), tensor]
    settings: dict[str, Any] = dict(vars(loss))
    if isinstance(loss, nn.Module):
        settings.update(loss.named_buffers())
    for name, value in sorted(settings.items()):
        if isinstance(value, Tensor | str | int | float):
            parts += [name, value if isinstance(value, Tensor) else repr(value)]
    return digest(*parts)


def digest_of_data(data: Data, dtype: torch.dtype) -> str:
    """A fingerprint of all points, however they are divided into batches."""
    found: list[Any] = []
    shapes: list[str] = []
    for inputs, targets in Batches(data, dtype, torch.device("cpu")):
        tensors = [*tensors_of(inputs), *(() if targets is None else (targets,))]
        found += [hashlib.sha256() for _ in range(len(tensors) - len(found))]
        for part, tensor in zip(found, tensors, strict=True):
            part.update(_bytes(tensor))
        shapes = [f"{tensor.dtype}{tuple(tensor.shape[1:])}" for tensor in tensors]
    return digest(*shapes, *(part.hexdigest() for part in found))


def require_same_data(ranks: OneRank, data: Data, dtype: torch.dtype, what: str) -> None:
    """Make sure that all ranks were given the same points; one rank alone looks at nothing.

    Args:
        ranks: the processes.
        data: the points.
        dtype: the type of the model.
        what: what they are called in the message.

    Raises:
        RanksError: some ranks have others.
    """
    if ranks.size == 1:
        return
    with ranks.agreed():
        found = digest_of_data(data, dtype)
    ranks.same(**{what: found[:12]})
