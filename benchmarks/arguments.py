"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Collection

__all__ = ["parse_data_argument"]


def parse_data_argument(description: str | None, parts: Collection[str] = ()) -> argparse.Namespace:
    """Read from the command line where the data lie and which parts to run (default: all)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data",
        help="folder with mnist/ and cifar10/ (default: $HCURV_DATA, the cache, a download)",
    )
    if parts:
        parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
        parser.add_argument("--only", action="append", help="only this network; may be repeated")
    return parser.parse_args()
