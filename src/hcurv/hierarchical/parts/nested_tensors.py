"""Walk over the tensors in nested parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["map_tensors", "tensors_of"]

T = TypeVar("T")


def map_tensors(function: Callable[[Tensor], Tensor], parts: T) -> T:
    """Return a copy of (nested) parts with ``function`` applied to every tensor in them."""
    if isinstance(parts, Tensor):
        return function(parts)  # type: ignore[return-value]
    if isinstance(parts, tuple):
        return tuple(map_tensors(function, part) for part in parts)  # type: ignore[return-value]
    if is_dataclass(parts) and not isinstance(parts, type):
        changed: dict[str, Any] = {
            f.name: map_tensors(function, getattr(parts, f.name)) for f in fields(parts)
        }
        return replace(parts, **changed)
    return parts


def tensors_of(parts: object) -> list[Tensor]:
    """Return all tensors in (nested) parts."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, parts)
    return found
