"""Translate the loss modules of torch."""

from __future__ import annotations

from torch import nn

from hcurv.losses.binary_cross_entropies import (
    BinaryCrossEntropy,
    BinaryCrossEntropyOfProbabilities,
)
from hcurv.losses.cross_entropies import CrossEntropy, NegativeLogLikelihood
from hcurv.losses.loss import Loss, Reduction
from hcurv.losses.poisson import PoissonNLL
from hcurv.losses.robust_errors import Huber, SmoothL1
from hcurv.losses.squared_errors import MeanSquaredError

__all__ = ["as_loss"]


def as_loss(loss: nn.Module | Loss) -> Loss:
    """Translate a loss module of torch into a `Loss`; a `Loss` is returned as it is.

    Args:
        loss: a `torch.nn.CrossEntropyLoss`, `NLLLoss`, `BCEWithLogitsLoss`, `BCELoss`, `MSELoss`,
            `HuberLoss`, `SmoothL1Loss` or `PoissonNLLLoss`, or a `Loss`.

    Raises:
        TypeError: the loss is none of these.
        ValueError: its ``reduction`` leaves no scalar loss, or another of its options does not
            allow a Hessian.

    Examples:
        >>> type(hcurv.losses.as_loss(torch.nn.CrossEntropyLoss())).__name__
        'CrossEntropy'
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, nn.Module) and (
        loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss)
    ):
        raise TypeError(
            f"this {type(loss).__name__} has hooks or a forward method of its own, for which no"
            " Hessian is known: pass the loss without them, or a subclass of hcurv.losses.Loss"
        )
    if type(loss) is nn.CrossEntropyLoss:
        return CrossEntropy(
            loss.weight, loss.ignore_index, loss.label_smoothing, _reduction(loss.reduction)
        )
    if type(loss) is nn.NLLLoss:
        return NegativeLogLikelihood(loss.weight, loss.ignore_index, _reduction(loss.reduction))
    if type(loss) is nn.BCEWithLogitsLoss:
        return BinaryCrossEntropy(loss.weight, loss.pos_weight, _reduction(loss.reduction))
    if type(loss) is nn.BCELoss:
        return BinaryCrossEntropyOfProbabilities(loss.weight, _reduction(loss.reduction))
    if type(loss) is nn.MSELoss:
        return MeanSquaredError(_reduction(loss.reduction))
    if type(loss) is nn.HuberLoss:
        return Huber(loss.delta, _reduction(loss.reduction))
    if type(loss) is nn.SmoothL1Loss:
        return SmoothL1(loss.beta, _reduction(loss.reduction))
    if type(loss) is nn.PoissonNLLLoss:
        return PoissonNLL(loss.log_input, loss.eps, _reduction(loss.reduction))
    if type(loss) is nn.GaussianNLLLoss:
        raise TypeError(
            "GaussianNLLLoss does not hold the variances that its Hessian needs: use"
            " hcurv.losses.GaussianNLL(variance=...), whose variances are given numbers"
        )
    raise TypeError(
        f"no Hessian is known for the loss {type(loss).__name__}; supported are"
        " torch.nn.CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss, BCELoss, MSELoss, HuberLoss,"
        " SmoothL1Loss and PoissonNLLLoss, hcurv.losses.HalfSquaredError and GaussianNLL, and any"
        " subclass of hcurv.losses.Loss"
    )


def _reduction(reduction: str) -> Reduction:
    if reduction == "mean":
        return "mean"
    if reduction == "sum":
        return "sum"
    raise ValueError(
        f"reduction={reduction!r} leaves no scalar loss; use reduction='mean' or 'sum'"
    )
