"""The cache folder: what was downloaded or trained once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_directory", "replacing"]

CACHE_VARIABLE = "HCURV_CACHE"


def cache_directory() -> Path:
    """``$HCURV_CACHE``, else ``$XDG_CACHE_HOME/hcurv``, else ``~/.cache/hcurv``; may not exist."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hcurv"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` if the block ends without an error.

    Whatever happens, no half-written file is left, and a reader sees the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)
