"""Every error is printed as one line on stderr, and every exit code has a meaning.

0: the command has finished; 1: it failed, and the line says why; 2: it was used wrongly; 130: it
was interrupted (Ctrl-C). If the environment variable ``HCURV_DEBUG`` is 1, the traceback of an
error is printed too.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from typer.core import TyperGroup

__all__ = ["DEBUG_VARIABLE", "Commands"]

DEBUG_VARIABLE = "HCURV_DEBUG"
INTERRUPTED = 130
_EXPECTED = (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError)
_EXTRAS = {"matplotlib": "plots", "rich": "cli", "safetensors": "files", "sklearn": "experiments"}


class Commands(TyperGroup):
    """The group of all commands. It turns whatever goes wrong in one of them into one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit the process."""
        try:
            with _warnings_in_one_line():
                code = super().main(
                    args, prog_name, complete_var, False, windows_expand_args, **extra
                )
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
                traceback.print_exc()
            message, code = _explain(error)
            print(f"error: {message}", file=sys.stderr)
        if code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        sys.exit(code or 0)


def _explain(error: Exception) -> tuple[str, int]:
    """Say in one line what went wrong, and choose the exit code."""
    if hasattr(error, "format_message"):  # typer reports wrong usage with such errors
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" (see {context.command_path} --help)"
        return _one_line(error.format_message()) + hint, getattr(error, "exit_code", 2)
    name = type(error).__name__
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRAS:
        extra = _EXTRAS[(error.name or "").split(".")[0]]
        return f"the package {error.name} is missing: pip install 'hcurv[{extra}]'", 1
    if not isinstance(error, _EXPECTED):
        return f"unexpected {name}: {_one_line(str(error))} ({DEBUG_VARIABLE}=1 shows where)", 1
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}", 1
    return _one_line(str(error)) or name, 1


def _one_line(text: str) -> str:
    """Join lines with spaces, and the items of a list with semicolons."""
    result = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        glue = "; " if line.startswith("- ") and not result.endswith(":") else " "
        result += glue + line.removeprefix("- ")
    return result.strip()


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"warning: {_one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
