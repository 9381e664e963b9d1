"""Measure time and memory, and describe the machine.

A time is the best of several repeats; a peak of memory counts what is used beyond what was in use
before.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = [
    "best_time",
    "best_times",
    "dense_product_seconds",
    "describe_machine",
    "peak_extra_bytes",
    "sgemm_rate",
]


def best_time(function: Callable[[], object], repeats: int = 5, budget: float = 20.0) -> float:
    """Return the seconds of the fastest of several calls.

    There are no further calls once ``budget`` seconds have passed.
    """
    return best_times([function], repeats, budget)[0]


def best_times(
    functions: Sequence[Callable[[], object]], repeats: int = 5, budget: float = 20.0
) -> list[float]:
    """Return the best time of each function. Calls alternate, so that noise hits all alike."""
    best, begin = [float("inf")] * len(functions), time.perf_counter()
    for _ in range(repeats):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - start)
        if time.perf_counter() - begin > budget:
            break
    return best


def sgemm_rate(size: int = 4096) -> float:
    """Measure the flops per second of a large float32 matrix product."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best_time(lambda: left @ right, repeats=15)


def dense_product_seconds(size: int, num_columns: int = 128) -> float:
    """Time the product of a dense float32 matrix with some columns, the unit of other times."""
    dense, columns = torch.randn(size, size), torch.randn(size, num_columns)
    return best_time(lambda: dense @ columns, 7)


# Measurements may be nested, and an inner one resets the system's peak. Each entry is the peak that
# a running measurement had reached before the latest inner one began.
_peaks: list[int] = []


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Measure the peak of resident memory while ``function`` runs, beyond what was in use before.

    This works on Linux; the result is -1 elsewhere.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed but kept would hide new use
        _peaks[:] = [max(peak, _status("VmHWM")) for peak in _peaks]
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    except OSError:
        function()
        return -1
    _peaks.append(0)
    try:
        result = function()
        extra = max(_peaks[-1], _status("VmHWM")) - before
        del result
        return extra
    finally:
        _peaks.pop()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


def describe_machine() -> str:
    """Describe the processor, the threads and the versions in one line."""
    return (
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__},"
        f" Python {platform.python_version()}"
    )
