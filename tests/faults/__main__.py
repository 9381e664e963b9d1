"""Run many faults: ``PYTHONPATH=tests python -m faults [interruptions|kills|soak]``."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch

from faults.broken_writes import (
    kill_while_saving,
    save_on_a_full_disk,
    two_matrices,
    two_writers,
)
from faults.interruptions import Interruptions
from faults.soak import growth, soak


def _interrupt(num: int, seed: int) -> list[str]:
    rng, interruptions = random.Random(seed), Interruptions()
    for _ in range(num):
        interruptions.once(rng.choice(interruptions.names), rng)
    print(f"{interruptions.num} interruptions, seed {seed}: {len(interruptions.problems)} problems")
    return interruptions.problems


def _kill(num: int, seed: int) -> list[str]:
    rng, matrices = random.Random(seed), two_matrices()
    with tempfile.TemporaryDirectory() as folder:
        found = [kill_while_saving(Path(folder), matrices, rng) for _ in range(num)]
    problems = [text for text in found if text is not None]
    print(f"{num} kills, seed {seed}: {len(problems)} problems")
    with tempfile.TemporaryDirectory() as folder:
        message, left = save_on_a_full_disk(Path(folder), matrices)
        print(f"full disk: {message!r}; files {left}")
    with tempfile.TemporaryDirectory() as folder:
        count, wrong = two_writers(Path(folder), matrices, 20)
        print(f"two writers: {count} reads, {len(wrong)} problems")
    return problems + wrong


def _soak(seconds: float, seed: int) -> list[str]:
    records = soak(seconds, seed)
    more, per_call = growth(records)
    for moment, count, size in records[:: max(1, len(records) // 12)]:
        print(f"{moment:7.0f} s {count:8d} calls {size / 2**20:8.1f} MB")
    print(f"growth {more / 2**20:.1f} MB, {per_call:.0f} bytes a call")
    # The allocator keeps some pages; a leak of one small tensor a call is more than this.
    allowed = max(32 * 2**20, 200 * records[-1][1])
    return [f"memory grows by {more} bytes"] if more > allowed else []


def main() -> int:
    """The exit code says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["interruptions", "kills", "soak"], nargs="?")
    parser.add_argument("--num", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1800)
    given = parser.parse_args()
    torch.set_num_threads(1)
    problems: list[str] = []
    if given.part in (None, "interruptions"):
        problems += _interrupt(given.num or 1000, given.seed)
    if given.part in (None, "kills"):
        problems += _kill(given.num or 200, given.seed)
    if given.part == "soak":
        problems += _soak(given.seconds, given.seed)
    print(*problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
