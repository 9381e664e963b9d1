"""The graph that autograd recorded: which functions use a parameter, and through which views.

From the outputs, ``next_functions`` lead to the ``AccumulateGrad`` node of each parameter. A node
that only rearranges entries (a transpose, a slice, a reshape) is a *view*; the first node after
the views is the *use* of the parameter, and holds what it was multiplied with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Graph", "Use", "read_graph"]

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Alias"),
        *("Unsqueeze", "Slice", "Split", "SplitWithSizes", "Select", "Unbind", "Narrow", "Clone"),
        *("UnsafeSplit", "Mt", "MT", "Swapaxes"),
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "ReshapeBackward0"}


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter.

    Attributes:
        parameter: the name of the parameter.
        node: the node of the function that uses it.
        slot: which input of the function the parameter is.
        views: the views between the function and the parameter, the last one first, each with the
            number of its output that leads on.
    """

    parameter: str
    node: Any
    slot: int
    views: tuple[tuple[Any, int], ...]

    def entries(self, parameter: Tensor, shape: torch.Size | None = None) -> Tensor | None:
        """The flat indices of the entries of the parameter that the function sees.

        Args:
            parameter: the parameter.
            shape: the shape in which the function sees it; None where it is asked of the last view.

        Returns:
            Integers in the shape that the function sees; None if it does not see single entries,
            each at most once.
        """
        if not self.views:
            return torch.arange(parameter.numel()).view(parameter.shape)
        if shape is None:
            last, number = self.views[0]
            shape = torch.Size(last._input_metadata[number].shape)
        seen = torch.arange(1, shape.numel() + 1, dtype=torch.float64).view(shape)
        values: Any = seen
        for node, number in self.views:
            gradients = [None] * len(node._input_metadata)
            gradients[number] = values
            values = node(*gradients)
            values = values[0] if isinstance(values, tuple) else values
        flat = values.reshape(-1)
        places = flat.nonzero().squeeze(1)
        numbers = flat[places].long() - 1
        if not torch.equal(numbers.sort().values, torch.arange(shape.numel())):
            return None
        result = torch.empty(shape.numel(), dtype=torch.long)
        result[numbers] = places
        return result.view(shape)


class Graph(NamedTuple):
    """What the graph of some outputs shows.

    Attributes:
        uses: all uses of the parameters in a fixed order: by parameter, then in the order in which
            the graph is walked.
        others: leaves that are none of the parameters.
        number: tells graphs of different functions apart.
    """

    uses: list[Use]
    others: list[Tensor]
    number: int


def read_graph(outputs: Tensor, parameters: Mapping[str, Tensor]) -> Graph:
    """Find all uses of some parameters in the computation of ``outputs``.

    Args:
        outputs: what was computed.
        parameters: leaves of the graph, by name.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    consumers: dict[Any, list[tuple[Any, int, int]]] = defaultdict(list)
    leaves: dict[str, Any] = {}
    others: list[Tensor] = []
    seen: dict[Any, None] = {}
    waiting = [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in names:
                leaves[names[id(variable)]] = node
            else:
                others.append(variable)
        for slot, (before, number) in enumerate(node.next_functions):
            if before is not None:
                consumers[before].append((node, slot, number))
                waiting.append(before)
    found = []
    for name in parameters:
        if name in leaves:
            pending: list[tuple[Any, tuple[tuple[Any, int], ...]]] = [(leaves[name], ())]
            while pending:
                node, views = pending.pop()
                for consumer, slot, number in consumers[node]:
                    path = ((node, number), *views) if node is not leaves[name] else views
                    if consumer.name() in _VIEWS:
                        pending.append((consumer, path))
                    else:
                        found.append(Use(name, consumer, slot, path))
    return Graph(found, others, hash(tuple(node.name() for node in seen)))
