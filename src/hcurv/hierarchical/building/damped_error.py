"""What a compression does to (A + λI)⁻¹: the error E = Gᵀ (H − A) G with G Gᵀ = (A + λI)⁻¹.

A variance jᵀ (A + λI)⁻¹ j of a row j of a root of H (H = Σ j jᵀ) is wrong by uᵀ E u with u = Gᵀ j.
Its mean over the rows, relative to the variances, is tr(Gᵀ H G E)/tr(Gᵀ H G). A probe s = G z with
Gaussian z shows it without Gᵀ: with y = (H − A) s and t = (A + λI)⁻¹ y,

    ‖E z‖² = yᵀ t,    zᵀ E z = sᵀ y,    zᵀ (Gᵀ H G E) z = (H s)ᵀ t,    zᵀ (Gᵀ H G) z = (H s)ᵀ s.

The spread of (H s)ᵀ t over probes is like that of uᵀ E u over the rows, so that its root mean
square is the estimate of the error of a variance.

Before anything is built, ‖E‖_F ≤ ‖H − A‖_F/λ tells which relative error τ = ‖H − A‖_F/‖H‖_F
suffices. What E changes is largest if H − A is all of one sign, as it is where eigenvalues are cut
off: the mean error of a variance is then about ‖E‖_F²/d, d = Σ μ/(μ + λ) the effective dimension.
If it has random signs it is at most ‖E‖_F/d. On three networks and λ/λ₁ from 1e-1 to 1e-6, τ from
this rule was 0.1 to 3 times λ/λ₁ for an error of 1e-2. The median errors of variances were then
at most 0.6 %, so that the rule is cautious, and almost always the first build suffices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hcurv.damping import as_damping
from hcurv.hierarchical.building.sampler import Sampler
from hcurv.hierarchical.matrix.build_record import DampedError
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.solving.factorization import Factorization, try_factorize
from hcurv.linalg import spectral_sample
from hcurv.operators import EntrySource
from hcurv.sources import has_product, product

__all__ = ["badness", "damped_step", "estimate_damped_error", "frobenius_tolerance", "is_met"]

# Number of probes: errors are then known to about 20 %.
_NUM_PROBES = 16
# Steps of a power iteration that estimates ‖E‖, the probes themselves included, and how many of the
# probes, those that E makes largest, take part in the later ones.
_POWER_STEPS, _POWER_PROBES = 3, 6
# Steps of Lanczos that estimate effective dimension and norm of the matrix to some 20 %.
_LANCZOS_STEPS = 24
# So many columns estimate the norm of a matrix that has no products.
_NUM_COLUMNS = 32
# The share of ‖E‖_F/d that a variance sees if H − A has random signs is at most about a third.
_SEEN = 1 / 3
# ‖E‖ is estimated from below. An estimate below this is taken for ‖E‖ < 1, which makes A + λI
# positive definite: H + λI = G⁻ᵀ (I + E) G⁻¹ gives A + λI ≥ λ/(1 + ‖E‖).
_SAFE_NORM = 0.9


def frobenius_tolerance(
    source: EntrySource, diagonal: Tensor, damping: float, tolerance: float, seed: int
) -> float:
    """The relative error in the Frobenius norm that makes variances right to a tolerance.

    Args:
        source: H.
        diagonal: its diagonal.
        damping: λ.
        tolerance: relative error of variances jᵀ (A + λI)⁻¹ j.
        seed: seed of a random vector.
    """
    if has_product(source):
        values, weights = spectral_sample(
            lambda vector: product(source, vector[:, None])[:, 0],
            source.shape[0],
            _LANCZOS_STEPS,
            source.dtype,
            source.device,
            seed,
        )
        values = values.clamp(min=0.0)
        norm = math.sqrt(float((weights * values.square()).sum()))
        dimension = float((weights * values / (values + damping)).sum())
    else:
        norm = _norm_of_columns(source, diagonal, seed)
        # Cauchy and Schwarz: (Σ μ)² ≤ Σ μ/(μ + λ) · Σ μ (μ + λ).
        trace = float(diagonal.double().sum())
        dimension = trace**2 / max(norm**2 + damping * trace, math.ulp(0.0))
    if norm == 0:
        return tolerance
    wanted = tolerance * dimension
    return min(tolerance, damping / norm * min(math.sqrt(wanted), wanted / _SEEN))


def _norm_of_columns(source: EntrySource, diagonal: Tensor, seed: int) -> float:
    """An estimate of ‖H‖_F from random columns, more of them where the diagonal is large."""
    shares = diagonal.double().clamp(min=0.0).cpu()
    if float(shares.sum()) == 0:
        return 0.0
    shares = shares / shares.sum()
    generator = torch.Generator().manual_seed(seed)
    columns = torch.multinomial(shares, _NUM_COLUMNS, replacement=True, generator=generator)
    values = source.block(slice(None), columns.to(source.device))
    squares = torch.linalg.vector_norm(values, dim=0, dtype=torch.float64).square().cpu()
    return math.sqrt(float((squares / shares[columns]).mean()))


def estimate_damped_error(
    matrix: HMatrix, rest: EntrySource, sampler: Sampler | None, damping: float, seed: int
) -> DampedError | None:
    """Estimate E with probes that the build did not use; None if A + λI is not definite.

    Args:
        matrix: A, with its global part V Vᵀ.
        rest: H − V Vᵀ.
        sampler: has held-out columns, for a rest without products; else None.
        damping: λ.
        seed: seed of the probes.
    """
    size = matrix.shape[0]
    factors = try_factorize(matrix, as_damping(damping, size))
    if factors is None:
        return None
    own = matrix.hierarchical_part
    if has_product(rest):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(size, _NUM_PROBES, dtype=matrix.dtype, generator=generator)
        probes = factors.sqrt_solve(noise.to(matrix.device)) / math.sqrt(_NUM_PROBES)
        errors = product(rest, probes) - own @ probes
    else:
        # Only multiples x of unit vectors with Σ x xᵀ ≈ I have known products. Scaled by the roots
        # of the diagonal of (A + λI)⁻¹ they stand for probes whose entries are independent.
        assert sampler is not None
        columns, products = sampler.held_out()
        places = columns.abs().argmax(0)
        scales = factors.inverse_diagonal()[places].clamp(min=0.0).sqrt()
        probes = columns * scales
        errors = products * scales - own @ probes
    solved = factors.solve(errors)
    images = errors + matrix @ probes
    seen, whole = _dots(images, solved), float(_dots(images, probes).sum())
    squares = _dots(errors, solved).clamp(min=0.0)
    scattered = math.sqrt(seen.numel() * float(seen.square().sum()))
    norm = math.sqrt(float(squares.sum()) / max(1, size))
    if has_product(rest):
        norm = max(norm, _power_norm(own, rest, factors, solved, squares))
    return DampedError(
        rms=math.sqrt(float(squares.sum()) / max(1, size)),
        trace=float(_dots(errors, probes).sum()),
        norm=norm,
        variance=scattered / whole if whole > 0 else 0.0,
    )


def _power_norm(
    own: HMatrix, rest: EntrySource, factors: Factorization, vectors: Tensor, squares: Tensor
) -> float:
    """Estimate ‖E‖ from below by a power iteration with (A + λI)⁻¹ (H − A), which is similar to E.

    Args:
        own: A without its global part.
        rest: H without the global part of A.
        factors: (A + λI)⁻¹.
        vectors: the probes after one step, (N, k).
        squares: their squared norms with A + λI in between, (k,), in which the iteration is
            symmetric.
    """
    largest = 0.0
    chosen = squares.topk(min(_POWER_PROBES, squares.numel())).indices
    vectors, squares = vectors[:, chosen], squares[chosen]
    for _ in range(_POWER_STEPS - 1):
        alive = squares > 0
        if not bool(alive.any()):
            break
        scales = torch.where(alive, squares, torch.ones_like(squares)).rsqrt() * alive
        vectors = vectors * scales.to(vectors)
        errors = product(rest, vectors) - own @ vectors
        vectors = factors.solve(errors)
        squares = _dots(errors, vectors).clamp(min=0.0)
        largest = math.sqrt(float(squares.max()))
    return largest


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of columns in double precision, (k,)."""
    return (left.double() * right.double()).sum(0)


def badness(error: DampedError | None) -> float:
    """What the best of several builds has least of."""
    return math.inf if error is None else max(error.variance, error.norm - _SAFE_NORM)


def is_met(error: DampedError | None, wanted: float, factor: float = 1.2) -> bool:
    """Whether variances are as accurate as wanted, and ‖E‖ < 1; None stands for an indefinite A."""
    return error is not None and error.variance <= factor * wanted and error.norm < _SAFE_NORM


def damped_step(error: DampedError | None, wanted: float) -> float:
    """The factor by which to change the tolerance of a build that missed the damped error.

    An error of variances falls like the tolerance or like its square, ‖E‖ like the tolerance.
    """
    if error is None:
        return 0.25
    step = 0.8 * math.pow(wanted / max(error.variance, wanted), 0.7)
    return min(max(min(step, 0.6 / max(error.norm, 0.6)), 0.05), 0.6)
