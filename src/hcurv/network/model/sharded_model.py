"""Models whose parameters `torch.distributed` has spread over ranks: copies with whole parameters.

`FullyShardedDataParallel` wraps modules, and keeps their parameters in flat pieces. `fully_shard`
gives modules another class and hooks, and makes their parameters tensors of its own. Both gather
parameters in their own hooks, which a matrix has no use for: it needs the model itself.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

from torch import Tensor, nn

__all__ = ["is_sharded", "whole_model"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MARKS = ("__composable_api", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def is_sharded(model: nn.Module) -> bool:
    """Whether some module inside is sharded by `torch.distributed.fsdp`."""
    return any(_is_wrapper(module) or _is_sharded(module) for module in model.modules())


def whole_model(model: nn.Module) -> nn.Module:
    """A copy of a sharded model with whole parameters, and without what shards it.

    All ranks over which the model is sharded must call this at the same time.

    Args:
        model: a model that `is_sharded`.
    """
    with contextlib.ExitStack() as stack:
        if any(_is_wrapper(module) for module in model.modules()):
            from torch.distributed.fsdp import FullyShardedDataParallel

            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if hasattr(tensor, "full_tensor"):  # spread over ranks
                memo[id(tensor)] = _whole(tensor)
        return _copied(model, memo)


def _whole(tensor: Tensor) -> Tensor:
    values = tensor.full_tensor().detach().clone()  # type: ignore[attr-defined]
    if not isinstance(tensor, nn.Parameter):
        return values  # type: ignore[no-any-return]
    return nn.Parameter(values, requires_grad=tensor.requires_grad)


def _is_wrapper(module: nn.Module) -> bool:
    known: Any = sys.modules.get("torch.distributed.fsdp")  # nothing is wrapped before its import
    return known is not None and isinstance(module, known.FullyShardedDataParallel)


def _is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on the module."""
    return any(
        kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module, with its parts that are sharded copied as what they were before."""
    known = memo.get(id(module))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if not is_sharded(module):
        return copy.deepcopy(module, memo)
    if _is_wrapper(module):
        inner: Any = module.module
        memo[id(module)] = _copied(inner, memo)
        return _copied(module, memo)
    # `fully_shard` derives a class from its own and that of the module.
    kind: Any = type(module).__bases__[1] if _is_sharded(module) else type(module)
    result: nn.Module = kind.__new__(kind)
    memo[id(module)] = result
    for child in module.children():
        _copied(child, memo)
    state = {
        name: _own_hooks(value) if name in _HOOKS else value
        for name, value in vars(module).items()
        if not name.startswith(_MARKS)
    }
    result.__dict__.update(copy.deepcopy(state, memo))
    return result


def _own_hooks(hooks: Any) -> Any:
    """The user's hooks, without those that gather parameters."""
    kept = hooks.copy()
    for key, hook in hooks.items():
        owner = type(getattr(hook, "__self__", None)).__module__
        if owner.startswith("torch.distributed"):
            del kept[key]
    return kept
