"""Warnings that point to the line of the user that led to them."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

_INSIDE = ("hcurv.", "torch.", "functools", "contextlib")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn, and name the first line outside of this package, however deep the call is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
