"""What a reproduced table consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, TrainedNetwork, train
from hcurv.gauss_newton import GaussNewton

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "Measured",
    "Rendered",
    "Settings",
    "Table",
    "Values",
    "gauss_newton",
    "reference_problem",
    "scientific",
    "share",
]

Settings = dict[str, Any]  # what a row is measured with: plain values, as JSON has them
Values = dict[str, Any]  # what was measured, likewise
Measured = Sequence[tuple[Settings, Values]]

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Rendered:
    """A table of strings.

    Attributes:
        header: of the columns.
        rows: as many cells each.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """One table of the paper, to be measured again.

    Attributes:
        name: on the command line.
        number: in the paper.
        title: one line.
        notes: what is measured, and how it may differ from the paper's.
        rows: settings of each row by its label, for the full or for the quick run.
        measure: values of a row; the second argument names the folder with data.
        render: all that was measured as a table, with the paper's numbers beside.
        draw: the same as a figure.
    """

    name: str
    number: int
    title: str
    notes: str
    rows: Callable[[bool], dict[str, Settings]]
    measure: Callable[[Settings, str | None], Values]
    render: Callable[[Measured], Rendered]
    draw: Callable[[Figure, Measured], None]


def reference_problem(settings: Settings, data: str | None) -> TrainedNetwork:
    """The network that a row is about, trained unless it says otherwise, with the row's points."""
    recipe = REFERENCE_NETWORKS[settings["network"]]
    trained = train(recipe, data, num_steps=settings.get("num_steps"))
    count = settings["num_points"]
    # Copies, so that the rest of the data set does not stay in memory.
    inputs, targets = trained.inputs[:count].clone(), trained.targets[:count].clone()
    return TrainedNetwork(trained.model, trained.loss, inputs, targets)


def gauss_newton(settings: Settings, data: str | None) -> GaussNewton:
    """The matrix that a row is about."""
    problem = reference_problem(settings, data)
    return GaussNewton(problem.model, problem.loss, problem.inputs)


def scientific(value: float | None) -> str:
    """Two digits, or a dash."""
    return "–" if value is None else f"{value:.1e}"


def share(value: float | None, digits: int = 3) -> str:
    """In per cent, or a dash."""
    return "–" if value is None else f"{100 * value:.{digits}f}"
