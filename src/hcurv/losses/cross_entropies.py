"""Cross-entropies on logits: independent labels, and one class out of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hcurv.losses.loss import Loss, Reduction, check_same_shape

__all__ = ["BinaryCrossEntropy", "CrossEntropy"]


class BinaryCrossEntropy(Loss):
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
        for name, value in (("weight", weight), ("pos_weight", pos_weight)):
            if value is not None and value.ndim > 1:
                raise ValueError(
                    f"BCEWithLogitsLoss: {name} must be a scalar or one value per output;"
                    f" got shape {tuple(value.shape)}"
                )
            if value is not None and bool((value < 0).any()):
                raise ValueError(f"BCEWithLogitsLoss: {name} must not be negative")
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
        """Compute w·((p·y + 1 − y)·σ − p·y).

        Examples:
            >>> outputs, targets = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
            >>> hcurv.losses.BinaryCrossEntropy().gradient(outputs, targets)
            tensor([[ 0.5000, -0.5000]])
        """
        factor = self._factors(outputs, targets)
        positive = targets.to(outputs)
        if self.weight is not None:
            positive = positive * self.weight.to(outputs)
        if self.pos_weight is not None:
            positive = positive * self.pos_weight.to(outputs)
        return factor * torch.sigmoid(outputs) - positive

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
        draws = _uniform(outputs, outputs.shape, generator) < chances
        return self._factors(outputs, targets).sqrt() * (chances - draws.to(outputs))

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Return the number of output values.

        Examples:
            >>> hcurv.losses.BinaryCrossEntropy().divisor(20, 3, None)
            60.0
        """
        return float(num_points * num_outputs)

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets must have the shape of the outputs and lie in [0, 1].

        Examples:
            >>> hcurv.losses.BinaryCrossEntropy().check_targets((1, 2), torch.tensor([[0.0, 2.0]]))
            Traceback (most recent call last):
            ValueError: targets of BCEWithLogitsLoss must lie in [0, 1]
        """
        check_same_shape(outputs_shape, targets)
        if bool(((targets < 0) | (targets > 1)).any()):
            raise ValueError("targets of BCEWithLogitsLoss must lie in [0, 1]")


class CrossEntropy(Loss):
    """Softmax cross-entropy on logits: `torch.nn.CrossEntropyLoss`.

    With p = softmax(x) the Hessian is a·(diag(p) − ppᵀ), and R = √a·(diag(√p) − √p pᵀ) is a square
    root of it that needs no eigendecomposition. The factor a is 1, unless class weights, an ignored
    class or class probabilities that do not add up to 1 change it.

    Args:
        weight: class weights, (d,).
        ignore_index: the label of points that do not count.
        label_smoothing: the share of the uniform distribution in the target.
        reduction: "mean" (divides by the total weight of the points that count) or "sum".

    Examples:
        >>> smoothed = hcurv.losses.CrossEntropy(label_smoothing=0.1)
        >>> ours = hcurv.GaussNewton(model, smoothed, inputs)
        >>> torch.equal(ours.diagonal(), H.diagonal())  # smoothing changes no second derivative
        True
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction)
        if weight is not None and bool((weight < 0).any()):
            raise ValueError("CrossEntropyLoss: class weights must not be negative")
        self.weight = weight
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        # The default of torch, -100, is not a class: it occurs only if the user put it there.
        self.needs_targets = weight is not None or ignore_index != -100

    def _probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute target distributions times class weights, t_i, (b, d): f = −Σ_c t_ic log p_ic."""
        num_classes = outputs.shape[1]
        if targets.is_floating_point():
            wanted = targets.to(outputs)
        else:
            labels = targets.long()
            counts = labels != self.ignore_index
            one_hot = functional.one_hot(torch.where(counts, labels, 0), num_classes)
            wanted = one_hot.to(outputs) * counts[:, None]
        smoothing = self.label_smoothing
        if smoothing:
            mass = wanted.sum(1, keepdim=True) if not targets.is_floating_point() else 1.0
            wanted = (1 - smoothing) * wanted + mass * (smoothing / num_classes)
        return wanted if self.weight is None else wanted * self.weight.to(outputs)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute √a·(diag(√p) − √p pᵀ), dense, (b, d, d).

        Examples:
            >>> R = hcurv.losses.CrossEntropy().hessian_sqrt(torch.zeros(1, 2), None)
            >>> R[0].T @ R[0]
            tensor([[ 0.2500, -0.2500],
                    [-0.2500,  0.2500]])
        """
        p = torch.softmax(outputs, dim=1)
        scale = p.sqrt()
        if targets is not None:
            scale = scale * self._probabilities(outputs, targets).sum(1, keepdim=True).sqrt()
        return torch.diag_embed(scale) - scale[:, :, None] * p[:, None, :]

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute a·p − t, where t is the target distribution.

        Examples:
            >>> hcurv.losses.CrossEntropy().gradient(torch.zeros(1, 2), torch.tensor([1]))
            tensor([[ 0.5000, -0.5000]])
        """
        wanted = self._probabilities(outputs, targets)
        return wanted.sum(1, keepdim=True) * torch.softmax(outputs, dim=1) - wanted

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Compute √a·(p − e_y') with the class y' drawn with the probabilities p.

        Examples:
            >>> generator = torch.Generator().manual_seed(0)
            >>> loss = hcurv.losses.CrossEntropy()
            >>> loss.sample_gradient(torch.zeros(1, 2), None, generator).abs()
            tensor([[0.5000, 0.5000]])
        """
        chances = torch.softmax(outputs, dim=1)
        draws = _uniform(outputs, (outputs.shape[0], 1), generator)
        labels = (chances.cumsum(1) < draws).sum(1, keepdim=True).clamp_(max=outputs.shape[1] - 1)
        result = chances.scatter_add(1, labels, -torch.ones_like(draws))
        if targets is not None:
            result = result * self._probabilities(outputs, targets).sum(1, keepdim=True).sqrt()
        return result

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Return the total class weight of the points that count.

        Without class weights this is the number of these points.

        Examples:
            >>> loss = hcurv.losses.CrossEntropy(ignore_index=0)
            >>> loss.divisor(4, 3, torch.tensor([0, 1, 2, 2]))
            3.0
        """
        if targets is None or targets.is_floating_point():
            return float(num_points)
        labels = targets.long()
        labels = labels[labels != self.ignore_index]
        if self.weight is None:
            return float(labels.numel())
        return float(self.weight.to(labels.device, torch.float64)[labels].sum())

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets must be class labels (b,) or class probabilities (b, d).

        Examples:
            >>> loss = hcurv.losses.CrossEntropy()
            >>> loss.check_targets((2, 3), torch.tensor([0, 2], dtype=torch.uint8))
            >>> loss.check_targets((2, 3), torch.full((2, 3), 1 / 3))
        """
        num_points, num_classes = outputs_shape
        if self.weight is not None and tuple(self.weight.shape) != (num_classes,):
            raise ValueError(
                f"CrossEntropyLoss: weight must have one value per class, ({num_classes},);"
                f" got {tuple(self.weight.shape)}"
            )
        if targets.is_floating_point():
            check_same_shape(outputs_shape, targets)
            if bool((targets < 0).any()):
                raise ValueError("class probabilities must not be negative")
            return
        if tuple(targets.shape) != (num_points,):
            raise ValueError(
                f"targets must be class labels of shape ({num_points},) or class probabilities of"
                f" shape {outputs_shape}; got {tuple(targets.shape)}"
            )
        labels = targets.long()
        labels = labels[labels != self.ignore_index]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f"class labels must lie in [0, {num_classes});"
                f" got {int(labels.min())} to {int(labels.max())}"
            )


def _uniform(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw numbers from [0, 1) in the type and on the device of ``like``."""
    numbers = torch.rand(shape, dtype=like.dtype, device=generator.device, generator=generator)
    return numbers.to(like.device)
