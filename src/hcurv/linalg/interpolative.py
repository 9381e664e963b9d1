"""Interpolative decompositions of many matrices at once: every row from a few chosen rows.

For samples Y of shape (m, s) a row decomposition is Y ≈ P Y[S], with a *skeleton* S of r rows and
an interpolation P of shape (m, r) that is the identity on the skeleton.

The rows are chosen by Cholesky factorization of YYᵀ with pivots: after r pivots YYᵀ = LLᵀ + (Schur
complement), the trace of the Schur complement is the squared error ‖Y − PY[S]‖_F² of the best P,
and P = L L[S]⁻¹ is that P. YYᵀ has the squared condition number of Y, so that it is factorized in
double precision; if Y is in double precision itself, a second round on the remainder makes up for
the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from scipy.linalg.lapack import dpstrf
from threadpoolctl import ThreadpoolController
from torch import Tensor

__all__ = ["Interpolation", "interpolate_rows", "interpolation_bytes"]

# A Gram matrix is computed in strips of this many rows, so that little more than half is enough.
_STRIP = 256
# A remainder of this many units of rounding, relative to the norm, is not worth a pivot.
_NOISE = 32


@dataclass(frozen=True)
class Interpolation:
    """samples[b] ≈ weights[b] @ samples[b][skeleton[b]] for each b of a batch.

    Attributes:
        skeleton: chosen rows, (B, r); meaningful up to the rank.
        weights: interpolation weights, (B, m, r), the identity on the skeleton; zero from the
            rank on.
        ranks: number of chosen rows, (B,).
        errors: ‖samples − weights @ samples[skeleton]‖_F, (B,).
    """

    skeleton: Tensor
    weights: Tensor
    ranks: Tensor
    errors: Tensor


def interpolate_rows(
    samples: Tensor,  # (B, m, s)
    max_rank: int | None = None,
    tolerance: float | Tensor = 0.0,  # one for all, or (B,)
    *,
    random_columns: bool = False,
) -> Interpolation:
    """Choose rows of each matrix of a batch that all its rows can be interpolated from.

    Args:
        samples: the matrices, (B, m, s); any of the three may be 0.
        max_rank: most rows to choose; None for no limit but min(m, s).
        tolerance: error ‖samples − weights @ samples[skeleton]‖_F to reach with as few rows as the
            pivots allow; 0 goes on until the remainder is rounding.
        random_columns: the s columns are a random sample of many more, for which the tolerance is
            meant (scaled to s columns). Weights fitted to s columns with r unknowns leave, on
            average, (s − r)/s of the square that they leave of other columns.

    Returns:
        Skeletons, weights, ranks and errors, padded to the largest rank of the batch.
    """
    if samples.ndim != 3:
        raise ValueError(f"samples must have shape (B, m, s); got {tuple(samples.shape)}")
    num_matrices, num_rows, num_samples = samples.shape
    limit = min(num_rows, num_samples)
    if max_rank is not None:
        if max_rank < 0:
            raise ValueError(f"max_rank must not be negative; got {max_rank}")
        limit = min(limit, max_rank)
    tolerances = torch.as_tensor(tolerance, dtype=torch.float64, device=samples.device)
    if not bool((tolerances >= 0).all()):
        raise ValueError("tolerance must not be negative")
    tolerances = tolerances.expand(num_matrices)
    limits = torch.full((num_matrices,), limit, device=samples.device)
    num_random = num_samples if random_columns else None
    found, remainder = _interpolate(samples, limits, tolerances, num_random)
    if remainder is not None:
        # Squares hide what is below 1e-8 of the norm: look once more at the remainder by itself.
        noise = _NOISE * torch.finfo(samples.dtype).eps * _norms(samples)
        short = found.errors > torch.maximum(_allowed(tolerances, found.ranks, num_random), noise)
        limits = torch.where(short, limits - found.ranks, 0)
        if bool((limits > 0).any()):
            finer = torch.maximum(tolerances, noise)
            found = _join(found, _interpolate(remainder, limits, finer, num_random)[0])
    return found


def interpolation_bytes(
    num_matrices: int, num_rows: int, num_samples: int, max_rank: int | None, dtype: torch.dtype
) -> int:
    """Bytes that `interpolate_rows` takes beyond its samples (B, m, s).

    While rows are chosen, there are the Gram matrices (m, m) in double precision, which become
    factors, and before that a copy of single samples. Afterwards there are the factors, their
    corners (r, r), the weights (m, r) and copies of them, and of samples in double precision what
    is left of them.
    """
    rank = min(num_rows, num_samples, num_samples if max_rank is None else max_rank)
    copied = num_rows * num_samples if dtype != torch.float64 else 0
    choosing = copied + num_rows**2
    solving = num_rows**2 + rank**2 + 3 * num_rows * rank
    if dtype == torch.float64:
        solving += num_rows * rank + (num_rows + rank) * num_samples
    return num_matrices * max(choosing, solving) * 8


def _allowed(tolerances: Tensor, ranks: Tensor, num_random: int | None) -> Tensor:
    """Errors on the given columns that stand for ``tolerances`` on all columns."""
    return tolerances if num_random is None else tolerances * (1 - ranks / num_random).sqrt()


def _norms(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), dtype=torch.float64)
    return norms


def _interpolate(
    samples: Tensor, limits: Tensor, tolerances: Tensor, num_random: int | None
) -> tuple[Interpolation, Tensor | None]:
    """The interpolation, and (in double precision) what it leaves of the samples."""
    gram = _gram(samples.double())
    pivots, ranks, traces = _factorize(gram, limits, tolerances.square(), num_random)
    weights = _weights(gram, pivots, ranks, samples.dtype)
    skeleton = pivots[:, : weights.shape[2]]
    if samples.dtype != torch.float64:
        return Interpolation(skeleton, weights, ranks, traces.sqrt().to(samples.dtype)), None
    remainder = torch.baddbmm(samples, weights, _rows(samples, skeleton), alpha=-1)
    return Interpolation(skeleton, weights, ranks, _norms(remainder)), remainder


def _join(first: Interpolation, second: Interpolation) -> Interpolation:
    """Y ≈ P₁ Y[S₁] + P₂ (Y − P₁ Y[S₁])[S₂] in terms of the rows S₁ and S₂."""
    ranks = first.ranks + second.ranks
    num_matrices, num_rows = first.weights.shape[:2]
    rank = int(ranks.max())
    corrected = first.weights - second.weights @ _rows(first.weights, second.skeleton)
    weights = first.weights.new_zeros(num_matrices, num_rows, rank)
    skeleton = first.skeleton.new_zeros(num_matrices, rank)
    for part, values, shift in (
        (first, corrected, torch.zeros_like(ranks)),
        (second, second.weights, first.ranks),
    ):
        within = torch.arange(part.skeleton.shape[1], device=ranks.device) < part.ranks[:, None]
        batch, column = within.nonzero(as_tuple=True)
        weights[batch, :, column + shift[batch]] = values[batch, :, column]
        skeleton[batch, column + shift[batch]] = part.skeleton[batch, column]
    weights = _put_identity(weights, skeleton, ranks)
    return Interpolation(skeleton, weights, ranks, second.errors)


def _factorize(
    gram: Tensor, limits: Tensor, squared_tolerances: Tensor, num_random: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky factorization with pivots: of matrices (B, m, m), which Lᵀ takes the place of.

    LAPACK goes through them one by one, which is far faster than any batch of small products.

    Returns:
        All rows in the order of the pivots, (B, m); ranks (B,); and traces of what is left, (B,).
        Row k of Lᵀ belongs to pivot k, its columns are in the order of the pivots. It is zero
        below its diagonal and from the rank on.
    """
    num_matrices, num_rows = gram.shape[:2]
    most = int(limits.max()) if num_matrices else 0
    diagonals = gram.diagonal(dim1=1, dim2=2)
    whole = diagonals.sum(1)
    if num_rows == 0 or num_matrices == 0:
        return limits.new_zeros(num_matrices, num_rows), torch.zeros_like(limits), whole
    # How much of the trace may be left after 0, 1, … pivots.
    allowed = squared_tolerances[:, None]
    if num_random is not None:
        free = num_random - torch.arange(most + 1, device=gram.device)
        allowed = allowed * (free / max(1, num_random)).clamp(min=0.0)
    floors = diagonals.amax(1) * (num_rows * torch.finfo(gram.dtype).eps)
    # Once no row that is left is larger, what is left of all of them is allowed.
    floors = torch.maximum(floors, allowed.amin(1) / num_rows)
    host = gram.cpu().contiguous()
    pivots = torch.empty(num_matrices, num_rows, dtype=torch.long)
    found = torch.empty(num_matrices, dtype=torch.long)
    # On several threads, SciPy's LAPACK takes twice as long, and slows down torch's for a while.
    with _blas_of_scipy().limit(limits=1):
        for place, (matrix, floor) in enumerate(zip(host.numpy(), floors.tolist(), strict=True)):
            # The transposed view is stored by columns, as LAPACK wants it, and is overwritten.
            factor, order, rank, _ = dpstrf(matrix.T, tol=floor, lower=1, overwrite_a=1)
            matrix.T[:] = factor
            pivots[place] = torch.from_numpy(order) - 1
            found[place] = rank
    gram.copy_(host).triu_()
    pivots, found = pivots.to(gram.device), found.to(gram.device)
    drops = torch.linalg.vecdot(gram[:, :most], gram[:, :most])
    drops = drops.masked_fill_(_from(found, most), 0.0)
    left = torch.cat([whole[:, None], whole[:, None] - drops.cumsum(1)], 1).clamp_(min=0.0)
    enough = left <= allowed
    ranks = torch.where(enough.any(1), enough.int().argmax(1), most)
    ranks = torch.minimum(ranks, torch.minimum(limits, found))
    gram.masked_fill_(_from(ranks, num_rows)[:, :, None], 0.0)
    return pivots, ranks, left.gather(1, ranks[:, None]).squeeze(1)


@cache
def _blas_of_scipy() -> ThreadpoolController:
    """The libraries whose number of threads can be set for a while."""
    return ThreadpoolController().select(user_api="blas")


def _from(ranks: Tensor, size: int) -> Tensor:
    """Which of the numbers 0 … size − 1 are not below some ranks, (B, size)."""
    return torch.arange(size, device=ranks.device) >= ranks[:, None]


def _weights(factors: Tensor, pivots: Tensor, ranks: Tensor, dtype: torch.dtype) -> Tensor:
    """P = L L[S]⁻¹ from Lᵀ, for rows in their own order: (B, m, r), with r the largest rank."""
    num_matrices, num_rows = pivots.shape
    rank = int(ranks.max()) if num_matrices else 0
    # Up to the smallest rank, the rows of all pivots are those of the identity.
    least = int(ranks.min()) if num_matrices else 0
    beyond = _from(ranks, rank)
    corner = factors[:, :rank, :rank] + torch.diag_embed(beyond.to(factors.dtype))
    solved = torch.linalg.solve_triangular(corner, factors[:, :rank, least:], upper=True)
    rows = solved.to(dtype).transpose(1, 2).contiguous()
    unit = torch.eye(rank, dtype=dtype, device=factors.device)[least:]
    own = rows[:, : rank - least]
    own.copy_(torch.where(beyond[:, least:, None], own, unit))
    result: Tensor = rows.new_zeros(num_matrices, num_rows, rank)
    result.scatter_(1, pivots[:, least:, None].expand_as(rows), rows)
    ones = rows.new_ones(1).expand(num_matrices, least)
    batch = torch.arange(num_matrices, device=ranks.device)[:, None].expand(-1, least)
    place = torch.arange(least, device=ranks.device).expand(num_matrices, -1)
    result.index_put_((batch, pivots[:, :least], place), ones)
    return result


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values[b, index[b]] for every b, (B, k, …)."""
    if not values.is_contiguous():
        return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))
    first = torch.arange(values.shape[0], device=index.device)[:, None] * values.shape[1]
    rows = values.flatten(0, 1).index_select(0, (index + first).flatten())
    return rows.view(*index.shape, values.shape[2])


def _gram(values: Tensor) -> Tensor:
    """YYᵀ, (B, m, m); of large matrices little more than the upper half is computed."""
    num_rows = values.shape[1]
    if num_rows < 2 * _STRIP:
        return values @ values.transpose(1, 2)
    result = values.new_empty(values.shape[0], num_rows, num_rows)
    for start in range(0, num_rows, _STRIP):
        stop = start + _STRIP
        result[:, start:stop, start:] = values[:, start:stop] @ values[:, start:].transpose(1, 2)
        result[:, stop:, start:stop] = result[:, start:stop, stop:].transpose(1, 2)
    return result


def _put_identity(weights: Tensor, skeleton: Tensor, ranks: Tensor) -> Tensor:
    rank = skeleton.shape[1]
    within = torch.arange(rank, device=ranks.device) < ranks[:, None]
    weights = weights * within[:, None]
    unit = torch.diag_embed(within.to(weights.dtype))
    batch, position = within.nonzero(as_tuple=True)
    weights[batch, skeleton[batch, position]] = unit[batch, position]
    return weights
