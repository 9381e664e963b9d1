"""The cache folder, which keeps what was downloaded or trained."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_directory"]

CACHE_VARIABLE = "HCURV_CACHE"


def cache_directory() -> Path:
    """Return the path of the cache folder, which may not exist yet.

    It is ``$HCURV_CACHE``, else ``$XDG_CACHE_HOME/hcurv``, else ``~/.cache/hcurv``.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hcurv"
