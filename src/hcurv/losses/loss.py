"""The base class of all losses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Loss", "Reduction", "check_same_shape", "draw_uniform"]

Reduction: TypeAlias = Literal["mean", "sum"]


class Loss(ABC):
    """F = Σ_i f(x_i, y_i) / divisor, where f is convex in the network's output x_i.

    To use a loss of your own, define a subclass with `hessian_sqrt` and pass an instance wherever a
    loss is expected. Define `gradient` as well to use `GaussNewton.gradient`, and `divisor` if
    "mean" divides by something else than the number of points.

    These methods see rows: vectors of outputs that enter the loss independently of each other. By
    default all outputs of a point are one row. If a point has several rows, such as the positions
    of a sequence, define `split_outputs`, and `split_targets` if the targets do not have the shape
    of the outputs.

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
            outputs: rows x_i of network outputs, (b, d).
            targets: the targets of these rows, or None. Integers come as int64, floating-point
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
            outputs: rows x_i of network outputs, (b, d).
            targets: the targets of these rows.

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

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the losses f(x_i, y_i) themselves, (b,), as `hcurv.optim.GaussNewton` needs them.

        Args:
            outputs: rows x_i of network outputs, (b, d).
            targets: the targets of these rows.

        Raises:
            TypeError: the loss does not define its value.

        Examples:
            >>> outputs, targets = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])
            >>> hcurv.losses.HalfSquaredError().value(outputs, targets)
            tensor([2.])
        """
        raise TypeError(
            f"{type(self).__name__} has no value: pass the loss module of torch instead, or define"
            " value(outputs, targets), the loss of each row, on it"
        )

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Draw a random gradient g for each row such that E[g gᵀ] is the Hessian, (b, d).

        For cross-entropies and likelihoods of classes, the result is the gradient for a label drawn
        from the network's own distribution. In general it is R_iᵀε with standard normal ε; for
        squared errors this, too, is the gradient for a target drawn from the network's
        distribution.

        Args:
            outputs: rows x_i of network outputs, (b, d).
            targets: the targets of these rows, or None.
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

    def split_outputs(self, outputs: Tensor) -> Tensor:
        """Split the outputs of each point into rows that enter the loss independently.

        The result is a rearrangement of the outputs, so that derivatives pass through it.

        Args:
            outputs: network outputs, (b, *shape).

        Returns:
            (b, t, d): t rows for each point; by default one row of all its outputs.

        Examples:
            >>> images = torch.zeros(2, 3, 8, 8)
            >>> hcurv.losses.MeanSquaredError().split_outputs(images).shape
            torch.Size([2, 1, 192])
            >>> hcurv.losses.CrossEntropy().split_outputs(images).shape  # three classes per pixel
            torch.Size([2, 64, 3])
        """
        return outputs.reshape(outputs.shape[0], 1, math.prod(outputs.shape[1:]))

    def split_targets(self, targets: Tensor, outputs_shape: tuple[int, ...]) -> Tensor:
        """Rearrange targets into those of the rows ``split_outputs(outputs).flatten(0, 1)``.

        By default, targets in the shape of the outputs are split like these. All others are
        returned as they are, which is right if every point is one row.

        Args:
            targets: the targets of b points, (b, ...).
            outputs_shape: the shape of the outputs of these points, (b, *shape).

        Returns:
            (b·t, ...): labels (b·t,) or values (b·t, d).

        Examples:
            >>> labels = torch.tensor([[0, 2, 1], [1, 1, 0]])  # of two sequences of length 3
            >>> hcurv.losses.CrossEntropy().split_targets(labels, (2, 5, 3))
            tensor([0, 2, 1, 1, 1, 0])
            >>> images = torch.zeros(2, 3, 8, 8)
            >>> hcurv.losses.MeanSquaredError().split_targets(images, (2, 3, 8, 8)).shape
            torch.Size([2, 192])
        """
        if tuple(targets.shape) == tuple(outputs_shape):
            return self.split_outputs(targets).flatten(0, 1)
        return targets

    def divisor(self, outputs_shape: tuple[int, ...], targets: Tensor | None) -> float:
        """Compute the number that "mean" divides by; over batches these numbers add up.

        Args:
            outputs_shape: the shape of the network's outputs, (b, *shape).
            targets: the targets of these b points as they are in the data, or None.

        Examples:
            >>> hcurv.losses.HalfSquaredError().divisor((20, 3), None)
            20.0
            >>> hcurv.losses.MeanSquaredError().divisor((20, 3), None)
            60.0
        """
        return float(outputs_shape[0])

    def check_outputs(self, outputs: Tensor) -> None:  # noqa: B027
        """Raise a clear error if the loss is not defined for these outputs.

        Args:
            outputs: rows of network outputs, (b, d).

        Examples:
            >>> hcurv.losses.CrossEntropy().check_outputs(torch.zeros(2, 3))  # any logits will do
        """

    def check_targets(  # noqa: B027
        self, outputs_shape: tuple[int, ...], targets: Tensor
    ) -> None:
        """Raise a clear error if ``targets`` cannot belong to outputs of this shape.

        Args:
            outputs_shape: the shape of the network's outputs, (b, *shape).
            targets: the targets of these b points as they are in the data.

        Examples:
            >>> hcurv.losses.CrossEntropy().check_targets((2, 3), torch.tensor([0, 2]))
            >>> hcurv.losses.CrossEntropy().check_targets((2, 3), torch.tensor([0, 3]))
            Traceback (most recent call last):
            ValueError: class labels must lie in [0, 3); got 0 to 3
        """


def check_same_shape(outputs_shape: tuple[int, ...], targets: Tensor) -> None:
    """Raise a ValueError unless the targets have the shape of the network's outputs."""
    expected, given = tuple(outputs_shape), tuple(targets.shape)
    if given == expected:
        return
    # Only axes of length 1 are forgotten or added by accident. To reshape anything else would mix
    # up the values.
    alike = [n for n in given if n != 1] == [n for n in expected if n != 1]
    hint = f" (use targets.reshape{expected})" if alike else ""
    raise ValueError(
        f"targets must have the shape of the network's outputs, {expected}; got {given}{hint}"
    )


def draw_uniform(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw numbers from [0, 1) in the type and on the device of ``like``."""
    numbers = torch.rand(shape, dtype=like.dtype, device=generator.device, generator=generator)
    return numbers.to(like.device)
