"""``hcurv reproduce``: measure the published tables again."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import typer

from hcurv.cli import options
from hcurv.cli.output import print_json, shows_progress

__all__ = ["EXAMPLES", "TABLES", "reproduce"]

EXAMPLES = (
    "hcurv reproduce comparison --quick",
    "hcurv reproduce all --data DIR --out results",
)
TableName: TypeAlias = Literal[
    "cost-accuracy",
    "comparison",
    "memory",
    "sampling",
    "sampled-compression",
    "complexity",
    "pruning",
    "training",
    "influence",
    "influence-damping",
    "laplace",
    "all",
]
TABLES: tuple[str, ...] = tuple(name for name in get_args(TableName) if name != "all")
_HELP = f"{', '.join(TABLES)}, or all."


def reproduce(
    table: Annotated[TableName, typer.Argument(metavar="TABLE", help=_HELP)],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small networks on scikit-learn's digits, in minutes.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="Folder with the data sets, searched first."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write the results into.")
    ] = Path("results"),
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="TEXT", help="Measure rows whose labels contain this."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Time of each row, for the table training."),
    ] = None,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Measure the published tables again, and print them.

    The tables are markdown. They are also written to the folder of results, with everything that
    was measured.
    """
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file: name a folder")
    from hcurv.experiments.reproduce import reproduce as measure

    done = []
    for name in TABLES if table == "all" else (table,):
        with redirect_stdout(sys.stderr):  # only the tables go to stdout
            path = measure(
                name,
                out,
                quick=quick,
                data=data,
                progress=shows_progress(progress),
                only=only,
                seconds=seconds,
            )
        text = path.read_text(encoding="utf-8")
        done.append({"name": name, "file": path, "markdown": text})
        if not as_json:
            print(text.rstrip() + "\n", flush=True)
    if as_json:
        print_json({"quick": quick, "tables": done})
