"""NumPy arrays where tensors are expected.

Vectors: NumPy in, NumPy out, in the precision of the operator. Data, dampings and dense matrices:
arrays are converted, and results are tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_tensor", "as_tensors", "takes_arrays"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def as_tensor(
    values: np.ndarray, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A tensor with the values of an array, which it does not share memory with.

    Args:
        values: a real array.
        dtype: the type of the result; None for that of the array.
        device: where the result lies; None for the CPU.

    Raises:
        TypeError: the array does not hold real numbers.
    """
    if values.dtype.kind not in "biuf":
        raise TypeError(f"arrays must hold real numbers; got {values.dtype}")
    # Copies have the byte order and the strides that torch knows.
    native = np.array(values, dtype=values.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native).to(device, dtype)


def as_tensors(item: Any, dtype: torch.dtype) -> Any:
    """Data with tensors in place of arrays, in tuples, lists and dictionaries of them.

    Args:
        item: inputs, or inputs and targets; anything else is returned as it is.
        dtype: the type of arrays of floats.
    """
    if isinstance(item, np.ndarray):
        return as_tensor(item, dtype if item.dtype.kind == "f" else None)
    if isinstance(item, Mapping) and any(isinstance(v, np.ndarray) for v in item.values()):
        return {name: as_tensors(value, dtype) for name, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(as_tensors(value, dtype) for value in item)
    return item


def takes_arrays(method: _Method) -> _Method:
    """Let a method of an operator take its first argument, by place or by name, as a NumPy array.

    What it returns is then an array as well.
    """
    name = list(inspect.signature(method).parameters)[1]

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = args[0] if args else kwargs.get(name)
        if not isinstance(values, np.ndarray):
            return method(self, *args, **kwargs)
        if args:
            args = (as_tensor(values, self.dtype, self.device), *args[1:])
        else:
            kwargs[name] = as_tensor(values, self.dtype, self.device)
        return method(self, *args, **kwargs).detach().cpu().numpy()

    return run  # type: ignore[return-value]
