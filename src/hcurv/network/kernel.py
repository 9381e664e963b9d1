"""The tangent kernel K = S D⁻¹ Sᵀ: the Gauss-Newton Hessian seen from the points.

S is the root of H = SᵀS, with a row for each point i and each row a of the loss's square root R_i.
H and S Sᵀ have the same non-zero eigenvalues; where n·q is less than N, K is the smaller of the
two. Its entries are as cheap as those of H: a layer with inputs x and factors C contributes

    K[(i, a), (j, b)] = (Σ_ν x_i[ν] x_j[ν] / d_ν) · (C_i[a] · C_j[b]),

where d is the layer's part of D, if all its units share it; if not, the sum over units and the sum
over inputs do not separate, and each unit contributes a product of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.factorized import Damping
from hcurv.indexing import Index, resolve_indices
from hcurv.memory import require_bytes
from hcurv.network import products
from hcurv.network.block_batches import resolve_blocks
from hcurv.network.layer_factors import LayerFactors
from hcurv.network.point_order import similarity_order
from hcurv.operators import SymmetricOperator

__all__ = ["TangentKernel"]

# Rows of K that a tile of `to_dense` has: two tiles of floats fit into the cache of a core.
_TILE_ROWS = 512
# Floats of the operands of one batch of blocks.
_BATCH_FLOATS = 2**24
# Random features by which points are ordered, so that neighbours are alike.
_NUM_FEATURES = 12


@dataclass(frozen=True)
class _LayerTerm:
    """What one layer contributes: rows of C, features x, and the weights 1/d.

    Attributes:
        units: the layer's range of units.
        features: the layer's inputs that trainable parameters see, (f, n).
        shared: 1/d by input, (f,), where all units have the same; else None.
        by_unit: 1/d by unit and input, (units, f), where they differ; else None.
    """

    units: slice
    features: Tensor
    shared: Tensor | None
    by_unit: Tensor | None


class TangentKernel(SymmetricOperator):
    """K = S D⁻¹ Sᵀ as a matrix: entries, blocks, products. Made by `GaussNewton.kernel`.

    Row i·q + a belongs to point i and row a of its loss's square root.

    Args:
        factors: what the entries are made of.
        damping: D, positive.
        workspace: bytes of temporary memory that one call may use beyond its result.

    Examples:
        >>> K = H.kernel()
        >>> root = H.root_columns(slice(None))
        >>> torch.allclose(K.to_dense(), root @ root.T)
        True
    """

    def __init__(self, factors: LayerFactors, damping: Damping, workspace: int) -> None:
        damping.require_positive("the kernel divides by it")
        self._factors, self._damping, self._workspace = factors, damping, workspace
        self._num_rows = factors.jacobian.num_rows
        self._terms = self._make_terms()

    def _make_terms(self) -> list[_LayerTerm]:
        factors = self._factors
        inverse = 1 / self._damping.diagonal(factors.num_parameters, factors.inputs.device)
        inverse = inverse.to(factors.inputs.dtype)[:, None]
        terms = []
        for place in factors.layers:
            weight, bias = place.layer.parameters.read(inverse)
            features, weights = [], []
            inputs = factors.inputs[place.inputs]
            if weight is not None:
                features.append(inputs[: weight.shape[1]])
                weights.append(weight.squeeze(2))
            if bias is not None:
                features.append(inputs[-1:])
                weights.append(bias)
            by_unit = torch.cat(weights, 1)
            shared = by_unit[0] if bool((by_unit == by_unit[:1]).all()) else None
            terms.append(
                _LayerTerm(
                    place.units,
                    torch.cat(features),
                    shared,
                    by_unit if shared is None else None,
                )
            )
        return terms

    def __repr__(self) -> str:
        """Size in one line."""
        return (
            f"TangentKernel(n·q={self.shape[0]}, num_points={self._factors.num_points},"
            f" dtype={self.dtype})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(n·q, n·q)``."""
        size = self._factors.num_points * self._num_rows
        return (size, size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._factors.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where the entries are computed."""
        return self._factors.inputs.device

    @property
    def num_stored(self) -> int:
        """Floats of the factors, which the kernel shares with its matrix."""
        return self._factors.num_stored

    def orders(self) -> dict[str, Tensor]:
        """Orders of the rows in which neighbours are alike, by name.

        "point-output" lists the points by similarity, and for each of them its rows;
        "output-point" lists for each row of R all points by similarity.

        Examples:
            >>> {name: order.numel() for name, order in H.kernel().orders().items()}
            {'point-output': 60, 'output-point': 60}
        """
        generator = torch.Generator().manual_seed(0)
        points = similarity_order(
            self._factors.jacobian.direction_features(_NUM_FEATURES, generator)
        )
        rows = points[:, None] * self._num_rows + torch.arange(self._num_rows, device=self.device)
        return {"point-output": rows.reshape(-1), "output-point": rows.T.reshape(-1)}

    def _matmat(self, rhs: Tensor) -> Tensor:
        back = products.root_transposed(self._factors, rhs, self._workspace)
        scale = self._damping.diagonal(back.shape[0], back.device).to(back.dtype)
        back /= scale[:, None]
        return products.root_product(self._factors, back, self._workspace)

    @cached_property
    def _rows(self) -> list[Tensor]:
        """C_i[a] of each term, by row of K: (n·q, units), or (n·q,) where C_i is diagonal."""
        factors, jacobian = self._factors, self._factors.jacobian
        require_bytes(
            jacobian.row_floats * factors.num_points * self.dtype.itemsize,
            self.device,
            f"the rows of a kernel of {self.shape[0]} rows",
            ("use fewer points", "use products with the kernel instead of its entries"),
        )
        everywhere = slice(0, factors.num_points)
        rows = [jacobian.column_rows(term.units, everywhere) for term in self._terms]
        return [part.reshape(self.shape[0], *part.shape[2:]).contiguous() for part in rows]

    def diagonal(self) -> Tensor:
        """The n·q diagonal entries.

        Examples:
            >>> torch.allclose(H.kernel().diagonal(), H.kernel().to_dense().diagonal())
            True
        """
        with torch.no_grad():
            result = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            for term, rows in zip(self._terms, self._rows, strict=True):
                squares = term.features.square()
                if term.shared is not None:
                    norms = (term.shared @ squares).repeat_interleave(self._num_rows)
                    result += norms * (rows.square() if rows.ndim == 1 else rows.square().sum(1))
                    continue
                assert term.by_unit is not None
                by_unit = term.by_unit @ squares  # (units, n)
                if rows.ndim == 1:
                    result += rows.square() * by_unit.T.reshape(-1)
                else:
                    norms = by_unit.T.repeat_interleave(self._num_rows, 0)
                    result += (rows.square() * norms).sum(1)
            return result

    def to_dense(self) -> Tensor:
        """The whole kernel, (n·q, n·q), if there is memory for it.

        Examples:
            >>> torch.allclose(H.kernel().to_dense() @ torch.ones(60).double(),
            ...                H.kernel() @ torch.ones(60).double())
            True
        """
        size = self.shape[0]
        require_bytes(
            size**2 * self.dtype.itemsize + self._workspace,
            self.device,
            f"a dense kernel of {size} x {size} entries",
            ("use fewer points", "use products with the kernel instead"),
        )
        return self.fill(torch.empty(size, size, dtype=self.dtype, device=self.device))

    def fill(self, result: Tensor, *, lower: bool = False) -> Tensor:
        """Write the kernel to ``result``, (n·q, n·q), in its precision, and return it.

        Only tiles on and below the diagonal are computed; the others are their transposes.

        Args:
            result: what is written to.
            lower: leave the tiles above the diagonal as they are. A Cholesky factorization does not
                read them.

        Examples:
            >>> H.kernel().fill(torch.empty(60, 60, dtype=torch.float64)).shape
            torch.Size([60, 60])
        """
        n, q = self._factors.num_points, self._num_rows
        step = max(1, _TILE_ROWS // q)
        # One tile and one product of factors, used again and again: fresh memory costs more than
        # the arithmetic.
        space = torch.empty(2, step * q, step * q, dtype=result.dtype, device=self.device)
        with torch.no_grad():
            for top in range(0, n, step):
                first = slice(top, min(top + step, n))
                for left in range(0, top + 1, step):
                    second = slice(left, min(left + step, n))
                    rows, cols = (slice(s.start * q, s.stop * q) for s in (first, second))
                    tile = self._tile(first, second, space)
                    if left == top:
                        # Both halves are the same to the last bit.
                        result[rows, cols] = (tile + tile.T) / 2
                        continue
                    result[rows, cols] = tile
                    if not lower:
                        result[cols, rows] = tile.T
        return result

    def _tile(self, first: slice, second: slice, space: Tensor) -> Tensor:
        """K between all rows of some points and all rows of others, in the first of two spaces."""
        q, count, other = self._num_rows, first.stop - first.start, second.stop - second.start
        dtype, used = space.dtype, count * q * other * q
        result: Tensor = space[0].view(-1)[:used].view(count * q, other * q)
        product = space[1].view(-1)[:used].view(count * q, other * q)
        result.zero_()
        for term, rows in zip(self._terms, self._rows, strict=True):
            left = rows[first.start * q : first.stop * q].to(dtype)
            right = rows[second.start * q : second.stop * q].to(dtype)
            above, beside = (term.features[:, points].to(dtype) for points in (first, second))
            if term.shared is not None:
                inner = (above * term.shared[:, None].to(dtype)).T @ beside
                _add_product(result, product, left, right, inner, q)
                continue
            assert term.by_unit is not None
            for unit, weights in enumerate(term.by_unit.to(dtype)):
                inner = (above * weights[:, None]).T @ beside
                if left.ndim == 2:
                    _add_product(
                        result, product, left[:, unit, None], right[:, unit, None], inner, q
                    )
                else:
                    own = result.view(count, q, other, q)[:, unit, :, unit]
                    own += inner * torch.outer(left[unit::q], right[unit::q])
        return result

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols``.

        Examples:
            >>> H.kernel().block([0, 3], slice(5)).shape
            torch.Size([2, 5])
        """
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        require_bytes(
            row_index.numel() * col_index.numel() * self.dtype.itemsize + self._workspace,
            self.device,
            f"a dense block of {row_index.numel()} x {col_index.numel()} entries",
            ("ask for fewer rows or columns at a time",),
        )
        if row_index.numel() == 0 or col_index.numel() == 0:
            return self._factors.inputs.new_zeros(row_index.numel(), col_index.numel())
        with torch.no_grad():
            return self._entries(row_index[None], col_index[None])[0]

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks K[rows[b], cols[b]] of equal size: (B, m), (B, k) → (B, m, k).

        Examples:
            >>> rows = torch.tensor([[0, 1], [7, 8]])
            >>> H.kernel().blocks(rows, rows).shape
            torch.Size([2, 2, 2])
        """
        row_index, col_index = resolve_blocks(rows, cols, self.shape[0], self.device)
        num_blocks, num_rows, num_cols = *row_index.shape, col_index.shape[1]
        result = self._factors.inputs.new_zeros(num_blocks, num_rows, num_cols)
        if result.numel() == 0:
            return result
        widest = max(term.features.shape[0] for term in self._terms)
        floats = (num_rows + num_cols) * (widest + self._factors.jacobian.row_floats)
        step = max(1, _BATCH_FLOATS // (floats + 2 * num_rows * num_cols))
        with torch.no_grad():
            for start in range(0, num_blocks, step):
                part = slice(start, start + step)
                result[part] = self._entries(row_index[part], col_index[part])
        return result

    def _entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Entries of any rows (B, m) and columns (B, k)."""
        q = self._num_rows
        result = self._factors.inputs.new_zeros(*rows.shape, cols.shape[1])
        same = (rows % q)[:, :, None] == (cols % q)[:, None, :]
        for term, values in zip(self._terms, self._rows, strict=True):
            left, right = values[rows], values[cols]
            above, beside = (term.features.T[index // q] for index in (rows, cols))
            if term.shared is not None:
                inner = (above * term.shared) @ beside.mT
                if values.ndim == 2:
                    result += inner.mul_(left @ right.mT)
                else:
                    result += inner.mul_(left[:, :, None] * right[:, None, :]).mul_(same)
                continue
            assert term.by_unit is not None
            for unit, weights in enumerate(term.by_unit):
                inner = (above * weights) @ beside.mT
                if values.ndim == 2:
                    result += inner.mul_(left[:, :, unit, None] * right[:, None, :, unit])
                else:
                    is_unit = same & (rows % q == unit)[:, :, None]
                    result += inner.mul_(left[:, :, None] * right[:, None, :]).mul_(is_unit)
        return result


def _add_product(
    result: Tensor, space: Tensor, left: Tensor, right: Tensor, inner: Tensor, q: int
) -> None:
    """Add (left · right) ⊙ inner, with ``inner`` by points and the others by rows of points.

    Vectors ``left`` and ``right`` are diagonals: rows of the same number alone interact.

    Args:
        result: what is added to, (b·q, b'·q).
        space: of the same shape, to be overwritten.
        left: factors of b·q rows, (b·q, units) or (b·q,).
        right: factors of b'·q rows.
        inner: products of the features of b and b' points.
        q: the number of rows of a point.
    """
    count, other = inner.shape
    if left.ndim == 2:
        torch.mm(left, right.T, out=space)
        # Repeated along its rows, ``inner`` is read in the order of memory.
        wide = inner.repeat_interleave(q, 1)[:, None]
        by_point = result.view(count, q, other * q)
        torch.addcmul(by_point, space.view(count, q, other * q), wide, out=by_point)
        return
    same = result.view(count, q, other, q).diagonal(dim1=1, dim2=3)  # (b, b', q)
    same += inner[:, :, None] * left.view(count, 1, q) * right.view(1, other, q)
