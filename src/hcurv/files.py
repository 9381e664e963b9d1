"""Write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

__all__ = ["as_path", "check_source", "check_target", "replacing", "write_atomically"]


def as_path(path: str | PathLike[str], name: str = "path") -> Path:
    """Return what the user passed for a file as a `Path`.

    Args:
        path: the name of a file.
        name: the name of the argument, for error messages.

    Raises:
        TypeError: it is not the name of a file.
        ValueError: no file can have this name.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(
            f"{name} must be the name of a file, a str or pathlib.Path; got {type(path).__name__}"
        )
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{name} must be the name of a file as text; got {text!r}")
    if not text or "\0" in text:
        raise ValueError(f"{name} must be the name of a file; got {text!r}")
    return Path(path)


def check_source(path: str | PathLike[str], name: str = "path") -> Path:
    """Return the path of a file that can be read.

    Args:
        path: the file to read.
        name: the name of the argument, for error messages.

    Raises:
        TypeError, ValueError: as for `as_path`.
        FileNotFoundError: there is no such file.
        IsADirectoryError: the path is a folder.
        OSError: it is no regular file: a device, a pipe or a socket.
    """
    source = as_path(path, name)
    if source.is_dir():
        raise IsADirectoryError(f"{name} must be a file; {source} is a folder")
    if not source.exists():
        raise FileNotFoundError(f"no such file: {source} ({name})")
    if not source.is_file():
        raise OSError(f"{name} must be a regular file; {source} is a device, a pipe or a socket")
    return source


def check_target(path: str | PathLike[str], name: str = "path") -> Path:
    """Return the path if a file can be written there; for a symbolic link, that of its target.

    Callers ask this before they start work whose result goes into the file.

    Args:
        path: the file to write.
        name: the name of the argument, for error messages.

    Raises:
        TypeError, ValueError: as for `as_path`.
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: the path is a folder.
        FileExistsError: the path is a device, a pipe or a socket, which no file may replace.
        PermissionError: the folder or the file cannot be written to.
    """
    target = as_path(path, name)
    if target.is_symlink():  # the link stays, and its target is written
        target = Path(os.path.realpath(target))
    folder = target.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder} ({name})")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: name a file in it ({name})")
    if os.path.lexists(target):
        if not target.is_file():
            raise FileExistsError(
                f"{target} is no regular file but a device, a pipe, a socket or a link to itself,"
                f" which is not replaced: choose another {name}"
            )
        if not os.access(target, os.W_OK):
            raise PermissionError(f"no permission to write the file {target} ({name})")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"no permission to write in the folder {folder} ({name})")
    return target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces ``path`` if the block ends without error.

    A reader sees either the old file or the new one. No half-written file is left behind. A new
    file has the mode of any new file; one that replaces another has its mode and its owner.

    Args:
        path: the file to replace. If it is a symbolic link, its target is replaced.

    Raises:
        OSError: as for `check_target`.
    """
    path = check_target(path)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.absolute().parent) as folder:
        temporary = Path(folder) / path.name
        # Some writers make files that only their owner can read. An empty file shows the mode that
        # a new file gets here.
        temporary.touch()
        usual = temporary.stat()
        temporary.unlink()
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        before = path.stat() if path.exists() else usual
        if (before.st_uid, before.st_gid) != (usual.st_uid, usual.st_gid):
            with suppress(PermissionError):
                os.chown(temporary, before.st_uid, before.st_gid)
        temporary.chmod(before.st_mode & 0o7777)
        os.replace(temporary, path)


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """Write a file as `replacing` does, by a function that takes the name of the file to write.

    Args:
        path: the file to write or replace.
        write: writes the file whose name it is given.
    """
    with replacing(path) as temporary:
        write(str(temporary))
