"""Random numbers of a case.

All generators take a `random.Random`. Hypothesis has one whose choices it can shrink
(`hypothesis.strategies.randoms`); the long runs have one for each case.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def of_case(seed: int, number: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{seed}/{number}")


def often(rng: random.Random, usual: T, unusual: Sequence[T], share: float = 0.15) -> T:
    """Mostly the usual value, with some share one of the others."""
    return rng.choice(list(unusual)) if rng.random() < share else usual


def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(31))


def normal(rng: random.Random, *shape: int) -> Tensor:
    """Normally distributed numbers that single precision has exactly, in double precision."""
    return torch.randn(*shape, generator=generator(rng)).double()


def integers(rng: random.Random, most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=generator(rng))


def positive(rng: random.Random, *shape: int) -> Tensor:
    """Positive numbers between a tenth and two, in double precision."""
    return 0.1 + 1.9 * torch.rand(*shape, generator=generator(rng)).double()
