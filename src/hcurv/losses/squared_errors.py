"""Squared errors: the loss of the paper, that of torch, and one with given variances."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.elementwise import ElementwiseLoss
from hcurv.losses.loss import Reduction

__all__ = ["GaussianNLL", "HalfSquaredError", "MeanSquaredError"]


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

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute ½‖x_i − y_i‖².

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.HalfSquaredError().value(outputs, targets)
            tensor([2.])
        """
        return 0.5 * (outputs - targets.to(outputs)).square().sum(1)

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

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute ‖x_i − y_i‖².

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.MeanSquaredError().value(outputs, targets)
            tensor([4.])
        """
        return (outputs - targets.to(outputs)).square().sum(1)


class GaussianNLL(ElementwiseLoss):
    """Negative log-likelihood of normal distributions with given variances v: ½(x − y)²/v.

    This is `torch.nn.GaussianNLLLoss`, up to a constant, where the outputs are the means and the
    variances are known. The Hessian is 1/v. Variances that the network itself predicts make a loss
    that is not convex.

    Args:
        variance: v, a positive number or one for each output, (d,).
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> loss = hcurv.losses.GaussianNLL(variance=torch.tensor([1.0, 4.0, 0.25]))
        >>> G = hcurv.GaussNewton(model, loss, inputs)
        >>> G.diagonal()[-3:]  # for the biases of the outputs: 1/v, divided by their number
        tensor([0.3333, 0.0833, 1.3333], dtype=torch.float64)
    """

    def __init__(self, variance: float | Tensor, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        values = torch.as_tensor(variance)
        if not bool(((values > 0) & values.isfinite()).all()):
            raise ValueError(f"variance must be positive and finite; got {variance}")
        self._check_factors(variance=values)
        self.variance = variance

    def _deviations(self, outputs: Tensor) -> Tensor:
        """Compute the standard deviations √v, in the type and on the device of the outputs."""
        variance = torch.as_tensor(self.variance, dtype=outputs.dtype, device=outputs.device)
        return variance.sqrt().expand_as(outputs)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return 1/√v, as a diagonal.

        Examples:
            >>> hcurv.losses.GaussianNLL(variance=0.25).hessian_sqrt(torch.zeros(1, 2), None)
            tensor([[2., 2.]])
        """
        return 1 / self._deviations(outputs)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute (x − y)/v.

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.GaussianNLL(variance=0.25).gradient(outputs, targets)
            tensor([[8., 0.]])
        """
        return (outputs - targets.to(outputs)) / self._deviations(outputs).square()

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute ½ Σ_j (x_j − y_j)²/v_j.

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.GaussianNLL(variance=0.25).value(outputs, targets)
            tensor([8.])
        """
        scaled = (outputs - targets.to(outputs)) / self._deviations(outputs)
        return 0.5 * scaled.square().sum(1)
