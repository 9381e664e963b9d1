"""Whether the entries of a matrix fit into its type, although those of its root do."""

from __future__ import annotations

import torch

from hcurv.network.problem import Problem
from hcurv.network.root import Root

__all__ = ["require_representable"]

# Inputs and weights that together are within this factor of one make usual derivatives.
_USUAL = 1e6
# A random estimate of the largest diagonal entry is right within this factor, by far.
_UNCERTAIN = 1e6


def require_representable(problem: Problem, root: Root, workspace: int) -> None:
    """Refuse a matrix whose entries overflow, or vanish although those of S do not.

    Products are computed from S, and entries are products of its entries: they have twice its
    exponent. So inputs of 1e-20 in float32 would give zero entries and products that are not zero.

    Args:
        problem: the model and the data.
        root: S.
        workspace: bytes of temporary memory to stay within.

    Raises:
        ValueError: the entries cannot be represented.
    """
    if _is_usual(problem):
        return
    limits = torch.finfo(root.dtype)
    # Entries that are smaller than the largest one by less than the precision must be right, too.
    least = limits.tiny / limits.eps
    generator = torch.Generator().manual_seed(0)
    rows = root.num_points * root.num_rows
    signs = torch.randint(2, (rows, 1), generator=generator).mul_(2).sub_(1)
    # The squares of Sᵀ times random signs have the diagonal of H as their mean.
    sums = root.apply_transposed(signs.to(root.device, root.dtype), workspace)
    guess = float(sums.abs().max()) ** 2
    if guess == 0 or least * _UNCERTAIN < guess < limits.max / _UNCERTAIN:
        return
    largest = float(root.diagonal(workspace).max())
    if least < largest < limits.max:
        return
    what, where = ("overflow", "large") if guess > 1 else ("underflow", "small")
    raise ValueError(
        f"the entries of the matrix {what} in {root.dtype}: the inputs or the weights are too"
        f" {where} (scale the inputs, or convert the model and the data to float64)"
    )


def _is_usual(problem: Problem) -> bool:
    """Whether neither inputs nor weights are so large or small that a closer look is needed."""
    largest = problem.survey.largest or 1.0
    factor = max(largest, 1 / largest)
    for parameter in problem.snapshot.module.parameters():
        if parameter.numel():
            factor *= max(1.0, float(parameter.detach().abs().max()))
    return factor < _USUAL
