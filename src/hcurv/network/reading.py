"""Read a torch module as a chain of Linear layers and elementwise activations.

The paper's network is x^ℓ = s(W_ℓ x^{ℓ-1}) (Eq. 1.1). `read_network` traces a module with
`torch.fx`, cuts the graph at its Linear layers, checks that the functions between two of them act
elementwise, and takes a snapshot: later training of the module does not change what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hcurv.layout import LinearParameters, ParameterLayout
from hcurv.network.tracing import (
    Stage,
    UnsupportedModelError,
    check_elementwise,
    derivative,
    extract_function,
    trace_stages,
)

__all__ = ["Layer", "Network", "read_network"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer, x = s(W·input + b), as it was when the model was read.

    Attributes:
        name: the qualified name of the Linear module.
        weight: W, (out_features, in_features), a copy.
        bias: b, (out_features,), a copy, or None.
        activation: s, or None for the identity.
        parameters: where W and b lie in the flat vector, as far as they are trainable.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor] | None
    parameters: LinearParameters

    @property
    def in_features(self) -> int:
        """The number of inputs, without the constant one that the bias multiplies."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The number of units."""
        return self.weight.shape[0]

    @property
    def trainable(self) -> bool:
        """Whether W or b belongs to the matrix."""
        return self.parameters.weight is not None or self.parameters.bias is not None

    def propagate(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the outputs s(z) and the slopes s'(z) at z = W·input + b.

        Args:
            inputs: (b, in_features).

        Returns:
            The outputs and the slopes, both (b, out_features). The slopes, which are the diagonal
            of the paper's M^ℓ, come from automatic differentiation; they are None if s is the
            identity.
        """
        return self.activate(self.preactivation(inputs))

    def preactivation(self, inputs: Tensor) -> Tensor:
        """z = W·input + b, (b, out_features)."""
        return nn.functional.linear(inputs, self.weight, self.bias)

    def activate(self, preactivation: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs s(z) and the slopes s'(z), as `propagate` returns them."""
        if self.activation is None:
            return preactivation, None
        return derivative(self.activation, preactivation, torch.ones_like(preactivation))


@dataclass(frozen=True)
class Network:
    """A chain of layers and the layout of their trainable parameters.

    Attributes:
        layers: the layers in the order in which they act.
        input_map: the function that acts before the first layer, or None if there is none.
        layout: the names and places of the trainable parameters in the flat vector.
    """

    layers: tuple[Layer, ...]
    input_map: Callable[[Tensor], Tensor] | None
    layout: ParameterLayout

    @property
    def num_parameters(self) -> int:
        """N, the number of trainable parameters."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.layers[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.layers[0].weight.device

    @property
    def num_outputs(self) -> int:
        """The number d_L of outputs."""
        return self.layers[-1].out_features

    @property
    def first_trainable(self) -> int:
        """The position of the first layer that has a trainable parameter."""
        return next(i for i, layer in enumerate(self.layers) if layer.trainable)

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """Compute what the first layer receives for the given inputs of the model.

        Args:
            inputs: one row per point, of any shape that the model takes.

        Returns:
            (b, d_0).

        Raises:
            ValueError: ``inputs`` do not fit the first layer.
        """
        first = self.layers[0]
        try:
            # What comes before the first layer may work in place.
            features = inputs if self.input_map is None else self.input_map(inputs.clone())
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

    Args:
        module: the model.

    Raises:
        UnsupportedModelError: the module is not such a chain; the message names the part at fault.
    """
    model = module
    if isinstance(module, nn.Linear):
        # torch.fx records what the root module does inside, so the layer must not be the root.
        module = nn.Sequential(module)
    stages = trace_stages(module)
    _check_parameters(module, stages)
    layout = ParameterLayout.of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
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
                parameters=layout.linear(
                    names.get(id(linear.weight)),
                    names.get(id(linear.bias)),
                    num_units=linear.out_features,
                    num_inputs=linear.in_features,
                ),
            )
        )
    return Network(tuple(layers), extract_function(module, stages[0]), layout)


def _check_parameters(module: nn.Module, stages: list[Stage]) -> None:
    """Refuse parameters that no Linear layer uses."""
    linears = [stage.linear for stage in stages if stage.linear is not None]
    used = {id(tensor) for linear in linears for tensor in (linear.weight, linear.bias)}
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    unused = [name for name, p in trainable.items() if id(p) not in used]
    if unused:
        raise UnsupportedModelError(
            f"the parameter '{unused[0]}' requires a gradient but no Linear layer of the forward"
            " pass uses it.",
            "Freeze it with requires_grad_(False) or remove it.",
        )
