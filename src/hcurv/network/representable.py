"""Whether the entries of a matrix fit into its type, although those of its root do."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.network.problem import Problem
from hcurv.network.root import Root

__all__ = ["require_finite", "require_representable"]

# Inputs and weights that together are within this factor of one make usual derivatives.
_USUAL = 1e6
# Products with vectors of norms up to this number must not overflow.
_HEADROOM = 1e3
# Two ways to compute the trace agree within this share, if nothing overflows or underflows.
_SAME = 1e-2


def require_representable(problem: Problem, root: Root, workspace: int) -> None:
    """Refuse a matrix whose entries overflow, or vanish although those of S do not.

    Products are computed from S, and entries are products of its entries: they have twice its
    exponent. So inputs of 1e-20 in float32 would give zero entries and products that are not zero.
    Diagonals and norms are computed from squares of the factors of S. These can overflow where no
    entry does: then the squares of large inputs are multiplied by those of small derivatives.

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
    # The squares of Sᵀ times random signs have the diagonal of H as their mean, and by the
    # inequality of Cauchy and Schwarz they are at most that diagonal times the number of rows.
    sums = root.apply_transposed(signs.to(root.device, root.dtype), workspace)
    squares = sums.squeeze(1).double().square()
    diagonal, norms = root.diagonal(workspace).double(), root.point_norms().double()
    largest, trace = float(diagonal.max()), float(diagonal.sum())
    if largest == 0 and not bool(squares.any()) and not bool(norms.any()):
        return
    bounded = squares <= (1 + _SAME) * rows * diagonal + least
    if (
        least < largest
        and trace < limits.max / _HEADROOM
        and abs(float(norms.sum()) - trace) <= _SAME * trace
        and bool(bounded.all())
    ):
        return
    inputs = problem.survey.largest or 1.0
    # The random signs may cancel, and diagonals may be lost, but hardly all of them.
    guess = max(float(squares.max()), largest, float(norms.max()))
    is_large = inputs > 1 if largest != largest or least < guess < limits.max else guess > 1
    what, where = ("overflow", "large") if is_large else ("underflow", "small")
    raise ValueError(
        f"the entries of the matrix {what} in {root.dtype}: the inputs or the weights are too"
        f" {where} (scale the inputs, or convert the model and the data to float64)"
    )


def require_finite(result: Tensor, rhs: Tensor) -> Tensor:
    """Return the product with finite vectors, if it is finite.

    Raises:
        ValueError: it overflows.
    """
    if _is_finite(result) or not _is_finite(rhs):
        return result
    raise ValueError(
        f"the product overflows in {result.dtype}: the vectors or the entries of the matrix are too"
        " large (scale the vectors, or convert the model and the data to float64)"
    )


def _is_finite(values: Tensor) -> bool:
    """Whether all values are finite, in one pass that allocates nothing."""
    if values.numel() == 0:
        return True
    least, most = values.aminmax()
    return bool(torch.isfinite(most - least)) or bool(torch.isfinite(values).all())


def _is_usual(problem: Problem) -> bool:
    """Whether neither inputs nor weights are so large or small that a closer look is needed."""
    largest = problem.survey.largest or 1.0
    factor = max(largest, 1 / largest)
    for parameter in problem.snapshot.module.parameters():
        if parameter.numel():
            factor *= max(1.0, float(parameter.detach().abs().max()))
    return factor < _USUAL
