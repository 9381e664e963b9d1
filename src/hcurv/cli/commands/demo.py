"""``hcurv demo``: run the three-minute demonstration."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from hcurv.cli import options
from hcurv.cli.output import print_json

__all__ = ["EXAMPLES", "demo"]

EXAMPLES = ("hcurv demo", "hcurv demo pictures")


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for the report and the pictures.")
    ] = Path("demo"),
    as_json: options.Json = False,
) -> None:
    """Show what hcurv can do, on scikit-learn's digits."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder")
    from hcurv.experiments.demo import main

    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        main(folder)
    if as_json:
        print_json({"folder": folder, "files": sorted(folder.iterdir())})
