"""Trace a module with `torch.fx` and cut its graph at the Linear layers.

The operations between two Linear layers become a function of their own, which must act
elementwise.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import redirect_stdout
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

# An activation is tried on this many random rows: enough that active dropout is seen for certain
# on a layer of one unit, and clipping by the norm of a row on wide ones.
_NUM_TRIED = 64


class UnsupportedModelError(ValueError):
    """The model cannot be read: its points influence each other, or its forward pass is random.

    The message says what was seen and what to do about it.

    Examples:
        >>> class Centred(torch.nn.Linear):
        ...     def forward(self, points):
        ...         return super().forward(points - points.mean(0))
        >>> try:
        ...     hcurv.GaussNewton(Centred(4, 3).double(), loss, inputs)
        ... except hcurv.UnsupportedModelError as error:
        ...     print("influence each other" in str(error))
        True
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(" ".join(part for part in (problem, advice) if part))


@dataclass
class Stage:
    """The nodes of the graph from one Linear layer (or the input) to the next (or the output).

    Attributes:
        name: the qualified name of the Linear layer, or "input".
        linear: the Linear layer, or None for the stage of the input.
        nodes: the nodes in the order of the graph; the first is the call of the Linear layer or
            the placeholder of the input.
        result: the node that the next stage reads.
    """

    name: str
    linear: nn.Linear | None
    nodes: list[fx.Node]
    result: fx.Node


class _Tracer(fx.Tracer):
    """Records a call of a Linear layer as one node, whatever its class is.

    The tracer of torch looks into subclasses that are defined outside ``torch.nn``, and finds the
    parameters there instead of the layer.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)


def trace_stages(module: nn.Module) -> list[Stage]:
    """Cut the forward pass at its Linear layers.

    Returns:
        The stage of the input, then one stage for each Linear layer.

    Raises:
        UnsupportedModelError: the forward pass cannot be traced, or is not a chain.
    """
    # torch.fx replaces these methods while it traces. If an interruption comes just when it puts
    # them back, it does not, and no module can be called any more.
    replaced = {name: getattr(nn.Module, name) for name in ("__call__", "__getattr__")}
    try:
        with redirect_stdout(io.StringIO()):  # The forward pass may print what it computes.
            graph = _Tracer().trace(module)
    except Exception as error:  # A forward method may raise anything on symbolic input.
        raise UnsupportedModelError(
            f"torch.fx cannot trace {type(module).__name__} ({error}).",
            "Control flow that depends on the data cannot be read.",
        ) from error
    finally:
        for name, method in replaced.items():
            setattr(nn.Module, name, method)
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
            continue  # A constant made in forward() is copied into the stage that uses it.
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
    """Refuse a node that reads anything but the last stage."""
    if sources != {len(stages) - 1}:
        source = stages[min(sources)].name if sources else "a constant"
        raise UnsupportedModelError(
            f"'{node.target}' reads '{source}' although '{stages[-1].name}' comes between:"
            " branches and skip connections cannot be read."
        )


def _check_linear(linear: nn.Linear, name: str, called: dict[int, str]) -> None:
    """Refuse a Linear layer whose parameters are not read in the ordinary way, and used once."""
    kind = type(linear).__name__
    if nn.parameter.is_lazy(linear.weight):
        raise UnsupportedModelError(
            f"'{name}' ({kind}) is not a plain Linear layer: its weight is lazy.",
            "Run the model once on a batch of inputs, so that it gets its shape.",
        )
    for parameter in ("weight", "bias"):
        _check_not_computed(linear, name, parameter)
    if type(linear).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            f"'{name}' ({kind}) is not a plain Linear layer: its class has a forward method of its"
            " own.",
            "Use torch.nn.Linear and put what the class adds into modules of their own.",
        )
    for tensor in linear.parameters():
        if id(tensor) in called:
            raise UnsupportedModelError(
                f"'{name}' shares weights with '{called[id(tensor)]}':"
                " weights that are used twice cannot be read."
            )
    called.update({id(tensor): name for tensor in linear.parameters()})


def _check_not_computed(linear: nn.Linear, name: str, parameter: str) -> None:
    """Refuse a weight or bias that is computed from other parameters in each forward pass."""
    held = {**linear._parameters, **linear._buffers}
    if parameter in held or getattr(linear, parameter) is None:
        return
    layer = f"model.get_submodule('{name}')"
    if parameter in getattr(linear, "parametrizations", {}):
        how, remedy = (
            "torch.nn.utils.parametrize",
            f"torch.nn.utils.parametrize.remove_parametrizations({layer}, '{parameter}')",
        )
    elif f"{parameter}_mask" in held:
        how, remedy = (
            "torch.nn.utils.prune",
            f"torch.nn.utils.prune.remove({layer}, '{parameter}')",
        )
    elif f"{parameter}_g" in held:
        how, remedy = (
            "torch.nn.utils.weight_norm",
            f"torch.nn.utils.remove_weight_norm({layer}, '{parameter}')",
        )
    elif f"{parameter}_u" in held:
        how, remedy = (
            "torch.nn.utils.spectral_norm",
            f"torch.nn.utils.remove_spectral_norm({layer}, '{parameter}')",
        )
    else:
        how, remedy = (
            "a hook or by hand",
            f"{layer}.{parameter} = torch.nn.Parameter(value), value being the tensor to use",
        )
    raise UnsupportedModelError(
        f"the parameter '{name}.{parameter}' is computed from other tensors in each forward pass"
        f" (by {how}), and only ordinary parameters can be read.",
        f"Make it an ordinary one first, with {remedy}.",
    )


def _check_module(module: nn.Module, name: str) -> None:
    """Refuse a module that is no Linear layer and can be no elementwise activation either."""
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
    """Refuse a parameter that the forward method uses by itself."""
    parent, _, attribute = name.rpartition(".")
    if isinstance(getattr(module.get_submodule(parent), attribute), nn.Parameter):
        raise UnsupportedModelError(f"the parameter '{name}' is used outside a Linear layer.")


def extract_function(module: nn.Module, stage: Stage) -> fx.GraphModule | None:
    """Make a function of the nodes that follow the first node of a stage.

    Returns:
        A copy that no longer depends on ``module``; None if the stage has no further node.
    """
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
    """Compute the value of an elementwise function and its derivative along ``direction``.

    The Jacobian of such a function is diagonal, so reverse mode gives the same result as forward
    mode. Forward mode and `torch.func` are avoided: the one makes torch load code that torch itself
    has deprecated, which prints a warning, and the other takes two seconds to import.

    Args:
        function: maps a tensor to one of the same shape, element by element.
        point: where the derivative is taken.
        direction: what the derivative is multiplied by, of the shape of ``point``.
    """
    with torch.enable_grad():
        variable = point.detach().requires_grad_()
        # Some activations work in place, which is not allowed on the variable itself.
        value = function(variable.clone())
        if not value.requires_grad:  # a constant
            return value.detach(), torch.zeros_like(point)
        # The gradient of a sum needs no ``grad_outputs``, for which torch would import sympy.
        (slope,) = torch.autograd.grad((value * direction).sum(), variable)
    return value.detach(), slope


def _describe(function: fx.GraphModule) -> str:
    """Name the operations of an extracted function; modules go by their qualified names."""
    names = []
    for node in function.graph.nodes:
        if node.op == "call_module":
            kind = type(function.get_submodule(str(node.target))).__name__
            names.append(f"'{node.target}' ({kind})")
        elif node.op.startswith("call"):
            names.append(f"'{node.name}'")
    return ", ".join(names)


def _acts_elementwise(function: Callable[[Tensor], Tensor], point: Tensor, probe: Tensor) -> bool:
    """Test on one direction whether the Jacobian of ``function`` at ``point`` is diagonal."""
    if function(point.clone()).shape != point.shape:
        return False
    value, slope = derivative(function, point, torch.ones_like(point))
    again, directional = derivative(function, point, probe)
    # An activation may be undefined at some of the points, as a logarithm is at negative numbers.
    defined = torch.isfinite(value) & torch.isfinite(slope) & torch.isfinite(directional)
    if not bool(defined.any()) or not torch.equal(value[defined], again[defined]):
        return False
    differences = (directional - slope * probe)[defined].abs()
    return bool(differences.max() <= 1e-4 * directional[defined].abs().max())


def check_elementwise(activation: fx.GraphModule, stage: Stage, linear: nn.Linear) -> None:
    """Refuse what follows a Linear layer, unless it is a fixed elementwise function.

    Args:
        activation: what follows the layer, as a function.
        stage: the stage of the layer.
        linear: the layer.

    Raises:
        UnsupportedModelError: the function is random, is not elementwise, or has no derivative.
    """
    weight = linear.weight
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_TRIED, linear.out_features)
    point, probe = (
        torch.randn(shape, dtype=weight.dtype, generator=generator).to(weight.device)
        for _ in range(2)
    )
    names = _describe(activation)
    try:
        with torch.random.fork_rng(devices=[]):
            # A module of torch.fx that is called and fails prints a traceback; its method does not.
            elementwise = _acts_elementwise(activation.forward, point, probe)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) cannot be differentiated at an"
            f" input of shape {shape}: {error}."
        ) from error
    if not elementwise:
        raise UnsupportedModelError(
            f"what follows '{stage.name}' ({names}) does not act elementwise, or is random."
        )
