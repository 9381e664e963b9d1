"""Find out how much memory is free, and refuse work that would not fit before it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
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


# A limit of this many bytes or more is none.
_NO_LIMIT = 2**60


def _read(path: str) -> str:
    """The first 8 kB of a small file of the system. Memory is asked for often: this is quick.

    Raises:
        OSError: it cannot be read.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 8192).decode()
    finally:
        os.close(number)


def _read_int(path: str) -> int | None:
    """Read a file with one integer; None if it is absent, unreadable, or says "max"."""
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return None


def _host_bytes() -> int | None:
    """Bytes that this machine can still give, or None if it does not say."""
    try:
        for line in _read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def _container_bytes() -> int | None:
    """Bytes that are left of the limits of all groups of this process, or None without limits.

    A group of processes (cgroup) may have a limit of its own, and so may each group around it.
    Pages of files that the system can drop at any time do not count as used.
    """
    left = []
    for folder, limit_file, used_file in _limited_groups():
        limit = _read_int(f"{folder}/{limit_file}")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _read_int(f"{folder}/{used_file}")
        if used is not None:
            left.append(max(0, limit - used + _droppable(folder)))
    return min(left, default=None)


# The names of the files with the limit and with what is used, in both versions of cgroups.
_NAMES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@lru_cache(maxsize=1)
def _limited_groups() -> tuple[tuple[str, str, str], ...]:
    """Folders of groups that can have limits, with the names of the files that say so.

    A process stays in its groups, so that they are looked for once.
    """
    return tuple(
        (folder, *names)
        for folder in dict.fromkeys(_group_folders())
        for names in _NAMES
        if os.path.exists(f"{folder}/{names[0]}")
    )


def _group_folders() -> list[str]:
    """The folders that describe the groups of this process, from the innermost outwards."""
    folders = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"]
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        inside = root / group.strip("/")
        folders += [str(folder) for folder in (inside, *inside.parents) if root in folder.parents]
    return folders


def _droppable(folder: str) -> int:
    """Bytes of files that a group holds in memory, and that the system drops first."""
    try:
        for line in _read(f"{folder}/memory.stat").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def _process_bytes() -> int | None:
    """Bytes that are left of this process's own limit (``ulimit -v``), or None without one."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        used = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return None
    return max(0, limit - used)


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None if the system is silent."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [b for b in (_host_bytes(), _container_bytes(), _process_bytes()) if b is not None]
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
