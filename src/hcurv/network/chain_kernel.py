"""The tangent kernel of a chain of Linear layers.

A layer with inputs x and factors C contributes

    K[(i, a), (j, b)] = (Σ_ν x_i[ν] x_j[ν] / d_ν) · (C_i[a] · C_j[b]),

where d is the layer's part of D, if all its units share it; if not, the sum over units and the sum
over inputs do not separate, and each unit contributes a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.memory import require_bytes
from hcurv.network.layer_factors import LayerFactors

__all__ = ["PASS_FLOPS", "ChainKernelParts"]

# A pass over a dense kernel (multiply, add, write) costs as much as this many flops per entry
# (measured on two cores of x86).
PASS_FLOPS = 60
# Rows of K that a tile has: two tiles of floats fit into the cache of a core.
_TILE_ROWS = 512


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


class ChainKernelParts:
    """Products of inputs times products of factors, layer by layer.

    Args:
        factors: the inputs x_i and the factors C_i.
        inverse_damping: 1/D, (N,).
    """

    def __init__(self, factors: LayerFactors, inverse_damping: Tensor) -> None:
        self._factors, self._num_rows = factors, factors.jacobian.num_rows
        self._size = factors.num_points * self._num_rows
        self._terms = self._make_terms(inverse_damping)

    def _make_terms(self, inverse_damping: Tensor) -> list[_LayerTerm]:
        factors = self._factors
        inverse = inverse_damping.to(factors.inputs.dtype)[:, None]
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

    @cached_property
    def _rows(self) -> list[Tensor]:
        """C_i[a] of each term, by row of K: (n·q, units), or (n·q,) where C_i is diagonal."""
        factors, jacobian = self._factors, self._factors.jacobian
        require_bytes(
            jacobian.row_floats * factors.num_points * factors.inputs.dtype.itemsize,
            factors.inputs.device,
            f"the rows of a kernel of {self._size} rows",
            ("use fewer points", "use products with the kernel instead of its entries"),
        )
        everywhere = slice(0, factors.num_points)
        rows = [jacobian.column_rows(term.units, everywhere) for term in self._terms]
        return [part.reshape(self._size, *part.shape[2:]).contiguous() for part in rows]

    @property
    def tile_points(self) -> int:
        """As many as leave two tiles in the cache of a core."""
        return max(1, _TILE_ROWS // self._num_rows)

    def diagonal(self) -> Tensor:
        """The n·q diagonal entries."""
        result = self._factors.inputs.new_zeros(self._size)
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

    def tile(self, first: slice, second: slice, out: Tensor, space: Tensor) -> None:
        """Write K between all rows of some points and all rows of others."""
        product = space.view(-1)[: out.numel()].view(out.shape)
        is_fresh = True
        for term, rows in zip(self._terms, self._rows, strict=True):
            for left, right, inner in self._products(term, rows, first, second, out.dtype):
                _add_product(out, product, left, right, inner, self._num_rows, is_fresh)
                is_fresh = False
        if is_fresh:
            out.zero_()

    def _products(
        self, term: _LayerTerm, rows: Tensor, first: slice, second: slice, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The operands of `_add_product` whose sum is what one layer contributes to a tile."""
        q = self._num_rows
        left, right = (rows[part.start * q : part.stop * q].to(dtype) for part in (first, second))
        above, beside = (term.features[:, points].to(dtype) for points in (first, second))
        if term.shared is not None:
            yield left, right, _weighted_inner(above, beside, term.shared.to(dtype))
            return
        assert term.by_unit is not None
        weights = term.by_unit.to(dtype)
        if rows.ndim == 1:  # row a of a point belongs to unit a alone
            inner = torch.stack([_weighted_inner(above, beside, own) for own in weights], 2)
            yield left, right, inner
            return
        for unit, own in enumerate(weights):
            inner = _weighted_inner(above, beside, own)
            yield left[:, unit, None], right[:, unit, None], inner

    @property
    def separates(self) -> bool:
        """Whether all units of each layer share their part of D."""
        return all(term.shared is not None for term in self._terms)

    def between(self, other: ChainKernelParts) -> Tensor:
        """S D⁻¹ S'ᵀ with the rows of another set of points, (n·q, n'·q'), where D `separates`."""
        first, second = self._num_rows, other._num_rows
        shape = (self._size // first, first, other._size // second, second)
        result = self._factors.inputs.new_zeros(shape)
        terms = zip(self._terms, self._rows, other._terms, other._rows, strict=True)
        for term, left, beside, right in terms:
            assert term.shared is not None
            inner = (term.features * term.shared[:, None]).T @ beside.features
            if left.ndim == 1 and right.ndim == 1:  # rows of the same number alone interact
                same = result.diagonal(dim1=1, dim2=3)
                same += inner[:, :, None] * left.view(-1, 1, first) * right.view(1, -1, second)
                continue
            products = _as_rows(left, first) @ _as_rows(right, second).T
            result.addcmul_(products.view(shape), inner[:, None, :, None])
            del products  # before those of the next layer are made
        return result.view(self._size, other._size)

    def batch_floats(self, num_rows: int, num_cols: int) -> int:
        """Features and factors of all rows and columns, and two products of them."""
        widest = max(term.features.shape[0] for term in self._terms)
        floats = (num_rows + num_cols) * (widest + self._factors.jacobian.row_floats)
        return floats + 2 * num_rows * num_cols

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
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


def _as_rows(rows: Tensor, q: int) -> Tensor:
    """C_i[a] by row of K, (n·q, units), also where C_i is diagonal and given as (n·q,)."""
    return rows if rows.ndim == 2 else torch.diag_embed(rows.view(-1, q)).flatten(0, 1)


def _weighted_inner(above: Tensor, beside: Tensor, weights: Tensor) -> Tensor:
    """Σ_ν above[ν] weights[ν] beside[ν] between points (f, b) and (f, b')."""
    if weights.numel() and bool((weights == weights[0]).all()):  # as with one damping for all
        return (above.T @ beside).mul_(weights[0])
    return (above * weights[:, None]).T @ beside


def _add_product(
    result: Tensor,
    space: Tensor,
    left: Tensor,
    right: Tensor,
    inner: Tensor,
    q: int,
    is_fresh: bool,
) -> None:
    """Add (left · right) ⊙ inner, with ``inner`` by points and the others by rows of points.

    Vectors ``left`` and ``right`` are diagonals: rows of the same number alone interact.

    Args:
        result: what is added to, (b·q, b'·q).
        space: of the same shape, to be overwritten.
        left: factors of b·q rows, (b·q, units) or (b·q,).
        right: factors of b'·q rows.
        inner: products of the features of b and b' points, (b, b'); for diagonals they may differ
            by row, (b, b', q).
        q: the number of rows of a point.
        is_fresh: whether ``result`` holds nothing yet and is overwritten. A pass over a tile costs
            as much as its flops, where units are few.
    """
    count, other = inner.shape[:2]
    if left.ndim == 2:
        torch.mm(left, right.T, out=space)
        # Repeated along its rows, ``inner`` is read in the order of memory.
        wide = inner.repeat_interleave(q, 1)[:, None]
        by_point = result.view(count, q, other * q)
        by_row = space.view(count, q, other * q)
        if is_fresh:
            torch.mul(by_row, wide, out=by_point)
        else:
            torch.addcmul(by_point, by_row, wide, out=by_point)
        return
    if is_fresh:
        result.zero_()
    same = result.view(count, q, other, q).diagonal(dim1=1, dim2=3)  # (b, b', q)
    by_row = inner if inner.ndim == 3 else inner[:, :, None]
    same += by_row * left.view(count, 1, q) * right.view(1, other, q)
