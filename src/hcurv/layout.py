"""The flat parameter vector: which index belongs to which parameter, layer, unit and input.

Rows and columns of every curvature matrix are numbered as in
`torch.nn.utils.parameters_to_vector` over the parameters with ``requires_grad``. `ParameterLayout`
is the one place that knows this numbering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from hcurv.arguments import check_dense

__all__ = ["Grouping", "LinearParameters", "ParameterLayout", "layout_of"]

Grouping: TypeAlias = Literal["parameter", "layer", "unit"]


@dataclass(frozen=True)
class LinearParameters:
    """The trainable parameters of a layer z = W x + b, as ranges of the flat vector.

    Attributes:
        weight: where W lies, row by row; None if it is frozen.
        bias: where b lies; None if there is none or it is frozen.
        num_units: rows of W and entries of b.
        num_inputs: columns of W, whether or not W is trainable.
    """

    weight: slice | None
    bias: slice | None
    num_units: int
    num_inputs: int

    def read(self, flat: Tensor, units: slice | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Views of flat columns (N, k): weights (units, inputs, k) and biases (units, k).

        Args:
            flat: vectors over all parameters, (N, k).
            units: a range of the layer's units; None for all of them.
        """
        first, last = (0, self.num_units) if units is None else (units.start, units.stop)
        weight, bias = None, None
        if self.weight is not None:
            start, width = self.weight.start, self.num_inputs
            weight = flat[start + first * width : start + last * width]
            weight = weight.view(last - first, width, flat.shape[1])
        if self.bias is not None:
            bias = flat[self.bias.start + first : self.bias.start + last]
        return weight, bias


class ParameterLayout:
    """Names, shapes and places of the trainable parameters in the flat vector.

    A *layer* is a module that holds parameters, called by its qualified name ("" for parameters
    of the model itself). *Unit* j of a layer is row j of each of its parameters: the weights that
    lead into the unit, and its bias.

    Args:
        shapes: shape of each trainable parameter by its name, in the order of the flat vector.

    Attributes:
        names: names of the parameters, in order.
        shapes: their shapes, by name.
        slices: their ranges in the flat vector, by name.
        layers: names of the parameters of each layer, by the layer's name, in order.

    Examples:
        >>> layout = hcurv.ParameterLayout.of(model)
        >>> layout.names
        ('0.weight', '0.bias', '2.weight', '2.bias')
        >>> layout.slices["0.bias"]
        slice(24, 30, None)
        >>> H[layout.select("0.bias"), layout.select("2.*")].shape
        torch.Size([6, 21])
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.names = tuple(self.shapes)
        self.slices: dict[str, slice] = {}
        layers: dict[str, list[str]] = {}
        start = 0
        for name, shape in self.shapes.items():
            stop = start + prod(shape)
            self.slices[name] = slice(start, stop)
            layers.setdefault(layer_of(name), []).append(name)
            start = stop
        self.layers = {layer: tuple(names) for layer, names in layers.items()}
        self._size = start

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model's parameters with ``requires_grad``.

        Examples:
            >>> hcurv.ParameterLayout.of(model).size == H.shape[0]
            True
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        return cls({name: p.shape for name, p in model.named_parameters() if p.requires_grad})

    @property
    def size(self) -> int:
        """N, the length of the flat vector."""
        return self._size

    def __repr__(self) -> str:
        """Every parameter with its shape and range."""
        lines = [
            f"  {name}: {tuple(self.shapes[name])}, [{part.start}:{part.stop}]"
            for name, part in self.slices.items()
        ]
        return "\n".join([f"ParameterLayout(N={self.size})", *lines])

    def __eq__(self, other: object) -> bool:
        """Whether names, shapes and their order agree."""
        if not isinstance(other, ParameterLayout):
            return NotImplemented
        return list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Join tensors of all parameters, by name, into one flat vector (N,).

        Examples:
            >>> flat = H.layout.flatten(dict(model.named_parameters()))
            >>> torch.equal(flat, torch.nn.utils.parameters_to_vector(model.parameters()))
            True
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be tensors by name; got {type(values).__name__}")
        unknown = [name for name in values if name not in self.shapes]
        missing = [name for name in self.names if name not in values]
        if unknown or missing:
            raise KeyError(
                f"values must have one tensor for each of {self._listed()};"
                f" missing: {missing or 'none'}, not in the layout: {unknown or 'none'}"
            )
        for name, shape in self.shapes.items():
            if values[name].shape != shape:
                raise ValueError(
                    f"'{name}' must have shape {tuple(shape)}; got {tuple(values[name].shape)}"
                )
        return torch.cat([values[name].reshape(-1) for name in self.names])

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat vector (N,) into tensors of the parameters' shapes, by name; all are views.

        A tensor of shape (N, k) is cut into tensors with a last axis of length k.

        Examples:
            >>> {name: tuple(part.shape) for name, part in H.layout.unflatten(b).items()}
            {'0.weight': (6, 4), '0.bias': (6,), '2.weight': (3, 6), '2.bias': (3,)}
        """
        if not isinstance(flat, Tensor):
            raise TypeError(f"flat must be a tensor; got {type(flat).__name__}")
        check_dense(flat, "flat")
        if flat.ndim not in (1, 2) or flat.shape[0] != self.size:
            raise ValueError(
                f"a flat vector must have shape ({self.size},) or ({self.size}, k);"
                f" got {tuple(flat.shape)}"
            )
        rest = flat.shape[1:]
        return {
            name: flat[part].view(*self.shapes[name], *rest) for name, part in self.slices.items()
        }

    def select(self, *patterns: str) -> Tensor:
        """Flat indices, ascending, of the parameters that any of the patterns names.

        Args:
            patterns: names of parameters or of layers, or shell-style patterns such as "*.bias".

        Raises:
            KeyError: a pattern names nothing; the message lists what there is.

        Examples:
            >>> H.layout.select("2.bias")
            tensor([48, 49, 50])
            >>> H.layout.select("0", "*.bias").numel()
            33
        """
        chosen: set[str] = set()
        for pattern in patterns:
            chosen.update(self.matching(pattern))
        parts = [torch.arange(p.start, p.stop) for name, p in self.slices.items() if name in chosen]
        return torch.cat([torch.zeros(0, dtype=torch.long), *parts])

    def matching(self, pattern: str) -> tuple[str, ...]:
        """Names of the parameters that a name, a layer's name or a shell-style pattern means.

        Examples:
            >>> H.layout.matching("*.weight")
            ('0.weight', '2.weight')
        """
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern must be a string; got {type(pattern).__name__}")
        if pattern in self.shapes:
            return (pattern,)
        if pattern in self.layers:
            return self.layers[pattern]
        inside = tuple(name for name in self.names if name.startswith(f"{pattern}."))
        found = inside or tuple(name for name in self.names if fnmatchcase(name, pattern))
        if not found:
            raise KeyError(
                f"no trainable parameter or layer is called {pattern!r}; there are {self._listed()}"
            )
        return found

    def blocks(self, grouping: Grouping) -> list[Tensor]:
        """Flat indices of each parameter, of each layer, or of each unit, in order.

        Parameters without rows (scalars) are blocks of their own where units are asked for.

        Examples:
            >>> [rows.numel() for rows in H.layout.blocks("layer")]
            [30, 21]
            >>> H.layout.blocks("unit")[0]
            tensor([ 0,  1,  2,  3, 24])
        """
        if grouping == "parameter":
            return [torch.arange(p.start, p.stop) for p in self.slices.values() if p.stop > p.start]
        if grouping == "layer":
            layers = [self.select(*names) for names in self.layers.values()]
            return [rows for rows in layers if rows.numel()]
        if grouping != "unit":
            raise ValueError(
                f'blocks must be grouped by "parameter", "layer" or "unit"; got {grouping!r}'
            )
        units: list[Tensor] = []
        for names in self.layers.values():
            by_height: dict[int, list[Tensor]] = {}
            for name in names:
                part, shape = self.slices[name], self.shapes[name]
                height = shape[0] if shape else 1
                if part.stop > part.start:
                    rows = torch.arange(part.start, part.stop).view(height, -1)
                    by_height.setdefault(height, []).append(rows)
            for tables in by_height.values():
                units.extend(torch.cat(tables, 1))
        return units

    def layer_shape(self, layer: str) -> tuple[int, int]:
        """Inputs and outputs of a layer: columns and rows of its largest weight.

        Examples:
            >>> H.layout.layer_shape("0")
            (4, 6)
        """
        if layer not in self.layers:
            raise KeyError(
                f"layer must be one of {', '.join(map(repr, self.layers))}; got {layer!r}"
            )
        shapes = [self.shapes[name] for name in self.layers[layer]]
        largest = max(shapes, key=lambda shape: (len(shape) > 1, shape.numel()))
        height = largest[0] if largest else 1
        return (prod(largest[1:]), height)

    def expand(self, values: Mapping[str, float | Tensor]) -> Tensor:
        """One number for each flat index, (N,), double precision, from numbers by name.

        Args:
            values: numbers (or tensors of one number, whose gradients are kept) by the name of a
                parameter or layer, or by a pattern. A parameter that several of them name takes
                the number of the most specific one: its own name before its layer's name, and
                that before a pattern. Every parameter must be named.

        Examples:
            >>> damping = H.layout.expand({"0": 1.0, "2": 0.1, "2.bias": 0.5})
            >>> damping[[0, 29, 30, 50]]
            tensor([1.0000, 1.0000, 0.1000, 0.5000], dtype=torch.float64)
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be numbers by name; got {type(values).__name__}")
        chosen: dict[str, tuple[int, float | Tensor]] = {}
        for pattern, value in values.items():
            rank = 2 if pattern in self.shapes else 1 if pattern in self.layers else 0
            for name in self.matching(pattern):
                known = chosen.get(name)
                if known is not None and known[0] == rank:
                    raise ValueError(f"'{name}' is named twice, the second time by {pattern!r}")
                if known is None or known[0] < rank:
                    chosen[name] = (rank, value)
        missing = [name for name in self.names if name not in chosen]
        if missing:
            raise KeyError(
                f"a number is needed for every parameter; none is given for {', '.join(missing)}"
                ' (add a pattern for the rest, such as "*")'
            )
        parts = []
        for name, part in self.slices.items():
            number = torch.as_tensor(chosen[name][1], dtype=torch.float64)
            if number.numel() != 1:
                raise ValueError(
                    f"the value for '{name}' must be one number; got shape {tuple(number.shape)}"
                )
            parts.append(number.reshape(1).expand(part.stop - part.start))
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    def linear(
        self, weight: str | None, bias: str | None, num_units: int, num_inputs: int
    ) -> LinearParameters:
        """The weight and bias of a Linear layer, as far as they are trainable.

        Args:
            weight: name of the weight; a name that is not in the layout is that of a frozen one.
            bias: name of the bias, likewise; None if the layer has none.
            num_units: outputs of the layer.
            num_inputs: inputs of the layer.

        Examples:
            >>> H.layout.linear("0.weight", "0.bias", num_units=6, num_inputs=4).bias
            slice(24, 30, None)
        """
        ranges = [None if name is None else self.slices.get(name) for name in (weight, bias)]
        return LinearParameters(ranges[0], ranges[1], num_units, num_inputs)

    def locate(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which parameter, which of its rows, and which place in that row each flat index is.

        Args:
            index: flat indices in [0, N), of any shape.

        Returns:
            Positions in ``names``, rows, and places in the row, all shaped like ``index``. An
            entry of a vector, such as a bias, is a row with one place.

        Examples:
            >>> [values.tolist() for values in H.layout.locate(torch.tensor([5, 25]))]
            [[0, 1], [1, 1], [1, 0]]
        """
        if not isinstance(index, Tensor) or index.is_floating_point() or index.is_sparse:
            raise TypeError(
                f"index must be a dense tensor of integers; got {type(index).__name__}"
                + (f" of {index.dtype}" if isinstance(index, Tensor) else "")
            )
        if index.is_meta:
            raise TypeError("index must hold values; got a tensor on the meta device")
        starts = torch.tensor([part.start for part in self.slices.values()], device=index.device)
        widths = torch.tensor(
            [prod(shape[1:]) for shape in self.shapes.values()], device=index.device
        )
        # With side="right" the last of several equal starts is taken, which is never empty.
        parameter = torch.searchsorted(starts, index.contiguous(), right=True) - 1
        local, width = index - starts[parameter], widths[parameter]
        return parameter, local.div(width, rounding_mode="floor"), local % width

    def _listed(self) -> str:
        names = [repr(name) for name in self.names]
        return ", ".join(names if len(names) <= 12 else [*names[:11], "…"])


def layout_of(matrix: object) -> ParameterLayout | None:
    """The layout of a matrix that knows the names of its parameters, else None."""
    # Dense tensors have an attribute ``layout``, too, which is something else.
    layout = getattr(matrix, "layout", None)
    return layout if isinstance(layout, ParameterLayout) else None


def layer_of(name: str) -> str:
    """The name of the module that holds a parameter: "net.0" for "net.0.weight"."""
    return name.rpartition(".")[0]
