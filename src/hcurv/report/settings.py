"""Say how a comparison is made again, and how its numbers are to be read."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from hcurv.memory import format_bytes
from hcurv.report.page import Html, element, table, together

if TYPE_CHECKING:
    from hcurv.report.comparison import Comparison, ComparisonDetails

__all__ = ["how_to_read", "settings"]

_PACKAGES = ("hcurv", "torch", "numpy", "scipy", "matplotlib")


def settings(comparison: Comparison, details: ComparisonDetails, curves: bool) -> Html:
    """Show the Python lines, the versions and the machine."""
    options = {
        "storage": comparison.storage,
        "damping": comparison.damping,
        "damping_ratios": comparison.damping_ratios,
        "tolerance": comparison.tolerance,
        "max_iterations": details.max_iterations,
        "num_probes": details.num_probes,
        "seed": details.seed,
    }
    listed = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    lines = (
        "import hcurv\n\n"
        "# with the same model, loss and data\n"
        f"comparison = hcurv.compare(\n    model,\n    loss,\n    data,\n{listed})\n"
        f'comparison.save_report("report.html"{"" if curves else ", curves=False"})\n'
    )
    environment = [
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in _PACKAGES),
        ("Machine", f"{platform.system()}, {platform.machine()}"),
        ("CPU cores", f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}"),
        ("Memory", _memory()),
        ("Device of the matrix", str(details.matrix.device)),
    ]
    where = table("Where it ran", ("what", "value"), environment, text=1)
    return together(element("pre", lines, tabindex=0), element("div", where, class_="facts"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the package is run from a folder
        return "unknown"


def _memory() -> str:
    try:
        return format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # this system does not know these names
        return "unknown"


def how_to_read() -> Html:
    """Explain every quantity in a short paragraph."""
    parts = [
        part for name, text in _MEANINGS for part in (element("dt", name), element("dd", text))
    ]
    return element("dl", *parts)


_MEANINGS = (
    (
        "Error",
        "‖H − A‖ / ‖H‖ in the Frobenius norm: 0 is exact, 1 is no better than the zero matrix. It"
        " is estimated from products with random vectors, the same for all methods, and usually"
        " right to a tenth of itself, so that it cannot decide close calls. It is the measure for"
        " products. It says little about solves and variances, which depend on the eigenvalues near"
        " the damping: for those, look at the errors of the inverse.",
    ),
    (
        "Storage",
        "The number of stored floats, divided by N². Integer indices are not counted. The"
        " hierarchical matrix and low rank use as much of the budget as they can; the others have"
        " no setting for it. Matrix-free stores what exact products need, which grows with the"
        " number of data points and not with N².",
    ),
    (
        "Build and product",
        "Times on this machine, with whatever else ran on it. Building was timed once, from the"
        " model or from the exact matrix, whose own time is that of matrix-free. The product is one"
        " with 16 vectors, the fastest of three.",
    ),
    (
        "Residual",
        "‖b − (H + damping·I) x‖ / ‖b‖ with the exact H and one random b, where x is the solution"
        " that the method alone gives. Above 1, x is worse than zero.",
    ),
    (
        "Errors of the inverse",
        "Variances are bᵀ(A + λI)⁻¹b for random rows b of the root S of H = SᵀS, the gradients of"
        " outputs, weighted by the loss; solves are (A + λI)⁻¹b, in the norm of H + λI. Both are"
        " medians of relative errors. The error of the log-determinant is a difference; half of it"
        " is the error of a log marginal likelihood. The truth is a dense factorization where one"
        " is affordable. Where it is not, solves with the exact matrix are right to a thousandth,"
        " and the log-determinant is estimated: ± is then its standard error.",
    ),
    (
        "Iterations",
        "The number of iterations of conjugate gradients on the exact matrix, with the method as"
        " preconditioner and one random right-hand side. Another right-hand side gives somewhat"
        " other numbers. An iteration costs one exact product and one solve with the method, so"
        " that fewer iterations do not always take less time.",
    ),
    (
        "Rank",
        "The width of the thin factors whose product is a block, or the global part. The storage is"
        " small because ranks are small.",
    ),
    (
        "Eigenvalues",
        "Matrices of up to 2,000 rows show all of them, computed densely. Larger matrices show the"
        " largest ones, by the Lanczos method, as far as they have converged to about a percent."
        " Those that are zero up to rounding are not drawn. In directions whose eigenvalues are far"
        " below the damping, the damping decides and not the data.",
    ),
    (
        "Curvature",
        "A diagonal entry of H, which is exact. It says how fast the loss bends when one parameter"
        " moves alone. Zero means that the parameter changes the output at no data point.",
    ),
)
