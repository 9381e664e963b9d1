"""Ridge leverage scores: how much each point matters for H + D, and subsets drawn by them.

The score of point i, with its q rows S_i of the root S,

    ℓ_i = tr(S_i (H + D)⁻¹ S_iᵀ),    Σ ℓ_i = d(D) = tr(H (H + D)⁻¹),

is the share of the point in the effective dimension. Points that are drawn in proportion to it and
weighted by the inverse keep H + D spectrally: with m draws, the eigenvalues of the estimate
relative to H + D lie within 1 ± O(√(d/m)) (Alaoui & Mahoney 2015; Cohen, Musco & Musco 2017).
Drawing by ‖S_i‖², the shares in the trace, keeps the Frobenius norm alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.factorized import Factorized
from hcurv.inversion.sample_space import SampleSpaceFactorization
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.random_draws import draw_points

__all__ = ["approximate_scores", "leverage_scores"]

# Scores are estimated from this many samples, each of which costs half a product over all points.
# The relative standard deviation of a score with q rows is then at most √(2/32).
_NUM_SAMPLES = 32
# Samples of this many points, drawn by their norms, stand for H when the scores are estimated.
_FIRST_ROWS = 2048
# All scores are raised by this share of their mean, so that a point whose score was underestimated
# by chance cannot get an enormous weight.
_FLOOR = 0.1
# Scores are estimated with random numbers of their own. If points were then drawn with the same
# numbers, the weights would depend on the draws, and subsets would be biased.
# The generator of torch uses the lowest 32 bits of a seed alone.
_SCORE_SEED = 0x5EED5EED


def leverage_scores(
    matrix: FactoredMatrix, factorized: Factorized, num_samples: int | None, seed: int = 0
) -> Tensor:
    """The scores ℓ_i of all points, (n,), in double precision.

    Args:
        matrix: H = SᵀS.
        factorized: (H + D)⁻¹, or an approximation of it.
        num_samples: the number of samples of N(0, (H + D)⁻¹) to estimate the scores from, without
            bias; None to compute them by n·q solves.
        seed: the seed of the samples.
    """
    rows = matrix.num_root_rows // matrix.num_points
    if num_samples is None:
        result = torch.zeros(matrix.num_root_rows, dtype=torch.float64, device=matrix.device)
        for index in torch.arange(matrix.num_root_rows, device=matrix.device).split(256):
            units = torch.zeros(
                matrix.num_root_rows, index.numel(), dtype=matrix.dtype, device=matrix.device
            )
            units[index, torch.arange(index.numel(), device=matrix.device)] = 1.0
            columns = matrix.root_transposed(units)
            solved = factorized.solve(columns)
            result[index] = torch.linalg.vecdot(columns.double(), solved.double(), dim=0)
    else:
        generator = torch.Generator().manual_seed(seed)
        samples = factorized.sample(num_samples, generator).T.contiguous()
        result = matrix.root_product(samples).double().square().mean(1)
    return result.view(-1, rows).sum(1)


def approximate_scores(matrix: FactoredMatrix, damping: Damping, seed: int = 0) -> Tensor:
    """Estimates of the scores ℓ_i that cost about two products over all points, (n,).

    A first subset, drawn by norms, stands for H; its factorization in sample space is exact.
    """
    rows = max(1, matrix.num_root_rows // matrix.num_points)
    few = min(matrix.num_points, max(1, _FIRST_ROWS // rows))
    seed ^= _SCORE_SEED
    points, weights = draw_points(matrix.root.point_norms(), few, seed)
    first = SampleSpaceFactorization.of(matrix.of_points(points, weights), damping, matrix.dtype)
    scores = leverage_scores(matrix, first, _NUM_SAMPLES, seed)
    return scores + _FLOOR * scores.mean()
