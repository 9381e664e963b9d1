"""Translate the loss modules of torch."""

from __future__ import annotations

from torch import nn

from hcurv.losses.binary_cross_entropies import BinaryCrossEntropy
from hcurv.losses.cross_entropies import CrossEntropy
from hcurv.losses.loss import Loss, Reduction
from hcurv.losses.squared_errors import MeanSquaredError

__all__ = ["as_loss"]


def as_loss(loss: nn.Module | Loss) -> Loss:
    """Translate a loss module of torch into a `Loss`; a `Loss` is returned as it is.

    Args:
        loss: a `torch.nn.CrossEntropyLoss`, `MSELoss` or `BCEWithLogitsLoss`, or a `Loss`.

    Raises:
        TypeError: the loss is none of these.
        ValueError: its ``reduction`` leaves no scalar loss.

    Examples:
        >>> type(hcurv.losses.as_loss(torch.nn.CrossEntropyLoss())).__name__
        'CrossEntropy'
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
