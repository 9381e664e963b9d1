"""Ctrl-C at any moment: the call ends with it, nothing is left behind, and a later call is right.

The interruption is raised at a chosen call of a Python function within the package or below it, so
that every case can be run again.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from faults.calls import Calls
from fuzz.outcomes import State


class _Counter:
    """Counts the calls of functions, and raises at one of them."""

    def __init__(self, last: int | None) -> None:
        self.count, self._last = 0, last

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        self.count += 1
        if self.count == self._last:
            sys.setprofile(None)
            raise KeyboardInterrupt


def _profiled(function: Callable[[], Any], last: int | None) -> tuple[Any, int]:
    counter = _Counter(last)
    sys.setprofile(counter)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, counter.count


class Interruptions:
    """Interrupts all calls again and again.

    Attributes:
        num: the number of interruptions so far.
        problems: what was left behind or wrong.
    """

    def __init__(self) -> None:
        self._calls = Calls()
        self._expected = {name: self._calls.run(name) for name in self._calls.functions}
        self._lengths = {
            name: _profiled(lambda n=name: self._calls.run(n), None)[1]  # type: ignore[misc]
            for name in self._calls.functions
        }
        self.num = 0
        self.problems: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(self._calls.functions)

    def once(self, name: str, rng: random.Random) -> None:
        """Interrupt a call once, and look at what is left."""
        at = rng.randint(1, self._lengths[name])
        before = [State(model) for model in self._calls.models]
        filters = list(warnings.filters)
        methods = {name: getattr(torch.nn.Module, name) for name in ("__call__", "__getattr__")}
        where = f"{name}, call {at}"
        try:
            found, _ = _profiled(lambda: self._calls.run(name), at)
        except KeyboardInterrupt:
            self.num += 1
        except BaseException as error:  # the interruption became another error
            self.problems.append(f"{where}: {type(error).__name__}: {error}")
        else:
            # It was raised in the destructor of some object, where Python ignores errors.
            self._compare(where, name, found)
        for state in before:
            try:
                state.check()
            except AssertionError as error:
                self.problems.append(f"{where}: {error}")
        if list(warnings.filters) != filters:
            self.problems.append(f"{where}: warning filters were changed")
            warnings.filters[:] = filters  # type: ignore[index]
        for method, original in methods.items():
            if getattr(torch.nn.Module, method) is not original:
                self.problems.append(f"{where}: nn.Module.{method} is that of torch.fx")
                setattr(torch.nn.Module, method, original)
        torch.set_grad_enabled(True)
        self._compare(f"{where}, afterwards", name, self._calls.run(name))

    def _compare(self, where: str, name: str, found: list[torch.Tensor]) -> None:
        same = [torch.equal(a, b) for a, b in zip(found, self._expected[name], strict=True)]
        if not all(same):
            self.problems.append(f"{where}: another result")
