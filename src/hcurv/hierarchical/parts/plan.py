"""What to store: how much of a matrix globally, how much in the tree, and in which tree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["Candidate", "Plan", "RankProfile", "StorageCurve", "tree_floats"]

# The floats above the leaves grow like depth^0.4, because with fewer levels each of them may make a
# larger error. The exponent was fitted on Gauss-Newton Hessians.
_RELIEF = 0.4
# The number of floats grows like tolerance^-0.7 (fitted on the same matrices), unless two
# tolerances whose logarithms differ by this much show another power, which is taken to lie between
# these.
_DECAY, _APART, _LEAST_DECAY, _MOST_DECAY = 0.7, 0.05, 0.15, 0.8
# That power grows by about this much when the tolerance grows by a factor of e (0.1 and 0.3 on two
# classifiers, between 2e-5 and 1e-3).
_BEND = 0.1
# The ranks of longer nodes are extrapolated from the last two steps of known ones.
_FIT = 2


@dataclass(frozen=True)
class Candidate:
    """One way to store a matrix.

    Attributes:
        global_rank: number of columns of the global part.
        leaf_size: largest leaf of the tree; 0 for no tree at all.
        ordering: ordering of the tree.
        floats: estimate of the number of floats that are stored.
    """

    global_rank: int
    leaf_size: int
    ordering: str
    floats: int


@dataclass(frozen=True)
class Plan:
    """The way in which a matrix is stored, and others that were looked at.

    Attributes:
        tolerance: relative error to aim at.
        size: number N of rows.
        chosen: what was chosen.
        others: the best candidates with other global ranks, best first.
        decay: near the tolerance, the number of floats is taken to grow like tolerance^-decay.

    Examples:
        >>> print(hcurv.compress(torch.ones(100, 100), tolerance=1e-2).plan)
        Plan for a relative error of 1.0e-02, N = 100 (estimates)
          global rank  leaves    stored  ordering
        →           1       –   1.0000%  none
    """

    tolerance: float
    size: int
    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    decay: float = _DECAY

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Make a plan from what `dataclasses.asdict` made of one.

        Examples:
            >>> from dataclasses import asdict
            >>> plan = hcurv.compress(torch.ones(100, 100)).plan
            >>> hcurv.Plan.from_dict(asdict(plan)) == plan
            True
        """
        chosen, *others = (Candidate(**c) for c in (values["chosen"], *values["others"]))
        return cls(values["tolerance"], values["size"], chosen, tuple(others), values["decay"])

    def __str__(self) -> str:
        """A small table of the choice and its alternatives."""
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
        num_rows: number of rows of the matrix.
        depth: depth of the tree in which the ranks were found.
        lengths: numbers of rows of nodes, ascending.
        means: mean ranks r of nodes of these lengths.
        roots: roots of the means of r².
        certain: whether all levels that were tried are among them, which is so if the samples had
            columns enough.
    """

    num_rows: int
    depth: float
    lengths: tuple[int, ...]
    means: tuple[float, ...]
    roots: tuple[float, ...]
    certain: bool

    @classmethod
    def of_levels(cls, num_rows: int, depth: int, ranks: Sequence[Tensor]) -> RankProfile:
        """The profile of the lowest levels of a tree, from the ranks of all of their nodes.

        Args:
            num_rows: number of rows of the matrix.
            depth: depth of the tree.
            ranks: ranks of the nodes of each level, from the leaves up, (2^level,).
        """
        levels = [level.double() for level in ranks]
        return cls(
            num_rows,
            float(depth),
            tuple(num_rows // level.numel() for level in levels),
            tuple(float(level.mean()) for level in levels),
            tuple(float(level.square().mean().sqrt()) for level in levels),
            True,
        )

    def without_growth(self) -> RankProfile:
        """The same ranks, as if those of longer nodes were no larger."""
        half = self.num_rows // 2
        if not self.lengths or self.lengths[-1] >= half:
            return self
        return replace(
            self,
            lengths=(*self.lengths, half),
            means=(*self.means, self.means[-1]),
            roots=(*self.roots, self.roots[-1]),
        )

    def at_leaf(self, length: float) -> float:
        """Floats of a leaf with some number of rows: its block, its basis and half a coupling."""
        mean, root = self._at(length, self.means), self._at(length, self.roots)
        return length**2 + max(0.0, length * mean - root**2 / 2)

    def at(self, length: float) -> float:
        """Floats of a node above the leaves: its basis, and half of the coupling with its sibling.

        They are (m − r) r + r²/2 if the skeletons of its children have m rows.
        """
        rows, rank = 2 * self._at(length / 2, self.roots), self._at(length, self.roots)
        return max(0.0, rows - rank) * rank + rank**2 / 2

    def _at(self, length: float, ranks: tuple[float, ...]) -> float:
        """A rank between or beyond the known lengths, on straight lines in logarithmic scale.

        A node of nearly all rows has few columns outside of it, which bounds its rank. So lengths
        are multiplied by the share of rows outside.
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
    """Floats of a tree of some depth: the blocks of its leaves, all bases and couplings."""
    length = num_rows / 2**depth
    if depth == 0:
        return float(length**2)
    above = sum(2**level * profile.at(num_rows / 2**level) for level in range(1, depth))
    # With fewer levels each of them may make a larger error, so that all ranks are smaller.
    fewer = (depth / profile.depth) ** _RELIEF
    return float(2**depth * profile.at_leaf(length) + fewer * above)


@dataclass(frozen=True)
class StorageCurve:
    """How the number of floats depends on the tolerance, as far as pairs of them have shown it.

    Attributes:
        decay: near the last tolerance, the number of floats is taken to grow like tolerance^-decay.
        last: the last tolerance and its number of floats, or None.
    """

    decay: float = _DECAY
    last: tuple[float, int] | None = None

    def seen(self, tolerance: float, floats: int) -> StorageCurve:
        """The curve once another tolerance has taken some floats."""
        decay = self.decay
        if self.last is not None and min(floats, self.last[1]) > 0:
            change = math.log(tolerance / self.last[0])
            fall = math.log(self.last[1] / floats)
            if abs(change) >= _APART and fall / change > 0:
                decay = fall / change + _BEND * change / 2
                decay = min(max(decay, _LEAST_DECAY), _MOST_DECAY)
        return StorageCurve(decay, (tolerance, floats))

    def step(self, wanted: int) -> float:
        """The factor by which to change the last tolerance to take so many floats.

        For its logarithm x, the logarithm of the floats falls by decay·x + bend·x²/2.
        """
        assert self.last is not None
        fall = math.log(max(1, self.last[1]) / max(1, wanted))
        root = math.sqrt(max(self.decay**2 + 2 * _BEND * fall, self.decay**2 / 4))
        return min(max(math.exp(2 * fall / (self.decay + root)), 0.1), 10.0)
