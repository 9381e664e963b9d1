"""Groups of training points, whose scores are added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_groups", "group_sums"]


def check_groups(groups: Tensor | Sequence[int], num_points: int, device: torch.device) -> Tensor:
    """Groups as a tensor of numbers that are not negative, one for each training point, (n,)."""
    members = torch.as_tensor(groups)
    if not members.numel():  # An empty list has no type of its own.
        members = members.long()
    if members.is_floating_point() or members.is_complex() or members.dtype == torch.bool:
        raise TypeError(f"groups must be whole numbers; got {members.dtype}")
    if members.shape != (num_points,):
        raise ValueError(
            f"groups must have one number for each of {num_points} training points;"
            f" got shape {tuple(members.shape)}"
        )
    if members.numel() and int(members.min()) < 0:
        raise ValueError(f"groups must not be negative; got {int(members.min())}")
    return members.to(device, torch.long)


def group_sums(values: Tensor, members: Tensor | None, width: int) -> Tensor:
    """Scores (b, n), or their sums over groups (b, width)."""
    if members is None:
        return values
    return values.new_zeros(len(values), width).index_add_(1, members, values)
