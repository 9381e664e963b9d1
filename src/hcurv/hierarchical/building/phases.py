"""What a compression is doing: the time of each phase, and a progress bar over all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["Phases"]

_BAR_FORMAT = "{desc} |{bar:20}| {elapsed}"


class Phases:
    """Measures the time of each phase, and shows on request what is being done.

    A phase within another one is not counted twice.

    Args:
        show: whether to show a progress bar on stderr.

    Attributes:
        seconds: time spent in each phase so far.
    """

    def __init__(self, show: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # time that phases within each open phase have taken
        self._bar = tqdm(total=1, bar_format=_BAR_FORMAT, disable=not show, leave=True)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase, without the time of phases within it."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            own = elapsed - self._inner.pop()
            self._inner[-1] += elapsed
            self.seconds[phase] = self.seconds.get(phase, 0.0) + own

    def describe(self, text: str) -> None:
        """Show what is being done now."""
        self._bar.set_description_str(text)

    def expect(self, num_steps: int) -> None:
        """Start the bar anew, to be full after so many steps."""
        self._bar.reset(max(1, num_steps))

    def advance(self) -> None:
        """Count one of the expected steps as done."""
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is, and start a new line."""
        self._bar.close()
