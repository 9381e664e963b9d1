"""All commands as one program."""

from __future__ import annotations

from typing import Annotated

import typer

import hcurv
from hcurv.cli.commands import (
    compare,
    compress,
    demo,
    diagonal,
    eigs,
    influence,
    info,
    laplace,
    prune,
    reproduce,
    solve,
)
from hcurv.cli.errors import Commands
from hcurv.cli.options import examples

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help starts faster, and its examples can be copied
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        *(module.EXAMPLES[0] for module in (compress, info, solve, eigs, diagonal, compare, prune))
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(hcurv.__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Gauss-Newton Hessians of networks: compress, solve, eigenvalues, variances.

    Results go to stdout, messages to stderr. Exit codes: 0 done, 1 it cannot be done, 2 wrong
    usage, 130 interrupted.
    """


app.command(epilog=examples(*compress.EXAMPLES))(compress.compress)
app.command(epilog=examples(*info.EXAMPLES))(info.info)
app.command(epilog=examples(*solve.EXAMPLES))(solve.solve)
app.command(epilog=examples(*eigs.EXAMPLES))(eigs.eigs)
app.command(epilog=examples(*diagonal.EXAMPLES))(diagonal.diagonal)
app.command(epilog=examples(*influence.EXAMPLES))(influence.influence)
app.command(epilog=examples(*laplace.EXAMPLES))(laplace.laplace)
app.command(epilog=examples(*compare.EXAMPLES))(compare.compare)
app.command(epilog=examples(*prune.EXAMPLES))(prune.prune)
app.command(epilog=examples(*reproduce.EXAMPLES))(reproduce.reproduce)
app.command(epilog=examples(*demo.EXAMPLES))(demo.demo)
