"""One batch of points: the graph that autograd recorded, and the rows of R_i.

It is asked how the rows of all functions are ordered, for the columns of S, and whether what was
read agrees with automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hcurv.network.layered.dense_jacobian import DenseJacobian
from hcurv.network.layered.layer_jacobian import LayerJacobian
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from hcurv.network.loss_rows import LossRows
from hcurv.network.model.autograd_graph import Graph
from hcurv.network.model.builders import make_builder
from hcurv.network.model.contributions import Contribution, DirectUse, LinearUse
from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.ordered_uses import BatchShape, Gradients, OrderedUse
from hcurv.network.model.per_point import PerPointColumns
from hcurv.network.model.point_rows import Probe, RowOrder, find_orders, halves
from hcurv.network.model.rules import contributions_of
from hcurv.network.model.snapshot import ModelSnapshot
from hcurv.network.model_inputs import Inputs, num_points

__all__ = ["BatchUses", "GraphBatch", "Reading", "Signature"]

# What is read is compared with autograd at this many points.
_NUM_CHECKED = 3

Signature: TypeAlias = tuple[Any, ...]


class Reading(NamedTuple):
    """How a batch is to be read.

    Attributes:
        uses: for each parameter that is read by rules, all its uses.
        signature: the shape of the graph, on which the right reading may depend.
        orders: the orders of the rows of all uses.
        settled: whether no other orders agree with what was seen.
    """

    uses: dict[str, list[OrderedUse]]
    signature: Signature
    orders: tuple[RowOrder, ...]
    settled: bool


class GraphBatch:
    """One batch of points: its graph, and the rows of R_i.

    Args:
        snapshot: the model.
        inputs: the inputs of the points.
        outputs: their outputs, with a graph, (b, t, d).
        rows: the rows of R_i.
        graph: all uses of trainable parameters in it.

    Attributes:
        working_floats: floats of temporary memory that `read` took, about.
    """

    def __init__(
        self,
        snapshot: ModelSnapshot,
        inputs: Inputs,
        outputs: Tensor,
        rows: LossRows,
        graph: Graph,
    ) -> None:
        self._inputs, self._outputs, self._rows = inputs, outputs, rows
        self._graph_number = graph.number
        self.working_floats = 0
        self._parameters = snapshot.trainable
        like = next(iter(self._parameters.values())).detach()
        self._shape = BatchShape(num_points(inputs), rows.num_rows, like)
        # What each parameter contributes; None where no rule knows one of its uses.
        self._known: dict[str, list[Contribution] | None] = {name: [] for name in self._parameters}
        for use in graph.uses:
            found = contributions_of(use, self._parameters[use.parameter].detach())
            known = self._known[use.parameter]
            both = None if found is None or known is None else [*known, *found]
            self._known[use.parameter] = both

    @property
    def num_points(self) -> int:
        """The number of points."""
        return self._shape.num_points

    def plan(self, unruly: set[str], trusted: dict[Signature, tuple[RowOrder, ...]]) -> Reading:
        """Find the order of the rows of all uses.

        Args:
            unruly: parameters that are not to be read by rules. Those with rows in an unknown order
                are added.
            trusted: orders that are known, by signature.
        """
        while True:
            known = {
                name: found
                for name, found in self._known.items()
                if found is not None and name not in unruly
            }
            every = [use for found in known.values() for use in found]
            signature: Signature = (
                self._graph_number,
                *((name, *map(self._signature, found)) for name, found in known.items()),
            )
            if signature in trusted:
                candidates = [[order] for order in trusted[signature]]
            else:
                candidates = self._find_orders(every)
            ordered = dict(zip(map(id, every), candidates, strict=True))
            lost = {name for name, uses in known.items() if not all(ordered[id(u)] for u in uses)}
            if not lost:
                break
            unruly |= lost
        uses = {
            name: [OrderedUse(use, ordered[id(use)][0]) for use in found]
            for name, found in known.items()
        }
        # A single point does not show how the rows of several are ordered.
        settled = self._shape.num_points > 1 and all(len(found) == 1 for found in candidates)
        return Reading(uses, signature, tuple(found[0] for found in candidates), settled)

    def _signature(self, use: Contribution) -> Signature:
        """What the order of rows, and the right reading, may depend on."""
        rows = use.num_rows / self._shape.num_points
        positions = use.inputs.shape[2] if isinstance(use, LinearUse) else 1
        return (type(use).__name__, rows, positions, tuple(use.entries.shape))

    def _graph_floats(self, reading: Reading) -> int:
        """Floats of temporary memory of a graph, about: results, derivatives and inputs."""
        every = [ordered for uses in reading.uses.values() for ordered in uses]
        if not every:
            return 0
        count = self._shape.num_points
        sizes = {ordered.use.node: _result_size(ordered.use.node) for ordered in every}
        linear = [use for use, _ in every if isinstance(use, LinearUse)]
        # The result of each function and its derivative, and the largest derivative once more.
        floats = 2 * sum(sizes.values()) + max(sizes.values())
        # Normalised inputs, and those of products, which are copied if positions are rows.
        floats += sum(sizes[node] for node in sizes.keys() - {use.node for use in linear})
        floats += sum((2 if use.num_rows > count else 1) * use.inputs.numel() for use in linear)
        return floats

    def read(self, reading: Reading, per_point: PerPointColumns) -> StackedJacobian:
        """The columns of all parameters."""
        builders = {
            name: make_builder(self._parameters[name].numel(), uses, self._shape)
            for name, uses in reading.uses.items()
        }
        multiplying = sum(builder.working_floats for builder in builders.values())
        self.working_floats = self._graph_floats(reading) + multiplying
        nodes = list({o.use.node: None for uses in reading.uses.values() for o in uses})
        for row in range(self._rows.num_rows):
            gradients = dict(zip(nodes, self._backward(nodes, self._rows.row(row)), strict=True))
            for builder in builders.values():
                builder.add(row, gradients.__getitem__)
            del gradients  # before those of the next row are made
        parts: dict[str, LayerJacobian] = {name: b.finish() for name, b in builders.items()}
        rest = [name for name in self._parameters if name not in parts]
        if rest:
            columns = per_point.of(rest, self._inputs, self._rows)
            parts |= {name: DenseJacobian(columns[name].contiguous()) for name in rest}
        return StackedJacobian([parts[name] for name in self._parameters])

    def _backward(self, nodes: list[Any], weights: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives of the weighted outputs with respect to the results of some nodes."""
        return differentiate(self._outputs, [GradientEdge(node, 0) for node in nodes], weights)

    def _find_orders(self, uses: list[Contribution]) -> list[list[RowOrder]]:
        """The orders that the rows of each use may have, seen from halves of the points."""
        count = self._shape.num_points
        nodes = list({use.node: None for use in uses})
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self._outputs.shape, generator=generator, dtype=torch.float64)
        noise = noise.to(self._outputs)
        probes: list[list[Probe]] = [[] for _ in uses]
        for half in halves(count):
            weights = noise * half.to(noise)[:, None, None]
            found = dict(zip(nodes, self._backward(nodes, weights), strict=True))
            for use, seen in zip(uses, probes, strict=True):
                if (gradient := found[use.node]) is not None:
                    seen.append(Probe(half, _nonzero_rows(use, gradient).cpu()))
        return [
            find_orders(use.num_rows, count, seen) for use, seen in zip(uses, probes, strict=True)
        ]

    def check(self, read: StackedJacobian, *, singly: bool) -> set[str]:
        """Names of the parameters whose columns differ from automatic differentiation.

        Args:
            read: the columns.
            singly: compare each of the first points by itself, not only the sum over all points.
        """
        generator = torch.Generator().manual_seed(1)
        shape = (self._shape.num_points, self._rows.num_rows)
        mix = torch.randn(shape, generator=generator, dtype=torch.float64).to(self._shape.like)
        wrong = self._differing(read, mix)
        for point in range(min(_NUM_CHECKED, shape[0]) if singly else 0):
            chosen = torch.zeros_like(mix)
            chosen[point] = mix[point]
            wrong |= self._differing(read, chosen)
        return wrong

    def _differing(self, read: StackedJacobian, weights: Tensor) -> set[str]:
        """Names of the parameters for which Sᵀ weights is wrong, for weights (b, q)."""
        gradients = differentiate(
            self._outputs, list(self._parameters.values()), self._rows.combine(weights)
        )
        # Embeddings may have sparse gradients.
        expected = [None if g is None else g.to_dense() for g in gradients]
        present = [g for g in expected if g is not None and g.numel()]
        largest = max((float(g.abs().max()) for g in present), default=0.0)
        wrong: set[str] = set()
        if not math.isfinite(largest):  # Derivatives that overflow are refused later.
            return wrong
        for (name, parameter), gradient, part in zip(
            self._parameters.items(), expected, read.parts, strict=True
        ):
            if parameter.numel() == 0:
                continue
            found = part.apply_transposed(weights[:, :, None]).view_as(parameter)
            wanted = torch.zeros_like(found) if gradient is None else gradient
            scale = float(wanted.norm()) + 1e-3 * largest
            tolerance = torch.finfo(found.dtype).eps ** 0.5
            if not float((found - wanted).norm()) <= tolerance * scale:
                wrong.add(name)
        return wrong


class BatchUses:
    """All uses of parameters at a batch of points. Made by `ModelReader.uses`.

    Args:
        batch: the batch.
        reading: how it is to be read.
        per_point: reads parameters that no rule knows.

    Attributes:
        known: the uses of each parameter that is read by rules, by its name.
        rows: the rows of R_i.
        shape: the sizes of the batch.
    """

    def __init__(self, batch: GraphBatch, reading: Reading, per_point: PerPointColumns) -> None:
        self._batch, self._per_point = batch, per_point
        self.known: Mapping[str, list[OrderedUse]] = reading.uses
        self.rows, self.shape = batch._rows, batch._shape
        self._nodes = list({o.use.node: None for uses in reading.uses.values() for o in uses})

    @torch.no_grad()
    def gradients(self, weights: Tensor) -> Gradients:
        """Derivatives of weighted outputs with respect to the results of all nodes of `known`.

        Args:
            weights: such as ``rows.row(0)``, (b, t, d).
        """
        found = self._batch._backward(self._nodes, weights)
        return dict(zip(self._nodes, found, strict=True)).__getitem__

    @torch.no_grad()
    def columns(self, names: list[str]) -> dict[str, Tensor]:
        """Columns of S, (p, q, b), of parameters that are not in `known`, by their names."""
        return self._per_point.of(names, self._batch._inputs, self.rows) if names else {}


def _result_size(node: Any) -> int:
    """The number of entries of a function's result."""
    return torch.Size(node._input_metadata[0].shape).numel()


def _nonzero_rows(use: Contribution, gradient: Tensor) -> Tensor:
    """Which rows have a derivative, (R,)."""
    if isinstance(use, LinearUse):
        return use.factors(gradient).flatten(1).any(1)
    return (use.gradients if isinstance(use, DirectUse) else use.factors)(gradient).any(1)
