"""Table 6 of the paper: accuracy of Monte Carlo entries, on whole training sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    add_legend,
    gauss_newton,
    scientific,
)
from hcurv.network.sampling_accuracy import sampling_error
from hcurv.report.looks import BLACK, BLUE, GREEN, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLE"]

_COUNTS = (10, 100, 1_000, 10_000)
# The paper's FMC is our "importance".
_PAPER = {
    ("AE (a)", "importance"): (9.7e-3, 3.1e-3, 9.6e-4, 3.1e-4),
    ("AE (a)", "uniform"): (0.3581, 0.1127, 0.0360, 0.0113),
    ("classifier (b)", "importance"): (0.6104, 0.189, 0.0611, 0.0193),
    ("classifier (b)", "uniform"): (0.9731, 0.3076, 0.09812, 0.03611),
}
# Schemes with their colours and markers.
_SCHEMES = {
    "uniform": (BLACK, "x"),
    "importance": (RED, "s"),
    "stratified": (BLUE, "o"),
    "subset": (GREEN, "^"),
}
# An autoencoder needs more pairs, because most of those that are drawn are exact zeros.
_FULL = {"AE (a)": (60_000, 60_000), "classifier (b)": (50_000, 4_000)}


def rows(quick: bool) -> dict[str, Settings]:
    """List two networks with four schemes each."""
    networks, counts = _FULL, list(_COUNTS)
    if quick:
        networks = {"AE (digits)": (1797, 4_000), "classifier (digits)": (1797, 1_000)}
        counts = counts[:3]
    return {
        f"{network} {scheme}": {
            "network": network,
            "num_points": num_points,
            "num_pairs": num_pairs,
            "scheme": scheme,
            "counts": counts,
            "seed": 0,
            "paper": list(_PAPER.get((network, scheme), ())),
        }
        for network, (num_points, num_pairs) in networks.items()
        for scheme in _SCHEMES
    }


def measure(settings: Settings, data: str | None) -> Values:
    """Measure relative errors in the Frobenius norm, with their standard errors."""
    matrix = gauss_newton(settings, data)
    errors, uncertain = [], []
    for count in settings["counts"]:
        if settings["scheme"] == "subset":
            sampled: Any = matrix.subsample(count, seed=settings["seed"])
        else:
            sampled = matrix.sample_entries(count, settings["scheme"], seed=settings["seed"])
        found = sampling_error(sampled, matrix, settings["num_pairs"])
        errors.append(found.value)
        uncertain.append(found.standard_error)
    return {"size": matrix.shape[0], "errors": errors, "standard_errors": uncertain}


def render(measured: Measured) -> Rendered:
    """Show a line for each scheme, with the paper's below it."""
    counts = measured[0][0]["counts"]
    header = ["network", "n", "scheme", *(f"ε, c = {count}" for count in counts)]
    lines = []
    for settings, values in measured:
        start = [settings["network"], str(settings["num_points"])]
        cells = [
            f"{scientific(error)} ± {scientific(uncertain)}"
            for error, uncertain in zip(values["errors"], values["standard_errors"], strict=True)
        ]
        lines.append([*start, settings["scheme"], *cells])
        if settings["paper"]:
            name = "paper: FMC" if settings["scheme"] == "importance" else "paper: uniform"
            lines.append([*start, name, *map(scientific, settings["paper"])])
    return Rendered(header, lines)


def draw(figure: Figure, measured: Measured) -> None:
    """Draw the errors against the number of samples."""
    networks = list(dict.fromkeys(settings["network"] for settings, _ in measured))
    figure.set_size_inches(4.8, 6.8)
    grid = figure.subplots(len(networks), 1, squeeze=False)
    for axes, network in zip(grid[:, 0], networks, strict=True):
        for settings, values in measured:
            if settings["network"] != network:
                continue
            colour, marker = _SCHEMES[settings["scheme"]]
            options = {"color": colour, "marker": marker}
            axes.loglog(settings["counts"], values["errors"], label=settings["scheme"], **options)
            if settings["paper"]:
                axes.loglog(
                    settings["counts"],
                    settings["paper"],
                    linestyle="--",
                    fillstyle="none",
                    label=f"paper: {settings['scheme']}",
                    **options,
                )
        axes.set(title=network, xlabel="samples per entry c", ylabel="relative error")
    add_legend(figure)


TABLE = Table(
    name="sampling",
    number=6,
    title="Accuracy of Monte Carlo entries",
    notes=(
        "‖H̃ − H‖_F/‖H‖_F over the whole training sets, estimated from pairs of entries drawn in"
        " proportion to H_kk·H_mm, ± one standard error. `importance` is the paper's FMC;"
        " `stratified` and `subset` (one weighted subset of c points for all entries) are ours."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw,
)
