"""Write the sections of a report, in words, tables and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hcurv.memory import format_bytes
from hcurv.report import figures
from hcurv.report.comparison import MATRIX_COLUMNS, matrix_row
from hcurv.report.findings import Findings
from hcurv.report.inside import layers, spectrum, structure
from hcurv.report.inverse_errors import percent
from hcurv.report.page import Html, element, figure, table, together
from hcurv.report.settings import how_to_read, settings

if TYPE_CHECKING:
    from hcurv.report.comparison import ComparedMethod, Comparison, ComparisonDetails

__all__ = ["all_sections", "headline"]


def all_sections(
    comparison: Comparison, details: ComparisonDetails, findings: Findings
) -> list[tuple[str, str, Html]]:
    """Return the name, the title and the content of each section."""
    return [
        ("computed", "What was computed", _computed(comparison, details)),
        ("methods", "Error against storage", _methods(comparison, findings)),
        ("inverse", "Errors of the inverse", _inverse(comparison)),
        ("structure", "Block structure", structure(details.compressed, findings.tree)),
        ("spectrum", "Spectrum", spectrum(comparison, findings)),
        ("layers", "Curvature of each layer", layers(findings)),
        ("convergence", "Conjugate gradients", _convergence(comparison, details)),
        (
            "settings",
            "Settings to reproduce it",
            settings(comparison, details, bool(findings.curves)),
        ),
        ("reading", "How to read it", how_to_read()),
    ]


def _percent(share: float, digits: int = 3) -> str:
    """Write a share in percent, or as a power of ten if it is tiny."""
    return f"{100 * share:.{digits}g}\u00a0%" if share >= 1e-5 or share == 0 else f"{share:.1e}"


def _error(value: float) -> str:
    """Write an error with two digits, because it is an estimate."""
    return _percent(value, 2)


def headline(comparison: Comparison) -> Html:
    """Say the main numbers in plain words."""
    found = {method.name: method for method in comparison.methods}
    ours, plain = found["hierarchical"], found["matrix-free"]
    lines = [
        f"The hierarchical matrix has a relative error of {_error(ours.error)} and stores"
        f" {_percent(ours.storage)} of the N² floats of the matrix.",
        _against_next_best(comparison, ours),
        f"It took {ours.build_seconds:.3g}\u00a0s to build, low rank"
        f" {found['low rank'].build_seconds:.3g}\u00a0s.",
        "Conjugate gradients on the exact matrix:"
        f" {_iterations(ours, comparison.tolerance)} with it as preconditioner,"
        f" {_iterations(plain, comparison.tolerance)} without any.",
        *_about_inverses(comparison),
    ]
    if plain.storage <= comparison.storage:
        lines.append(
            f"Exact products fit into the budget as well: they need {_percent(plain.storage)}."
        )
    return element("div", element("ul", *(element("li", line) for line in lines)), class_="lead")


def _about_inverses(comparison: Comparison) -> list[str]:
    """Say how wrong variances are, by the hierarchical matrix and by the best other method."""
    found = {
        method.name: method.inverse.variance
        for method in comparison.methods
        if method.inverse is not None and method.inverse.variance is not None
    }
    exact, ours = found.pop("H.factorize", None), found.pop("hierarchical", None)
    told = []
    if ours is not None and found:
        best = min(found, key=lambda name: found[name])
        told.append(
            f"Variances with damping {comparison.damping:.1e} are wrong by {percent(ours)} with the"
            f" hierarchical matrix, and by {percent(found[best])} with {best}, the best of the"
            " other methods (medians)."
        )
    if exact is not None:
        told.append(f"Those by H.factorize, which inverts the exact matrix: {percent(exact)}.")
    return told


def _against_next_best(comparison: Comparison, ours: ComparedMethod) -> str:
    """Compare the hierarchical matrix with the best of the others that fit into the budget."""
    others = [
        method
        for method in comparison.methods
        if method.name not in ("hierarchical", "matrix-free", "H.factorize")
        and method.storage <= comparison.storage
    ]
    if not others:
        return f"No other method fits into the budget of {_percent(comparison.storage)}."
    best = min(others, key=lambda method: method.error)
    told = (
        f"Of the other methods within the budget of {_percent(comparison.storage)}, {best.name}"
        f" is the most accurate: {_error(best.error)} with {_percent(best.storage)} stored"
    )
    if ours.error > 0 and best.error > ours.error:
        return f"{told}, {best.error / ours.error:.2g} times the error."
    return f"{told}. That is at least as accurate as the hierarchical matrix."


def _iterations(method: ComparedMethod, tolerance: float) -> str:
    if method.num_iterations is None:
        return "no iterations: it cannot solve"
    count = f"{method.num_iterations} iterations"
    reached = method.residuals[-1]
    return count if reached <= tolerance else f"{count} (not converged, residual {reached:.1e})"


def _computed(comparison: Comparison, details: ComparisonDetails) -> Html:
    matrix = details.matrix
    dense = comparison.size**2 * matrix.dtype.itemsize
    if matrix.network is None:
        network = f"{len(matrix.layout.layers)} layers with trainable parameters"
    else:
        chain = matrix.network.layers
        sizes = [chain[0].in_features, *(layer.out_features for layer in chain)]
        network = f"{' → '.join(map(str, sizes))}, {len(chain)} linear layers"
    damping = f"{comparison.damping:.2e}"
    if details.damping_is_default:
        damping += " (a thousandth of the largest eigenvalue)"
    facts = [
        ("Matrix", "Gauss-Newton Hessian H = Σ Jᵢᵀ Qᵢ Jᵢ of the loss over all points"),
        ("Network", network),
        ("Parameters, N", f"{comparison.size:,}"),
        ("Data points, n", f"{comparison.num_points:,}"),
        ("Loss", details.loss),
        ("Type of floats", str(matrix.dtype).removeprefix("torch.")),
        ("Size of H, if it were dense", format_bytes(dense)),
        (
            "Budget of storage",
            f"{_percent(comparison.storage)} of that, {format_bytes(comparison.storage * dense)}",
        ),
        ("Damping of all solves", damping),
        ("Date", f"{details.finished:%Y-%m-%d %H:%M} UTC"),
        ("Seed", details.seed),
    ]
    known = element("div", table("The problem", ("what", "value"), facts, text=1), class_="facts")
    rows = [
        (
            layer.name,
            layer.in_features,
            layer.out_features,
            "yes" if layer.bias is not None else "no",
            "yes" if layer.trainable else "no",
        )
        for layer in chain
    ]
    header = ("layer", "inputs", "units", "bias", "trained")
    summary = element("summary", "The model as PyTorch prints it")
    printed = element("pre", details.model, tabindex=0)
    return together(
        known,
        table("Linear layers. Those that are trained belong to the matrix", header, rows, text=2),
        element("details", summary, printed),
    )


def _methods(comparison: Comparison, findings: Findings) -> Html:
    header = (*MATRIX_COLUMNS, "settings")
    rows = [(*matrix_row(method), method.settings) for method in comparison.methods]
    label = "Relative error against storage of every method: " + "; ".join(
        f"{method.name} {method.error:.1e} at {method.storage:.3%}"
        for method in comparison.methods
        if method.error > 0
    )
    caption = (
        "Lower left is better. Both axes are logarithmic. Matrix-free and H.factorize use the exact"
        " matrix, so that they are not drawn; matrix-free stores"
        f" {_percent(comparison.methods[0].storage)}."
    )
    if findings.curves:
        caption += (
            " Lines join a quarter, a half and all of the budget. The smaller hierarchical matrices"
            " are made like the one at full budget, with smaller ranks. If they were planned for"
            " their own budgets, they might be better."
        )
    drawn = figures.error_figure(comparison, findings.curves, label)
    return together(
        figure(drawn, caption),
        table(
            "Every method at the budget. “–”: it cannot solve, or it is not meant for that",
            header,
            rows,
            text=1,
        ),
    )


def _inverse(comparison: Comparison) -> Html:
    """Show the errors of solves, variances and log-determinants, at one damping and at others."""
    parts = [
        table(title, header, rows, text=1) for title, header, rows in comparison.inverse_tables()
    ]
    drawn = [method for method in comparison.methods if _variances(method)]
    if drawn:
        label = "Median error of variances against the damping over the largest eigenvalue: "
        label += "; ".join(f"{method.name} {_variances(method)}" for method in drawn)
        caption = (
            "Median relative error of the variances bᵀ(A + λI)⁻¹b of rows b of a root of H, against"
            " the damping. Lower is better, small dampings are to the right, and both axes are"
            " logarithmic. Above the horizontal line variances are wrong by more than themselves;"
            f" errors below {figures.LEAST_ERROR:.0e} are drawn there."
            " The hierarchical matrix was compressed for the damping of the comparison, the dotted"
            " line; H.factorize was asked for solves that are right to 1\u00a0%."
        )
        parts.insert(0, figure(figures.inverse_figure(comparison, label), caption))
    return together(*parts)


def _variances(method: ComparedMethod) -> str:
    return ", ".join(
        f"{percent(error.variance)} at damping {error.damping:.1e}"
        for error in method.inverse_range
        if error.variance is not None
    )


def _convergence(comparison: Comparison, details: ComparisonDetails) -> Html:
    solving = [method for method in comparison.methods if method.residuals]
    label = "Residual of conjugate gradients against iterations: " + "; ".join(
        f"{method.name} {_iterations(method, comparison.tolerance)}" for method in solving
    )
    others = [method.name for method in comparison.methods if method.solve_residual is None]
    caption = (
        f"(H + {comparison.damping:.2e} I) x = b with the exact H and a random b, to a residual of"
        f" {comparison.tolerance:.0e} in at most {details.max_iterations} iterations, with each"
        " method as preconditioner. Fewer iterations are better."
    )
    if others:
        caption += f" Not shown, because they cannot solve: {', '.join(others)}."
    return figure(figures.cg_figure(solving, comparison.tolerance, label), caption)
