"""A copy of the user's model, as it was when it was read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hcurv.arguments import check_callable
from hcurv.layout import ParameterLayout
from hcurv.network.model.sharded_model import is_sharded, whole_model
from hcurv.network.model_inputs import Inputs, map_inputs
from hcurv.network.tracing import UnsupportedModelError

__all__ = [
    "ForwardFunction",
    "ModelSnapshot",
    "check_parameters",
    "plain_model",
    "unwrapped",
    "without_hooks",
]

ForwardFunction: TypeAlias = Callable[[Any, Any], Tensor]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `DataParallel`, `DistributedDataParallel` and compiled wrappers."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def plain_model(model: nn.Module) -> nn.Module:
    """The module inside wrappers; if it is sharded over ranks, a copy with whole parameters.

    Args:
        model: the model. If it is sharded, all of its ranks must call this at the same time.
    """
    if not isinstance(model, nn.Module):
        return model
    model = unwrapped(model)
    return whole_model(model) if is_sharded(model) else model


class ModelSnapshot:
    """A copy of a model that later training of the model does not change.

    Args:
        model: the model.
        forward_fn: computes the outputs from a model and the inputs of a batch; None to call the
            model with the inputs (a tuple as arguments, a dictionary as keyword arguments).

    Raises:
        UnsupportedModelError: the model cannot be copied.

    Attributes:
        module: the copy.
        layout: names and places of its trainable parameters.
        originals: names of the parameters of the model itself, by their identity.
        computed: copies of tensors with a history that lie on the model's modules, by name. If the
            forward pass uses one of them, its history is missing.
    """

    def __init__(self, model: nn.Module, forward_fn: ForwardFunction | None = None) -> None:
        check_callable(forward_fn, "forward_fn")
        self.module, self.computed = _copied(unwrapped(model))
        self._forward_fn = forward_fn
        self.layout = ParameterLayout.of(self.module)
        self.originals = {id(p): name for name, p in unwrapped(model).named_parameters()}
        # Buffers, how often they were changed, and their values, of all modules that have any.
        self._buffers = [
            (part, name, buffer, buffer._version, buffer.clone())
            for part in self.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters with ``requires_grad``, by name, in the order of the layout."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def outputs(self, inputs: Inputs, module: Callable[..., Any] | None = None) -> Tensor:
        """Run the model, with autograd as it is, and put buffers back that it has changed.

        Args:
            inputs: inputs of some points.
            module: what to call instead of the copy of the model.

        Raises:
            UnsupportedModelError: the model does not return a tensor of its own type.
        """
        run: Any = self.module if module is None else module
        # A model may change its inputs in place, which must not reach the user's data.
        inputs = map_inputs(torch.clone, inputs)
        try:
            result = self._run(run, inputs)
        finally:
            self._restore()
        if not isinstance(result, Tensor):
            raise UnsupportedModelError(
                f"the model must return one tensor of outputs; got {type(result).__name__}.",
                "Pass forward_fn=, a function of the model and the inputs that returns them.",
            )
        expected = next(self.module.parameters()).dtype
        if result.dtype != expected:
            raise UnsupportedModelError(
                f"the model returned outputs of type {result.dtype}, not {expected} as its"
                " parameters are.",
                "Return outputs of the same type, and do not use autocast.",
            )
        return result

    def _run(self, run: Any, inputs: Inputs) -> Any:
        if self._forward_fn is not None:
            return self._forward_fn(run, inputs)
        if isinstance(inputs, Tensor):
            return run(inputs)
        return run(**inputs) if isinstance(inputs, Mapping) else run(*inputs)

    def _restore(self) -> None:
        """Give buffers the values that they had when the model was read.

        Some models count their calls or refine an estimate. All passes shall compute the same.
        """
        for number, (part, name, buffer, version, values) in enumerate(self._buffers):
            if part._buffers.get(name) is not buffer or buffer._version != version:
                fresh = values.clone()
                part._buffers[name] = fresh
                self._buffers[number] = (part, name, fresh, fresh._version, values)


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy of a module whose hooks are gone, so that tracing does not call them."""
    copied, _ = _copied(module)
    for part in copied.modules():
        for name, value in vars(part).items():
            if name.startswith("_") and name.endswith("_hooks") and isinstance(value, dict):
                value.clear()
    return copied


def _copied(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy, and the copies of tensors with a history, which torch does not copy by itself.

    Models that keep their last activations have such tensors, and hooks of older torch utilities
    (weight_norm, prune) make them anew in each forward pass.
    """
    memo: dict[int, Any] = {}
    computed: dict[str, Tensor] = {}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                fresh = value.detach().clone().requires_grad_()
                memo[id(value)] = computed[f"{place}.{name}".lstrip(".")] = fresh
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"the model cannot be copied: {type(error).__name__}: {error}.",
            "Make it work with copy.deepcopy(model).",
        ) from error
    for parameter in copied.parameters():
        parameter.grad = None
    return copied, computed


def _unusable(parameter: nn.Parameter) -> str | None:
    """What is wrong with a parameter; None if nothing is."""
    if nn.parameter.is_lazy(parameter):
        return "is lazy: run the model once on a batch of inputs, so that it gets its shape"
    if parameter.is_meta:
        return "is on the device 'meta', which holds no values"
    if parameter.is_inference():
        return "was made inside torch.inference_mode(): make the model outside of it"
    if parameter.layout != torch.strided:
        return f"must be a dense tensor; got {parameter.layout}"
    return None if bool(torch.isfinite(parameter).all()) else "has NaN or infinite values"


def check_parameters(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The type and device of all parameters; refuse those that do not fit.

    Raises:
        ValueError: a parameter is NaN or infinite, on another device, or none is trainable.
        TypeError: the model is no module, or parameters are neither all float32 nor all float64.
        UnsupportedModelError: the gradient of a parameter has a hook.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    everything = dict(model.named_parameters())
    if not any(p.requires_grad for p in everything.values()):
        raise ValueError("the model has no parameter with requires_grad=True: nothing to do")
    dtypes = {p.dtype for p in everything.values()}
    if not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
        listed = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(
            f"parameters must be all float32 or all float64; got {listed}"
            " (convert the model with .float() or .double())"
        )
    devices = {str(p.device) for p in everything.values()}
    if len(devices) > 1:
        raise ValueError(f"parameters must be on one device; got {', '.join(sorted(devices))}")
    for name, parameter in everything.items():
        if problem := _unusable(parameter):
            raise ValueError(f"the parameter '{name}' {problem}")
        if parameter.requires_grad and parameter._backward_hooks:
            raise UnsupportedModelError(
                f"the parameter '{name}' has a hook on its gradient, which is no part of the"
                " forward pass.",
                "Remove it with handle.remove(), and apply what it does in forward().",
            )
    first = next(iter(everything.values()))
    return first.dtype, first.device
