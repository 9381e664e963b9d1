"""A picture of some queries, each beside the training images that matter most for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from hcurv.report.looks import BLACK, BLUE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_influential_images"]


def draw_influential_images(
    queries: tuple[Tensor, Tensor],
    training: tuple[Tensor, Tensor],
    helpful: tuple[Tensor, Tensor],
    harmful: tuple[Tensor, Tensor],
    image_shape: tuple[int, ...] | None = None,
) -> Figure:
    """Draw each query, then its most helpful and its most harmful training images, row by row.

    Args:
        queries: images (m, pixels) or (m, …), and their labels (m,).
        training: all training images and their labels.
        helpful: positions of training images (m, k), and their scores (m, k).
        harmful: the same, of those that harm.
        image_shape: height and width, or channels, height and width. None for square images with
            one channel, or three if only that fits.

    Raises:
        ValueError: the points are no images of this shape.
    """
    from matplotlib.figure import Figure

    shape = _image_shape(queries[0][0].numel(), image_shape)
    count, width = helpful[0].shape
    columns = 1 + 2 * width
    figure = Figure(figsize=(0.8 * columns + 0.3, 1.05 * count + 0.4), layout="constrained")
    grid = figure.subplots(count, columns, squeeze=False)
    for row in range(count):
        _draw(grid[row, 0], queries[0][row], shape, f"query: {int(queries[1][row])}", BLACK)
        for side, (found, colour) in enumerate(((helpful, BLUE), (harmful, RED))):
            for place in range(width):
                point, score = int(found[0][row, place]), float(found[1][row, place])
                title = f"{int(training[1][point])}: {score:+.1e}"
                axes = grid[row, 1 + side * width + place]
                _draw(axes, training[0][point], shape, title, colour)
    figure.suptitle("queries, helpful (blue) and harmful (red) training points", fontsize=9)
    return figure


def _image_shape(num_pixels: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is not None and len(given) in (2, 3) and math.prod(given) == num_pixels:
        return given
    for channels in (1, 3):
        side = math.isqrt(num_pixels // channels)
        if given is None and channels * side**2 == num_pixels:
            return (channels, side, side)
    shown = "square images" if given is None else f"images of shape {given}"
    raise ValueError(f"points of {num_pixels} numbers are no {shown}: pass image_shape=")


def _draw(axes: Axes, image: Tensor, shape: tuple[int, ...], title: str, colour: str) -> None:
    pixels = image.detach().cpu().reshape(shape)
    if len(shape) == 3:
        pixels = pixels[0] if shape[0] == 1 else pixels.permute(1, 2, 0).clamp(0, 1)
    axes.imshow(pixels.numpy(), cmap="gray_r" if pixels.ndim == 2 else None)
    axes.set_title(title, fontsize=7, color=colour, pad=2)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(colour)
