"""Print results to stdout, as tables or as one JSON document, and check where files may go.

Everything that is not a result goes to stderr.
"""

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
    "facts_of",
    "print_document",
    "print_facts",
    "print_json",
    "print_table",
    "shows_progress",
]

# A table that does not go to a terminal may be this many characters wide.
_WIDTH = 160


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document as JSON, with null for numbers that are not finite."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays
        return _plain(value.tolist())
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    raise TypeError(f"no JSON is known for {type(value).__name__}")


def print_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Print a document as JSON, or its numbers and texts line by line."""
    if as_json:
        print_json(document)
    else:
        print_facts(facts_of(document))


def facts_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a document, in words."""
    known = {name: _in_words(value) for name, value in document.items() if value is not None}
    return [(name.replace("_", " "), text) for name, text in known.items()]


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        known = {name: item for name, item in value.items() if item is not None}
        return ", ".join(f"{name} {_in_words(item)}" for name, item in known.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print(table: Table) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair in each line."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(*fact)
    _print(table)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. The first column and columns without a name hold text, the others numbers."""
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
    """Check, before any work is done, that a file can be written to a path.

    Args:
        path: the file to write, or None if there is none.
        inputs: the files that are read. The new file must not replace them.
        suffixes: the endings that its name may have. If there are none, any will do.

    Returns:
        The path.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError, ValueError: no file can be written
            there; the message says why.
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
    """Decide about progress bars: as wanted, and by default only if stderr is a terminal."""
    return sys.stderr.isatty() if wanted is None else wanted
