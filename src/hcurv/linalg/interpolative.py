"""Interpolative decompositions of many matrices at once: every row from a few chosen rows.

For samples Y of shape (m, s) a row decomposition is Y ≈ P Y[S], with a *skeleton* S of r rows and
an interpolation P of shape (m, r) that is the identity on the skeleton.

The rows are chosen by Cholesky factorization of YYᵀ with pivots, which takes matrix products only:
after r pivots YYᵀ = LLᵀ + (Schur complement), the trace of the Schur complement is the squared
error ‖Y − PY[S]‖_F² of the best P, and P = L L[S]⁻¹ is that P. Pivots are chosen in panels among
the rows with the largest remainders. YYᵀ has the squared condition number of Y, so that it is
factorized in double precision; if Y is in double precision itself, a second round on the remainder
makes up for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor

__all__ = ["Interpolation", "interpolate_rows", "interpolation_bytes"]

# This many pivots are chosen at a time. Wide panels mean larger products, but pivots that are
# somewhat worse; with few matrices in a batch the wide ones are faster.
_PANEL = 32
_WIDE_PANEL = 64
# Pivots of a panel come from this many times as many rows.
_CANDIDATES = 2
# At most this many matrices are factorized one by one, which is then faster than as a batch.
_FEW = 64
# A Gram matrix is computed in strips of this many rows, so that little more than half is enough.
_STRIP = 256
# A pivot must be at least this fraction of the largest row that is no candidate (both squared).
# Smaller ones would make for large weights.
_FIT = 1 / 256
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

    All of it is in double precision. While rows are chosen, there are a copy of single samples, the
    Gram matrices (m, m), the factors L (m, r), rows and squares of the k candidates, and two panels
    of w columns. Afterwards there are the factors, the weights, and of samples in double precision
    their skeleton rows and what is left of them.
    """
    rank = min(num_rows, num_samples, num_samples if max_rank is None else max_rank)
    panel = _WIDE_PANEL if num_matrices <= _FEW else _PANEL
    width, candidates = min(panel, rank), min(_CANDIDATES * panel, num_rows)
    is_single = dtype != torch.float64
    choosing = num_rows * (num_rows + rank + 2 * width) + 3 * candidates**2 + 3 * width**2
    solving = num_rows * 3 * rank
    if is_single:
        choosing, solving = (floats + num_rows * num_samples for floats in (choosing, solving))
    else:
        solving += (num_rows + rank) * num_samples
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
    values = samples.double()
    factor, skeleton, ranks, traces = _pivoted_cholesky(
        _gram(values), limits, tolerances.square(), num_random
    )
    rank = int(ranks.max()) if ranks.numel() else 0
    factor, skeleton = factor[:, :, :rank], skeleton[:, :rank]
    weights = _solve(factor, factor, skeleton, ranks)
    weights = _put_identity(weights, skeleton, ranks).to(samples.dtype)
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


def _pivoted_cholesky(
    gram: Tensor, limits: Tensor, squared_tolerances: Tensor, num_random: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L (B, m, limit), pivots (B, limit), ranks (B,), and traces of what is left, (B,).

    Columns of L beyond the rank are zero.
    """
    num_matrices, num_rows = gram.shape[:2]
    limit = int(limits.max()) if num_matrices else 0
    factors = gram.new_zeros(num_matrices, num_rows, limit)
    pivots = torch.zeros(num_matrices, limit, dtype=torch.long, device=gram.device)
    used = torch.zeros(num_matrices, limit, dtype=torch.bool, device=gram.device)
    ranks = torch.zeros(num_matrices, dtype=torch.long, device=gram.device)
    remainders = gram.diagonal(dim1=1, dim2=2).clone()
    largest = remainders.amax(1) if num_rows else remainders.sum(1)
    floors = largest * (num_rows * torch.finfo(gram.dtype).eps)
    active = (remainders.sum(1) > squared_tolerances) & (limits > 0)
    # Finished matrices are carried along until half of them are: copies cost more than the work.
    work = active.nonzero().squeeze(1)
    factor = factors if work.numel() == num_matrices else factors[work]
    gram = gram if work.numel() == num_matrices else gram[work]
    done = 0
    while bool(active.any()):
        panel = _WIDE_PANEL if work.numel() <= _FEW else _PANEL
        width = min(panel, int((limits - ranks)[active].max()))
        if done + width > factors.shape[2]:  # panels that were cut left gaps
            alone = factor is factors
            factors, pivots, used = (_wider(part, panel) for part in (factors, pivots, used))
            factor = factors if alone else _wider(factor, panel)
        rows, columns, fit = _panel(
            gram,
            factor[:, :, :done],
            remainders[work],
            floors[work],
            width,
            min(_CANDIDATES * panel, num_rows),
        )
        # How much of the trace is left after each pivot tells how many of them are needed.
        drops = columns.square()
        left = remainders[work].sum(1)[:, None] - drops.sum(1).cumsum(1)
        allowed = squared_tolerances[work, None]
        step = torch.arange(width, device=gram.device)
        if num_random is not None:
            count = ranks[work, None] + step + 1
            allowed = allowed * ((num_random - count) / num_random)
        enough = (left.clamp(min=0) <= allowed) & (step < fit[:, None])
        reached = enough.any(1)
        needed = torch.where(reached, enough.int().argmax(1) + 1, fit)
        needed = torch.minimum(needed, (drops.amax(1) > 0).sum(1))
        needed = torch.minimum(needed, (limits - ranks)[work]).masked_fill_(~active[work], 0)
        keep = step < needed[:, None]
        factor[:, :, done : done + width] = columns.mul_(keep[:, None])
        pivots[work, done : done + width] = rows * keep
        used[work, done : done + width] = keep
        ranks[work] += needed
        updated = (remainders[work] - drops.mul_(keep[:, None]).sum(2)).clamp_(min=0)
        chosen = torch.where(keep, 0.0, updated.gather(1, rows))
        remainders[work] = updated.scatter(1, rows, chosen)
        done += width
        goes_on = (needed == torch.clamp(fit, max=width)) & (needed > 0) & ~reached
        active[work] = active[work] & goes_on & (limits > ranks)[work]
        if 2 * int(active.sum()) <= work.numel():
            if factor is not factors:
                factors[work] = factor
            stay = active[work]
            work, gram, factor = work[stay], gram[stay], factor[stay]
    if factor is not factors:
        factors[work] = factor
    if not torch.equal(used, torch.arange(used.shape[1], device=gram.device) < ranks[:, None]):
        most = int(ranks.max())  # close the gaps
        order = (~used).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        pivots = pivots.gather(1, order)
        factors = factors.gather(2, order[:, None].expand(-1, num_rows, -1))
    return factors, pivots, ranks, remainders.sum(1)


def _wider(values: Tensor, extra: int) -> Tensor:
    """Zeros after the last entries."""
    return torch.cat([values, values.new_zeros(*values.shape[:-1], extra)], -1)


def _panel(
    gram: Tensor,
    factor: Tensor,
    remainders: Tensor,
    floors: Tensor,
    width: int,
    num_candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next pivots (A, width), their columns of L (A, m, width), and how many are fit, (A,).

    Columns are zero where no pivot is left. Pivots come from few candidates, the largest rows; once
    what is left of these is far below another row, it would make for large weights.
    """
    sizes, order = remainders.topk(min(num_candidates + 1, gram.shape[1]), dim=1)
    candidates = order[:, :num_candidates]
    beyond = sizes[:, num_candidates:].sum(1)  # the largest other row, if there is any
    chosen_factor = _rows(factor, candidates)
    square = _rows(gram, candidates)
    square = square.gather(2, candidates[:, None].expand(-1, num_candidates, -1))
    square = square - chosen_factor @ chosen_factor.transpose(1, 2)
    local, corner = _small_cholesky(square, floors, width)
    rows = candidates.gather(1, local)
    columns = _rows(gram, rows).transpose(1, 2)
    columns = torch.baddbmm(columns, factor, _rows(factor, rows).transpose(1, 2), alpha=-1)
    # The pivots' own rows of L are known: L[rows] = corner, so L = columns · corner⁻ᵀ.
    spent = corner.diagonal(dim1=1, dim2=2) == 0
    corner = corner + torch.diag_embed(spent.to(corner.dtype))
    inverse = torch.linalg.solve_triangular(corner, _identity_like(corner), upper=False)
    columns = columns @ inverse.transpose(1, 2)
    values = corner.diagonal(dim1=1, dim2=2).square().masked_fill(spent, 0.0)
    fit = (values >= _FIT * beyond[:, None]).int().cumprod(1).sum(1)
    return rows, columns.masked_fill_(spent[:, None], 0.0), fit


def _identity_like(square: Tensor) -> Tensor:
    eye = torch.eye(square.shape[1], dtype=square.dtype, device=square.device)
    return eye.expand_as(square)


def _small_cholesky(square: Tensor, floors: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """First pivots of small matrices, (A, width), all different, and their lower triangle of L.

    Columns of L for which no pivot above the floor is left are zero.
    """
    if square.device.type == "cpu" and square.shape[0] <= _FEW:
        return _lapack_cholesky(square, floors, width)
    square = square.clone()
    diagonal = square.diagonal(dim1=1, dim2=2).clone()
    factor = square.new_zeros(*square.shape[:2], width)
    order = []
    for step in range(width):
        position = diagonal.argmax(1, keepdim=True)
        column = _rows(square, position).squeeze(1)
        value = column.gather(1, position)
        root = torch.where(value > floors[:, None], value, torch.inf).sqrt()
        column = column / root
        square.addcmul_(column[:, :, None], column[:, None, :], value=-1)
        factor[:, :, step] = column
        diagonal = (diagonal - column.square()).scatter(1, position, -torch.inf)
        order.append(position)
    pivots = torch.cat(order, dim=1)
    return pivots, _rows(factor, pivots).tril()


def _lapack_cholesky(square: Tensor, floors: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The same, one by one."""
    pivots = torch.empty(square.shape[0], width, dtype=torch.long)
    corners = square.new_zeros(square.shape[0], width, width)
    for place, (matrix, floor) in enumerate(zip(square, floors.tolist(), strict=True)):
        factor, order, rank, _ = dpstrf(matrix.numpy(), tol=floor, lower=1)
        count = min(rank, width)
        corners[place, :count, :count] = torch.from_numpy(factor)[:count, :count].tril()
        pivots[place] = torch.from_numpy(order)[:width] - 1
    return pivots, corners


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


def _corner(factor: Tensor, skeleton: Tensor, ranks: Tensor) -> Tensor:
    """L[S], lower triangular, with ones on the diagonal from the rank on."""
    corner = _rows(factor, skeleton).tril()
    beyond = torch.arange(corner.shape[1], device=ranks.device) >= ranks[:, None]
    corner.masked_fill_(beyond[:, :, None], 0.0)
    return corner + torch.diag_embed(beyond.to(corner.dtype))


def _solve(rhs: Tensor, factor: Tensor, skeleton: Tensor, ranks: Tensor) -> Tensor:
    """rhs L[S]⁻¹."""
    corner = _corner(factor, skeleton, ranks)
    solution: Tensor = torch.linalg.solve_triangular(corner, rhs, upper=False, left=False)
    return solution


def _put_identity(weights: Tensor, skeleton: Tensor, ranks: Tensor) -> Tensor:
    rank = skeleton.shape[1]
    within = torch.arange(rank, device=ranks.device) < ranks[:, None]
    weights = weights * within[:, None]
    unit = torch.diag_embed(within.to(weights.dtype))
    batch, position = within.nonzero(as_tuple=True)
    weights[batch, skeleton[batch, position]] = unit[batch, position]
    return weights
