"""Random numbers for sampling: points in proportion to weights, and uniform numbers by hashing."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_points", "hashed_uniforms", "invert_cumulative"]


def draw_points(scores: Tensor, num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw points with probabilities p_t in proportion to scores, and merge repetitions.

    A point that is drawn m times out of c gets the weight m/(c·p_t), which makes the weighted sum
    of V(t)V(t)ᵀ over the drawn points an unbiased estimate of H.

    Args:
        scores: not negative, (n,), in double precision.
        num_points: c, the number of draws.
        seed: the seed of the draws.

    Returns:
        Distinct points in increasing order, and the weight of each, in double precision.
    """
    total = scores.sum()
    if total == 0:  # the matrix is zero, and any point represents it
        return torch.zeros(1, dtype=torch.long, device=scores.device), scores.new_ones(1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_points, generator=generator, dtype=torch.float64).to(scores.device)
    points, counts = torch.unique(invert_cumulative(scores.cumsum(0), draws), return_counts=True)
    return points, counts * total / (num_points * scores[points])


def invert_cumulative(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first positions where the cumulative weights exceed the given shares of the total.

    Such a position has a positive weight. Shares are kept below one, so that rounding cannot lead
    to a position after the last positive weight.

    Args:
        cumulative: running sums of weights, (…, n).
        uniforms: shares in [0, 1), (…, c).
    """
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    draws = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulative, draws, right=True)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned integer of 64 bits."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _FIRST, _SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(state: Tensor) -> Tensor:
    """Scramble bits by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * _FIRST
    state = (state ^ ((state >> 27) & (2**37 - 1))) * _SECOND
    return state ^ ((state >> 31) & (2**33 - 1))


def hashed_uniforms(seed: int, first: Tensor, second: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1) for pairs of indices, (pairs, count).

    They depend on the seed and the pair alone, so that there is no random state, and calls may
    come in any order.
    """
    base = _mix(torch.tensor(_signed(seed % 2**64), device=first.device))
    key = _mix(_mix(base + first * _GOLDEN) + second * _GOLDEN)
    counter = torch.arange(1, count + 1, device=first.device) * _GOLDEN
    bits = _mix(key[:, None] + counter)
    return ((bits >> 11) & (2**53 - 1)).double().mul_(2.0**-53)
