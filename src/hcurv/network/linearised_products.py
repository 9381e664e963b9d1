"""Products with H = SᵀS and with its root S by linearised passes through the layers.

These are the passes of the paper's Table 1, for many points and right-hand sides at a time. With
Ŵ_ℓ for the part of a right-hand side that belongs to layer ℓ:

    (a)  a_i^ℓ = Ŵ_ℓ x_i^{ℓ-1} + W_ℓ t_i^{ℓ-1},     t_i^ℓ = M_i^ℓ a_i^ℓ
    (b)  y_i = R_i M_i^L a_i^L,                     z_i^L = (R_i M_i^L)ᵀ y_i
    (c)  z_i^{ℓ-1} = M_i^{ℓ-1} W_ℓᵀ z_i^ℓ
    (d)  (Hŵ)^ℓ = Σ_i z_i^ℓ (x_i^{ℓ-1})ᵀ

Values of units are stored as (units, k, points), k for the right-hand sides, so that every step is
one product of matrices: W_ℓ multiplies (d, k·b), and x multiplies (d·k, inputs) or (d·k, b). A
product takes at most 8Nn flops per column, whatever the number of outputs is. `products` takes 4Nn
and what reading the stored factors costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.network.jacobians.contractions import contract, expand
from hcurv.network.linearisation import Linearisation
from hcurv.network.products import even_slices

__all__ = ["PassSizes", "product", "root_product", "root_transposed"]


@dataclass(frozen=True)
class PassSizes:
    """How much goes through the network at a time; the results do not depend on it.

    The defaults keep the values of a layer in the caches of a desktop processor, and were chosen by
    timing the products of deep networks in `benchmarks/entries.py`.

    Attributes:
        max_columns: most right-hand sides at a time.
        min_points: with fewer points at a time, the sums over points take longer to add up than to
            compute.
        hidden_floats: floats of the values of the widest hidden layer.
        output_floats: floats of the values of some outputs. There are more of these than of other
            values, and they go through one right-hand side after the other.
        sum_floats: floats of a running sum where R_i is not diagonal.
    """

    max_columns: int = 8
    min_points: int = 256
    hidden_floats: int = 2**20
    output_floats: int = 2**19
    sum_floats: int = 2**19


_DEFAULT_SIZES = PassSizes()


def product(
    linearisation: Linearisation, rhs: Tensor, workspace: int, sizes: PassSizes = _DEFAULT_SIZES
) -> Tensor:
    """H @ rhs for rhs of shape (N, k), within ``workspace`` bytes of temporary memory."""
    result = torch.empty_like(rhs)
    kind = _SummedOutputs if linearisation.sums_are_cheaper else _Outputs

    def multiply(passes: _Passes, columns: slice, points: list[slice]) -> None:
        passes.read(rhs[:, columns])
        outputs = kind(passes)
        for some in points:
            passes.go_to(some)
            passes.backward(outputs.turn(passes.forward()))
        outputs.finish()
        passes.write(result[:, columns])

    _for_all_columns(multiply, linearisation, rhs.shape[1], workspace, sizes)
    return result


def root_product(
    linearisation: Linearisation, rhs: Tensor, workspace: int, sizes: PassSizes = _DEFAULT_SIZES
) -> Tensor:
    """S @ rhs for rhs of shape (N, k), point by point: (n·q, k)."""
    num_columns = rhs.shape[1]
    result = rhs.new_empty(linearisation.num_points, linearisation.num_rows, num_columns)

    def multiply(passes: _Passes, columns: slice, points: list[slice]) -> None:
        passes.read(rhs[:, columns])
        for some in points:
            passes.go_to(some)
            reached, target = passes.forward(), result[some, :, columns]
            for part in passes.parts:
                values = passes.outputs(part, reached)
                target[:, part.rows, part.columns] = passes.weigh(part, values)

    _for_all_columns(multiply, linearisation, num_columns, workspace, sizes)
    return result.flatten(0, 1)


def root_transposed(
    linearisation: Linearisation, values: Tensor, workspace: int, sizes: PassSizes = _DEFAULT_SIZES
) -> Tensor:
    """Sᵀ @ values for values of shape (n·q, k): (N, k)."""
    num_columns = values.shape[1]
    outputs = values.reshape(linearisation.num_points, linearisation.num_rows, num_columns)
    result = values.new_empty(linearisation.num_parameters, num_columns)

    def multiply(passes: _Passes, columns: slice, points: list[slice]) -> None:
        for some in points:
            passes.go_to(some)
            returned, source = passes.turn_round(), outputs[some, :, columns]
            for part in passes.parts:
                weighted = passes.weigh_transposed(part, source[:, part.rows, part.columns])
                passes.take_back(part, weighted, returned)
            passes.backward(returned)
        passes.write(result[:, columns])

    _for_all_columns(multiply, linearisation, num_columns, workspace, sizes)
    return result


def _for_all_columns(
    multiply: Callable[[_Passes, slice, list[slice]], None],
    linearisation: Linearisation,
    num_columns: int,
    workspace: int,
    sizes: PassSizes,
) -> None:
    """Call ``multiply`` with passes, a range of columns and all points, in ranges that fit."""
    for columns, points in _steps(linearisation, num_columns, workspace, sizes):
        count = columns.stop - columns.start
        # No name refers to the passes, so that their memory is free before the next are made.
        multiply(_Passes(linearisation, count, points[0].stop, sizes), columns, points)


def _steps(
    linearisation: Linearisation, num_columns: int, workspace: int, sizes: PassSizes
) -> Iterator[tuple[slice, list[slice]]]:
    """Ranges of columns, and for each of them ranges of points; no range is longer than the first.

    Each column takes two copies of its N entries, and each column and point some values of units.
    """
    budget = workspace // linearisation.dtype.itemsize
    fewest = min(linearisation.num_points, sizes.min_points)
    copies, values = 2 * linearisation.num_parameters, linearisation.pass_floats
    most_columns = max(1, min(sizes.max_columns, budget // (copies + fewest * values)))
    for columns in even_slices(num_columns, most_columns):
        count = columns.stop - columns.start
        cached = max(fewest, sizes.hidden_floats // (linearisation.widest * count))
        most_points = max(1, min((budget // count - copies) // values, cached))
        yield columns, list(even_slices(linearisation.num_points, most_points))


class _Part(NamedTuple):
    """Some outputs and right-hand sides: one or all of these.

    Attributes:
        outputs: the range of the outputs; all of them if R_i is not diagonal.
        columns: the range of the right-hand sides.
        rows: the range of the rows of R_i.
    """

    outputs: slice
    columns: slice
    rows: slice


class _Passes:
    """Forward and backward passes for some right-hand sides, over one range of points at a time.

    Hidden layers are computed for all right-hand sides at once. The outputs come and go in parts.

    Args:
        linearisation: the network at all points.
        num_columns: k.
        most_points: the largest number b of points of a range.
        sizes: how much of the outputs exists at a time.

    Attributes:
        directions: Ŵ of the trainable layers, (units, k, inputs), by the number of the layer.
        sums: Σ_i z_i x_iᵀ, in the same form.
        parts: parts that cover all outputs and right-hand sides.
    """

    def __init__(
        self, linearisation: Linearisation, num_columns: int, most_points: int, sizes: PassSizes
    ) -> None:
        self.linearisation, self.num_columns = linearisation, num_columns
        self._sizes = sizes
        self._places = linearisation.places
        self.num_hidden = linearisation.num_layers - 1
        self.directions: dict[int, Tensor] = {}
        empty = linearisation.inputs.new_empty
        self.sums = {
            number: empty(
                place.layer.out_features,
                num_columns,
                place.trainable_inputs.stop - place.trainable_inputs.start,
            ).zero_()
            for number, place in self._places.items()
        }
        self.parts = self._divide_outputs(most_points)
        # The values of a layer and those of the next one take turns in these two.
        self._hidden = empty(2, linearisation.widest * num_columns * most_points)
        self._taken = 0
        first = self.parts[0]
        units = first.outputs.stop * first.columns.stop
        self._outputs = empty(units * most_points)

    def _divide_outputs(self, most_points: int) -> list[_Part]:
        """All right-hand sides at once if they are few or R_i is not diagonal, or one by one."""
        count, num_columns = self.linearisation.num_outputs, self.num_columns
        if self.linearisation.root.ndim == 3:
            everything = slice(0, self.linearisation.num_rows)
            return [_Part(slice(0, count), slice(0, num_columns), everything)]
        most = self._sizes.output_floats // most_points
        together = num_columns * min(count, 16) <= most
        step = num_columns if together else 1
        return [
            _Part(some, slice(column, column + step), some)
            for column in range(0, num_columns, step)
            for some in even_slices(count, max(16, most // step))
        ]

    def read(self, columns: Tensor) -> None:
        """Take Ŵ of all trainable layers, the biases last."""
        for number, place in self._places.items():
            weight, bias = place.read(columns, place.units)
            directions = torch.empty_like(self.sums[number])
            if weight is not None:
                directions[:, :, : weight.shape[1]] = weight.transpose(1, 2)
            if bias is not None:
                directions[:, :, -1] = bias
            self.directions[number] = directions

    def write(self, target: Tensor) -> None:
        """Write the sums as columns of the flat vector."""
        for number, place in self._places.items():
            weight, bias = place.read(target, place.units)
            sums = self.sums[number]
            if weight is not None:
                weight.copy_(sums[:, :, : weight.shape[1]].transpose(1, 2))
            if bias is not None:
                bias.copy_(sums[:, :, -1])

    def go_to(self, points: slice) -> None:
        """Go to a range of points."""
        self.points = points
        self.num_points = points.stop - points.start

    def features(self, number: int) -> Tensor:
        """The inputs x of a layer that belong to trainable parameters, (f, b)."""
        return self.linearisation.inputs[self._places[number].trainable_inputs, self.points]

    def _next(self, num_units: int) -> Tensor:
        """Memory for the values of the next layer, (units, k·b)."""
        self._taken = 1 - self._taken
        length = self.num_columns * self.num_points
        return self._hidden[self._taken, : num_units * length].view(num_units, length)

    def forward(self) -> Tensor:
        """Steps (a) up to the last hidden layer: its t, (units, k·b); no units without a layer."""
        current = self._next(0)
        for number in range(self.num_hidden):
            weight = self.linearisation.layers[number].weight
            following = self._next(len(weight))
            if number in self._places:
                directions = self.directions[number].flatten(0, 1)
                own = following.view(len(directions), -1)
                torch.mm(directions, self.features(number), out=own)
                if number > 0:
                    following.addmm_(weight, current)
            else:
                torch.mm(weight, current, out=following)
            self._scale(following, number)
            current = following
        return current

    def turn_round(self) -> Tensor:
        """Memory for W_Lᵀ z_L, (units, k·b)."""
        return self._next(self.linearisation.layers[-1].in_features if self.num_hidden else 0)

    def backward(self, values: Tensor) -> None:
        """Steps (c) and (d) of the hidden layers, from W_Lᵀ z_L, which is overwritten."""
        for number in range(self.num_hidden - 1, -1, -1):
            self._scale(values, number)
            if number in self._places:
                sums = self.sums[number].flatten(0, 1)
                sums.addmm_(values.view(len(sums), -1), self.features(number).T)
            if number > 0:
                weight = self.linearisation.layers[number].weight
                previous = self._next(weight.shape[1])
                values = torch.mm(weight.T, values, out=previous)

    def _scale(self, values: Tensor, number: int) -> None:
        """Multiply by the slopes M of a hidden layer."""
        slopes = self.linearisation.slopes[number]
        if slopes is not None:
            own = values.view(len(values), self.num_columns, -1)
            own.mul_(slopes[:, None, self.points])

    def _part_values(self, part: _Part) -> Tensor:
        """Memory for values of some outputs, (outputs, columns, b)."""
        shape = (_length(part.outputs), _length(part.columns), self.num_points)
        return self._outputs[: torch.Size(shape).numel()].view(shape)

    def _of_part(self, part: _Part, values: Tensor) -> Tensor:
        """The values of hidden units for some right-hand sides, (units, columns·b)."""
        start, stop = (end * self.num_points for end in (part.columns.start, part.columns.stop))
        return values[:, start:stop]

    def outputs(self, part: _Part, reached: Tensor) -> Tensor:
        """a of some outputs, (outputs, columns, b), from t of the last hidden layer."""
        values = self._part_values(part)
        by_output = values.flatten(1)
        weight = self.linearisation.layers[-1].weight[part.outputs]
        if self.num_hidden not in self._places:
            torch.mm(weight, self._of_part(part, reached), out=by_output)
            return values
        directions = self.directions[self.num_hidden][part.outputs, part.columns].flatten(0, 1)
        torch.mm(directions, self.features(self.num_hidden), out=values.flatten(0, 1))
        if self.num_hidden:
            by_output.addmm_(weight, self._of_part(part, reached))
        return values

    def take_back(self, part: _Part, values: Tensor, returned: Tensor) -> None:
        """Step (d) of the last layer, and add W_Lᵀ z of some outputs to ``returned``."""
        if self.num_hidden in self._places:
            sums = self.sums[self.num_hidden][part.outputs, part.columns].flatten(0, 1)
            sums.addmm_(values.flatten(0, 1), self.features(self.num_hidden).T)
        if self.num_hidden:
            weight = self.linearisation.layers[-1].weight[part.outputs]
            target = self._of_part(part, returned)
            torch.addmm(
                target, weight.T, values.flatten(1), beta=int(part.outputs.start > 0), out=target
            )

    def _root(self, part: _Part) -> Tensor:
        return self.linearisation.root[part.outputs, ..., self.points]

    def weigh(self, part: _Part, values: Tensor) -> Tensor:
        """y = R M a, (b, rows, columns), from a of some outputs, which is given up."""
        root = self._root(part)
        if root.ndim == 2:
            return values.mul_(root[:, None]).permute(2, 0, 1)
        result = root.new_zeros(self.num_points, root.shape[1], values.shape[1])
        contract(root, values.transpose(1, 2), result, self._sizes.sum_floats)
        return result

    def weigh_transposed(self, part: _Part, weighted: Tensor) -> Tensor:
        """z = (R M)ᵀ y of some outputs, (outputs, columns, b), from y, (b, rows, columns)."""
        values, root = self._part_values(part), self._root(part)
        if root.ndim == 2:
            return torch.mul(weighted.permute(1, 2, 0), root[:, None], out=values)
        return values.copy_(expand(root, weighted).transpose(1, 2))

    def weigh_twice(self, part: _Part, values: Tensor) -> Tensor:
        """z = (R M)ᵀ R M a of some outputs."""
        root = self._root(part)
        if root.ndim == 2:
            return values.mul_(root.square()[:, None])
        return self.weigh_transposed(part, self.weigh(part, values))


class _Outputs:
    """Step (b), through all outputs."""

    def __init__(self, passes: _Passes) -> None:
        self._passes = passes

    def turn(self, reached: Tensor) -> Tensor:
        """W_Lᵀ z_L from t of the last hidden layer, both (units, k·b)."""
        passes = self._passes
        returned = passes.turn_round()
        for part in passes.parts:
            values = passes.weigh_twice(part, passes.outputs(part, reached))
            passes.take_back(part, values, returned)
        return returned

    def finish(self) -> None:
        """Nothing is left to do."""


class _SummedOutputs:
    """Step (b) where R_i M_i^L is one number c_i: for linear outputs and squared errors.

    With s = t^{L-1} and x the inputs of the last layer, the sum Σ_i z_L xᵀ is
    W_L (Σ_i c² s xᵀ) + Ŵ (Σ_i c² x xᵀ), and W_Lᵀz_L is c²(W_LᵀW_L s + (W_LᵀŴ) x), so that nothing
    but sums over points is as wide as the outputs.
    """

    def __init__(self, passes: _Passes) -> None:
        self._passes, self._last = passes, passes.num_hidden
        self._weight = passes.linearisation.layers[-1].weight
        self._square = self._weight.T @ self._weight
        self._trainable = self._last in passes.directions
        if self._trainable:
            directions = passes.directions[self._last]
            num_inputs = directions.shape[2]
            self._crossed = (self._weight.T @ directions.flatten(1)).view(-1, num_inputs)
            self._moments = torch.zeros_like(self._crossed)
            self._gram = directions.new_zeros(num_inputs, num_inputs)

    def turn(self, reached: Tensor) -> Tensor:
        """W_Lᵀ z_L from t of the last hidden layer, both (units, k·b)."""
        passes = self._passes
        squares = passes.linearisation.root[0, passes.points].square()
        returned = torch.mm(self._square, reached, out=passes.turn_round())
        by_column = returned.view(-1, passes.num_points)
        if self._trainable:
            features = passes.features(self._last)
            scaled = features * squares
            self._moments.addmm_(reached.view_as(by_column), scaled.T)
            self._gram.addmm_(scaled, features.T)
            by_column.addmm_(self._crossed, features)
        by_column.mul_(squares)
        return returned

    def finish(self) -> None:
        """The sums of the last layer."""
        if self._trainable:
            sums = self._passes.sums[self._last]
            directions = self._passes.directions[self._last].flatten(0, 1)
            torch.mm(directions, self._gram, out=sums.flatten(0, 1))
            sums.flatten(1).addmm_(self._weight, self._moments.view(self._weight.shape[1], -1))


def _length(some: slice) -> int:
    return int(some.stop - some.start)
