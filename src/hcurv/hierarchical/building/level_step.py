"""One step from a level of a tree to the next, for builds and for the trials of the planner.

The rows Y of a node, outside of the node, are interpolated from few of them, Y ≈ P Y[S]. The
skeleton rows S stand for all rows on the level above: an error in one of them spreads to the other
rows with the weights in its column of P, and counts there accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.hierarchical.building.error_budget import out_of_sample
from hcurv.linalg.interpolative import interpolate_rows

__all__ = ["NodeSkeletons", "choose_skeletons"]

_ROUNDING = 1.001  # an error that is larger than allowed by less than this factor is not too large


@dataclass(frozen=True)
class NodeSkeletons:
    """Skeletons of some nodes: rows ≈ weights @ rows[skeleton].

    Attributes:
        skeleton: places of the skeleton rows among the rows of a node, (B, r); 0 beyond the rank.
        weights: interpolation, (B, m, r), the identity on the skeleton, zero beyond the rank.
        ranks: number of skeleton rows, (B,).
        scales: how much an error in a skeleton row weighs in the whole matrix, (B, r); 1 beyond
            the rank.
        errors: norms of weighted errors in the units of the samples, estimated for all columns,
            not only those of the samples, (B,), double precision.
        is_capped: which nodes the rank cap kept from the error that is allowed, (B,).
    """

    skeleton: Tensor
    weights: Tensor
    ranks: Tensor
    scales: Tensor
    errors: Tensor
    is_capped: Tensor


def choose_skeletons(
    samples: Tensor, scales: Tensor, allowed: float, max_rank: int | None, num_random: int | None
) -> NodeSkeletons:
    """Choose skeleton rows of nodes from samples of their rows.

    Args:
        samples: the rows of each node in some columns, (B, m, s), zero for padding. They are
            overwritten.
        scales: how much an error in a row weighs in the whole matrix, (B, m), 1 for padding.
        allowed: the weighted error that each node may make, in the units of the samples.
        max_rank: rank cap, or None.
        num_random: if the columns of the samples are a random choice of all columns, how many
            columns of a sketch tell as much; otherwise None.
    """
    is_random = num_random is not None
    found = interpolate_rows(
        samples.mul_(scales[:, :, None]), max_rank, allowed, random_columns=is_random
    )
    ranks, errors = found.ranks, found.errors
    limits = torch.full_like(errors, _ROUNDING * allowed)
    if is_random:
        limits *= (1 - ranks / max(1, samples.shape[2])).sqrt()
    is_capped = errors > limits
    is_capped &= ranks >= (samples.shape[1] if max_rank is None else max_rank)
    within = torch.arange(found.skeleton.shape[1], device=scales.device) < ranks[:, None]
    skeleton = torch.where(within, found.skeleton, 0)
    weights = found.weights.mul_(scales.gather(1, skeleton)[:, None]).div_(scales[:, :, None])
    squares = (scales.square()[:, None] @ weights.square()).squeeze(1)
    return NodeSkeletons(
        skeleton,
        weights,
        ranks,
        torch.where(within, squares.sqrt(), 1.0),
        errors.double() if num_random is None else out_of_sample(errors, ranks, num_random),
        is_capped,
    )
