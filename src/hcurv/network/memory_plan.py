"""What a precomputation stores, parameter by parameter, known before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hcurv.memory import format_bytes

__all__ = ["MemoryPlan", "StoredPart"]


class StoredPart(NamedTuple):
    """What is stored for one parameter.

    Attributes:
        name: the parameter, or what else is stored.
        form: how: "plain" or "positions" (factors), "look-up", "dense" (multiplied out), "unused".
        floats: floats for each point.
    """

    name: str
    form: str
    floats: float


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a `GaussNewton`; prints as a table.

    Attributes:
        parts: what is stored, by parameter.
        num_points: n.
        bytes_per_float: 4 or 8.
        working_bytes: temporary memory of the precomputation, besides what is stored.
        later: what is stored in addition when entries are first asked for. It is empty but for deep
            chains of Linear layers with many outputs, whose products do not need it.
        note: why nothing is stored, if ``factors="auto"`` decided so.
    """

    parts: tuple[StoredPart, ...]
    num_points: int
    bytes_per_float: int
    working_bytes: int
    later: tuple[StoredPart, ...] = ()
    note: str = ""

    @property
    def stored_bytes(self) -> int:
        """Bytes that stay when the data was read."""
        return self._bytes(*self.parts)

    @property
    def later_bytes(self) -> int:
        """Bytes that are added when entries are first asked for."""
        return self._bytes(*self.later)

    def _bytes(self, *parts: StoredPart) -> int:
        floats = sum(part.floats for part in parts)
        return round(floats * self.num_points) * self.bytes_per_float

    @property
    def peak_bytes(self) -> int:
        """Bytes at the most, while the data is read."""
        return self.stored_bytes + self.working_bytes

    def __str__(self) -> str:
        """A table, the largest first."""
        if not self.parts:
            reason = f" ({self.note})" if self.note else ""
            return (
                f"{self.num_points} points, recomputed at each call{reason};"
                f" {format_bytes(self.working_bytes)} of temporary memory"
            )
        width = max(len(part.name) for part in (*self.parts, *self.later))
        lines = [
            f"{self.num_points} points, {format_bytes(self.stored_bytes)} stored,"
            f" {format_bytes(self.peak_bytes)} at the most while reading"
        ]
        lines += self._rows(self.parts, width)
        if self.later:
            lines.append(f"{format_bytes(self.later_bytes)} more when entries are first asked for")
            lines += self._rows(self.later, width)
        return "\n".join(lines)

    def _rows(self, parts: tuple[StoredPart, ...], width: int) -> list[str]:
        return [
            f"  {part.name:<{width}}  {part.form:<10}{part.floats:>12.0f}"
            f"{format_bytes(self._bytes(part)):>12}"
            for part in sorted(parts, key=lambda part: -part.floats)
        ]
