"""The global low-rank part V Vᵀ: what it leaves of a source, and what it does to solves.

With the rest A₀ + damping·I = (G Gᵀ)⁻¹ factorized, Z = Gᵀ V = Q T (Q orthonormal) gives

    A₀ + V Vᵀ + damping·I = G⁻ᵀ (I + Q T Tᵀ Qᵀ) G⁻¹,

and with the eigenvalues σ of T Tᵀ, absorbing eigenvectors into Q, any function of the middle factor
is I + Q (f(1 + σ) − 1) Qᵀ. This is Woodbury's formula and the determinant lemma between two halves
of a solve, which gives samples too. Where A₀ + damping·I is indefinite there are no halves: then
with F its inverse, C = I + Vᵀ F V and W = F V,  F − W C⁻¹ Wᵀ is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.indexing import Index, resolve_indices
from hcurv.linalg.nystrom import double_gram, outer_eigenpairs
from hcurv.linalg.tall_factors import by_columns
from hcurv.operators import EntryOperator, EntrySource
from hcurv.sources import blocks, has_product, structural_orders

__all__ = ["GlobalPart", "GlobalUpdate", "Remainder", "make_update"]


def take(vectors: Tensor, rows: Tensor) -> Tensor:
    """Return rows of ``vectors`` (N, k). All of them are the vectors themselves."""
    if rows.numel() == vectors.shape[0]:
        return vectors
    if vectors.shape[1] == 1:  # torch takes numbers from a vector faster than rows from a matrix
        return vectors[:, 0].index_select(0, rows)[:, None]
    return vectors.index_select(0, rows)


def add_factor(
    outputs: Tensor, rows: Tensor, factor: Tensor, mixed: Tensor, scale: float = 1.0
) -> None:
    """Add a factor (k, g) times ``mixed`` (g, c), scaled, to rows (k,) of ``outputs`` (N, c)."""
    if rows.numel() == outputs.shape[0]:
        outputs.addmm_(factor, mixed, alpha=scale)
    else:
        outputs.index_add_(0, rows, factor @ mixed, alpha=scale)


@dataclass(frozen=True)
class GlobalPart:
    """V Vᵀ.

    Attributes:
        rows: rows of the matrix that V has, ascending, (k,); the others are zero.
        factor: V, (k, g), given in any memory layout, and kept as `by_columns` says.
    """

    rows: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        """Bring the factor into the layout in which products are fast."""
        object.__setattr__(self, "factor", by_columns(self.factor))

    @property
    def rank(self) -> int:
        """Number g of columns."""
        return self.factor.shape[1]

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.factor.numel()

    def add_product(self, inputs: Tensor, outputs: Tensor, scale: float = 1.0) -> None:
        """Add V Vᵀ, scaled, times ``inputs`` (N, k) to ``outputs``."""
        mixed = self.factor.T @ take(inputs, self.rows)
        add_factor(outputs, self.rows, self.factor, mixed, scale)

    def diagonal(self, size: int) -> Tensor:
        """Return the diagonal of V Vᵀ, (size,)."""
        result = self.factor.new_zeros(size)
        result[self.rows] = self.factor.square().sum(1)
        return result

    def rows_of(self, index: Tensor) -> Tensor:
        """Return the rows of V for rows of the matrix, (…, g)."""
        if self.rows.numel() == 0:
            return self.factor.new_zeros(*index.shape, self.rank)
        places = torch.searchsorted(self.rows, index).clamp_(max=self.rows.numel() - 1)
        found = self.factor.T.index_select(1, places.reshape(-1)).T.view(*index.shape, self.rank)
        return found.mul_((self.rows[places] == index)[..., None])

    def whole(self, size: int) -> Tensor:
        """Return V with all rows of the matrix, (size, g)."""
        factor = self.factor.contiguous()
        if self.rows.numel() == size:
            return factor if factor is not self.factor else factor.clone()
        return factor.new_zeros(size, self.rank).index_copy_(0, self.rows, factor)


class Remainder(EntryOperator):
    """What a global part leaves of a source, as a source.

    Args:
        source: the matrix; needs a product.
        part: V Vᵀ, not larger than the matrix.
        diagonal: of the matrix.
    """

    def __init__(self, source: EntrySource, part: GlobalPart, diagonal: Tensor) -> None:
        if not has_product(source):
            raise TypeError(f"a global part needs products, and {type(source).__name__} has none")
        self._source, self._part = source, part
        # Rounding can make a diagonal entry slightly negative. Clamp it to a tiny positive value,
        # because zero marks a row that is truly zero.
        least = torch.finfo(source.dtype).eps * diagonal
        rest = diagonal - part.diagonal(source.shape[0]).to(diagonal)
        self._diagonal = torch.maximum(rest, least)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._source.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the source."""
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        """That of the source."""
        return self._source.device

    @property
    def num_stored(self) -> int:
        """Number of floats that the global part stores."""
        return self._part.num_stored

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        return self._diagonal.clone()

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        left, right = self._part.rows_of(row_index), self._part.rows_of(col_index)
        return self._source.block(row_index, col_index).addmm_(left, right.T, alpha=-1)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return many blocks of equal size at once: (B, m), (B, k) → (B, m, k)."""
        left, right = self._part.rows_of(rows), self._part.rows_of(cols)
        return blocks(self._source, rows, cols).baddbmm_(left, right.transpose(1, 2), alpha=-1)

    def orders(self) -> dict[str, Tensor]:
        """Return the orders of the source."""
        return structural_orders(self._source)

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = self._source @ rhs
        self._part.add_product(rhs, result, -1.0)
        return result


@dataclass(frozen=True)
class GlobalUpdate:
    """What a global part changes in solves.

    Attributes:
        rows: rows of the matrix that the basis has, (k,).
        basis: Q, or W made so that C⁻¹ is diagonal with entries ±1, (k, g), kept as `by_columns`
            says.
        values: σ, or these signs, (g,), double precision.
        between: whether it belongs between the halves of a solve.
    """

    rows: Tensor
    basis: Tensor
    values: Tensor
    between: bool

    def __post_init__(self) -> None:
        """Bring the basis into the layout in which products are fast."""
        object.__setattr__(self, "basis", by_columns(self.basis))

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.basis.numel() + self.values.numel()

    def invert(self, vectors: Tensor) -> Tensor:
        """The middle factor's inverse times ``vectors`` (N, k), which are changed."""
        return self._change(vectors, -self.values / (1 + self.values))

    def invert_root(self, vectors: Tensor) -> Tensor:
        """Its symmetric inverse root times ``vectors``, which are changed."""
        return self._change(vectors, (1 + self.values).rsqrt() - 1)

    def correct(self, rhs: Tensor, solved: Tensor) -> Tensor:
        """From F b to (F − W C⁻¹ Wᵀ) b, for ``rhs`` b; ``solved`` is changed."""
        add_factor(solved, self.rows, self.basis, self._scaled(rhs, -self.values))
        return solved

    def _change(self, vectors: Tensor, values: Tensor) -> Tensor:
        add_factor(vectors, self.rows, self.basis, self._scaled(vectors, values))
        return vectors

    def _scaled(self, vectors: Tensor, values: Tensor) -> Tensor:
        mixed = self.basis.T @ take(vectors, self.rows)
        return mixed * values.to(mixed.dtype)[:, None]


class Update(NamedTuple):
    """A `GlobalUpdate`, what it adds to log |det|, and to the number of negative eigenvalues."""

    update: GlobalUpdate
    log_determinant: float
    num_negative: int


def make_update(
    part: GlobalPart, size: int, apply: Callable[[Tensor], Tensor], between: bool
) -> Update:
    """Return what a global part changes in solves.

    Args:
        part: V Vᵀ.
        size: N.
        apply: multiplies (N, k) by Gᵀ if ``between``, else by F.
        between: whether the update belongs between the halves of a solve.
    """
    columns = apply(part.whole(size))
    rows = torch.linalg.vector_norm(columns, torch.inf, dim=1).nonzero().squeeze(1)
    if rows.numel() < size:
        columns = columns.index_select(0, rows)
    if between:
        basis, values = outer_eigenpairs(columns)
        update = GlobalUpdate(rows, basis, values, True)
        return Update(update, float(values.log1p().sum()), 0)
    whole = part.whole(size)
    core = double_gram(whole if rows.numel() == size else whole.index_select(0, rows), columns)
    core = (core + core.T) / 2 + torch.eye(part.rank, dtype=core.dtype, device=core.device)
    values, mixing = torch.linalg.eigh(core)
    basis = columns @ (mixing * values.abs().rsqrt()).to(columns.dtype)
    # Sylvester's law for [A₀, V; Vᵀ, −I], whose Schur complements are −C and A₀ + V Vᵀ.
    num_negative = -int((values < 0).sum())
    log_determinant = float(values.abs().log().sum())
    return Update(GlobalUpdate(rows, basis, values.sign(), False), log_determinant, num_negative)
