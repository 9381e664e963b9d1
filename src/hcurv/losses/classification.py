"""What losses of one class out of several have in common: layout, weights, ignored labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hcurv.losses.loss import Loss, Reduction, draw_uniform

__all__ = ["ClassificationLoss", "draw_labels", "split_largest"]


class ClassificationLoss(Loss):
    """A loss of one class out of several, at every position of a point.

    Outputs have torch's layout with the classes second: (b, C), or (b, C, d1, ...) for sequences,
    images and so on, whose labels have the shape (b, d1, ...).

    Args:
        weight: class weights, (C,).
        ignore_index: the label of positions that do not count.
        reduction: "mean" (divides by the total weight of the positions that count) or "sum".
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction)
        if weight is not None and not bool((weight >= 0).all()):
            raise ValueError(f"{type(self).__name__}: class weights must not be negative")
        self.weight = weight
        self.ignore_index = ignore_index
        # The default of torch, -100, is not a class: it occurs only if the user put it there.
        self.needs_targets = weight is not None or ignore_index != -100

    def split_outputs(self, outputs: Tensor) -> Tensor:
        """Make one row of classes for each position: (b, C, d1, ...) becomes (b, d1·..., C).

        Examples:
            >>> hcurv.losses.CrossEntropy().split_outputs(torch.zeros(2, 5, 7)).shape
            torch.Size([2, 7, 5])
        """
        self._check_classes(tuple(outputs.shape))
        num_points, num_classes, *positions = outputs.shape
        return outputs.movedim(1, -1).reshape(num_points, math.prod(positions), num_classes)

    def split_targets(self, targets: Tensor, outputs_shape: tuple[int, ...]) -> Tensor:
        """Rearrange labels (b, d1, ...) to (b·d1·...,), and probabilities like the outputs.

        Examples:
            >>> loss = hcurv.losses.CrossEntropy()
            >>> loss.split_targets(torch.tensor([[0, 2, 1], [1, 1, 0]]), (2, 5, 3))
            tensor([0, 2, 1, 1, 1, 0])
            >>> loss.split_targets(torch.full((2, 5, 3), 0.2), (2, 5, 3)).shape
            torch.Size([6, 5])
        """
        if targets.is_floating_point():
            return super().split_targets(targets, outputs_shape)
        return targets.reshape(-1)

    def divisor(self, outputs_shape: tuple[int, ...], targets: Tensor | None) -> float:
        """Return the total class weight of the labels that count.

        Without class weights this is the number of these labels. Without labels it is the number of
        positions of all points.

        Examples:
            >>> loss = hcurv.losses.CrossEntropy(ignore_index=0)
            >>> loss.divisor((4, 3), torch.tensor([0, 1, 2, 2]))
            3.0
            >>> hcurv.losses.CrossEntropy().divisor((4, 3, 8), None)
            32.0
        """
        if targets is None or targets.is_floating_point():
            return float(outputs_shape[0] * math.prod(outputs_shape[2:]))
        labels = targets.long()
        labels = labels[labels != self.ignore_index]
        if self.weight is None:
            return float(labels.numel())
        return float(self.weight.to(labels.device, torch.float64)[labels].sum())

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must be class labels (b, d1, ...) for outputs (b, C, d1, ...).

        Examples:
            >>> loss = hcurv.losses.CrossEntropy()
            >>> loss.check_targets((2, 3), torch.tensor([0, 2], dtype=torch.uint8))
            >>> loss.check_targets((2, 3, 5), torch.zeros(2, 5, dtype=torch.long))
        """
        self._check_classes(outputs_shape)
        shape, given = tuple(outputs_shape), tuple(targets.shape)
        expected = (shape[0], *shape[2:])
        if targets.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} takes class labels: integers of shape {expected};"
                f" got {targets.dtype} of shape {given} (convert labels with targets.long())"
            )
        if given != expected:
            if len(shape) > 2 and given == shape[:-1]:
                move = "transpose(1, 2)" if len(shape) == 3 else "movedim(-1, 1)"
                raise ValueError(
                    f"class labels of shape {given} fit outputs of shape {shape} only if the"
                    " classes are the last axis, but torch's convention is classes second: pass"
                    f" forward_fn=lambda model, x: model(x).{move}"
                )
            raise ValueError(
                f"targets must be class labels of shape {expected} for outputs of shape {shape};"
                f" got {given}"
            )
        labels = targets.long()
        labels = labels[labels != self.ignore_index]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < shape[1]:
            raise ValueError(
                f"class labels must lie in [0, {shape[1]});"
                f" got {int(labels.min())} to {int(labels.max())}"
            )

    def _check_classes(self, outputs_shape: tuple[int, ...]) -> None:
        """Refuse outputs without an axis of classes, and weights of another number of classes."""
        if len(outputs_shape) < 2:
            raise ValueError(
                f"{type(self).__name__} takes outputs of shape (points, classes, ...);"
                f" got {tuple(outputs_shape)}"
            )
        num_classes = outputs_shape[1]
        if self.weight is not None and tuple(self.weight.shape) != (num_classes,):
            raise ValueError(
                f"{type(self).__name__}: weight must have one value per class, ({num_classes},);"
                f" got {tuple(self.weight.shape)}"
            )

    def _one_hot(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the unit vectors of the labels of rows, (b, C); zero for labels to ignore."""
        labels = labels.long()
        counts = labels != self.ignore_index
        one_hot = functional.one_hot(torch.where(counts, labels, 0), outputs.shape[1])
        return one_hot.to(outputs) * counts[:, None]

    def _weighted(self, wanted: Tensor) -> Tensor:
        """Multiply the columns of a matrix, (b, C), by the class weights."""
        return wanted if self.weight is None else wanted * self.weight.to(wanted)


def draw_labels(chances: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a class for each row with the probabilities (b, C), and return indices (b, 1)."""
    draws = draw_uniform(chances, (chances.shape[0], 1), generator)
    labels = (chances.cumsum(1) <= draws).sum(1, keepdim=True)
    # Rounding can leave the sum of all probabilities below the number that was drawn.
    return labels.clamp_(max=chances.shape[1] - 1)


def split_largest(chances: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable class of each row of (b, C), and the sum of all others, both (b, 1).

    The sum is 1 − p of that class. A subtraction would have no right digit where a network is
    certain: in single precision, 1 − p is a multiple of 6e-8.
    """
    largest = chances.argmax(1, keepdim=True)
    return largest, chances.scatter(1, largest, 0.0).sum(1, keepdim=True)
