"""Write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path

__all__ = ["check_target", "write_atomically"]


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


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """Write beside the target, then rename: whatever happens, no half-written file is left.

    Args:
        path: the target, replaced only once the new file is complete.
        write: writes the file of the name that it is given.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        write(name)
        with open(name, "rb+") as stream:
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as any new file; mkstemp's are private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
