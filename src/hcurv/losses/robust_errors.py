"""Errors that grow quadratically near zero and linearly far away."""

from __future__ import annotations

import math

from torch import Tensor

from hcurv.losses.elementwise import ElementwiseLoss
from hcurv.losses.loss import Reduction

__all__ = ["Huber", "SmoothL1"]


class Huber(ElementwiseLoss):
    """Squares of small errors, absolute values of large ones: `torch.nn.HuberLoss`.

    With the error r = x − y, f = ½r² where |r| < δ, and δ·(|r| − ½δ) elsewhere. So the Hessian is 1
    for small errors and 0 for large ones.

    Args:
        delta: δ, the threshold.
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> with torch.no_grad():
        ...     targets = model(inputs) + torch.tensor([0.1, -0.2, 5.0])  # the last one is far off
        >>> G = hcurv.GaussNewton(model, hcurv.losses.Huber(), (inputs, targets))
        >>> G.diagonal()[-3:]  # for the biases of the outputs
        tensor([0.3333, 0.3333, 0.0000], dtype=torch.float64)
    """

    needs_targets = True

    def __init__(self, delta: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        if not delta > 0:
            raise ValueError(f"delta must be positive; got {delta}")
        self.delta = delta

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return 1 where |x − y| < δ and 0 elsewhere, as a diagonal.

        Examples:
            >>> outputs, targets = torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)
            >>> hcurv.losses.Huber().hessian_sqrt(outputs, targets)
            tensor([[1., 0.]])
        """
        return _is_small(outputs, targets, self.delta)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute x − y, clipped to [−δ, δ].

        Examples:
            >>> outputs, targets = torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)
            >>> hcurv.losses.Huber().gradient(outputs, targets)
            tensor([[0.5000, 1.0000]])
        """
        return (outputs - targets.to(outputs)).clamp_(-self.delta, self.delta)


class SmoothL1(ElementwiseLoss):
    """Absolute errors with a round tip: `torch.nn.SmoothL1Loss`, the Huber loss divided by β.

    With the error r = x − y, f = ½r²/β where |r| < β, and |r| − ½β elsewhere. So the Hessian is 1/β
    for small errors and 0 for large ones.

    Args:
        beta: β, the threshold. It must be positive, because |x − y| itself has no second
            derivative at its tip.
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> data = (inputs, torch.zeros(20, 3))
        >>> smooth = hcurv.GaussNewton(model, hcurv.losses.SmoothL1(beta=0.5), data)
        >>> huber = hcurv.GaussNewton(model, hcurv.losses.Huber(delta=0.5), data)
        >>> torch.allclose(smooth.to_dense(), huber.to_dense() / 0.5)
        True
    """

    needs_targets = True

    def __init__(self, beta: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        if not beta > 0:
            raise ValueError(
                f"beta must be positive; got {beta} (at beta = 0 the loss is |x − y|, which has no"
                " second derivative)"
            )
        self.beta = beta

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return √(1/β) where |x − y| < β and 0 elsewhere, as a diagonal.

        Examples:
            >>> outputs, targets = torch.tensor([[0.1, 3.0]]), torch.zeros(1, 2)
            >>> hcurv.losses.SmoothL1(beta=0.25).hessian_sqrt(outputs, targets)
            tensor([[2., 0.]])
        """
        return _is_small(outputs, targets, self.beta) / math.sqrt(self.beta)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute (x − y)/β, clipped to [−1, 1].

        Examples:
            >>> outputs, targets = torch.tensor([[0.1, 3.0]]), torch.zeros(1, 2)
            >>> hcurv.losses.SmoothL1(beta=0.25).gradient(outputs, targets)
            tensor([[0.4000, 1.0000]])
        """
        return ((outputs - targets.to(outputs)) / self.beta).clamp_(-1, 1)


def _is_small(outputs: Tensor, targets: Tensor | None, threshold: float) -> Tensor:
    """Return 1 where |x − y| is below a threshold and 0 elsewhere."""
    assert targets is not None
    return ((outputs - targets.to(outputs)).abs() < threshold).to(outputs)
