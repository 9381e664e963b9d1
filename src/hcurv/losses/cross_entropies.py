"""Cross-entropies of one class out of several, on logits and on log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.losses.classification import ClassificationLoss, draw_labels, split_largest
from hcurv.losses.loss import Reduction, check_same_shape

__all__ = ["CrossEntropy", "NegativeLogLikelihood"]


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
        ignore_index: int = -100,
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
        result = -scale[:, :, None] * p[:, None, :]
        largest, others = split_largest(p)
        complement = (1 - p).scatter_(1, largest, others)
        result.diagonal(dim1=1, dim2=2).copy_(scale * complement)
        return result

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute a·p − t, where t is the target distribution.

        Examples:
            >>> hcurv.losses.CrossEntropy().gradient(torch.zeros(1, 2), torch.tensor([1]))
            tensor([[ 0.5000, -0.5000]])
        """
        wanted, p = self._wanted(outputs, targets), torch.softmax(outputs, dim=1)
        mass = wanted.sum(1, keepdim=True)
        # For the largest p the difference a·p − t cancels where a network is certain and right. It
        # equals (a − t) − a·(1 − p), and both are sums over the other classes.
        largest, others = split_largest(p)
        unwanted = wanted.scatter(1, largest, 0.0).sum(1, keepdim=True)
        return (mass * p - wanted).scatter_(1, largest, unwanted - mass * others)

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
        largest, others = split_largest(chances)
        drawn = torch.where(labels == largest, -others, chances.gather(1, labels) - 1)
        result = chances.scatter(1, labels, drawn)
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


class NegativeLogLikelihood(ClassificationLoss):
    """Cross-entropy on log-probabilities, as after a log-softmax: `torch.nn.NLLLoss`.

    The loss −a·x_y is linear in its outputs x = log p, so that its Hessian is zero. The matrix here
    is the Fisher information of the outputs, Q = a·diag(p). The Jacobian of the log-softmax turns
    it into a·(diag(p) − ppᵀ), so that the network has the same Gauss-Newton Hessian as with
    `CrossEntropy` on its logits.

    The classes are the second axis, as torch wants it: outputs are (b, C), or (b, C, d1, ...) with
    labels (b, d1, ...) for sequences, images and so on.

    Args:
        weight: class weights, (C,).
        ignore_index: the label of points or positions that do not count.
        reduction: "mean" (divides by the total weight of the labels that count) or "sum".

    Examples:
        >>> logits = torch.tensor([0.3, -1.0, 2.0])
        >>> log_softmax = torch.nn.LogSoftmax(dim=0)
        >>> J = torch.func.jacrev(log_softmax)(logits)
        >>> loss = hcurv.losses.NegativeLogLikelihood()
        >>> R = torch.diag(loss.hessian_sqrt(log_softmax(logits)[None], None)[0]) @ J
        >>> S = hcurv.losses.CrossEntropy().hessian_sqrt(logits[None], None)[0]
        >>> torch.allclose(R.T @ R, S.T @ S)
        True
    """

    def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Compute √a·exp(x/2), as a diagonal.

        Examples:
            >>> outputs = torch.tensor([[0.25, 0.75]]).log()
            >>> hcurv.losses.NegativeLogLikelihood().hessian_sqrt(outputs, None).square()
            tensor([[0.2500, 0.7500]])
        """
        return torch.exp(outputs / 2) * self._scale(outputs, targets)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute −a·e_y.

        Examples:
            >>> outputs = torch.tensor([[0.25, 0.75]]).log()
            >>> -hcurv.losses.NegativeLogLikelihood().gradient(outputs, torch.tensor([1]))
            tensor([[0., 1.]])
        """
        return -self._weighted(self._one_hot(outputs, targets))

    def sample_gradient(
        self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Compute −√a·e_y' with the class y' drawn with the probabilities p.

        Examples:
            >>> generator = torch.Generator().manual_seed(0)
            >>> outputs = torch.tensor([[0.0, 1.0]]).log()  # the second class is certain
            >>> loss = hcurv.losses.NegativeLogLikelihood()
            >>> loss.sample_gradient(outputs, None, generator)
            tensor([[ 0., -1.]])
        """
        labels = draw_labels(torch.exp(outputs), generator)
        result = torch.zeros_like(outputs).scatter_(1, labels, -1.0)
        return result * self._scale(outputs, targets)

    def _scale(self, outputs: Tensor, targets: Tensor | None) -> Tensor | float:
        """Compute √a, where a is the weight of a row's label, (b, 1)."""
        if targets is None:
            return 1.0
        return self._weighted(self._one_hot(outputs, targets)).sum(1, keepdim=True).sqrt()

    def check_outputs(self, outputs: Tensor) -> None:
        """Outputs must be logarithms of probabilities that add up to 1, to rounding.

        Examples:
            >>> loss = hcurv.losses.NegativeLogLikelihood()
            >>> loss.check_outputs(torch.tensor([[0.25, 0.75]]).log())
            >>> loss.check_outputs(torch.zeros(1, 2))
            Traceback (most recent call last):
            ValueError: NLLLoss takes log-probabilities ... end the network with log_softmax ...
        """
        sums = torch.logsumexp(outputs, dim=1)
        # The sum of a log-softmax is right to some units of rounding. A difference of two large
        # numbers, z − logsumexp(z), has fewer digits, and half of them are enough here.
        wrong = ~(sums.abs() <= torch.finfo(outputs.dtype).eps ** 0.5)
        if bool(wrong.any()):
            raise ValueError(
                "NLLLoss takes log-probabilities of the classes, but exp(outputs) adds up to"
                f" {sums[wrong][0].exp().item():.4g} instead of 1: end the network with log_softmax"
                " over the classes (torch.nn.LogSoftmax(dim=1)), or use CrossEntropyLoss on logits"
            )
