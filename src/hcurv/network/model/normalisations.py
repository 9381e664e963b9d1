"""Scales and shifts of layer, group and batch normalisation: γ·x̂ + β, x̂ the normalised input."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hcurv.network.model.contributions import Contribution, DirectUse

__all__ = ["batch_norm", "group_norm", "layer_norm"]


def layer_norm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """Every vector that is normalised is a row."""
    images, size = node._saved_input, entries.numel()
    rows = images.numel() // size
    if slot == 2:
        return [DirectUse(node, entries.reshape(-1), rows, lambda g: g.reshape(rows, size))]
    normal = ((images - node._saved_result1) * node._saved_result2).reshape(rows, size)
    return [DirectUse(node, entries.reshape(-1), rows, lambda g: g.reshape(rows, size) * normal)]


def group_norm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """Every image is a row."""
    images = node._saved_input
    count, groups = images.shape[0], int(node._saved_group)
    if slot == 2:
        return [_over_channels(node, entries, count)]
    grouped = images.reshape(count, groups, -1)
    mean, slope = (
        values.reshape(count, groups, 1) for values in (node._saved_result1, node._saved_result2)
    )
    return [_over_channels(node, entries, count, ((grouped - mean) * slope).view_as(images))]


def batch_norm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """Every image is a row; only with running statistics, where points are independent."""
    if node._saved_training:
        return None
    images = node._saved_input
    if slot == 2:
        return [_over_channels(node, entries, images.shape[0])]
    shape = (1, -1) + (1,) * (images.ndim - 2)
    mean, variance = node._saved_running_mean, node._saved_running_var
    slope = (variance + float(node._saved_eps)).rsqrt()
    normal = (images - mean.view(shape)) * slope.view(shape)
    return [_over_channels(node, entries, images.shape[0], normal)]


def _over_channels(
    node: Any, entries: Tensor, count: int, normal: Tensor | None = None
) -> DirectUse:
    """One number for each channel, (images, channels, …)."""

    def gradients(gradient: Tensor) -> Tensor:
        weighted = gradient if normal is None else gradient * normal
        return weighted.reshape(count, entries.numel(), -1).sum(2)

    return DirectUse(node, entries.reshape(-1), count, gradients)
