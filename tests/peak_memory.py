"""Exact accounting of the memory that tensors take while a function runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tracker(TorchDispatchMode):
    """Count the bytes of all storages that are made under it, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known | self._live.keys():
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            self._live.pop(key, None)
            self.current -= size

        self._live[key] = weakref.ref(storage, forget)
        self.current += size
        self.peak = max(self.peak, self.current)


def peak_beyond_result(function: Callable[[], torch.Tensor]) -> int:
    """Return the largest number of bytes that temporary tensors took at one time."""
    with _Tracker() as tracker:
        result = function()
    return tracker.peak - result.untyped_storage().nbytes()
