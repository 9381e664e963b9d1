"""The entry point of the ``hcurv`` script."""

from __future__ import annotations

import sys
from io import TextIOWrapper

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments name, and exit."""
    try:
        from hcurv.cli.program import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("error: the command line needs typer: pip install 'hcurv[cli]'")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # some terminals cannot show ² or λ
    app(sys.argv[1:] or ["--help"], prog_name="hcurv")
