"""Write the sections about the matrices themselves: blocks, spectrum, curvature of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hcurv.hierarchical import HMatrix
from hcurv.report import figures
from hcurv.report.findings import Findings, Spectrum
from hcurv.report.page import Html, element, figure, table, together

if TYPE_CHECKING:
    from hcurv.report.comparison import Comparison

__all__ = ["layers", "spectrum", "structure"]


def structure(matrix: HMatrix, tree: HMatrix | None) -> Html:
    """Show what the hierarchical matrix stores, and the blocks of a tree."""
    parts = {
        "global part": 0 if matrix.global_part is None else matrix.global_part.num_stored,
        "leaf blocks": matrix.leaves.num_stored,
        "bases": sum(b.num_stored for level in matrix.levels for b in level.bases),
        "couplings": sum(c.num_stored for level in matrix.levels for c in level.couplings),
    }
    total = max(1, sum(parts.values()))
    rows = [(name, f"{count:,}", _share(count / total)) for name, count in parts.items()]
    result = [
        element(
            "p",
            f"The hierarchical matrix is {_in_short(matrix)}. Its own estimate of its error is"
            f" {matrix.estimated_error:.1e}.",
        ),
        table("What it stores", ("part", "floats", "share"), rows, text=1),
    ]
    if tree is None:
        result.append(element("p", "There is nothing to draw: all rows are zero."))
    else:
        result += _drawn_tree(tree, is_own=tree is matrix)
    if matrix.plan is not None:
        summary = element("summary", "What was weighed when it was planned")
        result.append(element("details", summary, element("pre", matrix.plan, tabindex=0)))
    return together(*result)


def _in_short(matrix: HMatrix) -> str:
    tree, shared = matrix.tree, f"a global part of rank {matrix.global_rank}"
    if not tree.has_clusters:
        return (
            f"{shared} and the diagonal of what it leaves, because no tree was worth its storage at"
            " this budget. So it is nearly a low-rank matrix itself"
        )
    if tree.depth:
        own = (
            f"a tree of {tree.depth} levels, in the order “{tree.ordering}”, with {2**tree.depth}"
            f" leaves of at most {matrix.record.leaf_size} rows"
        )
    else:
        own = f"one dense block of {tree.num_kept} rows"
    return f"{shared} and {own}" if matrix.global_rank else own


def _drawn_tree(tree: HMatrix, is_own: bool) -> list[Html]:
    largest = [int(ranks.max()) for ranks in tree.ranks]
    listed = ", ".join(str(rank) for rank in largest) or "none: the matrix is one dense block"
    labels = (
        f"Blocks of the matrix in {tree.tree.depth} levels, each labelled with its rank",
        f"Ranks of all blocks by level; the largest of each level, from the top: {listed}",
    )
    blocks, ranks = figures.structure_figures(tree, labels)
    black = "finer levels" if tree.tree.depth > figures.LEVELS else "dense blocks"
    caption = (
        "Every square off the diagonal is a block, stored as thin factors. Its number and its"
        f" colour are its rank. Black: {black}."
    )
    drawn = element(
        "div",
        figure(blocks, caption, beside=False),
        figure(
            ranks,
            f"Every dot is the rank of a block. The line is their mean. Largest ranks by level:"
            f" {listed}.",
            beside=False,
        ),
        class_="pair",
    )
    if is_own:
        return [drawn]
    return [
        element(
            "p",
            "To show what blocks look like, the matrix was compressed once more as a tree alone,"
            f" with an estimated error of {tree.estimated_error:.1e} and"
            f" {tree.compression_rate:.3%} of N² stored. It takes no part in the comparison.",
        ),
        drawn,
    ]


def _share(share: float) -> Html:
    """Show a share as a number with a bar below it."""
    bar = element("span", "", class_="bar", style=f"width: {100 * share:.1f}%")
    return element("div", f"{share:.1%}", bar, class_="track")


def spectrum(comparison: Comparison, findings: Findings) -> Html:
    """Show the eigenvalues of the exact and of the compressed matrix."""
    exact, compressed = findings.exact, findings.compressed
    drawn = figures.spectrum_figure(
        exact,
        compressed,
        comparison.damping,
        f"Eigenvalues in descending order on a logarithmic scale: {_in_words('exact', exact)};"
        f" {_in_words('hierarchical', compressed)}; damping {comparison.damping:.2e}",
    )
    above = sum(value > comparison.damping for value in exact.values)
    count = f"{above}" if above < len(exact.values) or exact.complete else f"At least {above}"
    kind = (
        "All eigenvalues above rounding are shown."
        if exact.complete
        else "The leading eigenvalues are shown, as many as the Lanczos method has found."
    )
    return together(
        figure(drawn, f"{kind} {count} eigenvalues of the exact matrix are above the damping."),
        table(
            "Eigenvalues that are shown",
            ("matrix", "number", "largest", "smallest"),
            [
                (name, len(found.values), *_ends(found))
                for name, found in (("exact", exact), ("hierarchical", compressed))
            ],
        ),
    )


def _ends(found: Spectrum) -> tuple[str, str]:
    if not found.values:
        return "–", "–"
    return f"{found.values[0]:.2e}", f"{found.values[-1]:.2e}"


def _in_words(name: str, found: Spectrum) -> str:
    largest, smallest = _ends(found)
    return f"{name}, {len(found.values)} values from {largest} down to {smallest}"


def layers(findings: Findings) -> Html:
    """Show the diagonal of the exact matrix, layer by layer."""
    found = findings.layers
    medians = "; ".join(
        f"{layer.name} {'all zero' if layer.quantiles is None else f'{layer.quantiles[2]:.1e}'}"
        for layer in found
    )
    drawn = figures.layer_figure(
        found, f"Distribution of the curvature of the parameters of each layer; medians: {medians}"
    )
    zeros = sum(layer.num_zeros for layer in found)
    total = sum(layer.num_parameters for layer in found)
    rows = [
        (
            layer.name,
            f"{layer.num_parameters:,}",
            f"{layer.num_zeros / layer.num_parameters:.1%}",
            "–" if layer.quantiles is None else f"{layer.quantiles[2]:.1e}",
            "–" if layer.quantiles is None else f"{layer.quantiles[4]:.1e}",
            f"{layer.share:.1%}",
        )
        for layer in found
    ]
    header = ("layer", "parameters", "zero", "median", "99 %", "of the trace")
    return together(
        figure(
            drawn,
            "The diagonal of the exact matrix. The thick line is the median, the box holds half of"
            " the entries, and 98 % of them lie between the whiskers. Entries that are exactly zero"
            f" are left out: {zeros:,} of {total:,} ({zeros / total:.1%}). They belong to inputs"
            " that are always zero and to units that are never active.",
        ),
        table("Curvature of weights and biases. Median and 99 % leave out zeros", header, rows),
    )
