"""Write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

__all__ = ["check_target", "replacing", "write_atomically"]


def check_target(path: str | PathLike[str]) -> Path:
    """The path, if a file can be written there; to be asked before work is done for it.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: it cannot, and why.
    """
    target = Path(path)
    folder = target.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: name a file in it")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no permission to write in the folder {folder}")
    return target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` if the block ends without an error.

    Whatever happens, no half-written file is left, and a reader sees the old file or the new one.
    """
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.absolute().parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """The same for a function that writes the file of the name that it is given."""
    with replacing(path) as temporary:
        write(str(temporary))
