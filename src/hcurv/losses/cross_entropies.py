"""Cross-entropies of one class out of several."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.classification import NO_LABEL, ClassificationLoss, draw_labels
from hcurv.losses.loss import Reduction, check_same_shape

__all__ = ["CrossEntropy"]


class CrossEntropy(ClassificationLoss):
    """Softmax cross-entropy on logits: `torch.nn.CrossEntropyLoss`.

    With p = softmax(x) the Hessian is a·(diag(p) − ppᵀ), and R = √a·(diag(√p) − √p pᵀ) is a square
    root of it that needs no eigendecomposition. The factor a is 1, unless class weights, an ignored
    class or class probabilities that do not add up to 1 change it.

    The classes are the second axis, as torch wants it: outputs are (b, C), or (b, C, d1, ...) with
    labels (b, d1, ...) for sequences, images and so on.

    Args:
        weight: class weights, (C,).
        ignore_index: the label of points or positions that do not count.
        label_smoothing: the share of the uniform distribution in the target, from 0 to 1.
        reduction: "mean" (divides by the total weight of the labels that count) or "sum".

    Examples:
        >>> smoothed = hcurv.losses.CrossEntropy(label_smoothing=0.1)
        >>> ours = hcurv.GaussNewton(model, smoothed, inputs)
        >>> torch.equal(ours.diagonal(), H.diagonal())  # smoothing changes no second derivative
        True
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = NO_LABEL,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must lie in [0, 1]; got {label_smoothing}")
        self.label_smoothing = label_smoothing

    def _wanted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute target distributions times class weights, t_i, (b, C): f = −Σ_c t_ic log p_ic."""
        mass: Tensor | float = 1.0
        if targets.is_floating_point():
            wanted = targets.to(outputs)
        else:
            wanted = self._one_hot(outputs, targets)
            mass = wanted.sum(1, keepdim=True)
        smoothing = self.label_smoothing
        if smoothing:
            wanted = (1 - smoothing) * wanted + mass * (smoothing / outputs.shape[1])
        return self._weighted(wanted)

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute √a·(diag(√p) − √p pᵀ), dense, (b, C, C).

        Examples:
            >>> R = hcurv.losses.CrossEntropy().hessian_sqrt(torch.zeros(1, 2), None)
            >>> R[0].T @ R[0]
            tensor([[ 0.2500, -0.2500],
                    [-0.2500,  0.2500]])
        """
        p = torch.softmax(outputs, dim=1)
        scale = p.sqrt()
        if targets is not None:
            scale = scale * self._wanted(outputs, targets).sum(1, keepdim=True).sqrt()
        return torch.diag_embed(scale) - scale[:, :, None] * p[:, None, :]

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute a·p − t, where t is the target distribution.

        Examples:
            >>> hcurv.losses.CrossEntropy().gradient(torch.zeros(1, 2), torch.tensor([1]))
            tensor([[ 0.5000, -0.5000]])
        """
        wanted = self._wanted(outputs, targets)
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
        labels = draw_labels(chances, generator)
        result = chances.scatter_add(1, labels, -torch.ones_like(chances[:, :1]))
        if targets is not None:
            result = result * self._wanted(outputs, targets).sum(1, keepdim=True).sqrt()
        return result

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must be class labels (b, d1, ...), or class probabilities (b, C, d1, ...).

        Examples:
            >>> loss = hcurv.losses.CrossEntropy()
            >>> loss.check_targets((2, 3, 5), torch.zeros(2, 5, dtype=torch.long))
            >>> loss.check_targets((2, 3, 5), torch.full((2, 3, 5), 1 / 3))
        """
        shape = tuple(outputs_shape)
        self._check_classes(shape)
        if not targets.is_floating_point():
            if tuple(targets.shape) == shape:
                raise ValueError(
                    f"class probabilities must be floating-point numbers; got {targets.dtype} of"
                    f" the shape of the outputs, {shape} (convert them with targets.float(), or"
                    f" pass class labels of shape {(shape[0], *shape[2:])})"
                )
            super().check_targets(shape, targets)
            return
        if tuple(targets.shape) == (shape[0], *shape[2:]):
            raise ValueError(
                f"class labels must be integers; got {targets.dtype} of shape"
                f" {tuple(targets.shape)} (convert labels with targets.long(), or pass class"
                f" probabilities of shape {shape})"
            )
        check_same_shape(shape, targets)
        if self.ignore_index >= 0:
            raise ValueError(
                f"ignore_index={self.ignore_index} is a class label, but the targets are class"
                " probabilities, none of which can be ignored: leave ignore_index out"
            )
        if not bool((targets >= 0).all()):
            raise ValueError("class probabilities must not be negative or NaN")
