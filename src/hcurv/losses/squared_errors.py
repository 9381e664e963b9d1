"""Squared errors: the loss of the paper and that of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.elementwise import ElementwiseLoss

__all__ = ["HalfSquaredError", "MeanSquaredError"]


class HalfSquaredError(ElementwiseLoss):
    """½‖x_i − y_i‖², averaged over the points (but not over outputs): the loss of the paper.

    Args:
        reduction: "mean" or "sum".

    Examples:
        >>> half = hcurv.GaussNewton(model, hcurv.losses.HalfSquaredError(), inputs)
        >>> full = hcurv.GaussNewton(model, torch.nn.MSELoss(), inputs)
        >>> torch.allclose(half.diagonal(), 1.5 * full.diagonal())
        True
    """

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return the identity, as a diagonal.

        Examples:
            >>> hcurv.losses.HalfSquaredError().hessian_sqrt(torch.zeros(1, 2), None)
            tensor([[1., 1.]])
        """
        return torch.ones_like(outputs)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute x_i − y_i.

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.HalfSquaredError().gradient(outputs, targets)
            tensor([[2., 0.]])
        """
        return outputs - targets.to(outputs)

    def divisor(self, outputs_shape: tuple[int, ...], targets: Tensor | None) -> float:
        """Return the number of points.

        Examples:
            >>> hcurv.losses.HalfSquaredError().divisor((20, 3, 8), None)
            20.0
        """
        return float(outputs_shape[0])


class MeanSquaredError(ElementwiseLoss):
    """‖x_i − y_i‖² averaged over points *and* outputs: `torch.nn.MSELoss`.

    Args:
        reduction: "mean" or "sum".

    Examples:
        >>> ours = hcurv.GaussNewton(model, hcurv.losses.MeanSquaredError(), inputs)
        >>> theirs = hcurv.GaussNewton(model, torch.nn.MSELoss(), inputs)
        >>> torch.equal(ours.to_dense(), theirs.to_dense())
        True
    """

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return √2 times the identity, as a diagonal.

        Examples:
            >>> hcurv.losses.MeanSquaredError().hessian_sqrt(torch.zeros(1, 2), None).square()
            tensor([[2.0000, 2.0000]])
        """
        return torch.full_like(outputs, 2.0**0.5)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute 2(x_i − y_i).

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.MeanSquaredError().gradient(outputs, targets)
            tensor([[4., 0.]])
        """
        return 2 * (outputs - targets.to(outputs))
