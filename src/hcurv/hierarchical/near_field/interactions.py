"""Which nodes of a tree interact through bases, and which leaves directly.

Two leaves are *near* if the block between them is stored exactly; a leaf is near to itself. Two
nodes of a level are *close* if they contain leaves that are near, and *far* otherwise. Far nodes
are coupled through their bases on the highest level where they are far, so that their parents are
close. If no leaf is near to another one, siblings are coupled and nothing else, which is the HSS
form. Near leaves are chosen as in GOFMM: they hold most nearest neighbours of the rows of a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.hierarchical.tree.cluster_tree import ClusterTree, Distance
from hcurv.hierarchical.tree.neighbors import neighbor_lists
from hcurv.operators import EntrySource

__all__ = ["Interactions", "near_leaves"]

# Every row votes for the leaves of so many nearest neighbours.
_NEIGHBORS = 16


@dataclass(frozen=True)
class Interactions:
    """Pairs of nodes (a, b), a < b, on the levels of a tree.

    Attributes:
        depth: depth of the tree.
        near: pairs of near leaves, (P, 2), without repetitions.
    """

    depth: int
    near: Tensor

    @cached_property
    def _close(self) -> tuple[Tensor, ...]:
        """Pairs of close nodes for the levels 0, 1, …, depth, without pairs (a, a)."""
        levels = [self.near]
        for _ in range(self.depth):
            pairs = levels[-1] // 2
            levels.append(torch.unique(pairs[pairs[:, 0] < pairs[:, 1]], dim=0))
        return tuple(reversed(levels))

    def dense_pairs(self) -> Tensor:
        """Pairs of near leaves, (P, 2)."""
        return self.near

    def coupled_pairs(self, level: int) -> Tensor:
        """Siblings and other pairs that are coupled on a level, (P, 2)."""
        parents, others = self.far(level)
        return torch.cat([torch.stack([2 * parents, 2 * parents + 1], 1), others])

    def is_excluded(self, level: int, nodes: Tensor, others: Tensor) -> Tensor:
        """Which of ``others`` (B, s) the nodes (B,) are close to, themselves included."""
        return self.is_close(level, nodes).gather(1, others)

    def far(self, level: int) -> tuple[Tensor, Tensor]:
        """Coupled pairs of a level: the parents of siblings, (B,), and other pairs, (F, 2)."""
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
        """Which nodes of a level each of ``nodes`` is close to, itself included, (B, 2^level)."""
        places = torch.full((2**level,), -1, dtype=torch.long, device=nodes.device)
        places[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        result = torch.zeros(nodes.numel(), 2**level, dtype=torch.bool, device=nodes.device)
        result[places[nodes], nodes] = True
        for pairs in (self._close[level], self._close[level].flip(1)):
            is_asked = places[pairs[:, 0]] >= 0
            result[places[pairs[is_asked, 0]], pairs[is_asked, 1]] = True
        return result

    @staticmethod
    def keys(pairs: Tensor, level: int) -> Tensor:
        """One number for each pair of nodes."""
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
    """Choose near leaves: for every leaf those that get most votes from its rows.

    Every row votes for the leaves of its nearest neighbours. Leaves are near if one of them chose
    the other.

    Args:
        source: the matrix.
        tree: clusters of its rows.
        diagonal: its diagonal.
        budget: largest share of the leaves that a leaf may choose.
        distance: distance of nearest neighbours.
        seed: seed of the search for neighbours.
    """
    num_leaves = 2**tree.depth
    most = min(int(budget * num_leaves), num_leaves - 1)
    rows = tree.permutation
    if most == 0:
        return Interactions(tree.depth, rows.new_zeros(0, 2))
    bounds = tree.bounds(tree.depth)
    leaf = torch.full((tree.size + 1,), -1, dtype=torch.long, device=rows.device)
    leaf[rows] = torch.repeat_interleave(
        torch.arange(num_leaves, device=rows.device), bounds.diff()
    )
    neighbors, _ = neighbor_lists(
        source, _NEIGHBORS, distance=distance, rows=rows, diagonal=diagonal, seed=seed
    )
    voters, candidates = torch.broadcast_tensors(leaf[rows, None], leaf[neighbors])
    is_vote = (candidates >= 0) & (candidates != voters)
    keys = voters[is_vote] * num_leaves + candidates[is_vote]
    keys, votes = torch.unique(keys, return_counts=True)
    voter, candidate = keys // num_leaves, keys % num_leaves
    # Per leaf, the candidates by descending votes; keys break ties.
    order = votes.argsort(descending=True, stable=True)
    order = order[voter[order].argsort(stable=True)]
    voter, candidate = voter[order], candidate[order]
    counts = voter.bincount(minlength=num_leaves)
    place = torch.arange(voter.numel(), device=rows.device) - (counts.cumsum(0) - counts)[voter]
    chosen = torch.stack([voter, candidate], 1)[place < most]
    return Interactions(tree.depth, torch.unique(chosen.sort(dim=1).values, dim=0))
