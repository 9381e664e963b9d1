"""Arithmetic in the precision of the operands, whatever was switched on around a call.

Inside `torch.autocast`, products of float32 matrices are computed in bfloat16 or float16;
`torch.set_float32_matmul_precision` and a half-precision default type do similar things. Curvature
matrices need every digit that they have. So the public functions and methods of this package
switch these off while they run, and restore them when they return.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["FullPrecision", "full_precision"]

Params = ParamSpec("Params")
Result = TypeVar("Result")

_DEVICES = ("cpu", "cuda")
_DEFAULT_TYPES = (torch.float32, torch.float64)
# Special methods that compute something.
_SPECIAL = ("__init__", "__matmul__", "__getitem__", "__call__")


def _is_reduced() -> bool:
    return (
        any(map(torch.is_autocast_enabled, _DEVICES))
        or torch.get_float32_matmul_precision() != "highest"
        or torch.get_default_dtype() not in _DEFAULT_TYPES
    )


@contextlib.contextmanager
def _full() -> Iterator[None]:
    precision, default = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        if default not in _DEFAULT_TYPES:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, default)
        yield


def full_precision(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Run a function without autocast, with full products and a usual default type."""

    @functools.wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        grad_mode = torch.is_grad_enabled()
        try:
            if not _is_reduced():
                return function(*args, **kwargs)
            with _full():
                return function(*args, **kwargs)
        except BaseException:
            # `torch.no_grad` misses an interruption that comes just when it is entered or left.
            torch._C._set_grad_enabled(grad_mode)
            raise

    return run


class FullPrecision:
    """A base class whose public methods and properties run in full precision."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap what the subclass defines; generators must look after themselves."""
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if name.startswith("_") and name not in _SPECIAL:
                continue
            if inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
                setattr(cls, name, full_precision(value))
            elif type(value) is property and value.fget is not None:
                wrapped = property(full_precision(value.fget), value.fset, value.fdel)
                setattr(cls, name, wrapped)
