"""Matrices as linear operators of curvlinops, for its inverses and its estimators.

The other way round nothing is needed: an operator of curvlinops has products, so that
``hcurv.compress(operator)``, ``hcurv.eigsh`` and ``hcurv.cg`` take it as it is. To precondition its
conjugate gradients, pass ``preconditioner=F.solve`` to ``CGInverseLinearOperator``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.layout import layout_of
from hcurv.operators import SymmetricOperator
from hcurv.sources import MatrixProduct, as_operator

try:
    from curvlinops._torch_base import PyTorchLinearOperator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hcurv.interop.curvlinops needs curvlinops, version 3 or newer:"
        " pip install 'hcurv[curvlinops]'",
        name=error.name,
    ) from error

__all__ = ["SymmetricLinearOperator", "as_curvlinops"]


def as_curvlinops(
    matrix: SymmetricOperator | MatrixProduct | Tensor,
) -> SymmetricLinearOperator:
    """Make a `curvlinops.PyTorchLinearOperator` of any matrix of this library.

    Args:
        matrix: such as a `GaussNewton`, an `HMatrix` or a `Factorized`, whose products are solves.

    Returns:
        An operator that multiplies tensors (N,) and (N, k). If the matrix knows the names of its
        parameters (`layout`), lists of tensors in the shapes of the parameters work as well.

    Examples:
        >>> from hcurv.interop.curvlinops import as_curvlinops
        >>> operator = as_curvlinops(H)
        >>> torch.allclose(operator @ b, H @ b)
        True
        >>> [tuple(part.shape) for part in operator @ [p.detach() for p in model.parameters()]]
        [(6, 4), (6,), (3, 6), (3,)]
    """
    return SymmetricLinearOperator(as_operator(matrix, "the matrix"))


class SymmetricLinearOperator(PyTorchLinearOperator):
    """A matrix in the terms of curvlinops. Made by `as_curvlinops`."""

    SELF_ADJOINT = True

    def __init__(self, matrix: SymmetricOperator) -> None:
        layout = layout_of(matrix)
        shapes = [(matrix.shape[0],)] if layout is None else list(layout.shapes.values())
        super().__init__(shapes, shapes)
        self._matrix = matrix

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrix is."""
        return self._matrix.device

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        columns = torch.cat([part.flatten(end_dim=-2) for part in X])
        parts = (self._matrix @ columns).split(self._out_shape_flat)
        return [
            part.reshape(*shape, columns.shape[1])
            for part, shape in zip(parts, self._out_shape, strict=True)
        ]

    def _adjoint(self) -> SymmetricLinearOperator:
        return self
