"""Make the pictures of the pages.

    python docs/pictures.py [NAME ...]

writes all pictures, or those that are named, to docs/pictures. They are made from networks on
scikit-learn's digits, from a small regression, or from committed results. They are narrow and their
text is large, so that they can be read on a phone. Methods have the colours that they have in
reports.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor, nn

import hcurv
from hcurv.experiments.datasets import digits
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train
from hcurv.hierarchical.matrix.plots import draw_ranks, draw_structure
from hcurv.report.influential_images import draw_influential_images
from hcurv.report.looks import BLACK, BLUE, GRAY, GREEN, RED, SKY, look_of

WIDTH = 4.6  # inches: at 390 pixels a letter of 10 points is then still 11 pixels high
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "svg.fonttype": "path",  # letters have the same width on every machine
    "svg.hashsalt": "hcurv",  # the same picture gives the same file
}
TITLES = {"classifier (digits)": "classifier 64-20-10", "AE (digits)": "autoencoder 64-10-64"}
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def main(names: list[str]) -> None:
    """Make the pictures that are named, or all of them."""
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[], Figure]] = {
        "uncertainty.svg": draw_uncertainty,
        "influence.png": draw_influence,
        "damping.svg": draw_damping,
        "orders.png": draw_orders,
        "sampling.svg": draw_sampling,
        "blocks.svg": draw_blocks,
        "spectrum.svg": draw_spectra,
        "storage.svg": draw_storage,
        "pruning.svg": draw_pruning,
    }
    for name in names or list(pictures):
        with mpl.rc_context(STYLE):
            is_vector = name.endswith(".svg")
            metadata = {"Date": None} if is_vector else {"Software": None}
            pictures[name]().savefig(folder / name, dpi=170, metadata=metadata)
        print(f"wrote {folder / name}")


@cache
def matrix_of(name: str) -> hcurv.GaussNewton:
    """The exact matrix of one of the two networks on digits."""
    network = train(REFERENCE_NETWORKS[name], cache=False)
    return hcurv.GaussNewton(network.model, network.loss, network.inputs)


def new_figure(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels below each other."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def add_legend(figure: Figure, source: Axes, columns: int = 2) -> None:
    """A legend below all panels, where it hides nothing."""
    handles, labels = source.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2)


def draw_uncertainty() -> Figure:
    """Laplace approximation of a regression, by several methods."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-3, -1, 30), torch.linspace(0.5, 2.5, 30)]).double()[:, None]
    noise = 0.15
    y = torch.sin(2 * x) + noise * torch.randn(x.shape, generator=generator).double()
    grid = torch.linspace(-4.5, 4.5, 300).double()[:, None]
    prior = 0.1  # precision of the weights
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        ).double()
    loss = hcurv.losses.HalfSquaredError(reduction="sum")
    damping = prior * noise**2
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=600, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        weights = nn.utils.parameters_to_vector(model.parameters())
        value: Tensor = (model(x) - y).square().sum() / 2 + damping / 2 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(objective)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (grid,)))(
        parameters
    )
    columns = torch.cat([jacobians[name].flatten(1) for name in parameters], 1).T.contiguous()

    H = hcurv.GaussNewton(model, loss, (x, y))
    dense = H.to_dense()
    dense += damping * torch.eye(len(dense), dtype=dense.dtype)
    A = hcurv.compress(H, damping=damping, tolerance=1e-2).factorize(damping)
    kfac = hcurv.baselines.KFAC(model, loss, (x, y), num_samples=None).factorize(damping)
    ekfac = hcurv.baselines.KFAC(model, loss, (x, y), num_samples=None, ekfac=True)
    solves: dict[str, Tensor] = {
        "exact": torch.linalg.solve(dense, columns),
        "hierarchical": A.solve(columns),
        "K-FAC block-diagonal": kfac.solve(columns),
        "EKFAC": ekfac.factorize(damping).solve(columns),
        "diagonal": columns / (H.diagonal() + damping)[:, None],
    }
    deviations = {
        name: noise * (columns * solved).sum(0).clamp(min=0).sqrt()
        for name, solved in solves.items()
    }

    figure, (top, bottom) = new_figure(5.6, 2)
    with torch.no_grad():
        mean = model(grid)[:, 0]
    band = 2 * deviations["hierarchical"]
    top.fill_between(grid[:, 0], mean - band, mean + band, color=SKY, alpha=0.45, lw=0)
    top.plot(grid[:, 0], mean, color=BLUE)
    top.plot(x[:, 0], y[:, 0], ".", color=BLACK, ms=4)
    top.set(ylim=(-4, 4), ylabel="output", xlim=(-4.5, 4.5))
    top.set_title("data, network, and two standard deviations")
    for name, values in deviations.items():
        look = look_of(name)
        style: dict[str, Any] = {"color": look.colour, "ls": look.dashes, "lw": 1.6}
        label = {"hierarchical": "hcurv.compress", "K-FAC block-diagonal": "K-FAC"}.get(name, name)
        if name == "exact":
            style = {"color": "#b0b0b0", "lw": 5}
        elif name == "hierarchical":
            style["ls"] = "--"
        bottom.semilogy(grid[:, 0], values, label=label, **style)
    bottom.set(xlabel="input", ylabel="standard deviation", xlim=(-4.5, 4.5))
    add_legend(figure, bottom, 3)
    return figure


def draw_influence() -> Figure:
    """Test images of digits, and the training images that help and harm them most."""
    images, labels = digits()
    training, asked = (images[:1300], labels[:1300]), (images[1300:1305], labels[1300:1305])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10))
    loss, decay = nn.CrossEntropyLoss(), 3e-3
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        weights = nn.utils.parameters_to_vector(model.parameters())
        value: Tensor = loss(model(training[0]), training[1]) + decay / 2 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(objective)
    infl = hcurv.influence(model, loss, training, decay)
    sides = (infl.top(asked, 3, harmful=harmful) for harmful in (False, True))
    found = [(side.points, side.scores) for side in sides]
    return draw_influential_images(asked, training, found[0], found[1])


def draw_damping() -> Figure:
    """Errors of variances against the tolerance, as benchmarks/damping.py has measured them."""
    text = (RESULTS / "damping.txt").read_text()
    _, _, table = text.partition("Median error of the output variances")
    lines = table.partition("\n\n")[0].splitlines()
    ratios = [float(ratio) for ratio in re.findall(r"λ = (\S+) λ₁", lines[1])]
    tolerances, errors = [], []
    for line in lines[2:]:
        found = re.match(r"compress, tolerance (\S+)", line)
        if found:
            tolerances.append(float(found[1]))
            errors.append([float(value) for value in re.findall(r"([\d.]+) %", line)])
    figure, (axes,) = new_figure(4.4)
    looks = ((BLUE, "o"), (SKY, "s"), (GREEN, "^"), (RED, "D"))
    for place, (ratio, (colour, marker)) in enumerate(zip(ratios, looks, strict=True)):
        # The file has four digits, and smaller errors as zeros, which are left out.
        values = [row[place] or float("nan") for row in errors]
        label = f"λ = {ratio:.0e} λ₁"
        axes.loglog(tolerances, values, color=colour, marker=marker, label=label)
        chosen = tolerances.index(ratio)
        axes.plot(ratio, values[chosen], "o", ms=15, mfc="none", mec=BLACK, mew=1.2)
    axes.axhline(100, color=GRAY, ls=":")
    axes.annotate("100 %", (tolerances[-1], 115), color=GRAY)
    axes.set(xlabel="tolerance of hcurv.compress", ylabel="median error of the variances, %")
    axes.invert_xaxis()
    add_legend(figure, axes)
    return figure


def draw_orders() -> Figure:
    """Sizes of the entries, in three orders of the rows."""
    matrix = matrix_of("classifier (digits)")
    dense = matrix.to_dense().abs()
    by_angle = hcurv.compress(
        matrix, tolerance=0.5, global_rank=0, leaf_size=16, ordering="angle"
    ).tree
    orders = {
        "layer, unit, input\n(as numbered)": torch.arange(matrix.shape[0]),
        "layer, input, unit": matrix.orders()["layer-input-output"],
        "by angle": torch.cat([by_angle.permutation, by_angle.zero_rows]),
    }
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    grid = figure.subplots(2, 2)
    panels = list(grid.flat)
    largest = float(shrink(dense).max())
    for axes, (title, order) in zip(panels, orders.items(), strict=False):
        values = shrink(dense[order][:, order])
        norm = LogNorm(1e-4 * largest, largest)
        extent = (0, matrix.shape[0], matrix.shape[0], 0)
        image = axes.imshow(values.numpy(), norm=norm, cmap="Blues", extent=extent)
        axes.set_title(title)
        axes.grid(False)
        axes.set(xticks=[0, 1000], yticks=[0, 1000], xlabel="column", ylabel="row")
    panels[-1].axis("off")
    bar = panels[-1].inset_axes((0.05, 0.55, 0.9, 0.08))
    label = "absolute value of an entry\n(white: zero)"
    figure.colorbar(image, cax=bar, orientation="horizontal", label=label)
    return figure


def shrink(values: Tensor, by: int = 3) -> Tensor:
    """Means over small squares."""
    return nn.functional.avg_pool2d(values[None], by, ceil_mode=True)[0]


def draw_sampling() -> Figure:
    """Error against samples, for every scheme."""
    matrix = matrix_of("classifier (digits)")
    figure, (axes,) = new_figure(3.6)
    counts = (10, 30, 100, 300, 1000, 3000)
    looks = {"uniform": (BLACK, "x"), "importance": (RED, "s"), "stratified": (BLUE, "o")}
    for scheme, (colour, marker) in looks.items():
        errors = [
            hcurv.sampling_error(matrix.sample_entries(count, scheme), matrix).value  # type: ignore[arg-type]
            for count in counts
        ]
        axes.loglog(counts, errors, color=colour, marker=marker, label=scheme)
    axes.set(xlabel="samples per entry", ylabel="relative error of all entries")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    add_legend(figure, axes, 3)
    return figure


def draw_blocks() -> Figure:
    """Blocks with their ranks, and the ranks of each level."""
    tree = hcurv.compress(
        matrix_of("classifier (digits)"), tolerance=5e-2, global_rank=0, leaf_size=64
    )
    figure, (top, bottom) = new_figure(7.4, 2)
    top.grid(False)
    draw_structure(figure, top, tree, 3)
    draw_ranks(bottom, tree)
    return figure


def draw_spectra() -> Figure:
    """Eigenvalues of the exact and of the compressed matrices."""
    figure, (axes,) = new_figure(4.4)
    for name, colour in zip(TITLES, (BLUE, RED), strict=True):
        matrix = matrix_of(name)
        compressed = hcurv.compress(matrix, tolerance=1e-2)
        exact, near = (
            torch.linalg.eigvalsh(operator.to_dense().double()).flip(0)
            for operator in (matrix, compressed)
        )
        places = torch.arange(1, len(exact) + 1)
        shown = exact > 1e-7 * exact[0]
        title = TITLES[name].split()[0]
        look: dict[str, Any] = {"color": colour, "lw": 3.5, "alpha": 0.4}
        axes.loglog(places[shown], exact[shown] / exact[0], label=f"{title}, exact", **look)
        near = near / exact[0]
        positive = near > 1e-7
        label = f"{title}, compressed"
        axes.loglog(places[positive], near[positive], color=colour, ls="--", lw=1.2, label=label)
    axes.set(xlabel="number of the eigenvalue", ylabel="eigenvalue, over the largest")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    add_legend(figure, axes)
    return figure


def draw_storage() -> Figure:
    """Error against storage of trees, low rank, and both."""
    figure, panels = new_figure(6.6, 2)
    tolerances = (3e-1, 1e-1, 3e-2, 1e-2, 3e-3)
    for axes, name in zip(panels, TITLES, strict=True):
        matrix = matrix_of(name)
        built: dict[str, list[hcurv.SymmetricOperator]] = {
            "tree alone": [hcurv.compress(matrix, tolerance=t, global_rank=0) for t in tolerances],
            "low rank": [
                hcurv.baselines.LowRank(matrix, rank, power_iterations=1)
                for rank in (4, 12, 40, 120, 300)
            ],
            "hcurv.compress": [hcurv.compress(matrix, tolerance=t) for t in tolerances],
        }
        looks = ((GREEN, "^", "-"), (RED, "s", "-"), (BLUE, "o", "--"))
        for (label, operators), (colour, marker, dashes) in zip(built.items(), looks, strict=True):
            storage = [100 * operator.compression_rate for operator in operators]
            errors = [operator.relative_error(matrix) for operator in operators]
            axes.loglog(storage, errors, dashes, color=colour, marker=marker, label=label)
        axes.set(xlabel="stored floats, % of N²", ylabel="relative error", title=TITLES[name])
        axes.xaxis.set_major_formatter("{x:g}")
    add_legend(figure, panels[0], 3)
    return figure


def draw_pruning() -> Figure:
    """Accuracy against sparsity, and the pixels that are still read, of the tutorial's network."""
    scope: dict[str, Any] = {"__name__": "snippets"}
    tutorial = (Path(__file__).parent / "tutorials" / "pruning.md").read_text()
    with torch.random.fork_rng(devices=[]):
        exec(re.findall(r"```python\n(.*?)```", tutorial, re.S)[0], scope)
    model, loss, data, accuracy = (scope[name] for name in ("model", "nll", "data", "accuracy"))
    shares = [0.5, 0.7, 0.8, 0.85, 0.9, 0.95]
    methods: dict[str, list[hcurv.Pruning]] = {
        "magnitude, no corrections": [
            hcurv.prune(model, loss, data, s, saliency="magnitude", corrections=0, schedule=1)
            for s in shares
        ],
        "one correction a step": [hcurv.prune(model, loss, data, s) for s in shares],
        "four corrections": [hcurv.prune(model, loss, data, s, corrections=4) for s in shares],
    }
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(WIDTH, 5.2), layout=layout)
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 1))
    top = figure.add_subplot(grid[0, :])
    looks = ((GRAY, "x"), (SKY, "s"), (BLUE, "o"))
    for (label, found), (colour, marker) in zip(methods.items(), looks, strict=True):
        values = [accuracy(model), *(accuracy(thin.model) for thin in found)]
        top.plot([0.0, *shares], values, color=colour, marker=marker, label=label)
    top.set(xlabel="sparsity", ylabel="test accuracy", ylim=(0, 1))
    top.legend(loc="lower left")
    for place, share in enumerate((0.5, 0.8, 0.95)):
        axes = figure.add_subplot(grid[1, place])
        readers = methods["four corrections"][shares.index(share)].masks["0.weight"].sum(0)
        image = axes.imshow(readers.view(8, 8), cmap="Blues", vmin=0, vmax=24)
        axes.set(title=f"sparsity {share:g}", xticks=[], yticks=[])
        axes.grid(False)
    figure.colorbar(image, ax=figure.axes[1:], label="units that read it", shrink=0.8)
    return figure


if __name__ == "__main__":
    main(sys.argv[1:])
