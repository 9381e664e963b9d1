"""Inputs of a model: a tensor, or a tuple or a dictionary of tensors, with the points first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

__all__ = ["Inputs", "is_inputs", "map_inputs", "num_points", "split_inputs", "tensors_of"]

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors, in a fixed order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same structure, with a function applied to every tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(function(tensor) for tensor in inputs)


def num_points(inputs: Inputs) -> int:
    """The number of points."""
    return tensors_of(inputs)[0].shape[0]


def split_inputs(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """The inputs of ``size`` points at a time."""
    for start in range(0, num_points(inputs), size):
        yield map_inputs(lambda tensor: tensor[start : start + size], inputs)  # noqa: B023


def is_inputs(item: object) -> bool:
    """Whether this is a tensor, or a tuple, list or dictionary of nothing but tensors."""
    if isinstance(item, Tensor):
        return True
    if isinstance(item, Mapping):
        return bool(item) and all(isinstance(value, Tensor) for value in item.values())
    return (
        isinstance(item, tuple | list)
        and bool(item)
        and all(isinstance(value, Tensor) for value in item)
    )
