"""The fuzzer as a program: ``PYTHONPATH=tests python -m fuzz --seconds 600 --seed 1``."""

from __future__ import annotations

import argparse
import time

import torch

from fuzz.run import Tally, run_case


def main() -> int:
    """Run for a while, or one case; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone, with tracebacks")
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tally, shown = Tally(), 0
    if given.case is not None:
        run_case(given.seed, given.case, tally)
        for failure in tally.failures:
            print(failure, failure.trace, sep="\n")
        print(tally)
        return bool(tally.failures)
    number, end = given.start, time.monotonic() + given.seconds
    while time.monotonic() < end:
        run_case(given.seed, number, tally)
        number += 1
        for failure in tally.failures[shown:]:
            print(failure, flush=True)
        shown = len(tally.failures)
    print(tally)
    print(f"{tally.num_cases} cases of numbers {given.start} to {number - 1}, seed {given.seed}")
    return bool(tally.failures)


if __name__ == "__main__":
    raise SystemExit(main())
