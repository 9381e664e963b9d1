"""The cache folder: what was downloaded or trained once."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_directory"]

CACHE_VARIABLE = "HCURV_CACHE"


def cache_directory() -> Path:
    """``$HCURV_CACHE``, else ``$XDG_CACHE_HOME/hcurv``, else ``~/.cache/hcurv``; may not exist."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hcurv"
