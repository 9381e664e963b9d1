"""The precomputation for any model: read all batches, and keep the rows of S.

The first few points are read first. They show how many floats each parameter takes, so that memory
can be refused before it is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.memory import format_bytes, require_bytes
from hcurv.network.layered import LayeredRoot
from hcurv.network.layered.layer_jacobian import LayerJacobian
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from hcurv.network.memory_plan import MemoryPlan, StoredPart
from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.linearised_passes import PassError
from hcurv.network.model.reader import ModelReader
from hcurv.network.model_inputs import Inputs, map_inputs, num_points, split_inputs
from hcurv.network.problem import Problem

__all__ = ["ModelBatches", "compute_layered_root", "model_gradient", "structural_orders"]

# The first points, from which sizes are known.
_FIRST_POINTS = 4
# Temporary memory is about this many times what is counted: gaps between allocations, and what
# backward passes hold besides (measured on LeNet, ResNet-8 and ViT-tiny, benchmarks/general.py).
_OVERHEAD = 1.25
# Points are read at most so many at a time. Larger batches are not faster.
_MAX_BATCH = 256
# A linearised pass for one column takes as long as reading so many rows of a point (ResNet-8, ten
# rows: 1.5 seconds for a column of 1000 points, 8 seconds for the rows).
_ROWS_PER_COLUMN = 2


class ModelBatches:
    """The points of a model's data, read anew whenever they are asked for.

    Args:
        problem: the model, the loss and the data.
        workspace: bytes of temporary memory to stay within, as far as one point allows it.

    Attributes:
        num_points: the number of points.
        batch: most points that are read at a time.
        plan: what storing everything would take, and what reading takes.
        num_rows: the number of rows of each point.

    Raises:
        UnsupportedModelError: the model cannot be read.
    """

    def __init__(self, problem: Problem, workspace: int) -> None:
        self._problem, self.num_points = problem, problem.num_points
        self._orders = structural_orders(problem.layout)
        self._verified = False  # whether all points were read once
        self._has_passes = True
        # Without points, sizes are learnt from those of another rank.
        source = problem if problem.num_points else problem.first_points(_FIRST_POINTS)
        self._reader = ModelReader(problem.snapshot, problem.loss, source.loss_rows)
        few = _first_few(source)
        first = self._reader.read(few, slice(0, num_points(few)))
        self._reader.confirm(map_inputs(lambda tensor: tensor[1:], few))
        per_point = _OVERHEAD * self._reader.working_floats / num_points(few)
        size, most = problem.dtype.itemsize, max(1, problem.num_points)
        self.batch = int(max(1, min(_MAX_BATCH, most, workspace // (per_point * size + 1))))
        self.num_rows = first.num_rows
        self.plan = MemoryPlan(
            tuple(
                StoredPart(name, _form(part), part.num_floats / num_points(few))
                for name, part in zip(problem.layout.names, first.parts, strict=True)
            ),
            problem.num_points,
            size,
            int(self.batch * per_point * size),
        )

    @property
    def working_bytes(self) -> int:
        """What recomputing takes: a batch and the one before it, and temporaries of making it."""
        stored = self.plan.stored_bytes / max(1, self.plan.num_points)
        return int(2 * self.batch * stored) + self.plan.working_bytes

    def __iter__(self) -> Iterator[LayeredRoot]:
        """Read the data once, and yield the root of one batch after the other."""
        for chunk in self.chunks():
            yield LayeredRoot((chunk,), self._problem.layout, self._orders)

    def product(self, rhs: Tensor) -> Tensor | None:
        """SᵀS times (N, k) by linearised passes, which read no rows of S.

        Args:
            rhs: the columns, in the precision of the model.

        Returns:
            The product; None where rows of S are read faster, or have not been read before, or the
            model has no such passes.
        """
        if not (self._verified and self._has_passes):
            return None
        if _ROWS_PER_COLUMN * rhs.shape[1] > self.num_rows:
            return None
        result = torch.zeros_like(rhs)
        start = 0
        try:
            for inputs in self._problem.inputs():
                for some in split_inputs(inputs, self.batch):
                    points = slice(start, start + num_points(some))
                    result += self._reader.passes(some, points).product(rhs)
                    start = points.stop
        except PassError:
            self._has_passes = False
            return None
        return result

    def chunks(self) -> Iterator[StackedJacobian]:
        """Read the data once, and yield the rows of S of one batch after the other.

        The first pass compares them with automatic differentiation. The data of later passes is
        known to be the same.
        """
        start = 0
        for inputs in self._problem.inputs():
            for some in split_inputs(inputs, self.batch):
                points = slice(start, start + num_points(some))
                chunk = self._reader.read(some, points, verified=self._verified)
                if not self._verified:
                    _check_finite(chunk, points)
                yield chunk
                start = points.stop
        self._verified = True


def compute_layered_root(
    problem: Problem, batches: ModelBatches, progress: Callable[[int], object] | None = None
) -> tuple[LayeredRoot, MemoryPlan]:
    """Read all of the data, and keep it.

    Args:
        problem: the model, the loss and the data.
        batches: the data, ready to be read.
        progress: called with the number of points done since the last call.

    Raises:
        InsufficientMemoryError: the rows do not fit into free memory; nothing was allocated.
        UnsupportedModelError: the model cannot be read.
    """
    plan = batches.plan
    require_bytes(
        plan.peak_bytes,
        problem.device,
        f"the precomputation for {problem.num_points} points and {problem.layout.size}"
        f" parameters, with {batches.num_rows} rows a point"
        f" ({format_bytes(plan.stored_bytes)} to be stored)",
        (
            'pass factors="recompute", which stores nothing',
            "use fewer data points (the memory grows in proportion)",
            "pass num_samples=1, or a few more, if the loss has many outputs",
            "freeze layers that need not be part of the matrix with requires_grad_(False)",
            "convert the model and the data to float32, if they are float64",
        ),
    )
    chunks: list[StackedJacobian] = []
    for chunk in batches.chunks():
        chunks.append(chunk.for_entries())
        if progress is not None:
            progress(chunk.num_points)
    return LayeredRoot(tuple(chunks), problem.layout, structural_orders(problem.layout)), plan


def _check_finite(chunk: StackedJacobian, points: slice) -> None:
    for tensor in chunk.tensors:
        if tensor.is_floating_point() and tensor.numel():
            # A sum is faster than looking at each number, but may overflow where they are finite.
            if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"derivatives overflow at points {points.start} to {points.stop - 1}: the"
                    " weights or the inputs are too large (try float64)"
                )


def _first_few(problem: Problem) -> Inputs:
    """Inputs of the first points; a first batch of fewer points is repeated.

    Only sizes and orders are learnt from them, which repetition does not change. A single point
    would not show what points share.
    """
    size = num_points(problem.survey.first_inputs)
    index = torch.arange(min(_FIRST_POINTS, problem.num_points), device=problem.device) % size
    return map_inputs(lambda tensor: tensor[index], problem.survey.first_inputs)


def _form(jacobian: LayerJacobian) -> str:
    """How a parameter is stored, in one word."""
    if isinstance(jacobian, StackedJacobian):
        forms = dict.fromkeys(_form(part) for part in jacobian.parts)
        return "/".join(forms)
    return type(jacobian).form


def structural_orders(layout: ParameterLayout) -> dict[str, Tensor]:
    """Orders of the parameters that follow the layers, by name, each a permutation (N,).

    Rows of a weight are its outputs, and everything within a row is an input; biases, scales and
    shifts come last.
    """
    index = torch.arange(layout.size)
    parameter, row, column = layout.locate(index)
    layer_of = {name: i for i, names in enumerate(layout.layers.values()) for name in names}
    layers = torch.tensor([layer_of[name] for name in layout.names])[parameter]
    is_vector = torch.tensor([len(layout.shapes[name]) < 2 for name in layout.names])[parameter]
    column = torch.where(is_vector, column.max() + 1 + parameter, column)
    height, width = int(row.max()) + 1, int(column.max()) + 1
    by_output = (layers * height + row) * width + column
    by_input = (layers * width + column) * height + row
    return {"layer-output-input": by_output.argsort(), "layer-input-output": by_input.argsort()}


def model_gradient(problem: Problem, targets: Tensor, weights: Tensor) -> Tensor:
    """The flat gradient of Σ_i weights[i] f_i, (N,), by a pass over the data.

    Args:
        problem: the model, the loss and the data.
        targets: the targets of all points.
        weights: the weight of each point; points without weight are left out, (n,).
    """
    parameters = list(problem.snapshot.trainable.values())
    result = [torch.zeros_like(parameter) for parameter in parameters]
    start = 0
    for inputs in problem.inputs():
        for some in split_inputs(inputs, _MAX_BATCH):
            points = slice(start, start + num_points(some))
            start = points.stop
            chosen = weights[points].nonzero().squeeze(1)
            if chosen.numel() == 0:
                continue
            part = map_inputs(lambda tensor: tensor[chosen], some)  # noqa: B023
            own = targets[points][chosen]
            with torch.enable_grad():
                outputs = problem.loss.split_outputs(problem.snapshot.outputs(part))
            rows = problem.loss.split_targets(own, (len(own), *problem.point_shape))
            slopes = problem.loss.gradient(outputs.detach().flatten(0, 1), rows)
            slopes = slopes.view_as(outputs) * weights[points][chosen][:, None, None]
            found = differentiate(outputs, parameters, slopes)
            for total, gradient in zip(result, found, strict=True):
                if gradient is not None:
                    total += gradient
    return torch.cat([total.reshape(-1) for total in result]).detach()
