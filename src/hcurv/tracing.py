"""Trace a module with `torch.fx` and cut its graph at the Linear layers.

What lies between two Linear layers is kept as a function of its own, and must act elementwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

__all__ = [
    "Stage",
    "UnsupportedModelError",
    "check_elementwise",
    "derivative",
    "extract_function",
    "trace_stages",
]

_SUPPORTED = (
    "Supported are chains of torch.nn.Linear (with or without bias), elementwise activations"
    " (any module or function), Flatten, Identity and inactive Dropout."
)


class UnsupportedModelError(ValueError):
    """The module is not a chain of Linear layers and elementwise activations."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(" ".join(part for part in (problem, advice, _SUPPORTED) if part))


@dataclass
class Stage:
    """The nodes from one Linear layer (or the input) to the next (or the output)."""

    name: str
    linear: nn.Linear | None
    nodes: list[fx.Node]  # nodes[0] is the Linear call or the placeholder
    result: fx.Node  # the node that the next stage reads


def trace_stages(module: nn.Module) -> list[Stage]:
    """Cut the forward pass at its Linear layers: the input's stage, then one per layer.

    Raises:
        UnsupportedModelError: the forward pass cannot be traced, or is no chain.
    """
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # whatever the forward raises on symbolic input
        raise UnsupportedModelError(
            f"torch.fx cannot trace {type(module).__name__} ({error}).",
            "Control flow that depends on the data cannot be read.",
        ) from error
    stages: list[Stage] = []
    stage_of: dict[fx.Node, int] = {}
    called: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if stages:
                raise UnsupportedModelError(f"the model takes a second input, '{node.name}'.")
            stages.append(Stage("input", None, [node], node))
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
                stages.append(Stage(name, called_module, [node], node))
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


def _check_no_branch(stages: list[Stage], node: fx.Node, sources: set[int]) -> None:
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


def extract_function(module: nn.Module, stage: Stage) -> fx.GraphModule | None:
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


def derivative(
    function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """Value and directional derivative, in forward mode."""
    with torch.no_grad():
        result = torch.func.jvp(function, (point,), (direction,))
    return result[0], result[1]


def _describe(function: fx.GraphModule) -> str:
    """The operations of an extracted function, modules by their qualified names."""
    names = []
    for node in function.graph.nodes:
        if node.op == "call_module":
            kind = type(function.get_submodule(str(node.target))).__name__
            names.append(f"'{node.target}' ({kind})")
        elif node.op.startswith("call"):
            names.append(f"'{node.name}'")
    return ", ".join(names)


def _acts_elementwise(function: Callable[[Tensor], Tensor], point: Tensor, probe: Tensor) -> bool:
    """Whether the Jacobian of ``function`` at ``point`` is diagonal, tested on one tangent."""
    value, slope = derivative(function, point.clone(), torch.ones_like(point))
    again, directional = derivative(function, point.clone(), probe)
    if value.shape != point.shape:
        return False
    # Activations may be undefined at some of the points, as a logarithm is at negative ones.
    defined = torch.isfinite(value) & torch.isfinite(slope) & torch.isfinite(directional)
    if not bool(defined.any()) or not torch.equal(value[defined], again[defined]):
        return False
    differences = (directional - slope * probe)[defined].abs()
    return bool(differences.max() <= 1e-4 * directional[defined].abs().max())


def check_elementwise(activation: fx.GraphModule, stage: Stage, linear: nn.Linear) -> None:
    """Refuse what lies behind a Linear layer unless it is a fixed elementwise function."""
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    shape = (3, linear.out_features)
    point, probe = (
        torch.randn(shape, dtype=weight.dtype, generator=generator).to(weight.device)
        for _ in range(2)
    )
    names = _describe(activation)
    try:
        with torch.random.fork_rng(devices=[]):
            elementwise = _acts_elementwise(activation, point, probe)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) cannot be differentiated in forward mode on"
            f" an input of shape {shape}: {error}."
        ) from error
    if not elementwise:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) does not act elementwise, or is random."
        )
