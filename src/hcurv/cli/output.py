"""Results on stdout, as tables or as one JSON document, and in files; all else is for stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hcurv.files import check_target

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "check_out",
    "print_document",
    "print_facts",
    "print_json",
    "print_table",
    "shows_progress",
]

_WIDTH = 160  # of tables in files and pipes


def print_json(document: Mapping[str, Any]) -> None:
    """The document as JSON, with null for what is not finite."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays
        return _plain(value.tolist())
    if isinstance(value, Iterable):
        return [_plain(part) for part in value]
    raise TypeError(f"no JSON is known for {type(value).__name__}")


def print_document(document: Mapping[str, Any], as_json: bool) -> None:
    """The document as JSON, or else its numbers and texts, one per line."""
    if as_json:
        print_json(document)
    else:
        known = {name: _in_words(value) for name, value in document.items() if value is not None}
        print_facts([(name.replace("_", " "), text) for name, text in known.items()])


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        known = {name: part for name, part in value.items() if part is not None}
        return ", ".join(f"{name} {_in_words(part)}" for name, part in known.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print(table: Table) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names and values, one per line."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(*fact)
    _print(table)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; its first column and those without a name are text, the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if number and column else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _print(table)


def check_out(
    path: Path | None, *inputs: Path | str | None, suffixes: Sequence[str] = ()
) -> Path | None:
    """The path, if a file can be written there; to be asked before any work is done.

    Args:
        path: of the file to write, or None for none.
        inputs: files that are read, which it must not replace.
        suffixes: endings that its name may have; any, if none are given.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError, ValueError: it cannot, and why.
    """
    if path is None:
        return None
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} must end with {' or '.join(suffixes)}")
    target = check_target(path)
    for given in inputs:
        if given is not None and target.exists() and Path(given).exists():
            if target.samefile(given):
                raise ValueError(f"{target} is an input: choose another file to write")
    return target


def shows_progress(wanted: bool | None) -> bool:
    """Whether to show progress bars; if nobody says so, where somebody sees them."""
    return sys.stderr.isatty() if wanted is None else wanted
