"""Positive definiteness: the least damping that does, and a matrix that needs less of it.

Compression errors leave A with some negative eigenvalues, small ones, in few directions. The leaf
blocks are where they can be repaired: for an eigenvector v with eigenvalue −θ and parts v_i in the
leaves, adding the positive semi-definite w v_i v_iᵀ, w = θ/Σ‖v_i‖⁴, to all leaf blocks is the
smallest change along these parts that lifts it to zero, and lowers no other eigenvalue. Vectors
come from Lanczos with the inverse of A + μI, μ a damping that works. What is left after a few
rounds is taken away by a shift of the diagonal.

(Repairing node by node instead did not do: clipping singular values of scaled couplings changed a
kernel matrix by 86 %, and with semi-definite blocks added in skeleton rows another was left so
nearly singular that it did not factorize: once two children are nearly singular, what is left of
them is no measure of the whole. A shift alone more than doubled the error of rough compressions.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.hierarchical.elimination import IndefiniteError
from hcurv.hierarchical.factorization import NotPositiveDefiniteError
from hcurv.hierarchical.factorize import factorize_levels
from hcurv.krylov import lanczos

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix import HMatrix

__all__ = ["least_damping", "make_definite"]

_FRACTION = 0.5  # of a damping that has to suffice
_ROUNDS = 8
_FIRST_STEPS, _STEPS = 60, 48  # of Lanczos with A, with its inverse
_MARGIN, _GROWTH = 1.05, 1.5  # of an estimate, and for the next trial
_CLOSER = 1.3  # times the smallest eigenvalue: a shift that is safe and near
_CONVERGED = 0.1  # residual of an eigenvector that is used, relative


def is_definite(matrix: HMatrix, damping: float) -> bool:
    """Whether A + damping·I has a Cholesky factorization, over the rows that the tree holds."""
    try:
        factorize_levels(matrix, damping, keep=False)
    except IndefiniteError:
        return False
    return True


def least_damping(matrix: HMatrix) -> tuple[float, float]:
    """The smallest eigenvalue of A, estimated, and a damping slightly larger than it needs.

    The latter was tried: A + damping·I has a factorization.
    """
    if matrix.tree.num_kept == 0:
        return 0.0, _resolution(matrix)
    safe = _safe_damping(matrix)
    lowest = float(_lowest_pairs(matrix, safe)[0][0])
    return lowest, _tried(matrix, lowest, safe)


def make_definite(matrix: HMatrix, damping: float) -> HMatrix:
    """A matrix near A that is positive definite with half of this damping.

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
        # The closer to the spectrum, the faster Lanczos finds its end, which was just lifted.
        safe = min(safe, max(-_CLOSER * lowest, 2 * allowed))
    shift = max(0.0, _tried(matrix, lowest, safe) - allowed)
    leaves = matrix.leaves.values.clone()
    is_row = matrix.leaves.rows < matrix.tree.num_kept
    leaves.diagonal(dim1=1, dim2=2).add_(shift * is_row)
    return matrix.with_leaves(replace(matrix.leaves, values=leaves))


def _tried(matrix: HMatrix, lowest: float, safe: float) -> float:
    """A damping that works, for an estimate of the smallest eigenvalue and a damping that does."""
    damping = max(-_MARGIN * lowest, _resolution(matrix))
    while damping < safe and not is_definite(matrix, damping):
        damping *= _GROWTH
    return min(damping, safe)


def _resolution(matrix: HMatrix) -> float:
    """The smallest damping that makes a difference."""
    kind = torch.finfo(matrix.dtype)
    largest = float(matrix.diagonal().max()) if matrix.tree.num_kept else 0.0
    return max(float(kind.eps) * largest, math.sqrt(kind.tiny))


def _safe_damping(matrix: HMatrix) -> float:
    """A damping that works, not much larger than needed if that was easy to see."""
    values, _, residuals = lanczos(
        matrix.__matmul__, matrix.shape[0], _FIRST_STEPS, matrix.dtype, matrix.device
    )
    damping = max(float(residuals[0] - values[0]), _resolution(matrix))
    most = 1e3 * max(float(values[-1]), damping)
    while not is_definite(matrix, damping):
        damping *= _GROWTH
        if damping > most:
            raise NotPositiveDefiniteError(
                "the compressed matrix cannot be factorized with any damping: its bases are too"
                " ill-conditioned. Compress with another leaf_size, ordering or tolerance",
                damping,
                math.inf,
            )
    return damping


def _lowest_pairs(matrix: HMatrix, damping: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The lowest eigenvalues of A, ascending, and eigenvectors, with a damping that works."""
    factorization = matrix.factorize(damping)
    found, vectors, residuals = lanczos(
        factorization.__matmul__, matrix.shape[0], _STEPS, matrix.dtype, matrix.device, seed
    )
    # The largest of the inverse; the very largest always, however rough.
    good = residuals <= _CONVERGED * found
    good[-1] = True
    values = 1 / found[good].flip(0) - damping
    return values, vectors[:, good].flip(1)


def _lift(matrix: HMatrix, lacking: Tensor, vectors: Tensor) -> HMatrix:
    """Add to the leaf blocks what eigenvectors lack."""
    kept = torch.cat([vectors[matrix.tree.permutation], vectors.new_zeros(1, vectors.shape[1])])
    parts = kept[matrix.leaves.rows]  # (leaves, m, q)
    spread = parts.square().sum(1).square().sum(0)
    weights = (lacking / spread).to(parts.dtype)
    values = torch.baddbmm(matrix.leaves.values, parts * weights, parts.transpose(1, 2))
    return matrix.with_leaves(replace(matrix.leaves, values=values))
