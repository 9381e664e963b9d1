"""Pictures of predictions: calibration curves of classifiers, error bars of regressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.report.looks import BLUE, GRAY, SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_calibration", "draw_errors"]

# Bins with fewer points than this say nothing about accuracy, and are not drawn.
_FEWEST = 5


def draw_calibration(
    axes: Axes,
    confidence: Tensor,
    accuracy: Tensor,
    counts: Tensor,
    label: str = "",
    colour: str = BLUE,
    marker: str = "o",
) -> None:
    """Draw the accuracy against the confidence, bin by bin; the diagonal is what it should be.

    Args:
        axes: where to draw.
        confidence: the mean confidence of each bin.
        accuracy: the share of right answers in it.
        counts: the number of points in it.
        label: for the legend.
        colour: of the curve.
        marker: of its points.
    """
    shown = counts >= _FEWEST
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle=":", linewidth=1)
    axes.plot(
        confidence[shown].tolist(),
        accuracy[shown].tolist(),
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1.2,
        label=label,
    )
    axes.set(xlabel="confidence", ylabel="accuracy")


def draw_errors(axes: Axes, mean: Tensor, deviation: Tensor, targets: Tensor) -> None:
    """Draw targets against predictions, in the order of the predictions, with a 95 % band.

    Args:
        axes: where to draw.
        mean: predicted means, (n,).
        deviation: standard deviations of the targets, noise included, (n,).
        targets: (n,).
    """
    order = mean.argsort()
    places = torch.arange(len(order)).tolist()
    low, high = (mean - 1.96 * deviation)[order], (mean + 1.96 * deviation)[order]
    axes.fill_between(places, low.tolist(), high.tolist(), color=SKY, alpha=0.4, label="95 %")
    axes.plot(places, mean[order].tolist(), color=BLUE, linewidth=1.2, label="prediction")
    axes.plot(
        places,
        targets[order].tolist(),
        color="black",
        linestyle="",
        marker=".",
        markersize=3,
        label="target",
    )
    axes.set(xlabel="points, by their prediction", ylabel="target")
