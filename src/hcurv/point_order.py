"""Put data points into an order in which neighbours are alike, for stratified sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["similarity_order"]

_LEAF = 4  # points that need no further sorting
_POWER_STEPS = 6  # of the power method: any direction of large variance will do


def similarity_order(features: Tensor) -> Tensor:
    """A permutation of the points by recursive bisection along directions of largest variance.

    All parts of a level are halved at once, so the work is O(n log² n) in a few calls a level.

    Args:
        features: (num_features, n).

    Returns:
        The points in order, (n,).
    """
    num_features, num_points = features.shape
    order = torch.arange(num_points, device=features.device)
    num_levels = max(0, math.ceil(math.log2(max(1, num_points / _LEAF))))
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
