"""How a comparison is made again, and how its numbers are to be read."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from hcurv.memory import format_bytes
from hcurv.report.page import Html, element, table, together

if TYPE_CHECKING:
    from hcurv.comparison import Comparison, ComparisonDetails

__all__ = ["how_to_read", "settings"]

_PACKAGES = ("hcurv", "torch", "numpy", "scipy", "matplotlib")


def settings(comparison: Comparison, details: ComparisonDetails, curves: bool) -> Html:
    """Python lines, versions and the machine."""
    options = {
        "storage": comparison.storage,
        "damping": comparison.damping,
        "tolerance": comparison.tolerance,
        "max_iterations": details.max_iterations,
        "num_probes": details.num_probes,
        "seed": details.seed,
    }
    listed = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    lines = (
        "import hcurv\n\n"
        "# model, loss and data as they were\n"
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
    except PackageNotFoundError:  # run from a folder
        return "unknown"


def _memory() -> str:
    try:
        return format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not on this system
        return "unknown"


def how_to_read() -> Html:
    """One short paragraph per quantity."""
    parts = [
        part for name, text in _MEANINGS for part in (element("dt", name), element("dd", text))
    ]
    return element("dl", *parts)


_MEANINGS = (
    (
        "Error",
        "‖H − A‖ / ‖H‖ in the Frobenius norm: 0 is exact, 1 is no better than the zero matrix. It"
        " is an estimate from products with random vectors, the same for all methods, and usually"
        " right to a tenth of itself; close calls are not decided by it. It weighs large"
        " eigenvalues most: a small error says little about small eigenvalues.",
    ),
    (
        "Storage",
        "Stored floating-point numbers over N², those of the dense matrix; integer indices are not"
        " counted. The hierarchical matrix and low rank fill the budget as far as they can, the"
        " others take what they take. Matrix-free stores what exact products need, which grows"
        " with the number of data points and not with N².",
    ),
    (
        "Build and product",
        "Seconds on this machine, with whatever else ran on it: build once, from the model or from"
        " the exact matrix, whose own time is that of matrix-free; product with 16 vectors, the"
        " fastest of three.",
    ),
    (
        "Residual",
        "‖b − (H + damping·I) x‖ / ‖b‖ with the exact H and one random b, where x is what the"
        " method alone gives for a solution. Above 1 it is worse than x = 0.",
    ),
    (
        "Iterations",
        "Of conjugate gradients on the exact matrix, with the method as preconditioner and one"
        " random right-hand side. Another right-hand side gives somewhat other numbers. An"
        " iteration costs one exact product and one solve with the method, so that fewer"
        " iterations are not always less time.",
    ),
    (
        "Rank",
        "Width of the thin factors whose product is a block, or the global part. Small ranks are"
        " what makes the storage small.",
    ),
    (
        "Eigenvalues",
        "For matrices of up to 2,000 rows all of them, computed densely. Otherwise the largest, by"
        " the Lanczos method, as far down as they had converged to about a percent. Those that are"
        " zero to rounding are not drawn. Directions with eigenvalues far below the damping are"
        " decided by the damping, not by the data.",
    ),
    (
        "Curvature",
        "A diagonal entry of H, exact: how fast the loss bends when one parameter moves alone."
        " Zero means that no data point feels the parameter.",
    ),
)
