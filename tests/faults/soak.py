"""Mixed calls for a long time: memory must not grow after a warm-up."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

from faults.calls import Calls
from fuzz.run import Tally, run_case


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not say how much memory is in use")


def soak(seconds: float, seed: int, warm_up: float = 0.3) -> list[tuple[float, int, int]]:
    """Run calls and fuzzed cases at random.

    Returns:
        Time, number of calls and bytes in use, sixty times after the warm-up.
    """
    calls, rng, tally = Calls(), random.Random(seed), Tally()
    start, count, records = time.monotonic(), 0, []
    next_record = start + warm_up * seconds
    step = (1 - warm_up) * seconds / 60
    while time.monotonic() < start + seconds:
        if rng.random() < 0.5:
            calls.run(rng.choice(sorted(calls.functions)))
            count += 1
        else:
            run_case(seed, count, tally)
            count += 10
            tally = Tally()
        if time.monotonic() >= next_record:
            gc.collect()
            records.append((time.monotonic() - start, count, resident_bytes()))
            next_record += step
    return records


def growth(records: list[tuple[float, int, int]]) -> tuple[float, float]:
    """Bytes by which the median of the last third exceeds that of the first, and per call."""
    third = max(1, len(records) // 3)
    first, last = records[:third], records[-third:]
    median = lambda part: sorted(size for _, _, size in part)[len(part) // 2]  # noqa: E731
    more = median(last) - median(first)
    return more, more / max(1, last[-1][1] - first[0][1])
