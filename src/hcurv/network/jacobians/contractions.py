"""Sums and look-ups over stored factors, which all have the points as their last axis."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

__all__ = [
    "FEW_COLUMNS",
    "contract",
    "drop_tiny",
    "expand",
    "normalised",
    "project",
    "take",
    "without_tiny",
]

# Elementwise passes over the factors beat batched products below this many right-hand sides
# (timed on one core with factors that do not fit into its cache).
FEW_COLUMNS = 8


def contract(factor: Tensor, columns: Tensor, result: Tensor, sum_floats: int) -> None:
    """Add Σ_μ factor[μ, :, i] columns[μ, i, :] to ``result``.

    Args:
        factor: (d, q, b).
        columns: (d, b, k).
        result: (b, q, k).
        sum_floats: floats of the running sum, where it is formed elementwise.
    """
    if columns.shape[2] >= FEW_COLUMNS:
        result.baddbmm_(factor.permute(2, 1, 0).contiguous(), columns.permute(1, 0, 2))
        return
    step = max(1, sum_floats // (factor.shape[1] * factor.shape[2]))
    for column, output in zip(columns.unbind(2), result.unbind(2), strict=True):
        sums = factor[:step] * column[:step, None]
        for rest, weights in zip(factor[step:].split(step), column[step:].split(step), strict=True):
            sums[: rest.shape[0]].addcmul_(rest, weights[:, None])
        output += sums.sum(0).T


def expand(factor: Tensor, outputs: Tensor) -> Tensor:
    """Σ_q factor[μ, q, i] outputs[i, q, :]: (d, q, b) and (b, q, k) to (d, b, k)."""
    num_units, num_rows, num_points = factor.shape
    num_columns = outputs.shape[2]
    if num_columns >= FEW_COLUMNS:
        return torch.bmm(factor.permute(2, 0, 1).contiguous(), outputs).transpose(0, 1)
    result = factor.new_zeros(num_columns, num_units, num_points)
    for target, output in zip(result, outputs.permute(2, 1, 0).contiguous(), strict=True):
        for row in range(num_rows):
            target.addcmul_(factor[:, row], output[row])
    return result.permute(1, 2, 0)


def take(values: Tensor, position: tuple[Tensor, ...], points: Tensor) -> Tensor:
    """values[position][p, points[p, :]]: each pair p has a row and points of its own."""
    row = position[0]
    for axis, index in enumerate(position[1:], start=1):
        row = row * values.shape[axis] + index
    return values.reshape(-1).take(row[:, None] * values.shape[-1] + points)


def project(values: Tensor, num_features: int, generator: torch.Generator) -> Tensor:
    """A Gaussian projection of the rows of ``values``, (rows, n) to (num_features, n)."""
    weights = torch.randn(
        num_features, values.shape[0], dtype=torch.float64, generator=generator
    ).to(values)
    return weights @ values


def normalised(values: Tensor, norms: Tensor) -> Tensor:
    """Values divided by their norms where these are positive."""
    return values / torch.where(norms > 0, norms, 1)


def without_tiny(values: Tensor) -> Tensor:
    """Replace values whose square would be subnormal, or zero, by zero.

    Such values cannot change a diagonal entry, and arithmetic on subnormal numbers is a hundred
    times slower on common processors. The flat ends of softplus and dark pixels produce many.
    """
    return hardshrink(values, _least(values))


def drop_tiny(values: Tensor) -> Tensor:
    """The same in place; returns ``values``."""
    torch.ops.aten.hardshrink.out(values, _least(values), out=values)
    return values


def _least(values: Tensor) -> float:
    return math.sqrt(torch.finfo(values.dtype).tiny)
