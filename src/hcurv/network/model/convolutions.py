"""Convolutions and transposed convolutions of any dimension, as W times patches."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hcurv.network.model.contributions import Contribution, DirectUse, LinearUse

__all__ = ["convolution", "patches"]


def patches(
    images: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """What a convolution sees at each of its positions.

    Args:
        images: (b, channels, *size).
        kernel: size of the kernel along each axis.
        stride: distance of two positions.
        padding: zeros at either end.
        dilation: distance of two entries of the kernel.
        counts: the number of positions along each axis.

    Returns:
        (b, channels, prod(kernel), prod(counts)).
    """
    axes = range(len(kernel))
    needed = [(counts[a] - 1) * stride[a] + (kernel[a] - 1) * dilation[a] + 1 for a in axes]
    ends = [needed[a] - images.shape[2 + a] - padding[a] for a in axes]
    # `pad` takes the last axis first. A negative number takes entries away that nothing sees.
    pads = [number for a in reversed(axes) for number in (padding[a], ends[a])]
    padded = functional.pad(images, pads).contiguous()
    strides = padded.stride()
    view = padded.as_strided(
        (*padded.shape[:2], *kernel, *counts),
        (
            *strides[:2],
            *(strides[2 + a] * dilation[a] for a in axes),
            *(strides[2 + a] * stride[a] for a in axes),
        ),
    )
    return view.reshape(*padded.shape[:2], prod(kernel), prod(counts))


def convolution(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """The weight and the bias of a convolution; the images are the rows.

    A convolution multiplies the weight of each group, (units, channels·kernel), with patches of
    the input. A transposed one is the adjoint of a convolution: its weight, (channels,
    units·kernel), joins inputs to patches of the derivative.
    """
    images = node._saved_input
    if images is None:
        return None
    if slot == 2:
        count = images.shape[0]
        return [DirectUse(node, entries, count, lambda g: g.flatten(2).sum(2))]
    if slot != 1:
        return None
    groups, kernel = int(node._saved_groups), tuple(entries.shape[2:])
    stride, padding, dilation = (
        tuple(int(number) for number in values)
        for values in (node._saved_stride, node._saved_padding, node._saved_dilation)
    )
    geometry = (kernel, stride, padding, dilation)
    if node._saved_transposed:
        return _transposed(node, entries, images, geometry, groups)
    counts = _result_sizes(node)
    seen = patches(images, *geometry, counts).unflatten(1, (groups, -1)).flatten(2, 3)
    by_group = entries.view(groups, -1, entries[0].numel())

    def factors(gradient: Tensor, group: int) -> Tensor:
        by_group: Tensor = gradient.flatten(2).unflatten(1, (groups, -1))
        return by_group[:, group]

    return [
        LinearUse(node, by_group[group], seen[:, group], lambda g, n=group: factors(g, n))  # type: ignore[misc]
        for group in range(groups)
    ]


def _result_sizes(node: Any) -> tuple[int, ...]:
    return tuple(torch.Size(node._input_metadata[0].shape)[2:])


def _transposed(
    node: Any,
    entries: Tensor,
    images: Tensor,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
    groups: int,
) -> list[Contribution]:
    counts = images.shape[2:]
    inputs = images.flatten(2).unflatten(1, (groups, -1))
    by_group = entries.view(groups, images.shape[1] // groups, -1)

    def factors(gradient: Tensor, group: int) -> Tensor:
        own = gradient.unflatten(1, (groups, -1))[:, group]
        return patches(own, *geometry, counts).flatten(1, 2)

    return [
        LinearUse(node, by_group[group].T, inputs[:, group], lambda g, n=group: factors(g, n))  # type: ignore[misc]
        for group in range(groups)
    ]
