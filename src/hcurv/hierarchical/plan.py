"""What to store: how much of a matrix globally, how much in the tree, and in which tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Candidate", "Plan", "RankProfile", "tree_floats"]

_RELIEF = 0.15  # exponent, measured on Gauss-Newton Hessians


@dataclass(frozen=True)
class Candidate:
    """One way to store a matrix.

    Attributes:
        global_rank: columns of the global part.
        leaf_size: largest leaf of the tree; 0 for no tree at all.
        ordering: of the tree.
        floats: estimate of all that is stored.
    """

    global_rank: int
    leaf_size: int
    ordering: str
    floats: int


@dataclass(frozen=True)
class Plan:
    """The way that was chosen, and others that were looked at.

    Attributes:
        tolerance: relative error aimed at.
        size: N.
        chosen: what was chosen.
        others: the best of every other global rank and ordering.
    """

    tolerance: float
    size: int
    chosen: Candidate
    others: tuple[Candidate, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """From what `dataclasses.asdict` made of a plan."""
        chosen, *others = (Candidate(**c) for c in (values["chosen"], *values["others"]))
        return cls(values["tolerance"], values["size"], chosen, tuple(others))

    def __str__(self) -> str:
        """A small table."""
        lines = [
            f"Plan for a relative error of {self.tolerance:.1e}, N = {self.size} (estimates)",
            f"  {'global rank':>11} {'leaves':>7} {'stored':>9}  ordering",
        ]
        for candidate in (self.chosen, *self.others):
            mark = "→" if candidate is self.chosen else " "
            leaves = str(candidate.leaf_size) if candidate.leaf_size else "–"
            lines.append(
                f"{mark} {candidate.global_rank:>11} {leaves:>7}"
                f" {candidate.floats / self.size**2:>9.4%}  {candidate.ordering}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class RankProfile:
    """How ranks grow with the number of rows of a node.

    Attributes:
        lengths: numbers of rows, ascending.
        ranks: mean ranks r of nodes of these lengths.
        squares: means of r².
        floats: mean floats of a node: its basis, and half of the coupling with its sibling,
            (m − r) r + r²/2 if the skeletons of its children have m rows.
        certain: whether all levels that were tried are among them: samples had columns enough.
    """

    lengths: tuple[int, ...]
    ranks: tuple[float, ...]
    squares: tuple[float, ...]
    floats: tuple[float, ...]
    certain: bool

    def at_leaf(self, length: float) -> float:
        """Floats of a leaf with some number of rows, its block included."""
        rank, square = self._at(length, self.ranks, 1), self._at(length, self.squares, 2)
        return length**2 + max(0.0, length * rank - square / 2)

    def at(self, length: float) -> float:
        """Floats of a node above the leaves."""
        return self._at(length, self.floats, 2)

    def _at(self, length: float, values: tuple[float, ...], power: int) -> float:
        """Between or beyond the known lengths: on lines in logarithmic scale."""
        if not values:
            return 0.0
        above = next((i for i, known in enumerate(self.lengths) if known >= length), None)
        if above == 0:
            return float(values[0] * (length / self.lengths[0]) ** power)
        last = len(values) - 1 if above is None else above
        if last == 0 or 0.0 in (values[last - 1], values[last]):
            return values[last]
        steps = math.log(self.lengths[last] / self.lengths[last - 1])
        slope = math.log(values[last] / values[last - 1]) / steps
        if above is None:
            slope = min(max(slope, 0.0), float(power))
        return float(values[last] * (length / self.lengths[last]) ** slope)


def tree_floats(num_rows: int, depth: int, profile: RankProfile) -> float:
    """Floats of a tree of some depth: blocks of the leaves, bases and couplings."""
    length = num_rows / 2**depth
    if depth == 0:
        return float(length**2)
    above = sum(2**level * profile.at(num_rows / 2**level) for level in range(1, depth))
    # With fewer nodes each of them may leave more, which makes all ranks smaller.
    fewer = (length / profile.lengths[0]) ** -_RELIEF if profile.lengths else 1.0
    return float(2**depth * profile.at_leaf(length) + fewer * above)
