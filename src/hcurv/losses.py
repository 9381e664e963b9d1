"""Convex losses as the matrix sees them: a square root R of each point's Hessian, RᵀR = Q.

The Gauss-Newton Hessian H = JᵀQJ (paper, Definition 1.1) needs Q_i = ∂²f(x_i, y_i), the gradient
needs ∂f(x_i, y_i), and both need the divisor of the loss's ``reduction``. A `Loss` gives these
three. Torch's loss modules are translated by `as_loss`; a convex loss of your own is a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "HalfSquaredError",
    "Loss",
    "MeanSquaredError",
    "as_loss",
]

Reduction = Literal["mean", "sum"]


class Loss(ABC):
    """F = Σ_i f(x_i, y_i) / divisor, with f convex in the network's output x_i.

    Subclass it, give `hessian_sqrt`, and pass an instance wherever a loss is expected. `gradient`
    is needed only for `GaussNewton.gradient`, `divisor` only if "mean" divides by something else
    than the number of points.

    Attributes:
        reduction: "mean" divides the sum by the divisor, "sum" does not.
        needs_targets: whether the Hessian depends on the targets.
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
        """Square roots R_i of the loss Hessians, ∂²f(x_i, y_i) = R_iᵀR_i.

        Args:
            outputs: network outputs x_i, (b, d).
            targets: targets of these points as the user gave them, or None.

        Returns:
            (b, q, d), or (b, d) where every R_i is diagonal; the same form for every batch.
        """

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Derivatives ∂f(x_i, y_i) with respect to the outputs, (b, d)."""
        raise TypeError(
            f"{type(self).__name__} has no gradient: define gradient(outputs, targets) on it"
            " to use GaussNewton.gradient"
        )

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """A random gradient per point whose covariance is the Hessian, (b, d).

        Where the loss is the negative log-likelihood of a distribution, it is the gradient for a
        target drawn from that distribution; in general (and for squared errors, where it is the
        same) it is Rᵀε with Gaussian ε.
        """
        root = self.hessian_sqrt(outputs, targets)
        noise = torch.randn(
            root.shape[:2], dtype=root.dtype, device=generator.device, generator=generator
        ).to(root.device)
        if root.ndim == 2:
            return root * noise
        return torch.bmm(noise[:, None], root).squeeze(1)

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """The share of one batch in what "mean" divides by; shares add up over batches."""
        return float(num_points)

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:  # noqa: B027
        """Raise a clear error if ``targets`` cannot belong to outputs of this shape."""


def _uniform(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    numbers = torch.rand(shape, dtype=like.dtype, device=generator.device, generator=generator)
    return numbers.to(like.device)


def _check_same_shape(outputs_shape: tuple[int, int], targets: Tensor) -> None:
    if tuple(targets.shape) != outputs_shape:
        raise ValueError(
            f"targets must have the shape of the network's outputs, {outputs_shape};"
            f" got {tuple(targets.shape)}"
        )


class HalfSquaredError(Loss):
    """½‖x_i − y_i‖², averaged over the points (not over outputs): the paper's loss."""

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """The identity, as a diagonal."""
        return torch.ones_like(outputs)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """x_i − y_i."""
        return outputs - targets

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets look like outputs."""
        _check_same_shape(outputs_shape, targets)


class MeanSquaredError(Loss):
    """‖x_i − y_i‖² averaged over points *and* outputs: `torch.nn.MSELoss`."""

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """√2 times the identity, as a diagonal."""
        return torch.full_like(outputs, 2.0**0.5)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """2(x_i − y_i)."""
        return 2 * (outputs - targets)

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Number of output values."""
        return float(num_points * num_outputs)

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets look like outputs."""
        _check_same_shape(outputs_shape, targets)


class BinaryCrossEntropy(Loss):
    """Independent logistic losses on logits: `torch.nn.BCEWithLogitsLoss`.

    Args:
        weight: factor of each output, a scalar or (d,).
        pos_weight: factor of each output's positive term; makes the Hessian depend on targets.
        reduction: "mean" (over points and outputs) or "sum".
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
        """w·(p·y + 1 − y): what multiplies σ(1 − σ) in the second derivative."""
        factor = torch.ones_like(outputs)
        if self.pos_weight is not None:
            assert targets is not None
            factor = 1 + (self.pos_weight.to(outputs) - 1) * targets
        return factor if self.weight is None else factor * self.weight.to(outputs)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """√(w·(p·y + 1 − y)·σ(1 − σ)), as a diagonal."""
        slope = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        return (slope * self._factors(outputs, targets)).sqrt_()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """w·((p·y + 1 − y)·σ − p·y)."""
        factor = self._factors(outputs, targets)
        positive = targets
        if self.weight is not None:
            positive = positive * self.weight.to(outputs)
        if self.pos_weight is not None:
            positive = positive * self.pos_weight.to(outputs)
        return factor * torch.sigmoid(outputs) - positive

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """√(w·(p·y + 1 − y))·(σ − y') with y' drawn with probability σ."""
        chances = torch.sigmoid(outputs)
        draws = _uniform(outputs, outputs.shape, generator) < chances
        return self._factors(outputs, targets).sqrt() * (chances - draws.to(outputs))

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Number of output values."""
        return float(num_points * num_outputs)

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets look like outputs and lie in [0, 1]."""
        _check_same_shape(outputs_shape, targets)
        if bool(((targets < 0) | (targets > 1)).any()):
            raise ValueError("targets of BCEWithLogitsLoss must lie in [0, 1]")


class CrossEntropy(Loss):
    """Softmax cross-entropy on logits: `torch.nn.CrossEntropyLoss`.

    With p = softmax(x) the Hessian is a·(diag(p) − ppᵀ), and R = √a·(diag(√p) − √p pᵀ) is a
    square root of it, without an eigendecomposition. The factor a is 1 unless class weights,
    an ignored class or unnormalised class probabilities as targets change it.

    Args:
        weight: class weights, (d,).
        ignore_index: label of points that do not count.
        label_smoothing: share of the uniform distribution in the target.
        reduction: "mean" (divides by the total weight of the points that count) or "sum".
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
        # Torch's default, -100, is no class: it can only occur if the user put it into the targets.
        self.needs_targets = weight is not None or ignore_index != -100

    def _probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Target distributions times class weights, t_i, (b, d): f = −Σ_c t_ic log p_ic."""
        num_classes = outputs.shape[1]
        if targets.is_floating_point():
            wanted = targets
        else:
            counts = targets != self.ignore_index
            labels = torch.where(counts, targets, 0).long()
            wanted = functional.one_hot(labels, num_classes).to(outputs) * counts[:, None]
        smoothing = self.label_smoothing
        if smoothing:
            mass = wanted.sum(1, keepdim=True) if not targets.is_floating_point() else 1.0
            wanted = (1 - smoothing) * wanted + mass * (smoothing / num_classes)
        return wanted if self.weight is None else wanted * self.weight.to(outputs)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """√a·(diag(√p) − √p pᵀ), dense."""
        p = torch.softmax(outputs, dim=1)
        scale = p.sqrt()
        if targets is not None:
            scale = scale * self._probabilities(outputs, targets).sum(1, keepdim=True).sqrt()
        return torch.diag_embed(scale) - scale[:, :, None] * p[:, None, :]

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """a·p − t."""
        wanted = self._probabilities(outputs, targets)
        return wanted.sum(1, keepdim=True) * torch.softmax(outputs, dim=1) - wanted

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """√a·(p − e_y') with the class y' drawn with probability p."""
        chances = torch.softmax(outputs, dim=1)
        draws = _uniform(outputs, (outputs.shape[0], 1), generator)
        labels = (chances.cumsum(1) < draws).sum(1, keepdim=True).clamp_(max=outputs.shape[1] - 1)
        result = chances.scatter_add(1, labels, -torch.ones_like(draws))
        if targets is not None:
            result = result * self._probabilities(outputs, targets).sum(1, keepdim=True).sqrt()
        return result

    def divisor(self, num_points: int, num_outputs: int, targets: Tensor | None) -> float:
        """Total class weight of the points that count (their number, without class weights)."""
        if targets is None or targets.is_floating_point():
            return float(num_points)
        labels = targets[targets != self.ignore_index].long()
        if self.weight is None:
            return float(labels.numel())
        return float(self.weight.to(labels.device, torch.float64)[labels].sum())

    def check_targets(self, outputs_shape: tuple[int, int], targets: Tensor) -> None:
        """Targets are class labels (b,) or class probabilities (b, d)."""
        num_points, num_classes = outputs_shape
        if self.weight is not None and tuple(self.weight.shape) != (num_classes,):
            raise ValueError(
                f"CrossEntropyLoss: weight must have one value per class, ({num_classes},);"
                f" got {tuple(self.weight.shape)}"
            )
        if targets.is_floating_point():
            _check_same_shape(outputs_shape, targets)
            if bool((targets < 0).any()):
                raise ValueError("class probabilities must not be negative")
            return
        if tuple(targets.shape) != (num_points,):
            raise ValueError(
                f"targets must be class labels of shape ({num_points},) or class probabilities of"
                f" shape {outputs_shape}; got {tuple(targets.shape)}"
            )
        labels = targets[targets != self.ignore_index]
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f"class labels must lie in [0, {num_classes});"
                f" got {int(labels.min())} to {int(labels.max())}"
            )


def as_loss(loss: nn.Module | Loss) -> Loss:
    """Translate a torch loss module into a `Loss`; a `Loss` is returned as it is.

    Raises:
        TypeError: the loss is none of those supported.
        ValueError: its ``reduction`` leaves no scalar loss.
    """
    if isinstance(loss, Loss):
        return loss
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(
            loss.weight, loss.ignore_index, loss.label_smoothing, _reduction(loss.reduction)
        )
    if type(loss) is nn.MSELoss:
        return MeanSquaredError(_reduction(loss.reduction))
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, _reduction(loss.reduction))
    raise TypeError(
        f"no Hessian is known for the loss {type(loss).__name__}; supported are"
        " torch.nn.CrossEntropyLoss, MSELoss and BCEWithLogitsLoss, hcurv.losses.HalfSquaredError,"
        " and any subclass of hcurv.losses.Loss"
    )


def _reduction(reduction: str) -> Reduction:
    if reduction == "mean":
        return "mean"
    if reduction == "sum":
        return "sum"
    raise ValueError(
        f"reduction={reduction!r} leaves no scalar loss; use reduction='mean' or 'sum'"
    )
