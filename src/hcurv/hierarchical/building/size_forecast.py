"""Foresee how many floats a tree will take, while it is being built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.hierarchical.parts.plan import RankProfile, tree_floats

__all__ = ["MisfitError", "WantedFloats", "floats_of_ranks", "likely_ranks"]

# Where the ranks of the upper levels are extrapolated, those of at least so many levels have to be
# known, and of nodes with a sixteenth of all rows. They may go on growing as they did, or not at
# all. The truth was near the second on autoencoders, and above the first on classifiers. A mean
# with this weight of growth was at most 6 % too large on the former. On the latter it was a quarter
# too small when sixteen nodes were known, and a tenth when eight were.
_LEAST_LEVELS, _MOST_NODES, _GROWTH = 3, 16, 0.75
# A build that is likely to take more than this share of the floats that are allowed makes larger
# errors on the levels that are left. If these would have to do with less than this share of their
# floats, it is given up. Floats of the upper levels grow like tolerance^-0.6 (with a power of -0.45
# on a classifier, and of -1 on an autoencoder).
_NEARLY_ALL, _LEAST_SHARE, _DECAY = 0.97, 0.4, 0.6
# What a look at all levels with few columns foretells was within 20 % of the truth on twelve builds
# of three autoencoders and two classifiers. A build goes on if this is no more than such a share of
# the floats that are allowed.
_SURE = 0.95
# The two nodes below the root keep this many times the share of skeleton rows that others keep, if
# their ranks go on growing (0.72 to 0.8 on two classifiers).
_LAST_SHARE = 0.75


class MisfitError(Exception):
    """A build was given up, because the matrix would be too large, or needlessly inaccurate.

    Args:
        floats: about how many floats it would take.
    """

    def __init__(self, floats: int) -> None:
        super().__init__(f"the matrix would take about {floats} floats")
        self.floats = floats


@dataclass(frozen=True)
class WantedFloats:
    """Within which bounds the number of floats of a tree shall lie.

    Attributes:
        least: with fewer floats, the matrix could be more accurate.
        most: with more floats, it would be too large.
    """

    least: float
    most: float

    def without(self, floats: int) -> WantedFloats:
        """The bounds of a tree beside something else."""
        return WantedFloats(self.least - floats, self.most - floats)

    def require(self, floats: float) -> None:
        """Raise `MisfitError` if a look at all levels foretells a number out of bounds."""
        if not self.least <= floats <= _SURE * self.most:
            raise MisfitError(round(floats))

    def relief(self, sizes: Tensor, depth: int, ranks: Sequence[Tensor]) -> float:
        """By what factor the levels that are left should make a larger error, so that all fits.

        Args:
            sizes: numbers of rows of the leaves, (2^depth,).
            depth: depth of the tree.
            ranks: ranks of the nodes of each level that was built, from the leaves up.

        Raises:
            MisfitError: that would have to be too large a factor.
        """
        if len(ranks) < _LEAST_LEVELS or ranks[-1].numel() > _MOST_NODES:
            return 1.0
        num_rows = int(sizes.sum())
        profile = RankProfile.of_levels(num_rows, depth, ranks)
        least = tree_floats(num_rows, depth, profile.without_growth())
        most = tree_floats(num_rows, depth, profile)
        likely = least ** (1 - _GROWTH) * most**_GROWTH
        if likely <= _NEARLY_ALL * self.most:
            return 1.0
        built = floats_of_ranks(sizes, ranks)
        share = (_NEARLY_ALL * self.most - built) / max(likely - built, 1.0)
        if share < _LEAST_SHARE:
            raise MisfitError(round(likely))
        return float(min(share, 1.0) ** (-1 / _DECAY))


def floats_of_ranks(sizes: Tensor, ranks: Sequence[Tensor]) -> float:
    """Floats of a tree: the blocks of its leaves, and on each level bases and couplings.

    Args:
        sizes: numbers of rows of the leaves, (2^depth,).
        ranks: ranks of the nodes of all levels, from the leaves up.
    """
    rows = sizes.double()
    total = float(rows.square().sum())
    for level in ranks:
        level = level.double()
        total += float(((rows - level).clamp(min=0) * level).sum())
        pairs = level.view(-1, 2)
        total += float((pairs[:, 0] * pairs[:, 1]).sum())
        rows = pairs.sum(1)
    return total


def likely_ranks(sizes: Tensor, ranks: Sequence[Tensor], cap: int, max_rank: int) -> list[Tensor]:
    """Ranks of all nodes, if those of some nodes were cut off at ``cap``.

    A node that was cut off is taken to keep a share of its children's skeleton rows that lies
    between the share that its children kept and the share that other nodes of its level keep. If
    all nodes of a level were cut off, those of the last level where some were not count as the
    others. Ranks of the largest nodes grow more slowly on each level, but not as slowly as those of
    small nodes. Only half of all columns lie outside of each of the two nodes below the root, so
    that these keep fewer rows.

    Args:
        sizes: numbers of rows of the leaves, (2^depth,).
        ranks: ranks of the nodes of all levels, from the leaves up, cut off at the cap.
        cap: the largest rank that could be found.
        max_rank: the largest rank that is allowed.
    """
    rows, others, found = sizes.double(), 1.0, []
    below = torch.ones_like(rows)  # the shares that children kept
    for level in ranks:
        known, is_cut = level.double(), level >= cap
        if not bool(is_cut.all()):
            kept = float(rows[~is_cut].sum())
            others = float(known[~is_cut].sum()) / kept if kept > 0 else 0.0
        share = (below * others).sqrt() * (1.0 if level.numel() > 2 else _LAST_SHARE)
        likely = (share * rows).clamp(max=max_rank)
        found.append(torch.where(is_cut, torch.maximum(known, likely), known))
        pairs = found[-1].view(-1, 2)
        shares = torch.where(rows > 0, found[-1] / rows, 0.0).view(-1, 2)
        rows = pairs.sum(1)
        below = (pairs * shares).sum(1) / rows.clamp(min=1.0)
    return found
