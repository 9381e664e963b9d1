"""What `hcurv.compare` found: one record for each method, and a table of all of them."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from os import PathLike
from typing import TYPE_CHECKING, Any

from hcurv.hierarchical import HMatrix
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.inverse_errors import InverseError, percent
from hcurv.report.looks import GRAY, look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MATRIX_COLUMNS", "ComparedMethod", "Comparison", "ComparisonDetails", "matrix_row"]

MATRIX_COLUMNS = ("method", "error", "storage", "build", "product", "residual", "iterations")
# Printed lines are at most this many letters long.
_WIDTH = 100


@dataclass(frozen=True)
class ComparedMethod:
    """What was measured for one method.

    Attributes:
        name: The name of the method, as in the table and in the figures.
        error: The relative error ‖H − A‖_F/‖H‖_F, estimated with random vectors.
        storage: The number of stored floats, divided by N².
        build_seconds: How long it took to build, from the model or from the exact matrix.
        product_seconds: How long a product with 16 columns took. None for what is only an inverse.
        solve_residual: The relative residual, in the exact system, of a solve with the method
            alone. None if the method cannot solve.
        num_iterations: How many iterations conjugate gradients on the exact matrix took to reach
            the tolerance of the comparison, with the method as preconditioner. None if the method
            cannot solve.
        settings: What was chosen to fit the budget, in words.
        residuals: The relative residuals of these conjugate gradients, before the first and after
            each iteration. Empty if the method cannot solve.
        inverse: How wrong its solves, variances and log-determinant are at the damping of the
            comparison. None for matrix-free, whose solves are as accurate as its tolerance.
        inverse_range: The same at other dampings, the largest first.

    Examples:
        >>> exact = comparison.methods[0]
        >>> exact.name, exact.error, len(exact.residuals) == exact.num_iterations + 1
        ('matrix-free', 0.0, True)
    """

    name: str
    error: float
    storage: float
    build_seconds: float
    product_seconds: float | None
    solve_residual: float | None
    num_iterations: int | None
    settings: str
    residuals: tuple[float, ...] = ()
    inverse: InverseError | None = None
    inverse_range: tuple[InverseError, ...] = ()


@dataclass(frozen=True, eq=False)
class ComparisonDetails:
    """What a report needs beyond the table.

    Attributes:
        matrix: The exact matrix.
        compressed: The hierarchical matrix.
        model: The model, as PyTorch prints it.
        loss: The name of the loss and its reduction.
        damping_is_default: Whether the comparison chose the damping itself.
        max_iterations: The largest number of iterations of conjugate gradients.
        num_probes: The number of random vectors from which errors are estimated.
        seed: The seed of everything random.
        finished: When the comparison ended.
    """

    matrix: GaussNewton
    compressed: HMatrix
    model: str
    loss: str
    damping_is_default: bool
    max_iterations: int
    num_probes: int
    seed: int
    finished: datetime


@dataclass(frozen=True)
class Comparison:
    """All methods on one matrix. It prints as a table.

    Attributes:
        size: The number of parameters N.
        num_points: The number of data points n.
        storage: The budget, in floats divided by N².
        damping: The damping of all solves.
        largest_eigenvalue: That of H.
        logdet: log|H + damping·I|, with which log-determinants were compared. None if it is
            beyond the precision of the matrix.
        tolerance: The relative residual at which conjugate gradients stop.
        methods: What was measured for each method.
        details: The matrices themselves, which `save_report` needs. `to_dict` leaves them out.

    Examples:
        >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
        >>> print(comparison)
        N = 51, n = 20, budget 50.000% of N², damping ...
        >>> errors = {method.name: method.error for method in comparison.methods}
        >>> errors["low rank"] < errors["diagonal"]
        True
    """

    size: int
    num_points: int
    storage: float
    damping: float
    largest_eigenvalue: float
    logdet: float | None
    tolerance: float
    methods: tuple[ComparedMethod, ...]
    details: ComparisonDetails | None = field(default=None, repr=False, compare=False)

    @property
    def damping_ratios(self) -> tuple[float, ...]:
        """The other dampings at which inverses were measured, divided by the largest eigenvalue.

        Examples:
            >>> comparison = hcurv.compare(
            ...     model, loss, inputs, storage=0.5, num_probes=16, damping_ratios=(1e-2, 1e-4)
            ... )
            >>> comparison.damping_ratios
            (0.01, 0.0001)
        """
        measured = next((m.inverse_range for m in self.methods if m.inverse_range), ())
        return tuple(float(f"{e.damping / self.largest_eigenvalue:.6g}") for e in measured)

    def __str__(self) -> str:
        """Return the tables of all methods: matrices first, then their inverses."""
        lines = [
            f"N = {self.size}, n = {self.num_points}, budget {self.storage:.3%} of N², damping"
            f" {self.damping:.2e}, conjugate gradients to {self.tolerance:.0e}",
            *_columns(MATRIX_COLUMNS, [matrix_row(method) for method in self.methods]),
        ]
        chosen = [f"{method.name}: {method.settings}" for method in self.methods if method.settings]
        lines += textwrap.wrap("; ".join(chosen), _WIDTH)
        for title, header, rows in self.inverse_tables():
            lines += ["", *textwrap.wrap(title, _WIDTH), *_columns(header, rows)]
        return "\n".join(lines)

    def inverse_tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Return the title, the header and the rows of the tables about inverses.

        Examples:
            >>> title, header, rows = comparison.inverse_tables()[0]
            >>> header
            ('method', 'variances', 'solves', 'log-determinant')
        """
        measured = [(method, method.inverse) for method in self.methods if method.inverse]
        known = "" if self.logdet is None else f", where log|H + λI| = {self.logdet:.1f}"
        tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
            (
                f"Errors of (A + λI)⁻¹ at λ = {self.damping:.2e} ="
                f" {self.damping / self.largest_eigenvalue:.1e} λ₁{known}",
                ("method", "variances", "solves", "log-determinant"),
                [(method.name, *_inverse_cells(inverse)) for method, inverse in measured],
            )
        ]
        if ratios := [f"{ratio:.0e}" for ratio in self.damping_ratios]:
            tables.append(
                (
                    "Median error of variances with other dampings λ, over λ₁ (“–”: no inverse)",
                    ("method", *ratios),
                    [
                        (method.name, *(_share(error.variance) for error in method.inverse_range))
                        for method, _ in measured
                    ],
                )
            )
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, ready for JSON.

        Examples:
            >>> list(comparison.to_dict())[:4]
            ['size', 'num_points', 'storage', 'damping']
        """
        values = asdict(replace(self, details=None))
        del values["details"]
        return values

    def plot(self) -> Figure:
        """Draw the error of every method against its storage.

        Examples:
            >>> figure = comparison.plot()
            >>> figure.axes[0].get_xlabel()
            'stored floats, % of N²'
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for method in self.methods:
            if method.error > 0:
                look = {**look_of(method.name).options(), "linestyle": "none"}
                axes.plot(100 * method.storage, method.error, **look, ms=9, label=method.name)
        axes.axvline(100 * self.storage, color=GRAY, linestyle=":", label="budget")
        axes.set(xscale="log", yscale="log", title=f"N = {self.size:,}, n = {self.num_points:,}")
        axes.set(xlabel="stored floats, % of N²", ylabel="relative error ‖H − A‖/‖H‖")
        axes.xaxis.set_major_formatter("{x:g}")
        # Below the axes, so that it hides no point.
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
        axes.legend(**below, fontsize=9, frameon=False)
        return figure

    def save_report(self, path: str | PathLike[str], *, curves: bool = True) -> None:
        """Write the comparison as one HTML page with figures, which loads nothing from elsewhere.

        An existing file is replaced once the new one is complete.

        Args:
            path: Where to write the page.
            curves: Whether to measure the hierarchical matrix and low rank at a half and at a
                quarter of the budget, too. This builds both of them twice more.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: The page cannot be written there.
            ImportError: matplotlib is not installed.

        Examples:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder) / "report.html"
            ...     comparison.save_report(path, curves=False)
            ...     path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
            True
        """
        from hcurv.report import save_report

        save_report(self, path, curves=curves)


def matrix_row(method: ComparedMethod) -> tuple[str, ...]:
    """Write what was measured of a method's matrix, in the order of `MATRIX_COLUMNS`."""
    product = method.product_seconds
    return (
        method.name,
        f"{method.error:.1e}",
        f"{method.storage:.3%}",
        f"{method.build_seconds:.2f} s",
        "–" if product is None else f"{1e3 * product:.1f} ms",
        "–" if method.solve_residual is None else f"{method.solve_residual:.1e}",
        "–" if method.num_iterations is None else str(method.num_iterations),
    )


def _share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _inverse_cells(error: InverseError) -> tuple[str, ...]:
    """Write the errors of variances, of solves and of the log-determinant."""
    if error.failure:
        return ("–", "–", error.failure)
    logdet = "not measured"
    if error.logdet is not None:
        logdet = f"{error.logdet:+.2f}" if abs(error.logdet) < 10 else f"{error.logdet:+.0f}"
        if error.logdet_deviation:
            logdet += f" ± {error.logdet_deviation:.2g}"
    return (_share(error.variance), _share(error.solve), logdet)


def _columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Write a table of which the first column is text and the others are numbers."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    return [
        f"{row[0] if row is not header else '':<{widths[0]}}"
        + "".join(f"{cell:>{width + 3}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in (header, *rows)
    ]
