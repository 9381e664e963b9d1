"""Diagonal matrices: to add to others, and as the simplest approximation of a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import as_tensor
from hcurv.damping import Damping, DampingLike, DeviceLike, as_damping
from hcurv.factorized import Factorized, check_float_type
from hcurv.indexing import Index, resolve_blocks, resolve_indices
from hcurv.layout import layout_of
from hcurv.operators import EntryOperator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Diagonal", "DiagonalFactorization"]


@runtime_checkable
class _HasDiagonal(Protocol):
    def diagonal(self) -> Tensor: ...


class Diagonal(EntryOperator):
    """The operator diag(d): a matrix that is zero outside of its diagonal.

    Args:
        values: d, a floating-point tensor (N,), or anything with a method ``diagonal()``.

    Attributes:
        values: the diagonal, (N,).
        layout: the names of the parameters, where the diagonal is that of a matrix with names.

    Examples:
        >>> D = hcurv.Diagonal(torch.full((51,), 0.5, dtype=torch.float64))
        >>> torch.allclose((H + D) @ b, H @ b + 0.5 * b)
        True
        >>> torch.equal(hcurv.Diagonal(H).values, H.diagonal())
        True
        >>> hcurv.compress(H + D).shape
        (51, 51)
    """

    def __init__(self, values: Tensor | np.ndarray | _HasDiagonal) -> None:
        layout = None
        if isinstance(values, np.ndarray):
            values = as_tensor(values)
        if not isinstance(values, Tensor):
            if not isinstance(values, _HasDiagonal):
                raise TypeError(
                    "Diagonal takes a tensor (N,) or an object with a method diagonal(); got"
                    f" {type(values).__name__}"
                )
            layout, values = layout_of(values), values.diagonal()
            if not isinstance(values, Tensor):
                raise TypeError(f"diagonal() must return a tensor; got {type(values).__name__}")
        check_dense(values, "a diagonal")
        if values.ndim != 1 or values.numel() == 0:
            raise ValueError(
                f"a diagonal must have shape (N,) with N > 0; got {tuple(values.shape)}"
                " (for a dense matrix pass matrix.diagonal())"
            )
        if values.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"a diagonal must be float32 or float64; got {values.dtype} (convert it with .to())"
            )
        self.values = values.detach().clone()
        self.layout = layout

    def __repr__(self) -> str:
        """Size and type in one line."""
        return f"Diagonal(N={self.shape[0]}, dtype={self.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self.values.numel(), self.values.numel())

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def num_stored(self) -> int:
        """N."""
        return self.values.numel()

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,).

        Examples:
            >>> hcurv.Diagonal(torch.tensor([1.0, 2.0])).diagonal()
            tensor([1., 2.])
        """
        return self.values.clone()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``, always with two dimensions.

        Examples:
            >>> hcurv.Diagonal(torch.tensor([1.0, 2.0, 3.0])).block([0, 1], [1, 2])
            tensor([[0., 0.],
                    [2., 0.]])
        """
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        return self.blocks(row_index[None], col_index[None])[0]

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k).

        Examples:
            >>> rows, cols = torch.tensor([[0], [1]]), torch.tensor([[0, 1], [0, 1]])
            >>> hcurv.Diagonal(torch.tensor([1.0, 2.0])).blocks(rows, cols)
            tensor([[[1., 0.]],
            <BLANKLINE>
                    [[0., 2.]]])
        """
        rows, cols = resolve_blocks(rows, cols, self.shape[0], self.device)
        values = self.values[rows][:, :, None].expand(*rows.shape, cols.shape[1])
        return values.masked_fill(rows[:, :, None] != cols[:, None, :], 0.0)

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self.values[:, None] * rhs

    def factorize(self, damping: DampingLike) -> DiagonalFactorization:
        """Divide by the damped diagonal from now on.

        Args:
            damping: a number, a tensor (N,), or numbers by the names of parameters or layers.

        Examples:
            >>> D = hcurv.Diagonal(H).factorize({"0": 1.0, "2": 0.1})
            >>> D.solve(b).shape
            torch.Size([51])
        """
        return DiagonalFactorization(self.values, as_damping(damping, self.shape[0], self.layout))


class DiagonalFactorization(Factorized):
    """The inverse of a damped diagonal matrix. Made by `Diagonal.factorize`."""

    def __init__(self, values: Tensor, damping: Damping) -> None:
        super().__init__(damping)
        self._values = values
        self._damped = values.double() + damping.diagonal(values.numel(), values.device)
        if not bool((self._damped > 0).all()):
            raise ValueError(
                "the damped diagonal must be positive; its smallest entry is"
                f" {float(self._damped.min()):.3e}: choose a larger damping"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._values.numel(), self._values.numel())

    @property
    def dtype(self) -> torch.dtype:
        """Type of right-hand sides and solutions."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self._values.device

    @property
    def num_stored(self) -> int:
        """N floats."""
        return self._values.numel()

    def _matmat(self, rhs: Tensor) -> Tensor:
        return rhs / self._damped[:, None].to(rhs.dtype)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        return rhs / self._damped.sqrt()[:, None].to(rhs.dtype)

    def _logdet(self) -> Tensor:
        return self._damped.log().sum().cpu()

    def _inverse_diagonal(self) -> Tensor:
        return 1 / self._damped

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This factorization on another device or in another precision."""
        check_float_type(dtype, device)
        return type(self)(self._values.to(device, dtype), self._damping.to(device))
