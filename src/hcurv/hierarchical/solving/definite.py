"""Positive definiteness: the smallest damping that suffices, and a matrix that needs less of it.

Compression errors give A a few small negative eigenvalues. They can be repaired in the leaf blocks:
for an eigenvector v with eigenvalue −θ and its parts v_i in the leaves, adding the positive
semi-definite w v_i v_iᵀ, w = θ/Σ‖v_i‖⁴, to all leaf blocks is the smallest change along these parts
that lifts it to zero, and it lowers no other eigenvalue. The vectors come from Lanczos with the
inverse of A + μI, where μ is a damping that works. What remains after a few rounds is removed by a
shift of the diagonal.

Other repairs were tried. Repairing node by node fails: clipping the singular values of scaled
couplings changed a kernel matrix by 86 %, and adding semi-definite blocks in skeleton rows left
another one so nearly singular that it did not factorize, because once two children are nearly
singular, their remainder says nothing about the whole. A shift alone more than doubled the error of
rough compressions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.hierarchical.solving.elimination import IndefiniteError
from hcurv.hierarchical.solving.factorize import factorize_levels
from hcurv.hierarchical.solving.shared_solves import factorize_shared
from hcurv.linalg import lanczos

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = [
    "NotPositiveDefiniteError",
    "indefinite_error",
    "least_damping",
    "make_definite",
    "overflow_error",
]

# A repaired matrix is positive definite already with this fraction of the damping, so that the
# damping itself gives a well-conditioned factorization.
_FRACTION = 0.5
# Repairs stop after this many rounds. Most matrices of the tests need one to three.
_ROUNDS = 8
# Steps of Lanczos with A, to find a damping that works, and with the inverse, to find eigenvectors.
_FIRST_STEPS, _STEPS = 60, 48
# A damping that is tried exceeds the estimate by the first factor; the next trial by the second.
_MARGIN, _GROWTH = 1.05, 1.5
# A shift of this many times the smallest eigenvalue is safe, and near enough for fast convergence.
_CLOSER = 1.3
# An eigenvector is used if its residual is at most this fraction of its eigenvalue.
_CONVERGED = 0.1
# A suggested damping is at least this many units of rounding of the largest eigenvalue, so that
# solutions have a relative residual of about 1e-4 or less.
_ACCURATE = 1e4
# Steps of Lanczos that estimate the largest eigenvalue to a few per cent.
_NORM_STEPS = 10


class NotPositiveDefiniteError(ValueError):
    """A + D is not positive definite, so that it has no Cholesky factorization.

    Attributes:
        damping: the damping that was asked for, a number or a tensor (N,).
        smallest_damping: a number with which A + damping·I can be factorized and solved with
            accurately. Hardly any smaller one can (this is an estimate).

    Examples:
        >>> try:
        ...     A.factorize(damping=-1.0)
        ... except hcurv.NotPositiveDefiniteError as error:
        ...     print(error.damping, error.smallest_damping > 0)
        -1.0 True
        >>> A.factorize(error_damping := 2 * H.trace()).damping == error_damping
        True
    """

    def __init__(self, message: str, damping: float | Tensor, smallest_damping: float) -> None:
        super().__init__(message)
        self.damping = damping
        self.smallest_damping = smallest_damping


def indefinite_error(matrix: HMatrix, damping: Damping, definite: bool) -> NotPositiveDefiniteError:
    """Return the error for a damping with which A + D cannot be factorized.

    Args:
        matrix: A.
        damping: D.
        definite: whether A + D had to be positive definite, or just regular.
    """
    given = f"damping = {damping.number:.3e}" if damping.is_number else "this damping"
    if not definite:
        value = damping.value
        return NotPositiveDefiniteError(
            f"A + D is singular for {given}: −damping is an eigenvalue of A, or nearly so. Choose a"
            " slightly different damping",
            value,
            float(value.max()) if isinstance(value, Tensor) else value,
        )
    lowest, least = least_damping(matrix.hierarchical_part)
    # Rounded upwards, so that the number in the message works as well as the exact one.
    smallest = _round_up(max(least, _accurate_damping(matrix)))
    name = "A" if matrix.global_part is None else "A (without its global part)"
    num_zero = matrix.tree.size - matrix.tree.num_kept
    if num_zero and bool((damping.rows(matrix.tree.zero_rows) <= 0).any()):
        reason = f"{num_zero} rows of {name} are zero, and need a positive damping"
    elif lowest < -_resolution(matrix):
        reason = f"compression (or rounding) left eigenvalues of {name} down to about {lowest:.2e}"
    else:
        reason = f"{name} is singular up to rounding in {matrix.dtype}"
    return NotPositiveDefiniteError(
        f"A + D is not positive definite for {given}: {reason}. Use damping={smallest:.2e} or more,"
        " or compress for the damping that you need, compress(H, damping=…)",
        damping.value,
        smallest,
    )


def overflow_error(dtype: torch.dtype) -> ValueError:
    """Return the error for a matrix with values that are too large for its type."""
    return ValueError(
        "the matrix has values that are NaN or infinite, or become so in products: it cannot"
        f" be factorized. {dtype} holds numbers up to {torch.finfo(dtype).max:.1e}: convert the"
        " original matrix to torch.float64, or scale it first"
    )


def _accurate_damping(matrix: HMatrix) -> float:
    """The smallest damping with which solutions in the type of the matrix have some digits."""
    values, _, residuals = lanczos(
        matrix.__matmul__, matrix.shape[0], _NORM_STEPS, matrix.dtype, matrix.device
    )
    largest = max(0.0, float(values[-1] + residuals[-1]))
    # With any damping, a zero matrix is a multiple of the identity.
    return _ACCURATE * float(torch.finfo(matrix.dtype).eps) * (largest or 1.0)


def _round_up(number: float) -> float:
    """The next number that has three significant digits."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / digit) * digit:.2e}")


def is_definite(matrix: HMatrix, damping: float) -> bool:
    """Whether A + damping·I is positive definite on the rows that the tree holds.

    The global part of A is left out.
    """
    try:
        if matrix.nodes is None:
            factorize_levels(matrix, damping, keep=False)
        else:
            factorize_shared(cast("DistributedHMatrix", matrix), damping, keep=False)
    except IndefiniteError:
        return False
    return True


def least_damping(matrix: HMatrix) -> tuple[float, float]:
    """Estimate the smallest eigenvalue of A, and find a damping slightly larger than it needs.

    The damping was tried: A + damping·I can be factorized.
    """
    if matrix.tree.num_kept == 0:
        return 0.0, _resolution(matrix)
    safe = _safe_damping(matrix)
    lowest = float(_lowest_pairs(matrix, safe)[0][0])
    return lowest, _tried(matrix, lowest, safe)


def make_definite(matrix: HMatrix, damping: float) -> HMatrix:
    """Return a matrix near A that is positive definite with half of this damping.

    Args:
        matrix: A.
        damping: positive.
    """
    allowed = _FRACTION * damping
    if is_definite(matrix, allowed):
        return matrix
    safe = _safe_damping(matrix)
    lowest = -safe
    for number in range(_ROUNDS):
        values, vectors = _lowest_pairs(matrix, safe, seed=number)
        lowest = float(values[0])
        lacking = values < -0.9 * allowed
        if not bool(lacking.any()):
            break
        matrix = _lift(matrix, -values[lacking], vectors[:, lacking])
        if is_definite(matrix, allowed):
            return matrix
        # The closer the shift is to the spectrum, the faster Lanczos finds its lower end.
        safe = min(safe, max(-_CLOSER * lowest, 2 * allowed))
    shift = max(0.0, _tried(matrix, lowest, safe) - allowed)
    leaves = matrix.leaves.values.clone()
    is_row = matrix.leaves.rows < matrix.leaf_order.numel()
    leaves.diagonal(dim1=1, dim2=2).add_(shift * is_row)
    return matrix.with_leaves(replace(matrix.leaves, values=leaves))


def _tried(matrix: HMatrix, lowest: float, safe: float) -> float:
    """Find a damping that works and is hardly larger than needed.

    Args:
        matrix: A.
        lowest: an estimate of its smallest eigenvalue.
        safe: a damping that works.
    """
    damping = max(-_MARGIN * lowest, _resolution(matrix))
    while damping < safe and not is_definite(matrix, damping):
        damping *= _GROWTH
    return min(damping, safe)


def _resolution(matrix: HMatrix) -> float:
    """The smallest damping that changes the diagonal of A at all."""
    info = torch.finfo(matrix.dtype)
    largest = float(matrix.diagonal().max()) if matrix.tree.num_kept else 0.0
    return max(float(info.eps) * largest, info.tiny) if largest > 0 else math.sqrt(info.tiny)


def _safe_damping(matrix: HMatrix) -> float:
    """Find a damping that works. It is not much larger than needed if Lanczos converged."""
    values, _, residuals = lanczos(
        matrix.__matmul__, matrix.shape[0], _FIRST_STEPS, matrix.dtype, matrix.device
    )
    damping = max(float(residuals[0] - values[0]), _resolution(matrix))
    most = 1e3 * max(float(values[-1]), damping)
    while not is_definite(matrix, damping):
        damping *= _GROWTH
        if not (math.isfinite(damping) and math.isfinite(most)):
            raise overflow_error(matrix.dtype)
        if damping > most:
            raise NotPositiveDefiniteError(
                "the compressed matrix cannot be factorized with any damping: its bases are too"
                " ill-conditioned. Compress with another leaf_size, ordering or tolerance",
                damping,
                math.inf,
            )
    return damping


def _lowest_pairs(matrix: HMatrix, damping: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Find the lowest eigenvalues of A, ascending, and their eigenvectors (N, k).

    Args:
        matrix: A.
        damping: a damping that works.
        seed: seed of the first vector.
    """
    factorization = matrix.factorize(damping, warn=False)
    found, vectors, residuals = lanczos(
        factorization.__matmul__, matrix.shape[0], _STEPS, matrix.dtype, matrix.device, seed
    )
    # The largest eigenvalue of the inverse is always used, however rough its vector is.
    good = residuals <= _CONVERGED * found
    good[-1] = True
    values = 1 / found[good].flip(0) - damping
    return values, vectors[:, good].flip(1)


def _lift(matrix: HMatrix, lacking: Tensor, vectors: Tensor) -> HMatrix:
    """Add to the leaf blocks what lifts some eigenvalues to zero.

    Args:
        matrix: A.
        lacking: the negative eigenvalues times −1, (q,).
        vectors: their eigenvectors, (N, q).
    """
    kept = torch.cat([vectors[matrix.leaf_order], vectors.new_zeros(1, vectors.shape[1])])
    parts = kept[matrix.leaves.rows]  # (leaves, m, q)
    spread = parts.square().sum(1).square().sum(0)
    if matrix.nodes is not None and matrix.nodes.is_shared:
        spread = matrix.nodes.share.total(spread)
    weights = (lacking / spread).to(parts.dtype)
    values = torch.baddbmm(matrix.leaves.values, parts * weights, parts.transpose(1, 2))
    return matrix.with_leaves(replace(matrix.leaves, values=values))
