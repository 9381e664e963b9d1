"""Pictures of a hierarchical matrix: where its blocks lie, and how large their ranks are."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hcurv.hierarchical.matrix import HMatrix

__all__ = ["draw_ranks", "draw_structure", "plot_matrix"]

_MAX_LABELS = 64  # blocks of a level that are labelled with their ranks
_MAX_DOTS = 512  # nodes of a level that are drawn as vectors


def plot_matrix(matrix: HMatrix, max_levels: int) -> Figure:
    """Block structure with ranks beside the ranks per level."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hcurv[plots]'") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    structure, ranks = figure.subplots(1, 2, width_ratios=(1, 1.1))
    draw_structure(figure, structure, matrix, max_levels)
    draw_ranks(ranks, matrix)
    figure.suptitle(
        f"N = {matrix.shape[0]}, {matrix.compression_rate:.3%} of N² stored,"
        f" estimated error {matrix.estimated_error:.1e}, ordering {matrix.tree.ordering}"
    )
    return figure


def draw_structure(figure: Figure, axes: Axes, matrix: HMatrix, max_levels: int) -> None:
    """Squares of siblings, coloured and labelled by rank; what lies below is dark."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    tree = matrix.tree
    shown = min(tree.depth, max_levels)
    all_ranks = [ranks.cpu() for ranks in matrix.ranks[:shown]]
    largest = max((int(ranks.max()) for ranks in all_ranks), default=0)
    colours = ScalarMappable(Normalize(0, max(1, largest)), "viridis_r")
    for level, ranks in enumerate(all_ranks, start=1):
        bounds = tree.bounds(level).tolist()
        for node, rank in enumerate(ranks.tolist()):
            low, high = bounds[node], bounds[node + 1]
            left, right = bounds[node ^ 1], bounds[(node ^ 1) + 1]
            colour = colours.to_rgba(rank)
            axes.add_patch(
                Rectangle((left, low), right - left, high - low, fc=colour, ec="white", lw=0.5)
            )
            if len(ranks) <= _MAX_LABELS and rank and level <= 5:
                dark = sum(colour[:3]) < 1.5
                axes.text(
                    (left + right) / 2,
                    (low + high) / 2,
                    str(rank),
                    ha="center",
                    va="center",
                    fontsize=max(4, 13 - 2 * level),
                    color="white" if dark else "black",
                )
    bounds = tree.bounds(shown).tolist()
    for low, high in pairwise(bounds):
        axes.add_patch(
            Rectangle((low, low), high - low, high - low, fc="black", ec="white", lw=0.5)
        )
    axes.set_xlim(0, max(1, tree.num_kept))
    axes.set_ylim(max(1, tree.num_kept), 0)
    axes.set_aspect("equal")
    axes.set_title("blocks and ranks" + (" (black: dense)" if shown == tree.depth else ""))
    axes.set_xlabel(f"rows in tree order ({tree.size - tree.num_kept} zero rows left out)")
    figure.colorbar(colours, ax=axes, label="rank", shrink=0.8)


def draw_ranks(axes: Axes, matrix: HMatrix) -> None:
    """Ranks of every node: each dot a node, the line their mean."""
    levels, means = [], []
    for level, ranks in enumerate(matrix.ranks, start=1):
        values = ranks.cpu().double()
        spread = (values.argsort().argsort() / max(1, len(values) - 1) - 0.5) * 0.5
        axes.plot(
            (level + spread).tolist(),
            values.tolist(),
            ".",
            ms=3,
            alpha=0.6,
            color="C0",
            rasterized=len(values) > _MAX_DOTS,
        )
        levels.append(level)
        means.append(float(values.mean()))
    axes.plot(levels, means, "o-", color="C1", label="mean")
    if levels:
        axes.legend()
        axes.set_xticks(levels)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("level (1: halves of the matrix)")
    axes.set_ylabel("rank")
    axes.set_title("ranks of the nodes")
