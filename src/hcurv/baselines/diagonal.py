"""Diagonal and block-diagonal approximations from exact entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hcurv.gauss_newton import GaussNewton
from hcurv.memory import require_bytes
from hcurv.operators import SymmetricOperator

__all__ = ["BlockDiagonal", "Diagonal", "parameter_blocks"]


class Diagonal(SymmetricOperator):
    """The diagonal of a matrix (the paper's fast diagonal; what AdaHessian-like methods use).

    Args:
        source: anything with ``diagonal()``.
    """

    def __init__(self, source: Any) -> None:
        self.values: Tensor = source.diagonal()

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self.values.numel(), self.values.numel())

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self.values.device

    @property
    def num_stored(self) -> int:
        """N floats."""
        return self.values.numel()

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        return self.values.clone()

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self.values[:, None] * rhs

    def solve(self, rhs: Tensor, damping: float) -> Tensor:
        """Divide by the damped diagonal; rhs (N,) or (N, k)."""
        self._check_vectors(rhs)
        shifted = self._damped(damping).to(self.dtype)
        return rhs / (shifted if rhs.ndim == 1 else shifted[:, None])

    def logdet(self, damping: float) -> Tensor:
        """log det of the damped diagonal, in double precision."""
        return self._damped(damping).log().sum()

    def _damped(self, damping: float) -> Tensor:
        shifted = self.values.double() + damping
        if not (math.isfinite(damping) and bool((shifted > 0).all())):
            raise ValueError(f"the diagonal is not positive with damping {damping}")
        return shifted


def parameter_blocks(matrix: GaussNewton, kind: Literal["layer", "unit"]) -> list[Tensor]:
    """The flat indices of each layer's parameters, or of each unit's weights and bias."""
    if kind not in ("layer", "unit"):
        raise ValueError(f'blocks must be "layer" or "unit"; got {kind!r}')
    units, _ = matrix.factors.locate(torch.arange(matrix.shape[0], device=matrix.device))
    if kind == "layer":
        ends = torch.tensor([slot.units.stop for slot in matrix.factors.slots])
        units = torch.searchsorted(ends.to(units.device), units, right=True)
    order = units.argsort(stable=True)
    counts = units.bincount()
    return [part for part in order.split(counts.tolist()) if part.numel()]


class BlockDiagonal(SymmetricOperator):
    """Exact diagonal blocks, zero elsewhere.

    Args:
        source: a `GaussNewton`, or anything with ``block(rows, cols)`` if ``blocks`` are indices.
        blocks: "layer", "unit" (all weights and the bias of a unit), or disjoint index tensors.
            Rows in none of them are zero.
    """

    def __init__(
        self, source: Any, blocks: Literal["layer", "unit"] | Sequence[Tensor] = "layer"
    ) -> None:
        size = source.shape[0]
        self._shape = (size, size)
        self._device: torch.device = source.device
        self._dtype: torch.dtype = source.dtype
        if isinstance(blocks, str):
            if not isinstance(source, GaussNewton):
                raise TypeError(
                    f'blocks="{blocks}" needs a GaussNewton; pass index tensors for other matrices'
                )
            blocks = parameter_blocks(source, blocks)
        self.rows = [part.to(self._device) for part in blocks]
        everything = torch.cat([*self.rows, torch.zeros(0, dtype=torch.long, device=self._device)])
        if everything.unique().numel() < everything.numel():
            raise ValueError("blocks must not overlap")
        floats = sum(part.numel() ** 2 for part in self.rows)
        require_bytes(
            2 * floats * self._dtype.itemsize,
            self._device,
            f"{len(self.rows)} diagonal blocks of up to"
            f" {max((p.numel() for p in self.rows), default=0)} rows",
            ('choose smaller blocks, such as blocks="unit"', "compress the matrix instead"),
        )
        self.values = [source.block(part, part) for part in self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self._device

    @property
    def num_stored(self) -> int:
        """Floats of all blocks."""
        return sum(block.numel() for block in self.values)

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        result = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
        for rows, block in zip(self.rows, self.values, strict=True):
            result[rows] = block.diagonal()
        return result

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = torch.zeros_like(rhs)
        for rows, block in zip(self.rows, self.values, strict=True):
            result[rows] = block @ rhs[rows]
        return result

    def factorize(self, damping: float) -> BlockDiagonalFactors:
        """Cholesky factors of all damped blocks."""
        return BlockDiagonalFactors(self, damping)

    def solve(self, rhs: Tensor, damping: float) -> Tensor:
        """Solve with all damped blocks; `factorize` once for several right-hand sides."""
        return self.factorize(damping).solve(rhs)

    def logdet(self, damping: float) -> Tensor:
        """log det with damping, in double precision."""
        return self.factorize(damping).logdet()


class BlockDiagonalFactors:
    """Cholesky factors of damped diagonal blocks."""

    def __init__(self, matrix: BlockDiagonal, damping: float) -> None:
        if not (math.isfinite(damping) and damping > 0):
            raise ValueError(f"damping must be positive; got {damping}")
        self.shape, self.dtype = matrix.shape, matrix.dtype
        self._matrix, self._damping = matrix, float(damping)
        self._factors = []
        for block in matrix.values:
            shifted = block.double()
            shifted = shifted + damping * torch.eye(
                block.shape[0], dtype=torch.float64, device=block.device
            )
            factor, info = torch.linalg.cholesky_ex(shifted)
            if int(info):
                raise ValueError(f"a block is not positive definite with damping {damping:.1e}")
            self._factors.append(factor)

    def solve(self, rhs: Tensor) -> Tensor:
        """Solve for rhs, (N,) or (N, k)."""
        self._matrix._check_vectors(rhs)
        columns = rhs if rhs.ndim == 2 else rhs[:, None]
        result = columns / self._damping
        for rows, factor in zip(self._matrix.rows, self._factors, strict=True):
            solved = torch.cholesky_solve(columns[rows].double(), factor)
            result[rows] = solved.to(rhs.dtype)
        return result.view_as(rhs)

    def logdet(self) -> Tensor:
        """log det, in double precision."""
        inside = sum(part.numel() for part in self._matrix.rows)
        total = torch.tensor(
            (self._matrix.shape[0] - inside) * math.log(self._damping), dtype=torch.float64
        )
        for factor in self._factors:
            total = total + 2 * factor.diagonal().log().sum().cpu()
        return total
