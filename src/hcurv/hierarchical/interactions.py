"""Which nodes of a tree interact through bases, and which leaves directly.

A pair of leaves is *near* if its block is stored as it is; a leaf is near to itself. A pair of
nodes on any level is admissible if no leaves in them are near, and it is coupled through their
bases on the highest level where it is admissible: then the parents are not. Where no leaf is near
to another, siblings are coupled and nothing else: this is the HSS form. Near leaves are chosen as
in GOFMM: those that hold most nearest neighbours of the rows of a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, Distance
from hcurv.neighbors import neighbor_lists
from hcurv.operators import EntrySource

__all__ = ["Interactions", "near_leaves"]

_NEIGHBORS = 16  # of every row, that vote


@dataclass(frozen=True)
class Interactions:
    """Pairs of nodes (a, b), a < b, on the levels of a tree.

    Attributes:
        depth: of the tree.
        near: pairs of near leaves, (P, 2), without repetitions.
    """

    depth: int
    near: Tensor

    @classmethod
    def siblings_only(cls, depth: int, device: torch.device) -> Interactions:
        """No leaf is near to another."""
        return cls(depth, torch.zeros(0, 2, dtype=torch.long, device=device))

    @cached_property
    def _close(self) -> tuple[Tensor, ...]:
        """Pairs that are not admissible, for the levels 0, 1, …, depth, without (a, a)."""
        levels = [self.near]
        for _ in range(self.depth):
            pairs = levels[-1] // 2
            levels.append(torch.unique(pairs[pairs[:, 0] < pairs[:, 1]], dim=0))
        return tuple(reversed(levels))

    def far(self, level: int) -> tuple[Tensor, Tensor]:
        """Coupled pairs of a level: parents of siblings, (B,), and other pairs, (F, 2)."""
        num_parents = 2 ** (level - 1)
        parents = torch.arange(num_parents, device=self.near.device)
        close = self.keys(self._close[level], level)
        siblings = torch.stack([2 * parents, 2 * parents + 1], 1)
        admissible = ~torch.isin(self.keys(siblings, level), close)
        above = self._close[level - 1]
        children = torch.stack(
            [2 * above + above.new_tensor([i, j]) for i in (0, 1) for j in (0, 1)], 1
        ).reshape(-1, 2)
        others = children[~torch.isin(self.keys(children, level), close)]
        return parents[admissible], others

    def is_close(self, level: int, nodes: Tensor) -> Tensor:
        """Which nodes of a level some of them are close to, themselves included, (B, 2^level)."""
        slots = torch.full((2**level,), -1, dtype=torch.long, device=nodes.device)
        slots[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        result = torch.zeros(nodes.numel(), 2**level, dtype=torch.bool, device=nodes.device)
        result[slots[nodes], nodes] = True
        for pairs in (self._close[level], self._close[level].flip(1)):
            own = slots[pairs[:, 0]] >= 0
            result[slots[pairs[own, 0]], pairs[own, 1]] = True
        return result

    @staticmethod
    def keys(pairs: Tensor, level: int) -> Tensor:
        """One number for each pair."""
        number: Tensor = pairs[:, 0] * 2**level + pairs[:, 1]
        return number


def near_leaves(
    source: EntrySource,
    tree: ClusterTree,
    diagonal: Tensor,
    budget: float,
    distance: Distance,
    seed: int,
) -> Interactions:
    """For every leaf, up to a share ``budget`` of the leaves, those with most votes; both ways.

    Every row votes for the leaves of its nearest neighbours.
    """
    num_leaves = 2**tree.depth
    most = min(int(budget * num_leaves), num_leaves - 1)
    if most == 0:
        return Interactions.siblings_only(tree.depth, tree.permutation.device)
    rows = tree.permutation
    bounds = tree.bounds(tree.depth)
    leaf = torch.full((tree.size + 1,), -1, dtype=torch.long, device=rows.device)
    leaf[rows] = torch.repeat_interleave(
        torch.arange(num_leaves, device=rows.device), bounds.diff()
    )
    neighbors, _ = neighbor_lists(
        source, _NEIGHBORS, distance=distance, rows=rows, diagonal=diagonal, seed=seed
    )
    own, other = torch.broadcast_tensors(leaf[rows, None], leaf[neighbors])
    voted = (other >= 0) & (other != own)
    keys, votes = torch.unique(own[voted] * num_leaves + other[voted], return_counts=True)
    voter, candidate = keys // num_leaves, keys % num_leaves
    # Per leaf, the candidates by descending votes; keys break ties.
    order = votes.argsort(descending=True, stable=True)
    order = order[voter[order].argsort(stable=True)]
    voter, candidate = voter[order], candidate[order]
    counts = voter.bincount(minlength=num_leaves)
    place = torch.arange(voter.numel(), device=rows.device) - (counts.cumsum(0) - counts)[voter]
    chosen = torch.stack([voter, candidate], 1)[place < most]
    return Interactions(tree.depth, torch.unique(chosen.sort(dim=1).values, dim=0))
