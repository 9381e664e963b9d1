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
    """Return the path if a file can be written there.

    Callers ask this before they start work whose result goes into the file.

    Args:
        path: the file to write.

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: the path is a folder.
        PermissionError: the folder cannot be written to.
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
    """Give a temporary path to write to, which replaces ``path`` if the block ends without error.

    A reader sees either the old file or the new one. No half-written file is left behind.

    Args:
        path: the file to replace.
    """
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.absolute().parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        # Some writers make files that only their owner can read. Use the mode of any new file.
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """Write a file as `replacing` does, by a function that takes the name of the file to write.

    Args:
        path: the file to write or replace.
        write: writes the file whose name it is given.
    """
    with replacing(path) as temporary:
        write(str(temporary))
