"""How good predictions are: log-likelihood, accuracy, calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.applications.laplace.predictive import Prediction

__all__ = ["Score", "auroc", "calibration", "calibration_error", "score"]


@dataclass(frozen=True)
class Score:
    """How well predictions fit targets.

    Attributes:
        log_likelihood: the mean over points of the log-probability (or log-density) of the target.
        accuracy: the share of points whose most probable class is right; None without classes.
        calibration_error: the mean distance between confidence and accuracy, in 15 bins of
            confidence; None without classes.
        root_mean_square: of the errors of the mean; None for classes.
        coverage: the share of targets within 1.96 standard deviations, which should be 95 %; None
            without a normal distribution.

    Examples:
        >>> post = hcurv.laplace(model, loss, (inputs, targets))
        >>> post.score((inputs, targets)).log_likelihood < 0
        True
    """

    log_likelihood: float
    accuracy: float | None = None
    calibration_error: float | None = None
    root_mean_square: float | None = None
    coverage: float | None = None


def score(name: str, prediction: Prediction, targets: Tensor) -> Score:
    """Score predictions of one of the likelihoods by its name."""
    if name == "classes":
        return _score_classes(prediction.mean, targets)
    mean, values = prediction.mean.double(), targets.double()
    if name == "labels":
        chances = torch.where(values > 0.5, mean, 1 - mean)
        tiny = torch.finfo(torch.float64).tiny
        logs = values * mean.clamp(min=tiny).log() + (1 - values) * (1 - mean).clamp(min=tiny).log()
        both = torch.stack([1 - mean, mean], -1).flatten(0, -2)
        return Score(
            float(logs.sum(1).mean()),
            float((chances > 0.5).double().mean()),
            calibration_error(both, (values > 0.5).long().flatten()),
        )
    errors = mean - values
    scatter = float(errors.square().mean().sqrt())
    if name == "counts":
        logs = values * mean.log() - mean - torch.lgamma(values + 1)
        return Score(float(logs.sum(1).mean()), root_mean_square=scatter)
    assert prediction.target_variances is not None
    variances = prediction.target_variances.double()
    logs = -0.5 * (errors.square() / variances + variances.log() + math.log(2 * math.pi))
    inside = errors.abs() <= 1.96 * variances.sqrt()
    return Score(
        float(logs.sum(1).mean()),
        root_mean_square=scatter,
        coverage=float(inside.double().mean()),
    )


def _score_classes(chances: Tensor, labels: Tensor) -> Score:
    """Score probabilities of classes, (n, C), against labels (n,) or distributions (n, C)."""
    values = chances.double()
    logs = values.clamp(min=torch.finfo(torch.float64).tiny).log()
    if labels.is_floating_point():
        return Score(float((logs * labels.double()).sum(1).mean()))
    right = logs.gather(1, labels.long()[:, None])
    accuracy = (values.argmax(1) == labels).double().mean()
    return Score(float(right.mean()), float(accuracy), calibration_error(values, labels))


def calibration(
    chances: Tensor, labels: Tensor, num_bins: int = 15
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean confidence, accuracy and number of points in bins of equal width, all (num_bins,).

    Args:
        chances: probabilities, (n, C).
        labels: the right classes, (n,).
        num_bins: the number of bins of the largest probability.

    Returns:
        NaN where a bin has no points.
    """
    confidence, chosen = chances.double().max(1)
    right = (chosen == labels).double()
    bins = (confidence * num_bins).long().clamp(0, num_bins - 1)
    counts = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, torch.ones_like(right))
    sums = [
        torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, values)
        for values in (confidence, right)
    ]
    return sums[0] / counts, sums[1] / counts, counts


def calibration_error(chances: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """Σ_bins (share of points)·|accuracy − confidence|."""
    confidence, accuracy, counts = calibration(chances.cpu(), labels.cpu(), num_bins)
    used = counts > 0
    gaps = (confidence - accuracy).abs()[used] * counts[used]
    return float(gaps.sum() / counts.sum())


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a point from outside has a larger value than one from inside."""
    values = torch.cat([inside, outside]).double()
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0)
    ranks = (ends - (counts - 1) / 2)[inverse]  # Equal values share the mean of their ranks.
    m = outside.numel()
    total = ranks[inside.numel() :].sum() - m * (m + 1) / 2
    return float(total / (m * inside.numel()))
