"""What to store: how much of a matrix globally, how much in the tree, and in which tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Candidate", "Plan", "RankProfile", "tolerance_step", "tree_floats"]

_RELIEF = 0.4  # exponent, measured on Gauss-Newton Hessians
_DECAY = 0.7  # of floats with the tolerance, exponent, measured likewise
_FIT = 2  # steps from which ranks of longer nodes are foretold


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
        num_rows: of the matrix.
        depth: of the tree that ranks were found in.
        lengths: numbers of rows, ascending.
        means: mean ranks r of nodes of these lengths.
        roots: roots of the means of r².
        certain: whether all levels that were tried are among them: samples had columns enough.
    """

    num_rows: int
    depth: float
    lengths: tuple[int, ...]
    means: tuple[float, ...]
    roots: tuple[float, ...]
    certain: bool

    def at_leaf(self, length: float) -> float:
        """Floats of a leaf with some number of rows: its block, and as `at`."""
        mean, root = self._at(length, self.means), self._at(length, self.roots)
        return length**2 + max(0.0, length * mean - root**2 / 2)

    def at(self, length: float) -> float:
        """Floats of a node above the leaves: its basis, and half of the coupling with its sibling.

        They are (m − r) r + r²/2 if the skeletons of its children have m rows.
        """
        rows, rank = 2 * self._at(length / 2, self.roots), self._at(length, self.roots)
        return max(0.0, rows - rank) * rank + rank**2 / 2

    def _at(self, length: float, ranks: tuple[float, ...]) -> float:
        """Between or beyond the known lengths: on lines in logarithmic scale.

        A node of nearly all rows has few columns outside of it: its rows are counted by that share.
        """
        if not ranks or ranks[0] == 0.0:
            return 0.0
        length = self._outside(length)
        lengths = [self._outside(known) for known in self.lengths]
        if length <= lengths[0]:
            return ranks[0] * length / lengths[0]
        last = next((i for i, known in enumerate(lengths) if known >= length), len(lengths) - 1)
        if last == 0 or 0.0 in (ranks[last - 1], ranks[last]):
            return ranks[last]
        first = last - 1 if length <= lengths[-1] else max(0, last - _FIT)
        slope = math.log(ranks[last] / ranks[first]) / math.log(lengths[last] / lengths[first])
        if length > lengths[-1]:
            slope = min(max(slope, 0.0), 1.0)
        return float(ranks[last] * (length / lengths[last]) ** slope)

    def _outside(self, length: float) -> float:
        return length * (1 - length / max(1, self.num_rows))


def tree_floats(num_rows: int, depth: int, profile: RankProfile) -> float:
    """Floats of a tree of some depth: blocks of the leaves, bases and couplings."""
    length = num_rows / 2**depth
    if depth == 0:
        return float(length**2)
    above = sum(2**level * profile.at(num_rows / 2**level) for level in range(1, depth))
    # With fewer levels each of them may leave more, which makes all ranks smaller.
    fewer = (depth / profile.depth) ** _RELIEF
    return float(2**depth * profile.at_leaf(length) + fewer * above)


def tolerance_step(floats: int, wanted: int) -> float:
    """By how much to change a tolerance that took some floats, to take ``wanted`` ones."""
    step = math.pow(floats / max(1, wanted), 1 / _DECAY)
    return min(max(step, 0.1), 10.0)
