"""What `hcurv.compare` found: one record for each method, and a table of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from os import PathLike
from typing import TYPE_CHECKING, Any

from hcurv.hierarchical import HMatrix
from hcurv.network.gauss_newton import GaussNewton
from hcurv.report.looks import GRAY, look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ComparedMethod", "Comparison", "ComparisonDetails"]


@dataclass(frozen=True)
class ComparedMethod:
    """What was measured for one method.

    Attributes:
        name: The name of the method, as in the table and in the figures.
        error: The relative error ‖H − A‖_F/‖H‖_F, estimated with random vectors.
        storage: The number of stored floats, divided by N².
        build_seconds: How long it took to build, from the model or from the exact matrix.
        product_seconds: How long a product with 16 columns took.
        solve_residual: The relative residual, in the exact system, of a solve with the method
            alone. None if the method cannot solve.
        num_iterations: How many iterations conjugate gradients on the exact matrix took to reach
            the tolerance of the comparison, with the method as preconditioner. None if the method
            cannot solve.
        settings: What was chosen to fit the budget, in words.
        residuals: The relative residuals of these conjugate gradients, before the first and after
            each iteration. Empty if the method cannot solve.

    Examples:
        >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
        >>> exact = comparison.methods[0]
        >>> exact.name, exact.error, len(exact.residuals) == exact.num_iterations + 1
        ('matrix-free', 0.0, True)
    """

    name: str
    error: float
    storage: float
    build_seconds: float
    product_seconds: float
    solve_residual: float | None
    num_iterations: int | None
    settings: str
    residuals: tuple[float, ...] = ()


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
    tolerance: float
    methods: tuple[ComparedMethod, ...]
    details: ComparisonDetails | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return the table of all methods."""
        lines = [
            f"N = {self.size}, n = {self.num_points}, budget {self.storage:.3%} of N², damping"
            f" {self.damping:.2e}, conjugate gradients to {self.tolerance:.0e}",
            f"{'':26}{'error':>9}{'storage':>10}{'build':>10}{'product':>11}{'residual':>10}"
            f"{'iterations':>12}",
        ]
        for method in self.methods:
            residual = "–" if method.solve_residual is None else f"{method.solve_residual:.1e}"
            iterations = "–" if method.num_iterations is None else str(method.num_iterations)
            lines.append(
                f"{method.name:26}{method.error:>9.1e}{method.storage:>10.3%}"
                f"{method.build_seconds:>8.2f} s{1e3 * method.product_seconds:>8.1f} ms"
                f"{residual:>10}{iterations:>12}  {method.settings}".rstrip()
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, ready for JSON.

        Examples:
            >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
            >>> sorted(comparison.to_dict())
            ['damping', 'methods', 'num_points', 'size', 'storage', 'tolerance']
        """
        values = asdict(replace(self, details=None))
        del values["details"]
        return values

    def plot(self) -> Figure:
        """Draw the error of every method against its storage.

        Examples:
            >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
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
            >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder) / "report.html"
            ...     comparison.save_report(path, curves=False)
            ...     path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
            True
        """
        from hcurv.report import save_report

        save_report(self, path, curves=curves)
