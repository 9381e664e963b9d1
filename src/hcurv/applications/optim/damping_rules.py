"""The damping λ of the groups, and the rules of Levenberg and Marquardt that it follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DampingRules", "check_group", "expand_setting"]

# Above the first ratio of the true and the predicted decrease λ falls, below the second it grows.
_GOOD, _POOR = 0.75, 0.25
# λ stays above this share of the curvature along the first gradient.
_LEAST_SHARE = {torch.float32: 1e-7, torch.float64: 1e-12}


class DampingRules:
    """Changes the damping of all groups by the same factors.

    Args:
        factor: what λ is multiplied or divided by.
        adapt: whether λ changes at all from step to step.

    Attributes:
        least: λ does not fall below this number.

    Raises:
        ValueError: the factor is not above 1.
    """

    def __init__(self, factor: float, adapt: bool) -> None:
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 1):
            raise ValueError(f"damping_factor must be a number above 1; got {factor!r}")
        self._factor, self.adapts = float(factor), bool(adapt)
        self.least = 0.0

    def start(self, groups: Sequence[dict[str, Any]], curvature: float, dtype: torch.dtype) -> None:
        """Set what is not known before the first gradient is.

        Args:
            groups: the parameter groups.
            curvature: gᵀHg/gᵀg.
            dtype: the type of the parameters.
        """
        scale = curvature if curvature > 0 and math.isfinite(curvature) else 1.0
        if not self.least:
            self.least = _LEAST_SHARE[dtype] * scale
        for group in groups:
            if group["damping"] is None:
                group["damping"] = scale

    def is_started(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether `start` has nothing to do."""
        return self.least > 0 and all(group["damping"] is not None for group in groups)

    def follow(self, groups: Sequence[dict[str, Any]], ratio: float) -> None:
        """Change λ after a step with the ratio ρ; a NaN changes nothing."""
        if ratio > _GOOD:
            self._multiply(groups, 1 / self._factor)
        elif ratio < _POOR:
            self._multiply(groups, self._factor)

    def grow(self, groups: Sequence[dict[str, Any]], rejected: int) -> None:
        """Raise λ, because so many steps were rejected one after the other."""
        self._multiply(groups, self._factor**rejected)

    def _multiply(self, groups: Sequence[dict[str, Any]], factor: float) -> None:
        for group in groups:
            damping = float(group["damping"])
            # A damping that the user set below the least is never raised by a good step.
            group["damping"] = max(factor * damping, min(damping, self.least))


def expand_setting(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[nn.Parameter], name: str
) -> Tensor:
    """A setting of the groups for every entry of the flat vector, (N,)."""
    values = {id(p): float(group[name]) for group in groups for p in group["params"]}
    return torch.cat([p.detach().new_full((p.numel(),), values[id(p)]) for p in parameters])


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that are out of range.

    Raises:
        ValueError: one of them is.
    """
    for name, least in (("lr", 0.0), ("weight_decay", 0.0), ("momentum", 0.0)):
        value = group.get(name, least)
        if isinstance(value, torch.Tensor):
            value = float(value)
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be a number that is not negative; got {value!r}")
    if not group.get("momentum", 0.0) <= 1:
        raise ValueError(f"momentum must lie in [0, 1]; got {group['momentum']!r}")
    damping = group.get("damping")
    if damping is not None and not (
        isinstance(damping, int | float) and math.isfinite(damping) and damping > 0
    ):
        raise ValueError(f"damping must be positive, or None; got {damping!r}")
