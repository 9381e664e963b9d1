"""Scores: what it costs to remove a weight, or a group of weights."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hcurv.applications.pruning.quadratic import QuadraticModel
from hcurv.applications.pruning.structures import Groups, Structure

__all__ = ["Saliency", "resolve_saliency", "select_active"]

Saliency: TypeAlias = Literal["auto", "magnitude", "diagonal", "inverse"]


def resolve_saliency(saliency: Saliency, quadratic: QuadraticModel, active: Tensor) -> Saliency:
    """What "auto" means now: "inverse" where that takes seconds, and "diagonal" elsewhere."""
    if saliency != "auto":
        return saliency
    return "inverse" if quadratic.has_cheap_inverse(active) else "diagonal"


def select_active(
    saliency: Saliency,
    quadratic: QuadraticModel,
    weights: Tensor,
    active: Tensor,
    structure: Structure,
    sparsity: float,
) -> Tensor:
    """Choose the weights that stay.

    Args:
        saliency: how they are judged, not "auto".
        quadratic: the quadratic model of the loss.
        weights: the weights that are judged, flat, (N,).
        active: which of them have not been removed, (N,), boolean.
        structure: what becomes zero together.
        sparsity: the share to reach.

    Returns:
        (N,), boolean.
    """
    if saliency == "inverse" and isinstance(structure, Groups) and not structure.is_single:
        if quadratic.is_dense(active):
            totals = _joint_costs(quadratic, weights, active, structure)
            return structure.select_groups(totals, active, sparsity)
    return structure.select(_costs(saliency, quadratic, weights, active), active, sparsity)


def _costs(
    saliency: Saliency, quadratic: QuadraticModel, weights: Tensor, active: Tensor
) -> Tensor:
    """θ_k², θ_k²·H_kk or θ_k²/[(H + λI)⁻¹]_kk, (N,)."""
    squares = weights.double().square()
    if saliency == "diagonal":
        return squares * quadratic.diagonal
    if saliency == "inverse":
        return squares / quadratic.inverse_diagonal(active)
    return squares


def _joint_costs(
    quadratic: QuadraticModel, weights: Tensor, active: Tensor, structure: Groups
) -> Tensor:
    """θ_gᵀ {[(H + λI)⁻¹]_gg}⁻¹ θ_g of every group g: what it costs to remove all of it at once."""
    inverse = quadratic.inverse(active)
    position = active.long().cumsum(0) - 1
    totals = torch.zeros(structure.num_groups, dtype=torch.float64, device=weights.device)
    for number, group in enumerate(structure.groups()):
        rows = group[active[group]]
        if rows.numel():
            values, at = weights[rows].double(), position[rows]
            totals[number] = values @ torch.linalg.solve(inverse[at[:, None], at], values)
    return totals
