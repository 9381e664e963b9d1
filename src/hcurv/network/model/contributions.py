"""What a use of a parameter contributes to the columns of S, row by row.

A function that uses a parameter works on *rows*: the rows of a matrix, the images of a
convolution, the vectors that are normalised. Each row belongs to one point; a point may have
several. With g the derivative of a weighted output with respect to the function's result, a use is

- `LinearUse`: z = W x at each row (and at each inner position of it): g and x are kept apart;
- `LookupUse`: z = W[row of a table];
- `DirectUse`: everything whose derivative with respect to the parameter is known for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Contribution", "DirectUse", "LinearUse", "LookupUse"]


@dataclass(frozen=True, eq=False)
class LinearUse:
    """z = W x.

    Attributes:
        node: the node whose result's derivative is asked for.
        entries: flat indices of the parameter's entries that W consists of, (d_out, d_in).
        inputs: x, (rows, d_in, positions).
        factors: turns a derivative with respect to the result into one with respect to z,
            (rows, d_out, positions).
    """

    node: Any
    entries: Tensor
    inputs: Tensor
    factors: Callable[[Tensor], Tensor]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.inputs.shape[0]


@dataclass(frozen=True, eq=False)
class LookupUse:
    """z = W[place].

    Attributes:
        node: the node whose result's derivative is asked for.
        entries: flat indices of the parameter's entries that the table consists of, (V, d).
        places: the row of the table that each row looks up, (rows,).
        factors: turns a derivative with respect to the result into one with respect to z,
            (rows, d).
    """

    node: Any
    entries: Tensor
    places: Tensor
    factors: Callable[[Tensor], Tensor]

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.places.shape[0]


@dataclass(frozen=True, eq=False)
class DirectUse:
    """Any function whose derivative is known for each row.

    Attributes:
        node: the node whose result's derivative is asked for.
        entries: flat indices of the parameter's entries that the function sees, (p,).
        num_rows: the number of rows.
        gradients: turns a derivative with respect to the result into those with respect to the
            entries, for each row, (rows, p).
    """

    node: Any
    entries: Tensor
    num_rows: int
    gradients: Callable[[Tensor], Tensor]


Contribution: TypeAlias = LinearUse | LookupUse | DirectUse
