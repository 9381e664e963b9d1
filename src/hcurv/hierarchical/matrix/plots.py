"""Pictures of a compressed matrix: its blocks and their ranks, or its global part alone."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hcurv.linalg.nystrom import double_gram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = ["draw_diagonal", "draw_ranks", "draw_spectrum", "draw_structure", "plot_matrix"]

# The blocks of a level are labelled with their ranks if there are at most this many of them.
_MAX_LABELS = 64
# More dots than this in one go are drawn as pixels instead of vectors, which keeps files small.
_MAX_DOTS = 512
# Parameters are named below the diagonal if there are at most this many of them.
_MAX_NAMES = 16


def plot_matrix(matrix: HMatrix, max_levels: int) -> Figure:
    """Draw a matrix: blocks and ranks of its tree, or its global part if it has no tree."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hcurv[plots]'") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    if matrix.tree.has_clusters:
        draw_structure(figure, left, matrix, max_levels)
        draw_ranks(right, matrix)
        form = f"global rank {matrix.global_rank}, ordering {matrix.tree.ordering}"
    else:
        draw_spectrum(left, matrix)
        draw_diagonal(right, matrix)
        rest = "a diagonal" if matrix.tree.num_kept else "no tree"
        form = f"a global part of rank {matrix.global_rank} and {rest}"
    figure.suptitle(
        f"N = {matrix.shape[0]}, {matrix.compression_rate:.3%} of N² stored,"
        f" estimated error {matrix.estimated_error:.1e}, {form}"
    )
    return figure


def draw_spectrum(axes: Axes, matrix: HMatrix) -> None:
    """Draw the eigenvalues of the global part V Vᵀ, which are those of VᵀV, largest first."""
    axes.set_title("eigenvalues of the global part")
    axes.set_xlabel("number")
    axes.set_ylabel("eigenvalue")
    factor = None if matrix.global_part is None else matrix.global_part.factor
    if factor is None or factor.numel() == 0:
        axes.text(0.5, 0.5, "the matrix is zero", ha="center", transform=axes.transAxes)
        return
    values = torch.linalg.eigvalsh(double_gram(factor, factor).cpu()).flip(0)
    # Rounding can make the smallest eigenvalues negative, which a logarithmic scale cannot show.
    values = values[values > 0]
    dots = values.numel() > _MAX_DOTS
    axes.semilogy(range(1, values.numel() + 1), values.tolist(), ".-", rasterized=dots)


def draw_diagonal(axes: Axes, matrix: HMatrix) -> None:
    """Draw the diagonal entries, row by row, with the parameters that the rows belong to."""
    diagonal = matrix.diagonal().cpu().double()
    rows = (diagonal > 0).nonzero().squeeze(1)
    num_zero = diagonal.numel() - rows.numel()
    axes.set_title("diagonal entries" + (f" ({num_zero} are zero)" if num_zero else ""))
    axes.set_ylabel("diagonal entry")
    axes.set_xlabel("row")
    axes.set_xlim(-0.5, diagonal.numel() - 0.5)
    if not rows.numel():
        return
    values = diagonal[rows]
    dots = rows.numel() > _MAX_DOTS
    axes.semilogy(rows.tolist(), values.tolist(), ".", ms=3, alpha=0.6, rasterized=dots)
    layout = matrix.layout
    if layout is None or len(layout.names) > _MAX_NAMES:
        return
    for name in layout.names[1:]:
        axes.axvline(layout.slices[name].start - 0.5, color="0.7", lw=0.8)
    middles = [(part.start + part.stop - 1) / 2 for part in layout.slices.values()]
    axes.set_xticks(middles, layout.names, rotation=45, ha="right")
    axes.set_xlabel("row, by the parameter that it belongs to")


def draw_structure(figure: Figure, axes: Axes, matrix: HMatrix, max_levels: int) -> None:
    """Draw the blocks between siblings, coloured and labelled by rank. Finer levels are black."""
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
    """Draw the ranks of all nodes by level: every dot is a node, and the line is their mean."""
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
