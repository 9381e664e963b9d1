"""Run cases, and say how they ended."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fuzz.damaged_files import file_case
from fuzz.operations import LONGER, QUICK
from fuzz.outcomes import Refused, State, WrongError, refusals, told
from fuzz.problems import Made, ambient, draw_problem, make
from fuzz.randomness import of_case

# The share of numbers that are about files.
FILE_SHARE = 0.2


@dataclass
class Failure:
    """A case that ended in neither of the two good ways."""

    seed: int
    number: int
    what: str
    message: str
    tags: set[str]
    trace: str = ""

    @property
    def command(self) -> str:
        return f"PYTHONPATH=tests python -m fuzz --seed {self.seed} --case {self.number}"

    def __str__(self) -> str:
        return f"{self.what}: {self.message}\n  {', '.join(sorted(self.tags))}\n  {self.command}"


@dataclass
class Tally:
    """How many cases ended in which way, by class."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def num_cases(self) -> int:
        return self.right.total() + self.refused.total() + len(self.failures)

    def __str__(self) -> str:
        failed = Counter(failure.what for failure in self.failures)
        names = sorted({*self.right, *self.refused, *failed})
        lines = [f"{'class':<28}{'right':>9}{'refused':>9}{'failures':>9}"]
        lines += [
            f"{name:<28}{self.right[name]:>9}{self.refused[name]:>9}{failed[name]:>9}"
            for name in names
        ]
        total = (self.right.total(), self.refused.total(), len(self.failures))
        lines.append(f"{'all':<28}{total[0]:>9}{total[1]:>9}{total[2]:>9}")
        return "\n".join(lines)


class Run:
    """All that happens in the cases of one number: a problem, and operations on its matrix."""

    def __init__(self, seed: int, number: int, tally: Tally) -> None:
        self._seed, self._number, self._tally = seed, number, tally
        self._tags: set[str] = set()

    def attempt(self, what: str, function: Callable[[], object]) -> object:
        """Run one case, and note how it ended; None if it did not end well."""
        try:
            with told():
                result = function()
        except Refused as refusal:
            self._tally.refused[what] += 1
            self._tally.refusals[str(refusal).split(";")[0][:90]] += 1
            return None
        except Exception as error:
            kind = "" if isinstance(error, WrongError) else f"raw {type(error).__name__}: "
            failure = Failure(
                self._seed,
                self._number,
                what,
                f"{kind}{str(error)[:300]}",
                set(self._tags),
                traceback.format_exc(),
            )
            self._tally.failures.append(failure)
            return None
        self._tally.right[what] += 1
        return result

    def problem(self) -> None:
        """A network, a loss and data, and some operations."""
        rng = of_case(self._seed, self._number)
        problem = draw_problem(rng)
        self._tags = problem.tags
        state = State(problem.model)
        with ambient(problem.ambient):
            made = self.attempt("matrix", lambda: make(problem))
            if isinstance(made, Made):
                for name, function in _operations(rng):
                    if name == "gradient" and problem.must_refuse:
                        continue
                    self.attempt(name, lambda f=function: f(made, rng))  # type: ignore[misc]
        self.attempt("state left behind", state.check)

    def files(self) -> None:
        """Some damaged or crafted files."""
        rng = of_case(self._seed, self._number)
        for _ in range(10):
            name, function = file_case(rng)
            self.attempt(name, function)


def _operations(rng: random.Random) -> Iterator[tuple[str, Callable[[Made, random.Random], None]]]:
    for name in rng.sample(sorted(QUICK), 7):
        yield name, QUICK[name]
    for name in rng.sample(sorted(LONGER), 2):
        yield name, LONGER[name]


def run_case(seed: int, number: int, tally: Tally) -> None:
    """Run everything of one number."""
    kind = of_case(seed, -number - 1).random()
    run = Run(seed, number, tally)
    if kind < FILE_SHARE:
        run.files()
    else:
        run.problem()


__all__ = ["Failure", "Tally", "refusals", "run_case"]
