"""The base class of all losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Loss", "Reduction", "check_same_shape"]

Reduction: TypeAlias = Literal["mean", "sum"]


class Loss(ABC):
    """F = Σ_i f(x_i, y_i) / divisor, where f is convex in the network's output x_i.

    To use a loss of your own, define a subclass with `hessian_sqrt` and pass an instance wherever a
    loss is expected. Define `gradient` as well to use `GaussNewton.gradient`, and `divisor` if
    "mean" divides by something else than the number of points.

    Attributes:
        reduction: "mean" divides the sum over points by the divisor, "sum" does not.
        needs_targets: whether the Hessian depends on the targets.

    Examples:
        >>> class Quartic(hcurv.losses.Loss):
        ...     "f = Σ_j x_j⁴, whose Hessian is diagonal: 12 x_j²."
        ...
        ...     def hessian_sqrt(self, outputs, targets):
        ...         return 12**0.5 * outputs.abs()
        >>> hcurv.GaussNewton(model, Quartic(), inputs).shape
        (51, 51)
    """

    needs_targets: bool = False

    def __init__(self, reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' or 'sum'; got {reduction!r}"
                " (a Hessian belongs to a scalar loss)"
            )
        self.reduction: Reduction = reduction

    @abstractmethod
    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute square roots R_i of the Hessians ∂²f(x_i, y_i) = R_iᵀR_i.

        Args:
            outputs: network outputs x_i, (b, d).
            targets: the targets of these points, or None. Integers come as int64, floating-point
                numbers in the type of the outputs.

        Returns:
            (b, q, d), or (b, d) if every R_i is diagonal; the same form for every batch.

        Examples:
            >>> R = hcurv.losses.CrossEntropy().hessian_sqrt(model(inputs), None)
            >>> R.shape
            torch.Size([20, 3, 3])
            >>> p = torch.softmax(model(inputs), 1)
            >>> torch.allclose(R[0].T @ R[0], torch.diag(p[0]) - torch.outer(p[0], p[0]))
            True
        """

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the derivatives ∂f(x_i, y_i) with respect to the outputs, (b, d).

        Args:
            outputs: network outputs x_i, (b, d).
            targets: the targets of these points.

        Raises:
            TypeError: the loss does not define its gradient.

        Examples:
            >>> outputs = model(inputs).detach()
            >>> g = hcurv.losses.CrossEntropy().gradient(outputs, targets)
            >>> one_hot = torch.nn.functional.one_hot(targets, 3)
            >>> torch.allclose(g, torch.softmax(outputs, 1) - one_hot)
            True
        """
        raise TypeError(
            f"{type(self).__name__} has no gradient: define gradient(outputs, targets) on it"
            " to use GaussNewton.gradient"
        )

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Draw a random gradient for each point whose covariance is the Hessian, (b, d).

        If the loss is the negative log-likelihood of a distribution, the result is the gradient for
        a target drawn from that distribution. In general it is R_iᵀε with standard normal ε; for
        squared errors the two are the same.

        Args:
            outputs: network outputs x_i, (b, d).
            targets: the targets of these points, or None.
            generator: the source of randomness.

        Examples:
            >>> generator = torch.Generator().manual_seed(0)
            >>> outputs = torch.zeros(100_000, 2)
            >>> g = hcurv.losses.HalfSquaredError().sample_gradient(outputs, None, generator)
            >>> torch.allclose(g.T @ g / 100_000, torch.eye(2), atol=0.02)
            True
        """
        root = self.hessian_sqrt(outputs, targets)
        noise = torch.randn(
            root.shape[:2], dtype=root.dtype, device=generator.device, generator=generator
        ).to(root.device)
        if root.ndim == 2:
            return root * noise
        return torch.bmm(noise[:, None], root).squeeze(1)

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Compute the number that "mean" divides by; over batches these numbers add up.

        Args:
            num_points: the number of points.
            num_outputs: the number of outputs of the network.
            targets: the targets of these points, or None.

        Examples:
            >>> hcurv.losses.HalfSquaredError().divisor(20, 3, None)
            20.0
            >>> hcurv.losses.MeanSquaredError().divisor(20, 3, None)
            60.0
        """
        return float(num_points)

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:  # noqa: B027
        """Raise a clear error if ``targets`` cannot belong to outputs of this shape.

        Args:
            outputs_shape: (points, outputs).
            targets: the targets of these points.

        Examples:
            >>> hcurv.losses.CrossEntropy().check_targets((2, 3), torch.tensor([0, 2]))
            >>> hcurv.losses.CrossEntropy().check_targets((2, 3), torch.tensor([0, 3]))
            Traceback (most recent call last):
            ValueError: class labels must lie in [0, 3); got 0 to 3
        """


def check_same_shape(outputs_shape: tuple[int, int], targets: Tensor) -> None:
    """Raise a ValueError unless the targets have the shape of the network's outputs."""
    if tuple(targets.shape) != outputs_shape:
        raise ValueError(
            f"targets must have the shape of the network's outputs, {outputs_shape};"
            f" got {tuple(targets.shape)}"
        )
