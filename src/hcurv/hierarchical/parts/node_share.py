"""Which nodes of a tree a rank builds.

A rank has one or several neighbouring nodes of the *cut level* and everything below them. What a
rank knows of its own nodes is numbered from 0. What decides how a build goes on is made known to
all ranks: numbers of rows and ranks of all nodes, never their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hcurv.hierarchical.parts.row_share import RowShare, cut_level, largest_of
from hcurv.hierarchical.tree.cluster_tree import ClusterTree

__all__ = ["NodeShare"]


@dataclass(frozen=True)
class NodeShare:
    """The nodes of this rank on all levels from the cut level down.

    Attributes:
        share: the rows of the tree.
        cut: the cut level; None if one process has all nodes.
    """

    share: RowShare
    cut: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have nodes, too."""
        return self.cut is not None

    def bounds(self, depth: int) -> list[int]:
        """Where the nodes of each rank begin and end on a level."""
        if self.cut is None:
            return [0, 2**depth]
        size = self.share.ranks.size
        nodes = [int(2**self.cut) * rank // size for rank in range(size + 1)]
        return [node << (depth - self.cut) for node in nodes]

    def first(self, depth: int) -> int:
        """The number of the first own node of a level."""
        return 0 if self.cut is None else self.bounds(depth)[self.share.ranks.rank]

    def num_nodes(self, depth: int) -> int:
        """The number of own nodes of a level."""
        if self.cut is None:
            return int(2**depth)
        return self.bounds(depth)[self.share.ranks.rank + 1] - self.first(depth)

    def leaf_bounds(self, tree: ClusterTree) -> Tensor:
        """Where the own leaves begin and end among the own rows."""
        bounds = tree.bounds(tree.depth)
        if self.cut is None:
            return bounds
        first = self.first(tree.depth)
        return bounds[first : first + self.num_nodes(tree.depth) + 1] - self.share.start

    def of_all(self, values: Tensor, depth: int) -> Tensor:
        """One row for each node of a level, from those of the own nodes."""
        if self.cut is None:
            return values
        counts = [b - a for a, b in pairwise(self.bounds(depth))]
        return self.share.ranks.collect(values, counts)

    def own_of(self, members: Tensor, depth: int) -> Tensor:
        """Those of some nodes of a level that are own ones, numbered from 0."""
        if self.cut is None:
            return members
        first = self.first(depth)
        own = members[(members >= first) & (members < first + self.num_nodes(depth))]
        return own - first

    @classmethod
    def of_tree(cls, share: RowShare, tree: ClusterTree) -> NodeShare:
        """The nodes that go with a share of the rows of a tree."""
        ranks = share.ranks
        is_shared = ranks.size > 1 and tree.num_kept > 0
        return cls(share, cut_level(ranks.size, tree.depth) if is_shared else None)

    def own_pairs(self, depth: int) -> Tensor:
        """Pairs of siblings among the own nodes of a level below the cut."""
        device = self.share.rows.device
        return torch.arange(self.num_nodes(depth), device=device).view(-1, 2)

    def row_counts(self, counts: Tensor, depth: int) -> list[int]:
        """The number of rows of each rank on a level, from those of all its nodes."""
        return [int(counts[a:b].sum()) for a, b in pairwise(self.bounds(depth))]

    def largest(self, value: int) -> int:
        """The largest of one number of each rank."""
        return value if self.cut is None else largest_of(self.share.ranks, value)

    def totals(self, *values: float) -> tuple[float, ...]:
        """Sums of numbers over all ranks."""
        if self.cut is None:
            return values
        return tuple(self.share.total(torch.tensor(values, dtype=torch.float64)).tolist())
