"""Make the model and find the loss that a command names.

The model comes from a state dict, or from a function that builds it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from hcurv.cli.arrays import read_tensors
from hcurv.losses import HalfSquaredError, Loss

__all__ = ["ACTIVATIONS", "DTYPES", "LOSSES", "build_chain", "make_model", "read_state_dict"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "leaky-relu": nn.LeakyReLU,
    "identity": nn.Identity,
}
LOSSES: dict[str, Callable[[], nn.Module | Loss]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "mse": nn.MSELoss,
    "half-squared-error": HalfSquaredError,
    "bce-with-logits": nn.BCEWithLogitsLoss,
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_WAY_OUT = "give the model with --model package.module:function"


class _Layer(NamedTuple):
    name: str
    weight: Tensor
    bias: Tensor | None


def make_model(
    weights: Path | None,
    factory: str | None,
    activation: str | None,
    output_activation: str | None,
    dtype: str | None,
) -> nn.Module:
    """Make the model that weights, a factory or both describe, in evaluation mode.

    Args:
        weights: a safetensors file with a state dict. It is optional if there is a factory.
        factory: ``package.module:function``, which is called without arguments. None means that
            the model is the chain of Linear layers that the weights describe.
        activation: the name of the activation between these layers.
        output_activation: the name of the activation after the last of them.
        dtype: "float32" or "float64"; None keeps the type of the weights.

    Raises:
        ValueError, TypeError, ImportError, FileNotFoundError: the model cannot be made; the message
            says why.
    """
    if weights is None and factory is None:
        raise ValueError("WEIGHTS are needed, a .safetensors file with a state dict, or --model")
    state = None if weights is None else read_state_dict(weights)
    if factory is None:
        assert state is not None
        model: nn.Module = build_chain(state, activation, output_activation)
    else:
        if activation is not None or output_activation is not None:
            raise ValueError("--activation and --output-activation do not go with --model")
        model = _call_factory(factory)
        if state is not None:
            _load(model, state, f"{weights} does not fit the model of {factory}")
    tensors = dict(model.named_parameters()) if state is None else state
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if dtype is not None:
        model.to(DTYPES[dtype])
    elif len(dtypes) == 1 and dtypes <= set(DTYPES.values()):
        model.to(dtypes.pop())
    elif dtypes:
        listed = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        raise TypeError(f"the weights are {listed}: choose --dtype float32 or float64")
    return model.eval()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Pickles are refused.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a state dict in safetensors format.
    """
    if path.suffix.lower() in _PICKLES:
        raise ValueError(
            f"{path} looks like a pickle, which could run any code: convert it once with"
            f" safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True),"
            f" {path.with_suffix('.safetensors').name!r})"
        )
    tensors = read_tensors(path)
    if "permutation" in tensors:
        raise ValueError(f"{path} is a compressed matrix or a factorization, not a state dict")
    return tensors


def build_chain(
    state: Mapping[str, Tensor], activation: str | None, output_activation: str | None
) -> nn.Sequential:
    """Build the Linear layers of a state dict, in the order of the numbers in their names.

    Raises:
        ValueError: the state dict is not such a chain; the message names the layer at fault.
    """
    layers = _read_layers(state)
    if len(layers) > 1 and activation is None:
        raise ValueError(
            f"there are {len(layers)} layers: say what lies between them with --activation"
        )
    model = nn.Sequential()
    for layer in layers:
        rows, columns = layer.weight.shape
        with_bias = layer.bias is not None
        linear = skip_init(nn.Linear, columns, rows, bias=with_bias, dtype=layer.weight.dtype)
        values = {"weight": layer.weight, "bias": layer.bias}
        linear.load_state_dict(
            {key: tensor for key, tensor in values.items() if tensor is not None}
        )
        last = layer is layers[-1]
        follower = output_activation if last else activation
        name = layer.name.replace(".", "_") or "linear"
        model.add_module(name, linear)
        if follower is not None and follower != "identity":
            model.add_module(f"{name}_activation", ACTIVATIONS[follower]())
    return model


def _read_layers(state: Mapping[str, Tensor]) -> list[_Layer]:
    weights: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name, _, parameter = key.rpartition(".")
        if parameter == "weight" and tensor.ndim == 2 and tensor.numel():
            weights[name] = tensor
        elif parameter != "bias" or f"{name}.weight".removeprefix(".") not in state:
            raise ValueError(
                f"'{key}' with shape {tuple(tensor.shape)} belongs to no Linear layer: {_WAY_OUT}"
            )
    if not weights:
        raise ValueError(f"there are no weights of Linear layers, 'NAME.weight': {_WAY_OUT}")
    layers = []
    for name in _ordered(list(weights)):
        weight, bias = weights[name], state.get(f"{name}.bias".removeprefix("."))
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"the bias of '{name}' has shape {tuple(bias.shape)}, its weight"
                f" {tuple(weight.shape)}: {_WAY_OUT}"
            )
        layers.append(_Layer(name, weight, bias))
    for before, after in pairwise(layers):
        if after.weight.shape[1] != before.weight.shape[0]:
            raise ValueError(
                f"'{before.name}' gives {before.weight.shape[0]} values, but '{after.name}' takes"
                f" {after.weight.shape[1]}: these layers are no chain; {_WAY_OUT}"
            )
    return layers


def _ordered(names: list[str]) -> list[str]:
    """Sort names by the numbers in them. Files sort their keys as text, "10" before "2"."""
    patterns = {re.sub(r"\d+", "#", name): name for name in names}
    if len(patterns) > 1:
        first, second = list(patterns.values())[:2]
        raise ValueError(
            f"the names '{first}' and '{second}' do not tell which layer comes first, as '0', '2'"
            f" or 'fc1', 'fc2' do: {_WAY_OUT}"
        )
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def _call_factory(factory: str) -> nn.Module:
    module_name, _, function_name = factory.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"--model must look like package.module:function; got {factory!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with redirect_stdout(sys.stderr):  # only results go to stdout
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # the code of the module may raise anything
            raise ImportError(f"--model: {module_name} cannot be imported: {error}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ValueError(f"--model: {module_name} has no function {function_name!r}")
        try:
            model = function()
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"--model: {factory} failed: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"--model: {factory} must return a torch.nn.Module; got {type(model).__name__}"
        )
    return _printing_to_stderr(model)


def _printing_to_stderr(model: nn.Module) -> nn.Module:
    """Let what the forward pass prints go to stderr, because only results go to stdout."""
    kind: Any = type(model)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with redirect_stdout(sys.stderr):
            return kind.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    return model


def _load(model: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # it lists all keys that are missing or not used
        raise ValueError(f"{problem}: {error}") from error
