"""Find out how much memory is free, and refuse work that would not fit before it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["InsufficientMemoryError", "available_bytes", "format_bytes", "require_bytes"]


class InsufficientMemoryError(MemoryError):
    """The work needs more memory than is free. Nothing was allocated.

    The message says how much is needed, how much is free, and what to do instead.

    Examples:
        >>> from hcurv.memory import require_bytes
        >>> try:
        ...     require_bytes(10**18, torch.device("cpu"), "this example", ["ask for less"])
        ... except hcurv.InsufficientMemoryError as error:
        ...     print(str(error).split(",")[0])
        this example needs 1e+06 TB
    """


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes as people read it, such as ``1.9 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _read_int(path: str) -> int | None:
    """Read a file with one integer; None if it is absent, unreadable, or says "max"."""
    try:
        return int(Path(path).read_text().strip())
    except (OSError, ValueError):
        return None


def _host_bytes() -> int | None:
    """Bytes that this machine can still give, or None if it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def _container_bytes() -> int | None:
    """Bytes that are left of the limit of a container, or None if there is no limit."""
    limit = _read_int("/sys/fs/cgroup/memory.max")
    used = _read_int("/sys/fs/cgroup/memory.current")
    return None if limit is None or used is None else max(0, limit - used)


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if the system is silent."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [b for b in (_host_bytes(), _container_bytes()) if b is not None]
    return min(known, default=None)


def require_bytes(needed: int, device: torch.device, what: str, ways_out: Sequence[str]) -> None:
    """Raise `InsufficientMemoryError` unless ``needed`` bytes are free on ``device``.

    Args:
        needed: the number of bytes about to be allocated.
        device: the device on which they are allocated.
        what: what they are for, as the subject of a sentence.
        ways_out: what the user can do instead; each is an imperative clause.

    Raises:
        InsufficientMemoryError: there is less free memory than that.
    """
    free = available_bytes(device)
    if free is None or needed <= free:
        return
    remedies = "\n".join(f"  - {way}" for way in ways_out)
    raise InsufficientMemoryError(
        f"{what} needs {format_bytes(needed)}, but only {format_bytes(free)} is free on {device}. "
        f"Ways out:\n{remedies}"
    )
