"""Read a torch module as a chain of Linear layers and elementwise activations.

The paper's network is x^ℓ = s(W_ℓ x^{ℓ-1}) (Eq. 1.1). `read_network` traces a module with
`torch.fx`, cuts the graph at its Linear layers, checks that what lies between two of them acts
elementwise, and takes a snapshot: later training of the module does not change what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hcurv.tracing import (
    Stage,
    UnsupportedModelError,
    check_elementwise,
    derivative,
    extract_function,
    trace_stages,
)

__all__ = ["Layer", "Network", "check_reading", "read_network"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer, x = s(W·input + b), frozen in time.

    Attributes:
        name: qualified name of the Linear module.
        weight: W, (out_features, in_features), a copy.
        bias: b, (out_features,), a copy, or None.
        activation: s, or None for the identity.
        weight_offset: where W begins in the flat parameter vector, None if W is frozen.
        bias_offset: where b begins in the flat parameter vector, None if absent or frozen.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor] | None
    weight_offset: int | None
    bias_offset: int | None

    @property
    def in_features(self) -> int:
        """Size of the input, without the homogeneous coordinate."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Number of units."""
        return self.weight.shape[0]

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters belongs to the matrix."""
        return self.weight_offset is not None or self.bias_offset is not None

    def propagate(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs s(z) and slopes s'(z) at z = W·input + b, both (b, out_features).

        The slopes, the diagonal of the paper's M^ℓ, come from one forward-mode derivative; they
        are None where s is the identity.
        """
        preactivation = nn.functional.linear(inputs, self.weight, self.bias)
        if self.activation is None:
            return preactivation, None
        return derivative(self.activation, preactivation, torch.ones_like(preactivation))


@dataclass(frozen=True)
class Network:
    """A chain of layers and the flat layout of their trainable parameters.

    The flat index is that of `torch.nn.utils.parameters_to_vector` over the parameters with
    ``requires_grad``, in the order of ``module.parameters()``.

    Attributes:
        layers: the layers in the order in which they act.
        input_map: what happens before the first layer, or None for nothing.
        num_parameters: N, the number of trainable parameters.
    """

    layers: tuple[Layer, ...]
    input_map: Callable[[Tensor], Tensor] | None
    num_parameters: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.layers[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.layers[0].weight.device

    @property
    def num_outputs(self) -> int:
        """d_L."""
        return self.layers[-1].out_features

    @property
    def first_trainable(self) -> int:
        """Position of the first layer that has a trainable parameter."""
        return next(i for i, layer in enumerate(self.layers) if layer.trainable)

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """What the first layer receives for raw ``inputs``, (b, d_0).

        Raises:
            ValueError: ``inputs`` do not fit the first layer.
        """
        first = self.layers[0]
        try:
            features = inputs if self.input_map is None else self.input_map(inputs)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"the model cannot read points of shape {tuple(inputs.shape[1:])}: {error}"
            ) from error
        if features.shape != (inputs.shape[0], first.in_features):
            flat = " (is an nn.Flatten missing?)" if features.ndim > 2 else ""
            raise ValueError(
                f"the first Linear layer, '{first.name}', takes {first.in_features} features, but"
                f" points of shape {tuple(inputs.shape[1:])} reach it with shape"
                f" {tuple(features.shape[1:])}{flat}"
            )
        return features


def read_network(module: nn.Module) -> Network:
    """Read ``module`` as a chain of layers and take a snapshot of its parameters.

    Raises:
        UnsupportedModelError: the module is no such chain; the message names the part at fault.
        ValueError: a parameter is NaN or infinite, or there is none to differentiate.
        TypeError: the parameters are neither all float32 nor all float64.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(module).__name__}")
    if isinstance(module, nn.Linear):
        module = nn.Sequential(module)  # torch.fx would trace into a Linear that is the root
    stages = trace_stages(module)
    _check_parameters(module, stages)
    offsets, num_parameters = _parameter_offsets(module)
    layers = []
    for stage in stages[1:]:
        linear = stage.linear
        assert linear is not None
        activation = extract_function(module, stage)
        if activation is not None:
            check_elementwise(activation, stage, linear)
        layers.append(
            Layer(
                name=stage.name,
                weight=linear.weight.detach().clone(),
                bias=None if linear.bias is None else linear.bias.detach().clone(),
                activation=activation,
                weight_offset=offsets.get(id(linear.weight)),
                bias_offset=None if linear.bias is None else offsets.get(id(linear.bias)),
            )
        )
    return Network(tuple(layers), extract_function(module, stages[0]), num_parameters)


def check_reading(network: Network, module: nn.Module, inputs: Tensor) -> None:
    """Make sure that the network as read gives the module's own outputs on a few points.

    This finds what no trace shows: hooks, subclasses that behave otherwise, points of a batch
    that influence each other.

    Raises:
        UnsupportedModelError: the outputs differ.
        ValueError: ``inputs`` do not fit the model.
    """
    few = inputs[:4]
    outputs = []
    for point in few.split(1):
        current = network.prepare_inputs(point)
        for layer in network.layers:
            current, _ = layer.propagate(current)
        outputs.append(current)
    read = torch.cat(outputs)
    with torch.no_grad():
        expected = module(few)
    tolerance = torch.finfo(network.dtype).eps ** 0.5
    if read.shape != expected.shape or not torch.allclose(
        read, expected, rtol=tolerance, atol=tolerance * float(read.abs().max()), equal_nan=True
    ):
        raise UnsupportedModelError(
            f"the model's outputs on {few.shape[0]} points differ from what its layers give one"
            " point at a time: hooks, custom Linear layers, or points that influence each other?"
        )


def _check_parameters(module: nn.Module, stages: list[Stage]) -> None:
    used = {id(p) for stage in stages if stage.linear for p in stage.linear.parameters()}
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    unused = [name for name, p in trainable.items() if id(p) not in used]
    if unused:
        raise UnsupportedModelError(
            f"the parameter '{unused[0]}' requires a gradient but no Linear layer of the forward"
            " pass uses it.",
            "Freeze it with requires_grad_(False) or remove it.",
        )
    if not trainable:
        raise ValueError("the model has no parameter with requires_grad=True: nothing to do")
    everything = dict(module.named_parameters())
    kinds = {p.dtype for p in everything.values()}
    if not kinds <= {torch.float32, torch.float64} or len(kinds) > 1:
        listed = ", ".join(sorted(str(kind) for kind in kinds))
        raise TypeError(
            f"parameters must be all float32 or all float64; got {listed}"
            " (convert the model with .float() or .double())"
        )
    devices = {str(p.device) for p in everything.values()}
    if len(devices) > 1:
        raise ValueError(f"parameters must be on one device; got {', '.join(sorted(devices))}")
    for name, parameter in everything.items():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"the parameter '{name}' has NaN or infinite values")


def _parameter_offsets(module: nn.Module) -> tuple[dict[int, int], int]:
    offsets, total = {}, 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            offsets[id(parameter)] = total
            total += parameter.numel()
    return offsets, total
