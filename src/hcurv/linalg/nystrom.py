"""Leading eigenpairs from random sketches of a positive semi-definite matrix H.

Nyström: with Y = HΩ, H ≈ Y (ΩᵀY)⁻¹ Yᵀ, which is at most H, so that what it leaves is positive
semi-definite (Tropp, Yurtsever, Udell, Cevher 2017). Single precision is orthonormalized by Gram
matrices in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.ranks import OneRank

__all__ = [
    "double_gram",
    "leading",
    "nystrom",
    "nystrom_of_sketch",
    "orthonormal",
    "outer_eigenpairs",
    "tall_qr",
    "whitening",
]

# Rows are converted to double precision in strips of this many floats, which fit into a cache, but
# of at least so many rows.
_GRAM_FLOATS = 2**18
_GRAM_ROWS = 256
# A symmetric Gram matrix is computed in panels of this many rows, so that half of it is enough.
_GRAM_PANEL = 128
# Threads share one product of narrow matrices badly. Up to this width each multiplies pieces of
# this many rows of its own: two threads then take up to four times less.
_GRAM_NARROW = 64
_GRAM_PIECE = 256
# Eigenvalues of a Gram matrix that are this small, relative to the largest, count as zero.
_DEPENDENT = 1e-13
# If the squared pivots of a Cholesky factor differ by less than this ratio, the factor is accurate
# enough, and faster than eigenvectors.
_SAFE = 1e-9
# Eigenvectors of eigenvalues below this fraction of the largest are orthogonalized once more.
_GRADED = 1e-4
# A Gaussian matrix with at most this ratio of columns to rows has singular values within 1 ± 1/4.
_TALL = 1 / 16
# One process has all rows of a tall matrix.
_ALONE = OneRank()


def orthonormal(
    columns: Tensor, rounds: int = 2, negligible: float = 0.0, ranks: OneRank = _ALONE
) -> Tensor:
    """Return a basis of the range of tall columns. Single precision uses Gram matrices in double.

    One round makes it well conditioned, a second one orthonormal. Directions below a
    ``negligible`` share of the largest count as zero (for columns in double precision). Each of
    the ``ranks`` has some rows of the columns, and of the basis.
    """
    if columns.dtype == torch.float64:
        basis, triangle = tall_qr(columns, ranks)
        sizes = triangle.diagonal().abs()
        safe = max(_DEPENDENT, 10 * sizes.numel() * negligible)
        if not sizes.numel() or bool((sizes > safe * sizes.max()).all()):
            return basis
        if ranks.size > 1:
            rotation, values, _ = torch.linalg.svd(triangle, full_matrices=False)
            basis = basis @ rotation
        else:
            basis, values, _ = torch.linalg.svd(columns, full_matrices=False)
        least = max(torch.finfo(columns.dtype).eps, negligible)
        kept: Tensor = basis[:, values > least * values[:1]]
        return kept
    for _ in range(rounds):
        gram = double_gram(columns, columns, ranks)
        norms = gram.diagonal().sqrt()
        if not bool(norms.all()):
            columns, gram = columns[:, norms > 0], gram[norms > 0][:, norms > 0]
            norms = norms[norms > 0]
        mixing = whitening(gram / norms / norms[:, None]) / norms[:, None]
        columns = columns @ mixing.to(columns.dtype)
    return columns


def outer_eigenpairs(columns: Tensor, ranks: OneRank = _ALONE) -> tuple[Tensor, Tensor]:
    """Q and σ with W Wᵀ = Q diag(σ) Qᵀ, for tall columns W (N, k): orthonormal (N, r), and (r,).

    σ is in double precision. Each of the ``ranks`` has some rows of W, and of Q.
    """
    found = None
    if columns.dtype != torch.float64 and columns.shape[1]:
        found = _cholesky_qr(columns, ranks)
    if found is None:
        basis = orthonormal(columns, ranks=ranks)
        mixing = torch.eye(basis.shape[1], dtype=torch.float64, device=basis.device)
        triangle = double_gram(basis, columns, ranks)
    else:
        basis, mixing, triangle = found
    values, rotation = torch.linalg.eigh(triangle @ triangle.T)
    return basis @ (mixing @ rotation).to(basis.dtype), values.clamp_(min=0.0)


def _cholesky_qr(columns: Tensor, ranks: OneRank) -> tuple[Tensor, Tensor, Tensor] | None:
    """B, M and T with columns = (B M) T, where B M is orthonormal and M and T are small.

    Gram matrices in double precision give the triangles of two rounds, so that nothing tall has to
    be multiplied for T, and M can be joined with what is done next (CholeskyQR2: Yamamoto,
    Nakatsukasa, Yanagisawa, Fukaya 2015). None if columns are nearly dependent.
    """
    gram = double_gram(columns, columns, ranks)
    norms = gram.diagonal().sqrt()
    if not bool((norms > 0).all()):
        return None
    first, failed = torch.linalg.cholesky_ex(gram / norms / norms[:, None])
    if bool(failed) or not bool(first.diagonal().square().min() > _SAFE):
        return None
    identity = torch.eye(norms.numel(), dtype=first.dtype, device=first.device)
    inverse = torch.linalg.solve_triangular(first.T, identity, upper=True) / norms[:, None]
    basis = columns @ inverse.to(columns.dtype)
    second, failed = torch.linalg.cholesky_ex(double_gram(basis, basis, ranks))
    if bool(failed):
        return None
    mixing = torch.linalg.solve_triangular(second.T, identity, upper=True)
    return basis, mixing, second.T @ first.T * norms


def tall_qr(columns: Tensor, ranks: OneRank = _ALONE) -> tuple[Tensor, Tensor]:
    """Q and R of tall columns, of which each rank has some rows; R is on all ranks.

    Each rank factorizes its own rows, and all of them the triangles of all (Demmel, Grigori,
    Hoemmen, Langou 2012). This is as accurate as one QR factorization of all rows.
    """
    own, triangle = torch.linalg.qr(columns)
    if ranks.size == 1:
        return own, triangle
    triangles = ranks.gather(triangle)
    start = sum(one.shape[0] for one in triangles[: ranks.rank])
    basis, joint = torch.linalg.qr(torch.cat(triangles))
    return own @ basis[start : start + triangle.shape[0]], joint


def whitening(gram: Tensor, negligible: float = 0.0) -> Tensor:
    """Some M with Mᵀ gram M = I, in double precision: few columns where the matrix is singular.

    Args:
        gram: a Gram matrix, (k, k).
        negligible: eigenvalues below this count as zero.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    sizes = factor.diagonal().square()
    least = max(_SAFE * float(sizes.max()), 10 * negligible) if gram.shape[0] else 0.0
    if gram.shape[0] and not bool(failed) and bool(sizes.min() > least):
        identity = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
        inverse: Tensor = torch.linalg.solve_triangular(factor.T, identity, upper=True)
        return inverse
    values, vectors = torch.linalg.eigh(gram)
    keep = (values > _DEPENDENT * values[-1:]) & (values > negligible)
    mixing: Tensor = vectors[:, keep] * values[keep].rsqrt()
    return mixing


def double_gram(left: Tensor, right: Tensor, ranks: OneRank = _ALONE) -> Tensor:
    """Return leftᵀ right in double precision. If both are one tensor, half of it is computed.

    Each of the ``ranks`` has some rows of both, and all have the result.
    """
    width, symmetric = left.shape[1], left is right
    result = torch.zeros(width, right.shape[1], dtype=torch.float64, device=left.device)
    step = max(_GRAM_ROWS, _GRAM_FLOATS // max(1, width))
    in_pieces = max(width, right.shape[1]) <= _GRAM_NARROW and torch.get_num_threads() > 1
    for first, second in zip(left.split(step), right.split(step), strict=True):
        rows = first.double()
        if in_pieces:
            result += _gram_in_pieces(rows, rows if symmetric else second.double())
        elif not symmetric:
            result.addmm_(rows.T, second.double())
        else:
            for start in range(0, width, _GRAM_PANEL):
                part = slice(start, start + _GRAM_PANEL)
                result[part, start:].addmm_(rows[:, part].T, rows[:, start:])
    result = result.triu_().add_(result.triu(1).T) if symmetric else result
    return ranks.sum(result) if ranks.size > 1 else result


def _gram_in_pieces(left: Tensor, right: Tensor) -> Tensor:
    """LeftᵀRight as a sum over pieces of the rows."""
    whole = left.shape[0] // _GRAM_PIECE * _GRAM_PIECE
    first, second = (one[:whole].unflatten(0, (-1, _GRAM_PIECE)) for one in (left, right))
    return torch.bmm(first.mT, second).sum(0).addmm_(left[whole:].T, right[whole:])


def leading(columns: Tensor, mixing: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the squared singular values and the left singular vectors of tall columns @ mixing.

    The values descend. Those that are zero up to rounding are left out.
    """
    if columns.dtype == torch.float64:
        columns = columns if mixing is None else columns @ mixing
        vectors, singular, _ = torch.linalg.svd(columns, full_matrices=False)
        keep = singular > torch.finfo(columns.dtype).eps * singular[:1]
        return singular[keep].square(), vectors[:, keep]
    gram = double_gram(columns, columns)
    if mixing is not None:
        gram = mixing.T @ gram @ mixing
    values, rotation = torch.linalg.eigh(gram)
    keep = values > 1e-14 * values[-1:]
    values, rotation = values[keep].flip(0), rotation[:, keep].flip(1)
    rotation = rotation * values.rsqrt()
    rotation = rotation if mixing is None else mixing @ rotation
    vectors = columns @ rotation.to(columns.dtype)
    if bool((values < _GRADED * values[:1]).any()):
        # Rounding is large in vectors of small values. Make each orthogonal to those before it.
        vectors = torch.linalg.qr(vectors).Q
    return values, vectors


def nystrom(
    product: Callable[[Tensor], Tensor], start: Tensor, power_iterations: int = 0
) -> tuple[Tensor, Tensor]:
    """Return leading eigenvalues, descending, and orthonormal eigenvectors, by products with H.

    Args:
        product: H times (N, k).
        start: Gaussian Ω, (N, k).
        power_iterations: how often Ω is replaced by a basis of HΩ first.
    """
    if start.shape[1] == 0:
        return start.new_zeros(0), start
    # A start with singular values about 1 keeps ΩᵀY as well conditioned as H allows.
    start = start / math.sqrt(start.shape[0])
    if start.shape[1] > _TALL * start.shape[0]:
        start = orthonormal(start, rounds=1)
    for _ in range(power_iterations):
        start = orthonormal(product(start), rounds=1)
    return nystrom_of_sketch(start, product(start))


def nystrom_of_sketch(start: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same from Ω, whose singular values are about 1, and Y = HΩ."""
    limits, norm = torch.finfo(sketch.dtype), float(torch.linalg.vector_norm(sketch))
    if not limits.tiny**0.5 / limits.eps < norm < limits.max**0.5:
        # Squares of the entries overflow or underflow, so the sketch is scaled.
        scale = float(sketch.abs().max()) if sketch.numel() else 0.0
        if scale not in (0.0, 1.0) and math.isfinite(scale):
            values, vectors = nystrom_of_sketch(start, sketch / scale)
            return values * scale, vectors
    # A small shift makes the core positive definite in floating point; it is taken off again.
    shift = limits.eps * norm
    sketch = torch.add(sketch, start, alpha=shift)
    # The core needs no more digits than the sketch has; its Gram matrix, a square, does.
    values, mixing = torch.linalg.eigh((start.T @ sketch).double())
    keep = values > 0.25 * shift
    found, vectors = leading(sketch, mixing[:, keep] * values[keep].rsqrt())
    return (found - shift).clamp_(min=0.0).to(sketch.dtype), vectors
