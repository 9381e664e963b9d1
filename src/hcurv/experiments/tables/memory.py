"""Table 5 of the paper: memory and accuracy for the two large classifiers, n = 10,000."""

from __future__ import annotations

from hcurv.experiments.tables.compression import draw_errors, measure_formats, row_settings
from hcurv.experiments.tables.table import (
    Measured,
    Rendered,
    Settings,
    Table,
    Values,
    gauss_newton,
    scientific,
    share,
)
from hcurv.memory import format_bytes

__all__ = ["TABLE"]

_ROWS = {
    ("classifier (c)", "low"): ((0.00165, 3.1e-1), {"tolerance": 1e-1}),
    ("classifier (c)", "high"): ((0.01268, 4.2e-2), {"tolerance": 2e-2}),
    ("classifier (d)", "low"): ((0.00012, 1.2e-1), {"tolerance": 1e-1}),
    ("classifier (d)", "high"): ((0.00177, 2.2e-2), {"tolerance": 2e-2}),
}
_PAPER_BYTES = {"classifier (c)": 191e6, "classifier (d)": 423e6}


def rows(quick: bool) -> dict[str, Settings]:
    """List two networks at two accuracies."""
    if quick:
        return {
            network: row_settings(network, "low", 1000, None, leaf_size=32)
            for network in ("classifier (digits)", "AE (digits)")
        }
    return {
        f"{network} {accuracy}": row_settings(network, accuracy, 10_000, paper, **options)
        for (network, accuracy), (paper, options) in _ROWS.items()
    }


def measure(settings: Settings, data: str | None) -> Values:
    """Measure the bytes of the precomputation, and both formats."""
    matrix = gauss_newton(settings, data)
    return {
        "size": matrix.shape[0],
        "precomputed_bytes": matrix.nbytes,
        "dense_bytes": matrix.shape[0] ** 2 * matrix.dtype.itemsize,
        **measure_formats(matrix, settings),
    }


def render(measured: Measured) -> Rendered:
    """Show the figures beside the paper's."""
    header = ["network", "N", "precomputed", "paper", "dense", "accuracy", "paper %K", "paper ε"]
    for name in ("tree", "default"):
        header += [f"{name} %K", f"{name} ε", f"{name} bytes", f"{name} build", f"{name} peak"]
    lines = []
    for settings, values in measured:
        paper = _PAPER_BYTES.get(settings["network"])
        line = [
            settings["network"],
            str(values["size"]),
            format_bytes(values["precomputed_bytes"]),
            "–" if paper is None else format_bytes(paper),
            format_bytes(values["dense_bytes"]),
            settings["accuracy"],
            share(settings["paper_storage"]),
            scientific(settings["paper_error"]),
        ]
        for name in ("tree", "default"):
            found = values[name]
            line += [
                share(found["storage"], 4),
                scientific(found["error"]),
                format_bytes(found["bytes"]),
                f"{found['build_seconds']:.0f} s",
                format_bytes(found["peak_bytes"]),
            ]
        lines.append(line)
    return Rendered(header, lines)


TABLE = Table(
    name="memory",
    number=5,
    title="Memory of the precomputation and of the compressed matrix",
    notes=(
        "Over the first 10,000 training images, in single precision. `tree` and `default` as in"
        " Table 3. Peak: resident memory while compressing, beyond what was there before."
    ),
    rows=rows,
    measure=measure,
    render=render,
    draw=draw_errors,
)
