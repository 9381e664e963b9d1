"""Read a torch module as a chain of Linear layers and elementwise activations.

The paper's network is x^ℓ = s(W_ℓ x^{ℓ-1}) (Eq. 1.1). `read_network` traces a module with
`torch.fx`, cuts the graph at its Linear layers, checks that what lies between two of them acts
elementwise, and takes a snapshot: later training of the module does not change what was read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

__all__ = ["Layer", "Network", "UnsupportedModelError", "check_reading", "read_network"]

_SUPPORTED = (
    "Supported are chains of torch.nn.Linear (with or without bias), elementwise activations"
    " (any module or function), Flatten, Identity and inactive Dropout."
)


class UnsupportedModelError(ValueError):
    """The module is not a chain of Linear layers and elementwise activations."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(" ".join(part for part in (problem, advice, _SUPPORTED) if part))


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
        return _derivative(self.activation, preactivation, torch.ones_like(preactivation))


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


def _derivative(
    function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """Value and directional derivative, in forward mode."""
    with torch.no_grad():
        result = torch.func.jvp(function, (point,), (direction,))
    return result[0], result[1]


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
    graph = _trace(module)
    stages = _cut_at_linear_layers(module, graph)
    _check_parameters(module, stages)
    offsets, num_parameters = _parameter_offsets(module)
    layers = []
    for stage in stages[1:]:
        linear = stage.linear
        assert linear is not None
        activation = _subgraph(module, stage)
        if activation is not None:
            _check_elementwise(activation, stage, linear)
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
    return Network(tuple(layers), _subgraph(module, stages[0]), num_parameters)


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


@dataclass
class _Stage:
    """The nodes from one Linear layer (or the input) to the next (or the output)."""

    name: str
    linear: nn.Linear | None
    nodes: list[fx.Node]  # nodes[0] is the Linear call or the placeholder
    result: fx.Node  # the node that the next stage reads


def _trace(module: nn.Module) -> fx.Graph:
    try:
        return fx.Tracer().trace(module)
    except Exception as error:  # whatever the forward raises on symbolic input
        raise UnsupportedModelError(
            f"torch.fx cannot trace {type(module).__name__} ({error}).",
            "Control flow that depends on the data cannot be read.",
        ) from error


def _cut_at_linear_layers(module: nn.Module, graph: fx.Graph) -> list[_Stage]:
    stages: list[_Stage] = []
    stage_of: dict[fx.Node, int] = {}
    called: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if stages:
                raise UnsupportedModelError(f"the model takes a second input, '{node.name}'.")
            stages.append(_Stage("input", None, [node], node))
            stage_of[node] = 0
            continue
        sources = {stage_of[source] for source in node.all_input_nodes if source in stage_of}
        if node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                raise UnsupportedModelError("the model must return one tensor.")
            _check_no_branch(stages, node, sources)
            stages[-1].result = node.args[0]
            continue
        if node.op == "get_attr":
            _check_attribute(module, str(node.target))
            continue
        if node.op == "call_module":
            called_module = module.get_submodule(str(node.target))
            if isinstance(called_module, nn.Linear):
                name = str(node.target)
                _check_linear(called_module, name, called)
                _check_no_branch(stages, node, sources)
                stages[-1].result = node.all_input_nodes[0]
                stages.append(_Stage(name, called_module, [node], node))
                stage_of[node] = len(stages) - 1
                continue
            _check_module(called_module, str(node.target))
        if not sources:
            continue  # constants built in forward(); copied where they are used
        if len(sources) > 1:
            names = " and ".join(f"'{stages[i].name}'" for i in sorted(sources))
            raise UnsupportedModelError(
                f"'{node.name}' combines the outputs of {names}: branches and skip connections"
                " cannot be read."
            )
        stage = sources.pop()
        stage_of[node] = stage
        stages[stage].nodes.append(node)
    if len(stages) < 2:
        raise UnsupportedModelError("the model has no Linear layer.")
    return stages


def _check_no_branch(stages: list[_Stage], node: fx.Node, sources: set[int]) -> None:
    if sources != {len(stages) - 1}:
        source = stages[min(sources)].name if sources else "a constant"
        raise UnsupportedModelError(
            f"'{node.target}' reads '{source}' although '{stages[-1].name}' comes between:"
            " branches and skip connections cannot be read."
        )


def _check_linear(linear: nn.Linear, name: str, called: dict[int, str]) -> None:
    plain = type(linear).forward is nn.Linear.forward and "weight" in linear._parameters
    if not plain or nn.parameter.is_lazy(linear.weight):
        raise UnsupportedModelError(
            f"'{name}' ({type(linear).__name__}) is not a plain Linear layer: its weight is lazy,"
            " parametrized or used in another way.",
            "Materialise or remove the parametrization first.",
        )
    for parameter in linear.parameters():
        if id(parameter) in called:
            raise UnsupportedModelError(
                f"'{name}' shares weights with '{called[id(parameter)]}':"
                " weights that are used twice cannot be read."
            )
    called.update({id(parameter): name for parameter in linear.parameters()})


def _check_module(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, nn.modules.dropout._DropoutNd):
        if module.training and module.p > 0:
            raise UnsupportedModelError(
                f"'{name}' ({kind}, p={module.p}) is active: the model is in training mode.",
                "Call model.eval() first.",
            )
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        raise UnsupportedModelError(f"'{name}' ({kind}) is a normalisation.")
    elif next(module.parameters(), None) is not None:
        raise UnsupportedModelError(
            f"'{name}' ({kind}) has parameters but is no Linear layer.",
            "If it is a frozen feature map at the front, apply it to the data first.",
        )


def _check_attribute(module: nn.Module, name: str) -> None:
    parent, _, attribute = name.rpartition(".")
    if isinstance(getattr(module.get_submodule(parent), attribute), nn.Parameter):
        raise UnsupportedModelError(f"the parameter '{name}' is used outside a Linear layer.")


def _check_parameters(module: nn.Module, stages: list[_Stage]) -> None:
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


def _subgraph(module: nn.Module, stage: _Stage) -> nn.Module | None:
    """The stage's nodes after the first, as a function of the first; None for the identity."""
    if stage.result is stage.nodes[0]:
        return None
    graph = fx.Graph()
    copies = {stage.nodes[0]: graph.placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copied(source)
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    graph.output(copied(stage.result))
    return copy.deepcopy(fx.GraphModule(module, graph))


def _describe(node: fx.Node, owner: nn.Module) -> str:
    if node.op != "call_module":
        return f"'{node.name}'"
    name = str(node.target)
    return f"'{name}' ({type(owner.get_submodule(name)).__name__})"


def _acts_elementwise(function: Callable[[Tensor], Tensor], point: Tensor, probe: Tensor) -> bool:
    """Whether the Jacobian of ``function`` at ``point`` is diagonal, tested on one tangent."""
    value, slope = _derivative(function, point.clone(), torch.ones_like(point))
    again, directional = _derivative(function, point.clone(), probe)
    if value.shape != point.shape or not torch.equal(value, again):
        return False
    return bool((directional - slope * probe).abs().max() <= 1e-4 * directional.abs().max())


def _check_elementwise(activation: nn.Module, stage: _Stage, linear: nn.Linear) -> None:
    """Refuse what lies behind a Linear layer unless it is a fixed elementwise function."""
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    shape = (3, linear.out_features)
    point, probe = (
        torch.randn(shape, dtype=weight.dtype, generator=generator).to(weight.device)
        for _ in range(2)
    )
    names = ", ".join(_describe(node, activation) for node in stage.nodes[1:])
    try:
        with torch.random.fork_rng(devices=[]):
            elementwise = _acts_elementwise(activation, point, probe)
    except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) cannot be differentiated in forward mode on"
            f" an input of shape {shape}: {error}."
        ) from error
    if not elementwise:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) does not act elementwise, or is random."
        )
