"""Which blocks of a matrix are stored dense, and which ones through the bases of two nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BlockPattern", "SiblingPattern"]


class BlockPattern(Protocol):
    """Covers every pair of different leaves once: by a dense block, or by a coupling above them.

    The blocks of the leaves with themselves are always dense.
    """

    def dense_pairs(self) -> Tensor:
        """Pairs of different leaves whose block is stored dense, (P, 2)."""

    def coupled_pairs(self, level: int) -> Tensor:
        """Pairs of nodes of a level that are coupled through their bases, (P, 2)."""

    def is_excluded(self, level: int, nodes: Tensor, others: Tensor) -> Tensor:
        """Which nodes the basis of a node has nothing to do with on this level and above.

        Args:
            level: level of all nodes.
            nodes: numbers of some nodes, (B,).
            others: numbers of nodes to compare each of them with, (B, s).

        Returns:
            A mask, (B, s). A node always excludes itself.
        """


@dataclass(frozen=True)
class SiblingPattern:
    """The HSS pattern: siblings are coupled on every level, and only leaves are dense.

    Attributes:
        device: where the pairs live.
    """

    device: torch.device

    def dense_pairs(self) -> Tensor:
        """No pair of different leaves is dense, (0, 2)."""
        return torch.zeros(0, 2, dtype=torch.long, device=self.device)

    def coupled_pairs(self, level: int) -> Tensor:
        """All pairs of siblings, (2^(level − 1), 2)."""
        return torch.arange(2**level, device=self.device).view(-1, 2)

    def is_excluded(self, level: int, nodes: Tensor, others: Tensor) -> Tensor:
        """Whether ``others`` (B, s) are the nodes (B,) themselves."""
        return others == nodes[:, None]
