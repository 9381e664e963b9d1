"""The likelihood of counts."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.elementwise import ElementwiseLoss
from hcurv.losses.loss import Reduction

__all__ = ["PoissonNLL"]


class PoissonNLL(ElementwiseLoss):
    """Negative log-likelihood of counts: `torch.nn.PoissonNLLLoss`.

    If the output x is the logarithm of the rate, then f = exp(x) − y·x, and the Hessian is exp(x).
    If it is the rate itself, then f = x − y·log(x + ε), and the Hessian is y/(x + ε)², which needs
    the targets. The option ``full`` of torch's loss only adds a constant.

    Args:
        log_input: whether outputs are logarithms of rates.
        eps: ε, which keeps the logarithm finite if outputs are rates.
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> loss = hcurv.losses.PoissonNLL()
        >>> counts = torch.tensor([[0.0, 2.0, 5.0]]).expand(20, 3)
        >>> ours = hcurv.GaussNewton(model, loss, (inputs, counts))
        >>> theirs = hcurv.GaussNewton(model, torch.nn.PoissonNLLLoss(), (inputs, counts))
        >>> torch.equal(ours.to_dense(), theirs.to_dense())
        True
    """

    def __init__(
        self, log_input: bool = True, eps: float = 1e-8, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(reduction)
        self.log_input = log_input
        self.eps = eps
        self.needs_targets = not log_input

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute exp(x/2) or √y/(x + ε), as a diagonal.

        Examples:
            >>> hcurv.losses.PoissonNLL().hessian_sqrt(torch.zeros(1, 2), None)
            tensor([[1., 1.]])
        """
        if self.log_input:
            return torch.exp(outputs / 2)
        assert targets is not None
        return targets.to(outputs).sqrt() / (outputs + self.eps)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute exp(x) − y or 1 − y/(x + ε).

        Examples:
            >>> outputs, counts = torch.zeros(1, 2), torch.tensor([[0, 3]])
            >>> hcurv.losses.PoissonNLL().gradient(outputs, counts)
            tensor([[ 1., -2.]])
        """
        if self.log_input:
            return torch.exp(outputs) - targets.to(outputs)
        return 1 - targets.to(outputs) / (outputs + self.eps)

    def check_outputs(self, outputs: Tensor) -> None:
        """Rates must be positive, or ε must make them so.

        Examples:
            >>> loss = hcurv.losses.PoissonNLL(log_input=False)
            >>> loss.check_outputs(torch.tensor([[0.5, -0.5]]))
            Traceback (most recent call last):
            ValueError: PoissonNLLLoss(log_input=False) takes positive rates; ... down to -0.5: ...
        """
        if not self.log_input and not bool((outputs + self.eps > 0).all()):
            raise ValueError(
                "PoissonNLLLoss(log_input=False) takes positive rates; got outputs down to"
                f" {outputs.min().item():.4g}: end the network with an exponential or a softplus,"
                " or use log_input=True"
            )

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must have the shape of the outputs and not be negative.

        Examples:
            >>> hcurv.losses.PoissonNLL().check_targets((1, 2), torch.tensor([[1, -1]]))
            Traceback (most recent call last):
            ValueError: targets of PoissonNLLLoss are counts and must not be negative; got -1
        """
        super().check_targets(outputs_shape, targets)
        if not bool((targets >= 0).all()):
            raise ValueError(
                "targets of PoissonNLLLoss are counts and must not be negative;"
                f" got {targets.min().item()}"
            )
