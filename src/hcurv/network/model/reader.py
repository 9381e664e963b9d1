"""Read the rows of S of batches of points from what autograd records in forward passes.

One forward pass records the graph; q backward passes, one for each row of R, give the derivatives
of the weighted outputs with respect to the results of all functions that use a parameter. What is
read is compared with autograd, along a random direction over all points of each batch, and point by
point on the first ones for each shape that the graph has. A parameter for which that fails is read
one point at a time. A shape of the graph is trusted once batches of two sizes have shown, beyond
doubt, how the rows of points are ordered. Points that are read again are not compared again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hcurv.losses import Loss
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from hcurv.network.loss_rows import LossRows
from hcurv.network.model.autograd_graph import Graph, read_graph
from hcurv.network.model.graph_batch import BatchUses, GraphBatch, Reading, Signature
from hcurv.network.model.independence import require_independent, require_own_derivatives
from hcurv.network.model.linearised_passes import LinearisedPasses
from hcurv.network.model.per_point import PerPointColumns
from hcurv.network.model.point_rows import RowOrder
from hcurv.network.model.snapshot import ModelSnapshot
from hcurv.network.model_inputs import Inputs, map_inputs, num_points
from hcurv.network.tracing import UnsupportedModelError

__all__ = ["ModelReader", "RowMaker"]

# A graph of a new shape is tried on this many points. Four show how the rows of points are ordered.
_NUM_TRIED = 4


class RowMaker(Protocol):
    """Makes the rows of R_i of a batch; see `LossRows`."""

    def __call__(self, outputs: Tensor, points: slice) -> LossRows:
        """The rows at a range of points, for outputs (b, t, d)."""


class ModelReader:
    """Reads batches of points.

    Args:
        snapshot: the model.
        loss: the loss, which says how outputs are arranged.
        make_rows: gives the rows of R_i at some points.
    """

    def __init__(self, snapshot: ModelSnapshot, loss: Loss, make_rows: RowMaker) -> None:
        self._snapshot, self._loss, self._make_rows = snapshot, loss, make_rows
        self._per_point = PerPointColumns(snapshot, loss)
        # Parameters for which no rule held, and the orders of rows for graphs that are trusted.
        self._unruly: set[str] = set()
        self._trusted: dict[Signature, tuple[RowOrder, ...]] = {}
        # The sizes of the batches that have shown these orders.
        self._sizes: dict[tuple[Signature, tuple[RowOrder, ...]], set[int]] = {}
        self._native_recurrence = False
        # Whether some points have shown that their derivatives do not depend on other points.
        self._derivatives_are_own = False
        # Floats of temporary memory that the last batch took, about.
        self.working_floats = 0

    @torch.no_grad()
    def read(self, inputs: Inputs, points: slice, *, verified: bool = False) -> StackedJacobian:
        """The rows of S of some points, with one part for each parameter.

        Args:
            inputs: the inputs of these points.
            points: the range of these points in the data.
            verified: whether the same points were read before, so that the model need not be
                compared with automatic differentiation once more.

        Raises:
            UnsupportedModelError: what was read differs from automatic differentiation.
        """
        return self._read(self._record_points(inputs, points, verified), verified)

    @torch.no_grad()
    def uses(self, inputs: Inputs, points: slice) -> BatchUses:
        """All uses of parameters at some points, without making the rows of S.

        Args:
            inputs: the inputs of these points.
            points: the range of these points in the data.

        Raises:
            UnsupportedModelError: what was read differs from automatic differentiation.
        """
        batch = self._record_points(inputs, points)
        reading = batch.plan(self._unruly, self._trusted)
        if reading.signature not in self._trusted:
            # One row at a few points shows whether a graph is read correctly; all points are only
            # taken if their graph has another shape.
            few = map_inputs(lambda tensor: tensor[:_NUM_TRIED], inputs)
            self._read(self._record(few, LossRows.random))
            self.confirm(map_inputs(lambda tensor: tensor[1:], few))
            reading = batch.plan(self._unruly, self._trusted)
        if reading.signature not in self._trusted:
            self._read(self._record(inputs, LossRows.random))
            reading = batch.plan(self._unruly, self._trusted)
        return BatchUses(batch, reading, self._per_point)

    @torch.no_grad()
    def passes(self, inputs: Inputs, points: slice) -> LinearisedPasses:
        """Linearised passes at some points that were read before.

        Args:
            inputs: the inputs of these points.
            points: the range of these points in the data.
        """
        outputs = self.forward(inputs)
        rows = self._make_rows(outputs.detach(), points)
        return LinearisedPasses(self._snapshot, self._loss, inputs, outputs, rows)

    def _record_points(self, inputs: Inputs, points: slice, verified: bool = False) -> GraphBatch:
        """Run the model on points of the data, and make sure that it treats them independently."""

        def make_rows(outputs: Tensor) -> LossRows:
            if verified:
                return self._make_rows(outputs, points)
            if not self._derivatives_are_own:
                few = map_inputs(lambda tensor: tensor[:_NUM_TRIED], inputs)
                require_own_derivatives(self.forward, few, points)
                self._derivatives_are_own = num_points(few) > 1
            require_independent(self.forward, inputs, outputs, points)
            return self._make_rows(outputs, points)

        return self._record(inputs, make_rows)

    def _record(self, inputs: Inputs, make_rows: Callable[[Tensor], LossRows]) -> GraphBatch:
        """Run the model, and find all uses of its parameters."""
        outputs, graph = self.graph(inputs)
        rows = make_rows(outputs.detach())
        self._require_uses(graph)
        return GraphBatch(self._snapshot, inputs, outputs, rows, graph)

    def _read(self, batch: GraphBatch, verified: bool = False) -> StackedJacobian:
        """The rows of S of a batch, compared with autograd unless that was done before."""
        while True:
            reading = batch.plan(self._unruly, self._trusted)
            result = batch.read(reading, self._per_point)
            self.working_floats = batch.working_floats
            # What is read one point at a time is always compared point by point: it would hide that
            # points influence each other.
            by_rules = len(reading.uses) == len(self._snapshot.trainable)
            trusted = by_rules and reading.signature in self._trusted
            if trusted and verified:
                return result
            wrong = batch.check(result, singly=not trusted)
            if not wrong:
                if not trusted:
                    self._remember(reading, batch.num_points)
                return result
            if wrong <= self._unruly and not self._per_point.give_up_vectorising():
                raise UnsupportedModelError(
                    f"the derivatives of the outputs with respect to '{sorted(wrong)[0]}' could not"
                    " be read: those of single points do not add up to those of a batch.",
                    "Do points of a batch influence each other, is the forward pass random, does it"
                    " compute in half precision, or does a hook change gradients in a way that is"
                    " not linear?",
                )
            self._unruly |= wrong

    @torch.no_grad()
    def confirm(self, inputs: Inputs) -> None:
        """See whether a batch of another size shows the same orders of rows as those before."""
        if num_points(inputs) > 1:
            batch = self._record(inputs, LossRows.random)
            self._remember(batch.plan(self._unruly, self._trusted), batch.num_points)

    def _require_uses(self, graph: Graph) -> None:
        """Refuse outputs that depend on no parameter, or on those of another copy of the model."""
        originals = self._snapshot.originals
        computed = {id(tensor): name for name, tensor in self._snapshot.computed.items()}
        for leaf in graph.others:
            if id(leaf) in computed:
                raise UnsupportedModelError(
                    f"'{computed[id(leaf)]}' was computed from other tensors before the forward"
                    " pass, which a copy of the model cannot follow.",
                    "Compute it in forward(), or make it a torch.nn.Parameter.",
                )
            if id(leaf) in originals:
                raise UnsupportedModelError(
                    f"the forward pass uses '{originals[id(leaf)]}' of the model itself, where a"
                    " copy of the model was run.",
                    "A hook, a lambda or forward_fn refers to the model by name: use the module"
                    " that it is given as an argument, or write it as a method.",
                )
        if torch.is_inference_mode_enabled():
            raise UnsupportedModelError(
                "derivatives are not recorded inside torch.inference_mode().",
                "Build the matrix outside of it; torch.no_grad() does no harm.",
            )
        if not graph.uses:
            raise UnsupportedModelError(
                "the outputs do not depend on any parameter with requires_grad=True.",
                "Is the forward pass inside torch.no_grad()?",
            )

    def _remember(self, reading: Reading, count: int) -> None:
        """Trust orders that batches of two sizes have shown.

        Rows that points share may look like rows of points in a batch of one size, but their number
        does not grow with the batch.
        """
        if reading.settled:
            sizes = self._sizes.setdefault((reading.signature, reading.orders), set())
            sizes.add(count)
            if len(sizes) > 1:
                self._trusted[reading.signature] = reading.orders

    def forward(self, inputs: Inputs) -> Tensor:
        """Outputs with a graph, arranged as the loss sees them, (b, t, d)."""
        # The fused LSTM of mkldnn is one node in the graph; the composite one has a node for each
        # product with its weights.
        native = _without_mkldnn() if self._native_recurrence else contextlib.nullcontext()
        with torch.enable_grad(), native:
            outputs = self._snapshot.outputs(inputs)
            return self._loss.split_outputs(outputs)

    def graph(self, inputs: Inputs) -> tuple[Tensor, Graph]:
        """Outputs, and all uses of trainable parameters."""
        outputs = self.forward(inputs)
        graph = read_graph(outputs, self._snapshot.trainable)
        fused = any(use.node.name().startswith("MkldnnRnn") for use in graph.uses)
        if fused and not self._native_recurrence:
            self._native_recurrence = True
            return self.graph(inputs)
        return outputs, graph


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    # `torch.backends.mkldnn.flags` sets the precision of products as well, and warns about it.
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before
