"""The parts of a table that can be measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, TrainedNetwork, train
from hcurv.network.gauss_newton import GaussNewton

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Measured",
    "Rendered",
    "Settings",
    "Table",
    "Values",
    "add_legend",
    "gauss_newton",
    "reference_problem",
    "scientific",
    "share",
]

# What a row is measured with, and what was measured: values that JSON can hold.
Settings = dict[str, Any]
Values = dict[str, Any]
Measured = Sequence[tuple[Settings, Values]]


@dataclass(frozen=True)
class Rendered:
    """A table of strings.

    Attributes:
        header: the names of the columns.
        rows: the cells of each row, one for each column.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """One table of the paper, or of a use of the matrix, to be measured again.

    Attributes:
        name: the name of the table on the command line.
        number: its number in the paper; None for a table that the paper does not have.
        title: its title, in one line.
        notes: what is measured, and how that may differ from the paper.
        rows: returns the settings of each row by its label, for the full or for the quick run.
        measure: returns the values of a row; its second argument is the folder with the data.
        render: turns everything that was measured into a table, beside the paper's numbers.
        draw: draws everything that was measured into a figure.
    """

    name: str
    number: int | None
    title: str
    notes: str
    rows: Callable[[bool], dict[str, Settings]]
    measure: Callable[[Settings, str | None], Values]
    render: Callable[[Measured], Rendered]
    draw: Callable[[Figure, Measured], None]

    @property
    def heading(self) -> str:
        """The title, with the number that it has in the paper."""
        return self.title if self.number is None else f"Table {self.number}: {self.title}"


def reference_problem(settings: Settings, data: str | None) -> TrainedNetwork:
    """Train the network of a row, for as many steps as the row says, and take the row's points."""
    recipe = REFERENCE_NETWORKS[settings["network"]]
    trained = train(recipe, data, num_steps=settings.get("num_steps"))
    count = settings["num_points"]
    # Copies, so that the rest of the data set does not stay in memory.
    inputs, targets = trained.inputs[:count].clone(), trained.targets[:count].clone()
    return TrainedNetwork(trained.model, trained.loss, inputs, targets)


def gauss_newton(settings: Settings, data: str | None) -> GaussNewton:
    """Make the matrix of a row."""
    problem = reference_problem(settings, data)
    return GaussNewton(problem.model, problem.loss, problem.inputs)


def add_legend(figure: Figure, columns: int = 2) -> None:
    """Add one legend for all axes of a figure, below them, where it hides nothing."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(str(label), handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
    )


def scientific(value: float | None) -> str:
    """Format a number with two digits; a dash stands for None."""
    return "–" if value is None else f"{value:.1e}"


def share(value: float | None, digits: int = 3) -> str:
    """Format a share in per cent; a dash stands for None."""
    return "–" if value is None else f"{100 * value:.{digits}f}"
