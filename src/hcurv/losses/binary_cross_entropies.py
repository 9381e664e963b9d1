"""Cross-entropies of independent labels, on logits and on probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.elementwise import ElementwiseLoss
from hcurv.losses.loss import Reduction, draw_uniform

__all__ = ["BinaryCrossEntropy", "BinaryCrossEntropyOfProbabilities"]


class BinaryCrossEntropy(ElementwiseLoss):
    """Independent logistic losses on logits: `torch.nn.BCEWithLogitsLoss`.

    The Hessian of one output is w·(p·y + 1 − y)·σ(1 − σ), where σ is the sigmoid of the output, y
    the target, w the weight and p the positive weight.

    Args:
        weight: a factor for each output, a scalar or (d,).
        pos_weight: a factor for the positive term of each output; it makes the Hessian depend on
            the targets.
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> loss = hcurv.losses.BinaryCrossEntropy(pos_weight=torch.tensor(2.0))
        >>> loss.needs_targets
        True
        >>> hcurv.GaussNewton(model, loss, (inputs, torch.ones(20, 3))).shape
        (51, 51)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction)
        self._check_factors(weight=weight, pos_weight=pos_weight)
        self.weight = weight
        self.pos_weight = pos_weight
        self.needs_targets = pos_weight is not None

    def _factors(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute w·(p·y + 1 − y), the factor of σ(1 − σ) in the second derivative."""
        factor = torch.ones_like(outputs)
        if self.pos_weight is not None:
            assert targets is not None
            factor = 1 + (self.pos_weight.to(outputs) - 1) * targets.to(outputs)
        return factor if self.weight is None else factor * self.weight.to(outputs)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute √(w·(p·y + 1 − y)·σ(1 − σ)), as a diagonal.

        Examples:
            >>> hcurv.losses.BinaryCrossEntropy().hessian_sqrt(torch.zeros(1, 2), None)
            tensor([[0.5000, 0.5000]])
        """
        slope = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        return (slope * self._factors(outputs, targets)).sqrt_()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute w·((1 − y)·σ − p·y·(1 − σ)), where 1 − σ is the sigmoid of minus the output.

        Examples:
            >>> outputs, targets = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
            >>> hcurv.losses.BinaryCrossEntropy().gradient(outputs, targets)
            tensor([[ 0.5000, -0.5000]])
        """
        wanted = targets.to(outputs)
        positive = wanted * torch.sigmoid(-outputs)
        if self.pos_weight is not None:
            positive = positive * self.pos_weight.to(outputs)
        result = (1 - wanted) * torch.sigmoid(outputs) - positive
        return result if self.weight is None else result * self.weight.to(outputs)

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Compute √(w·(p·y + 1 − y))·(σ − y') with y' drawn to be 1 with probability σ.

        Examples:
            >>> generator = torch.Generator().manual_seed(0)
            >>> loss = hcurv.losses.BinaryCrossEntropy()
            >>> loss.sample_gradient(torch.zeros(1, 2), None, generator).abs()
            tensor([[0.5000, 0.5000]])
        """
        chances = torch.sigmoid(outputs)
        draws = draw_uniform(outputs, outputs.shape, generator) < chances
        result = torch.where(draws, -torch.sigmoid(-outputs), chances)
        return self._factors(outputs, targets).sqrt() * result

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must have the shape of the outputs and lie in [0, 1].

        Examples:
            >>> hcurv.losses.BinaryCrossEntropy().check_targets((1, 2), torch.tensor([[0.0, 2.0]]))
            Traceback (most recent call last):
            ValueError: targets of a binary cross-entropy must lie in [0, 1]; got 0.0 to 2.0
        """
        super().check_targets(outputs_shape, targets)
        _check_chances(targets)


class BinaryCrossEntropyOfProbabilities(ElementwiseLoss):
    """Independent logistic losses on probabilities, as after a sigmoid: `torch.nn.BCELoss`.

    The matrix of one output s is w/(s(1 − s)), where w is the weight. This is the Fisher
    information: the mean of the Hessian over targets that are drawn with the probability s. The
    Jacobian of the sigmoid, s(1 − s), turns it into w·s(1 − s), so that the network has the same
    Gauss-Newton Hessian as with `BinaryCrossEntropy` on its logits.

    Args:
        weight: a factor for each output, a scalar or (d,).
        reduction: "mean" (over points and outputs) or "sum".

    Examples:
        >>> network = torch.nn.Sequential(*model, torch.nn.Sigmoid())
        >>> ours = hcurv.GaussNewton(network, torch.nn.BCELoss(), inputs)
        >>> on_logits = hcurv.GaussNewton(model, torch.nn.BCEWithLogitsLoss(), inputs)
        >>> torch.allclose(ours.to_dense(), on_logits.to_dense())
        True
    """

    def __init__(self, weight: Tensor | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        self._check_factors(weight=weight)
        self.weight = weight

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute √(w/(s(1 − s))), as a diagonal; 0 where s is exactly 0 or 1.

        There the sigmoid is flat, so that the product with its Jacobian is zero, as it should be.

        Examples:
            >>> loss = hcurv.losses.BinaryCrossEntropyOfProbabilities()
            >>> loss.hessian_sqrt(torch.tensor([[0.5, 0.2, 1.0]]), None)
            tensor([[2.0000, 2.5000, 0.0000]])
        """
        # A product of two roots does not overflow, even where s is the smallest positive number.
        root = outputs.rsqrt() * (1 - outputs).rsqrt()
        root = torch.where((outputs > 0) & (outputs < 1), root, 0.0)
        return root if self.weight is None else root * self.weight.to(outputs).sqrt()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute w·(s − y)/(s(1 − s)), where torch makes the divisor at least 1e-12.

        Examples:
            >>> outputs, targets = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.0, 1.0]])
            >>> hcurv.losses.BinaryCrossEntropyOfProbabilities().gradient(outputs, targets)
            tensor([[ 2.0000, -5.0000]])
        """
        slope = (outputs * (1 - outputs)).clamp_(min=1e-12)
        result = (outputs - targets.to(outputs)) / slope
        return result if self.weight is None else result * self.weight.to(outputs)

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Compute √w·(s − y')/(s(1 − s)) with y' drawn to be 1 with probability s.

        Examples:
            >>> generator = torch.Generator().manual_seed(0)
            >>> loss = hcurv.losses.BinaryCrossEntropyOfProbabilities()
            >>> loss.sample_gradient(torch.tensor([[0.5, 0.5, 1.0]]), None, generator).abs()
            tensor([[2., 2., 0.]])
        """
        # (s − y')/(s(1 − s)) is 1/(1 − s) for y' = 0, and −1/s for y' = 1.
        draws = draw_uniform(outputs, outputs.shape, generator) < outputs
        result = torch.where(draws, -1 / outputs, 1 / (1 - outputs))
        result = torch.where((outputs > 0) & (outputs < 1), result, 0.0)
        return result if self.weight is None else result * self.weight.to(outputs).sqrt()

    def check_outputs(self, outputs: Tensor) -> None:
        """Outputs must be probabilities.

        Examples:
            >>> loss = hcurv.losses.BinaryCrossEntropyOfProbabilities()
            >>> loss.check_outputs(torch.tensor([[0.5, -2.0]]))
            Traceback (most recent call last):
            ValueError: BCELoss takes probabilities in [0, 1]; got outputs from -2 to 0.5: ...
        """
        if not bool(((outputs >= 0) & (outputs <= 1)).all()):
            raise ValueError(
                "BCELoss takes probabilities in [0, 1]; got outputs from"
                f" {outputs.min().item():.4g} to {outputs.max().item():.4g}: end the network with a"
                " sigmoid, or use BCEWithLogitsLoss on logits"
            )

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must have the shape of the outputs and lie in [0, 1].

        Examples:
            >>> loss = hcurv.losses.BinaryCrossEntropyOfProbabilities()
            >>> loss.check_targets((1, 2), torch.tensor([[0.0, 1.0]]))
        """
        super().check_targets(outputs_shape, targets)
        _check_chances(targets)


def _check_chances(targets: Tensor) -> None:
    """Refuse targets that are no probabilities."""
    if not bool(((targets >= 0) & (targets <= 1)).all()):
        raise ValueError(
            "targets of a binary cross-entropy must lie in [0, 1];"
            f" got {targets.min().item()} to {targets.max().item()}"
        )
