"""What K-FAC needs of any model: moments of inputs and gradients over points and positions.

A weight that is used at positions t = 1…T of point i (pixels, words, calls of a module) has the
gradient Σ_t g_it x_itᵀ. There are two ways to make one Kronecker product of its second moment:

    expand:  G = Σ_i Σ_t E[g_it g_itᵀ],  A = (1/n) Σ_i (1/T) Σ_t x_it x_itᵀ,
    reduce:  G = Σ_i E[g_i g_iᵀ],        A = (1/n) Σ_i x_i x_iᵀ,

where g_i is the sum and x_i the mean over positions. The first is that of Grosse and Martens
(2016), the second that of Eschenhagen et al. (2023). The first is exact for a linear network whose
positions have losses of their own, the second for one that averages its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hcurv.baselines.kronecker_chain import KroneckerPair
from hcurv.baselines.kronecker_moments import Moments, ParameterMatrix, gram, require_finite
from hcurv.baselines.model_blocks import DiagonalBlock, LinearBlock, find_blocks, linear_groups
from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.layered.layer_jacobian import LayerJacobian
from hcurv.network.loss_rows import RowChoice
from hcurv.network.model.builders import make_builder
from hcurv.network.model.graph_batch import BatchUses
from hcurv.network.model.ordered_uses import Gradients, OrderedUse
from hcurv.network.model.reader import ModelReader
from hcurv.network.model_inputs import map_inputs, num_points, split_inputs
from hcurv.network.problem import Problem
from hcurv.network.tracing import UnsupportedModelError

__all__ = ["ModelFactors", "Positions"]

Positions: TypeAlias = Literal["expand", "reduce"]

# The first points, which show which blocks there are; four show how rows of points are ordered.
_FIRST_POINTS = 4
# Temporaries of one batch take about this many floats, as far as one point allows it.
_BATCH_FLOATS = 2**24
# Points are read at most so many at a time. Larger batches are not faster.
_MAX_BATCH = 256
# Gradients of single points in the eigenbasis take no more floats than this at a time.
_TURNED_FLOATS = 2**22


class ModelFactors:
    """Passes over the data of any model.

    Args:
        problem: the model, the loss and the data.
        positions: how positions are treated.
        num_samples: the number of targets to draw for each point; None for the exact expectation.
        seed: the seed of the draws.

    Attributes:
        layers: the parameters of each Kronecker block.
        others: the parameters of each diagonal block.
    """

    def __init__(
        self, problem: Problem, positions: Positions, num_samples: int | None, seed: int
    ) -> None:
        self._problem = replace(problem, choice=RowChoice(num_samples=num_samples, seed=seed))
        self._reduce = positions == "reduce"
        self._reader = ModelReader(problem.snapshot, problem.loss, self._problem.loss_rows)
        few = map_inputs(lambda tensor: tensor[:_FIRST_POINTS], problem.survey.first_inputs)
        first = self._reader.uses(few, slice(0, num_points(few)))
        self._blocks, self._diagonals = find_blocks(first, problem.layout)
        self.layers: Sequence[ParameterMatrix] = [block.matrix for block in self._blocks]
        self.others: Sequence[ParameterMatrix] = [block.matrix for block in self._diagonals]
        per_point = self._floats(first) / num_points(few)
        self._batch_size = int(max(1, min(_MAX_BATCH, _BATCH_FLOATS // (per_point + 1))))

    def _floats(self, uses: BatchUses) -> int:
        """The floats of temporary memory that a batch takes, about."""
        batch = _FactorBatch(uses, self._blocks, self._diagonals)
        total = 0
        for number, block in enumerate(self._blocks):
            columns, units = block.matrix.num_columns, block.matrix.num_units
            total += batch.num_positions(number) * (2 * columns + 3 * units)
        gradients = uses.gradients(uses.rows.row(0))
        for other in self._diagonals:
            if other.parameter in uses.known:
                total += 2 * batch.part(other, gradients).num_floats
            else:
                total += other.matrix.num_units * uses.rows.num_rows * uses.shape.num_points
        return total

    def _batches(self) -> Iterator[_FactorBatch]:
        """The uses of all parameters at all points; the same ones in every pass."""
        start = 0
        for inputs in self._problem.inputs():
            for some in split_inputs(inputs, self._batch_size):
                points = slice(start, start + num_points(some))
                start = points.stop
                uses = self._reader.uses(some, points)
                yield _FactorBatch(uses, self._blocks, self._diagonals)

    def moments(
        self, pairs: list[tuple[int, int]], progress: Callable[[int], object]
    ) -> tuple[Moments, list[Tensor]]:
        """Add up the moments of all Kronecker blocks, and the squares of diagonal ones.

        Args:
            pairs: (ℓ, ℓ) for all Kronecker blocks ℓ.
            progress: called with the number of points of each batch.

        Returns:
            The moments, and the values (p, 1) of all diagonal blocks.

        Raises:
            ValueError: the moments overflow.
        """
        zeros = torch.zeros((), dtype=self._problem.dtype, device=self._problem.device).new_zeros
        inputs = [zeros(layer.num_columns, layer.num_columns) for layer in self.layers]
        gradients = [zeros(layer.num_units, layer.num_units) for layer in self.layers]
        squares = [zeros(part.num_units) for part in self.others]
        for batch in self._batches():
            for number, total in enumerate(inputs):
                features = batch.inputs(number)
                rows = features.mean(2) if self._reduce else _by_position(features)
                total += gram(rows, rows) * (batch.num_points / rows.shape[0])
            for derivatives in batch.gradients():
                for number, total in enumerate(gradients):
                    factors = batch.factors(number, derivatives)
                    rows = factors.sum(2) if self._reduce else _by_position(factors)
                    total += gram(rows, rows)
                batch.add_squares(squares, derivatives)
            batch.add_other_squares(squares)
            progress(batch.num_points)
        require_finite((*inputs, *gradients, *squares))
        count = self._problem.num_points
        found = Moments(
            {pair: total.div_(count) for pair, total in zip(pairs, inputs, strict=True)},
            dict(zip(pairs, gradients, strict=True)),
        )
        return found, [total[:, None] for total in squares]

    def eigenvalues(
        self, bases: Sequence[KroneckerPair], progress: Callable[[int], object]
    ) -> list[Tensor]:
        """Measure the curvature along products of the eigenvectors of A and G of each block.

        Args:
            bases: the eigenvectors.
            progress: called with the number of points of each batch.

        Returns:
            The values (units, columns) of each Kronecker block.
        """
        values = [torch.zeros_like(basis.gradients[:, :1] @ basis.inputs[:1]) for basis in bases]
        for batch in self._batches():
            inputs = [basis.inputs.T @ batch.inputs(number) for number, basis in enumerate(bases)]
            for derivatives in batch.gradients():
                for number, basis in enumerate(bases):
                    factors = basis.gradients.T @ batch.factors(number, derivatives)
                    _add_turned(values[number], factors, inputs[number])
            progress(batch.num_points)
        return values


class _FactorBatch:
    """The inputs and gradients of all blocks at a batch of points.

    Args:
        uses: the uses of all parameters.
        blocks: the Kronecker blocks.
        diagonals: the diagonal blocks.

    Raises:
        UnsupportedModelError: parameters are used in another way than at the first points.
    """

    def __init__(
        self,
        uses: BatchUses,
        blocks: Sequence[LinearBlock],
        diagonals: Sequence[DiagonalBlock],
    ) -> None:
        self._uses, self._blocks, self._diagonals = uses, blocks, diagonals
        self.num_points = uses.shape.num_points
        groups = {
            name: linear_groups(uses.known.get(name, []))
            for name in {block.parameter for block in blocks}
        }
        self._groups: list[list[OrderedUse]] = []
        for block in blocks:
            found = (groups[block.parameter] or {}).get(block.key)
            if found is None:
                raise UnsupportedModelError(
                    "K-FAC needs a model that uses its weights in the same way at all points, which"
                    f" this one does not do with '{block.parameter}'.",
                    "Use baselines.Diagonal or baselines.LowRank instead.",
                )
            self._groups.append(found)

    def num_positions(self, number: int) -> int:
        """The number of positions of a block, of all points together."""
        return self.inputs(number)[:, 0].numel()

    def inputs(self, number: int) -> Tensor:
        """The inputs of a Kronecker block, (b, columns, T)."""
        return without_tiny(self._blocks[number].inputs(self._groups[number], self.num_points))

    def factors(self, number: int, gradients: Gradients) -> Tensor:
        """The gradients of a Kronecker block in one row, (b, units, T)."""
        block, uses = self._blocks[number], self._groups[number]
        return without_tiny(block.factors(uses, gradients, self.num_points))

    def gradients(self) -> Iterator[Gradients]:
        """The derivatives of all rows of R_i, one after the other."""
        for row in range(self._uses.rows.num_rows):
            yield self._uses.gradients(self._uses.rows.row(row))

    def part(self, block: DiagonalBlock, gradients: Gradients) -> LayerJacobian:
        """The columns of a parameter that is read by rules, in one row."""
        shape = self._uses.shape._replace(num_rows=1)
        uses = self._uses.known[block.parameter]
        builder = make_builder(block.matrix.num_units, uses, shape)
        builder.add(0, gradients)
        return builder.finish()

    def add_squares(self, squares: Sequence[Tensor], gradients: Gradients) -> None:
        """Add the squares of one row to diagonal blocks that are read by rules."""
        for total, block in zip(squares, self._diagonals, strict=True):
            if block.parameter in self._uses.known:
                total += self.part(block, gradients).square_sums()

    def add_other_squares(self, squares: Sequence[Tensor]) -> None:
        """Add the squares of all rows to diagonal blocks that are not read by rules."""
        names = [
            block.parameter for block in self._diagonals if block.parameter not in self._uses.known
        ]
        found = self._uses.columns(names)
        for total, block in zip(squares, self._diagonals, strict=True):
            if block.parameter in found:
                total += found[block.parameter].square().sum((1, 2))


def _by_position(values: Tensor) -> Tensor:
    """(b, d, T) as (b·T, d)."""
    return values.mT.flatten(0, 1)


def _add_turned(total: Tensor, factors: Tensor, inputs: Tensor) -> None:
    """Add Σ_i (Σ_t g_it x_itᵀ)², with the squares of all entries.

    Args:
        total: what is added to, (units, columns).
        factors: g, (b, units, T).
        inputs: x, (b, columns, T).
    """
    if inputs.shape[2] == 1:
        total.addmm_(factors[:, :, 0].square().T, inputs[:, :, 0].square())
        return
    step = max(1, _TURNED_FLOATS // total.numel())
    for some, features in zip(factors.split(step), inputs.split(step), strict=True):
        total += torch.bmm(some, features.mT).square_().sum(0)
