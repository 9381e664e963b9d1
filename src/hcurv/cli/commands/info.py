"""``hcurv info``: show what a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_facts, print_json, print_table

__all__ = ["EXAMPLES", "info"]

EXAMPLES = (
    "hcurv info A.safetensors",
    "hcurv info A.safetensors --plot A.png",
    "hcurv info F.safetensors --json",
)
_PICTURES = (".png", ".svg", ".pdf")


def info(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Compressed matrix, or factorization.")
    ],
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw blocks and ranks into a .png, .svg or .pdf file."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what a saved matrix or factorization is."""
    target = check_out(plot, file, suffixes=_PICTURES)
    import torch
    from safetensors import safe_open

    import hcurv
    from hcurv.cli.describe import describe, facts_of, rank_rows
    from hcurv.files import write_atomically

    stored = hcurv.load(file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    if target is not None:
        if not isinstance(stored, hcurv.HMatrix):
            raise TypeError(f"{file} is a factorization: only compressed matrices are drawn")
        figure, file_format = stored.plot(), target.suffix[1:].lower()
        write_atomically(target, lambda name: figure.savefig(name, format=file_format, dpi=120))
    if as_json:
        versions = {
            "format": int(metadata["version"]),
            "hcurv": hcurv.__version__,
            "torch": str(torch.__version__),
        }
        print_json({"file": file, **describe(stored), "versions": versions, "plot": target})
        return
    versions_text = f"format {metadata['version']}, read by hcurv {hcurv.__version__}"
    print_facts(
        [("file", str(file)), *facts_of(stored), ("versions", versions_text)]
        + ([] if target is None else [("picture", str(target))])
    )
    if isinstance(stored, hcurv.HMatrix):
        if stored.ranks:
            print("\nranks of the nodes, level by level")
            print_table(("level", "nodes", "least", "mean", "most"), rank_rows(stored))
        if stored.plan is not None:
            print(f"\n{stored.plan}")
