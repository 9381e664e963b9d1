"""Checks of numbers, functions and tensors that users pass, one place for each kind.

Indices, counts and seeds are checked in `indexing`, paths in `files`, matrices in `sources`,
dampings in `damping`, and devices and types in `factorized`. All of them raise a TypeError or a
ValueError that names the argument.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_callable", "check_dense", "check_number"]


def check_number(
    value: Any,
    name: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Return a finite number as a float.

    Args:
        value: a number, or a tensor or array of one.
        name: the name of the argument, for error messages.
        above: the number must be larger than this.
        least: the number must be at least this.
        below: the number must be smaller than this.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: it is NaN, infinite, or out of range.
    """
    bounds = [
        text
        for is_bound, text in (
            (above > -math.inf, f"larger than {above:g}"),
            (least > -math.inf, f"of at least {least:g}"),
            (below < math.inf, f"smaller than {below:g}"),
        )
        if is_bound
    ]
    positive = above == 0 and below == math.inf
    wanted = "positive and finite" if positive else "a finite number " + " and ".join(bounds)
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise TypeError(f"{name} must be {wanted.strip()}; got {_shown(value)}") from None
    if not (math.isfinite(number) and number > above and least <= number < below):
        raise ValueError(f"{name} must be {wanted.strip()}; got {number:g}")
    return number


def check_callable(value: object, name: str) -> None:
    """Raise a TypeError unless ``value`` is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None; got {_shown(value)}")


def check_dense(tensor: Tensor, name: str) -> None:
    """Raise a TypeError unless a tensor holds its values one by one: not sparse, nested or meta."""
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor (use .to_dense()); got one of layout {tensor.layout}"
        )
    if tensor.is_meta:
        raise TypeError(f"{name} must hold values; got a tensor on the meta device")


def _shown(value: object) -> str:
    """A short text for a value."""
    text = repr(value)
    return text if len(text) < 60 else type(value).__name__
