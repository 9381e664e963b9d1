"""Put data points into an order in which neighbours are similar, for stratified sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["similarity_order"]

# Parts of this many points are not sorted any further.
_SMALLEST_PART = 4
# Steps of the power method for each direction. A few suffice: any direction of large variance
# serves the purpose.
_POWER_STEPS = 6


def similarity_order(features: Tensor) -> Tensor:
    """Order points by recursive bisection along directions of largest variance.

    All parts of a level are halved at once, with a few calls for each level and O(n log² n) work.

    Args:
        features: numbers that describe the points, (num_features, n).

    Returns:
        The points in their order, a permutation (n,).
    """
    num_features, num_points = features.shape
    order = torch.arange(num_points, device=features.device)
    num_levels = max(0, math.ceil(math.log2(max(1, num_points / _SMALLEST_PART))))
    for level in range(num_levels):
        num_parts = 2**level
        part = torch.arange(num_points, device=order.device) * num_parts // num_points
        values = features[:, order].T
        counts = torch.bincount(part, minlength=num_parts).clamp_(min=1)[:, None]
        means = values.new_zeros(num_parts, num_features).index_add_(0, part, values) / counts
        centred = values - means[part]
        direction = values.new_ones(num_parts, num_features)
        for _ in range(_POWER_STEPS):
            weights = (centred * direction[part]).sum(1, keepdim=True)
            direction.zero_().index_add_(0, part, centred * weights)
            norms = direction.norm(dim=1, keepdim=True)
            direction /= torch.where(norms > 0, norms, 1)
        along = (centred * direction[part]).sum(1)
        by_value = along.argsort(stable=True)
        order = order[by_value[part[by_value].argsort(stable=True)]]
    return order
