"""Make the pictures of `how-it-works.md`, from networks on scikit-learn's digits.

    python docs/pictures.py [FOLDER]

writes them to docs/pictures unless another folder is given. Colours are those of Okabe and Ito.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor, nn

import hcurv
from hcurv.cluster_tree import cluster
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train
from hcurv.hierarchical import build
from hcurv.hierarchical.error_budget import ErrorBudget

BLACK, BLUE, RED, GREEN, SKY = "#000000", "#0072B2", "#D55E00", "#009E73", "#56B4E9"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hcurv",  # the same picture gives the same file
}
TITLES = {"classifier (digits)": "classifier 64-20-10", "AE (digits)": "autoencoder 64-10-64"}


def main(folder: Path) -> None:
    """Make all pictures."""
    matrices = {}
    for name in TITLES:
        network = train(REFERENCE_NETWORKS[name], cache=False)
        matrices[name] = hcurv.GaussNewton(network.model, network.loss, network.inputs)
    classifier = matrices["classifier (digits)"]
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[], Figure]] = {
        "orders.png": lambda: draw_orders(classifier),
        "sampling.svg": lambda: draw_sampling(classifier),
        "blocks.svg": lambda: draw_blocks(classifier),
        "budget.svg": lambda: draw_budget(classifier),
        "spectrum.svg": lambda: draw_spectra(matrices),
        "storage.svg": lambda: draw_storage(matrices),
    }
    for name, draw in pictures.items():
        with mpl.rc_context(STYLE):
            kind = name.rpartition(".")[2]
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            draw().savefig(folder / name, dpi=110, metadata=metadata)
        print(f"wrote {folder / name}")


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with some panels beside each other."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def draw_orders(matrix: hcurv.GaussNewton) -> Figure:
    """Sizes of the entries, in three orders of the rows."""
    from matplotlib.colors import LogNorm

    dense = matrix.to_dense().abs()
    tree = cluster(matrix, leaf_size=16, ordering="angle", seed=0)
    orders = {
        "as numbered: layer, unit, input": torch.arange(matrix.shape[0]),
        "layer, input, unit": matrix.orders()["layer-input-output"],
        "by angle": torch.cat([tree.permutation, tree.zero_rows]),
    }
    figure, panels = new_figure(10, 3.1, len(orders))
    largest = float(shrink(dense).max())
    for axes, (title, order) in zip(panels, orders.items(), strict=True):
        values = shrink(dense[order][:, order])
        norm = LogNorm(1e-4 * largest, largest)
        extent = (0, matrix.shape[0], matrix.shape[0], 0)
        image = axes.imshow(values.numpy(), norm=norm, cmap="Blues", extent=extent)
        axes.set(title=title)
        axes.grid(False)
    figure.colorbar(image, ax=panels, label="size of the entries")
    return figure


def shrink(values: Tensor, by: int = 3) -> Tensor:
    """Means over small squares."""
    return nn.functional.avg_pool2d(values[None], by, ceil_mode=True)[0]


def draw_sampling(matrix: hcurv.GaussNewton) -> Figure:
    """Error against samples, for every scheme."""
    figure, (axes,) = new_figure(5, 3.6)
    counts = (10, 30, 100, 300, 1000, 3000)
    looks = {"uniform": (BLACK, "x"), "importance": (RED, "s"), "stratified": (BLUE, "o")}
    for scheme, (colour, marker) in looks.items():
        errors = [
            hcurv.sampling_error(matrix.sample_entries(count, scheme), matrix).value  # type: ignore[arg-type]
            for count in counts
        ]
        axes.loglog(counts, errors, color=colour, marker=marker, label=scheme)
    axes.set(xlabel="samples per entry", ylabel="relative error")
    axes.legend()
    return figure


def draw_blocks(matrix: hcurv.GaussNewton) -> Figure:
    """Blocks and ranks."""
    with mpl.rc_context({"axes.grid": False}):
        return hcurv.compress(matrix, tolerance=5e-2, global_rank=0, leaf_size=64).plot()


class RecordedBudget(ErrorBudget):
    """A budget that remembers what every level was given and has spent, over the whole."""

    made: list[RecordedBudget] = []  # noqa: RUF012

    def __init__(self, tolerance: float, depth: float) -> None:
        super().__init__(tolerance, depth)
        self.given: dict[float, float] = {}
        self.spent: dict[float, float] = {}
        RecordedBudget.made.append(self)

    def node_error(self, depth: float) -> float:
        """As the original."""
        error = super().node_error(depth)
        self.given[depth] = 2**depth * error**2 / self._whole
        return error

    def spend(self, squared_error: float) -> None:
        """As the original."""
        super().spend(squared_error)
        self.spent[min(self.given)] = squared_error / self._whole


def draw_budget(matrix: hcurv.GaussNewton) -> Figure:
    """What every level may spend, and what it spends."""
    with mock.patch.object(build, "ErrorBudget", RecordedBudget):
        result = hcurv.compress(
            matrix, tolerance=5e-2, global_rank=0, leaf_size=16, ordering="layer-output-input"
        )
    budget = RecordedBudget.made[-1]
    levels = sorted(budget.given)
    figure, (left, right) = new_figure(8.5, 3.4, 2)
    bars: dict[str, Any] = {"width": 0.38, "edgecolor": BLACK, "linewidth": 0.6}
    for shift, values, colour, label in (
        (-0.2, budget.given, SKY, "may spend"),
        (0.2, budget.spent, RED, "spends"),
    ):
        heights = [100 * values[level] for level in levels]
        left.bar([level + shift for level in levels], heights, color=colour, label=label, **bars)
    left.set(xlabel="level", ylabel="% of the budget", title="squared error")
    left.legend()
    sizes = [level.num_stored for level in reversed(result.levels)]
    total = result.num_stored
    right.bar(levels, [100 * size / total for size in sizes], color=SKY, edgecolor=BLACK, lw=0.6)
    leaves = 100 * result.leaves.num_stored / total
    right.set(xlabel="level", ylabel="% of all floats", title="storage of bases and couplings")
    right.annotate(
        f"blocks of the leaves: {leaves:.0f} %", (0.03, 0.93), xycoords="axes fraction", va="top"
    )
    for axes in (left, right):
        axes.set_xticks(levels)
        axes.grid(False, axis="x")
    return figure


def draw_spectra(matrices: dict[str, hcurv.GaussNewton]) -> Figure:
    """Eigenvalues of the exact and of the compressed matrices."""
    figure, (axes,) = new_figure(5.6, 3.8)
    for (name, matrix), colour in zip(matrices.items(), (BLUE, RED), strict=True):
        compressed = hcurv.compress(matrix, tolerance=1e-2)
        exact, near = (
            torch.linalg.eigvalsh(operator.to_dense().double()).flip(0)
            for operator in (matrix, compressed)
        )
        places = torch.arange(1, len(exact) + 1)
        shown = exact > 1e-7 * exact[0]
        axes.loglog(places[shown], exact[shown] / exact[0], color=colour, lw=2.5, alpha=0.5)
        near = near / exact[0]
        label = f"{TITLES[name]}, compressed to 1e-2"
        positive = near > 1e-7
        axes.loglog(places[positive], near[positive], color=colour, ls="--", lw=1.2, label=label)
        axes.plot([], [], color=colour, lw=2.5, alpha=0.5, label=f"{TITLES[name]}, exact")
    axes.set(xlabel="number of the eigenvalue", ylabel="eigenvalue, over the largest")
    axes.legend(loc="lower left", fontsize=9)
    return figure


def draw_storage(matrices: dict[str, hcurv.GaussNewton]) -> Figure:
    """Error against storage of trees, low rank, and both."""
    figure, panels = new_figure(9, 3.8, 2)
    tolerances = (3e-1, 1e-1, 3e-2, 1e-2, 3e-3)
    for axes, (name, matrix) in zip(panels, matrices.items(), strict=True):
        found: dict[str, list[hcurv.SymmetricOperator]] = {
            "tree alone": [hcurv.compress(matrix, tolerance=t, global_rank=0) for t in tolerances],
            "low rank alone": [
                hcurv.baselines.LowRank(matrix, rank, power_iterations=1)
                for rank in (4, 12, 40, 120, 300)
            ],
            "hcurv.compress": [hcurv.compress(matrix, tolerance=t) for t in tolerances],
        }
        looks = ((GREEN, "^", "-"), (RED, "s", "-"), (BLUE, "o", "--"))
        for (label, operators), (colour, marker, dashes) in zip(found.items(), looks, strict=True):
            storage = [100 * operator.compression_rate for operator in operators]
            errors = [operator.relative_error(matrix) for operator in operators]
            axes.loglog(storage, errors, dashes, color=colour, marker=marker, label=label)
        axes.set(xlabel="stored floats, % of N²", ylabel="relative error", title=TITLES[name])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend()
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
