"""Failures that are known, each until it is mended.

A case that fails is forgiven if it has one of these tags. `test_fuzz.py` fails if no case with the
tag fails any more among those that it runs, so that an entry cannot outlive its fault.
"""

from __future__ import annotations

from fuzz.run import Failure

# Tag → what is wrong.
KNOWN: dict[str, str] = {}


def is_known(failure: Failure) -> bool:
    """Whether a failure is listed."""
    return bool(failure.tags & KNOWN.keys())
