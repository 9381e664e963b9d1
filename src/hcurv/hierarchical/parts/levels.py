"""The parts of a hierarchical matrix: leaf blocks, nested bases, couplings; what each one does.

Vectors are carried from level to level. On the lowest, a vector has one row per kept row of the
matrix, in tree order; on level ℓ it has one row per skeleton row of the nodes of ℓ. One further
row, always zero, is what padded indices point to. Nodes are batched by shape, so that the number of
operations grows with the number of levels and shapes, not of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Basis",
    "Coupling",
    "LeafBlocks",
    "Level",
    "identity_bases",
    "put_rows",
    "row_table",
    "take_rows",
]


def row_table(starts: Tensor, counts: Tensor, width: int, padding: int) -> Tensor:
    """Return the positions start, start + 1, … of each node's rows, (B, width), padded."""
    places = torch.arange(width, device=starts.device)
    table = starts[:, None] + places
    return table.masked_fill(places >= counts[:, None], padding)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return rows of ``values`` (size + 1, k) by an index table (B, m), as (B, m, k)."""
    return values.index_select(0, index.reshape(-1)).view(*index.shape, values.shape[1])


def put_rows(values: Tensor, index: Tensor, rows: Tensor) -> None:
    """Set rows of ``values`` (size + 1, k) by an index table (B, m) to ``rows`` (B, m, k)."""
    values.index_copy_(0, index.reshape(-1), rows.flatten(0, 1))


@dataclass(frozen=True)
class LeafBlocks:
    """Diagonal blocks of all leaves, in their order.

    Attributes:
        rows: positions in tree order, (2^depth, m).
        values: symmetric blocks, (2^depth, m, m).
    """

    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, bounds: Tensor, values: Tensor) -> LeafBlocks:
        """Return the blocks of leaves that begin and end at ``bounds``."""
        counts = bounds.diff()
        return cls(row_table(bounds[:-1], counts, values.shape[1], int(bounds[-1])), values)

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.values.numel()

    def add_product(self, inputs: Tensor, outputs: Tensor, scale: float = 1.0) -> None:
        """Add the blocks, scaled, times ``inputs`` to ``outputs``."""
        rows = take_rows(outputs, self.rows)
        rows.baddbmm_(self.values, take_rows(inputs, self.rows), alpha=scale)
        put_rows(outputs, self.rows, rows)


@dataclass(frozen=True)
class Basis:
    """Interpolation from the skeleton rows of nodes to all of their rows.

    Attributes:
        nodes: the nodes, (B,).
        skeleton: positions of the skeleton rows on the level below, (B, r).
        rest: positions of the other rows on the level below, (B, m).
        target: positions of the skeleton rows on this level, (B, r).
        weights: rows ``rest`` from rows ``skeleton``, (B, m, r); the identity between skeleton
            rows and themselves is not stored.
    """

    nodes: Tensor
    skeleton: Tensor
    rest: Tensor
    target: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls, nodes: Tensor, ranks: Tensor, skeleton: Tensor, rest: Tensor, weights: Tensor
    ) -> Basis:
        """Return the bases of some nodes, given the ranks of all nodes of their level."""
        starts = ranks.cumsum(0) - ranks
        target = row_table(starts[nodes], ranks[nodes], weights.shape[2], int(ranks.sum()))
        return cls(nodes, skeleton, rest, target, weights)

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.weights.numel()

    def gather(self, below: Tensor, here: Tensor) -> None:
        """Set the nodes' rows of ``here`` to Pᵀ times those of ``below``."""
        rows = take_rows(below, self.skeleton)
        rows.baddbmm_(self.weights.transpose(1, 2), take_rows(below, self.rest))
        put_rows(here, self.target, rows)

    def spread(self, here: Tensor, below: Tensor) -> None:
        """Set the nodes' rows of ``below`` to P times those of ``here``."""
        rows = take_rows(here, self.target)
        put_rows(below, self.skeleton, rows)
        put_rows(below, self.rest, self.weights @ rows)


@dataclass(frozen=True)
class Coupling:
    """Blocks between the rows of pairs of nodes: their skeletons, or all rows of two leaves.

    Attributes:
        pairs: the nodes, (B, 2).
        left: positions of the first nodes' rows, (B, p).
        right: positions of the second nodes', (B, q).
        values: the blocks, (B, p, q).
        disjoint: whether no node is in two pairs.
    """

    pairs: Tensor
    left: Tensor
    right: Tensor
    values: Tensor
    disjoint: bool

    @classmethod
    def of(cls, pairs: Tensor, counts: Tensor, values: Tensor) -> Coupling:
        """Return the blocks of some pairs of nodes, given the row counts of all their level."""
        starts, size = counts.cumsum(0) - counts, int(counts.sum())
        left, right = (
            row_table(starts[nodes], counts[nodes], width, size)
            for nodes, width in zip(pairs.T, values.shape[1:], strict=True)
        )
        return cls(pairs, left, right, values, pairs.unique().numel() == pairs.numel())

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        return self.values.numel()

    def add_product(self, inputs: Tensor, outputs: Tensor, scale: float = 1.0) -> None:
        """Add the blocks, both ways and scaled, times ``inputs`` to ``outputs``."""
        transposed = self.values.transpose(1, 2)
        left, right = take_rows(inputs, self.left), take_rows(inputs, self.right)
        for rows, values, other in (
            (self.left, self.values, right),
            (self.right, transposed, left),
        ):
            if self.disjoint:
                own = take_rows(outputs, rows)
                put_rows(outputs, rows, own.baddbmm_(values, other, alpha=scale))
            else:
                product = (values @ other).flatten(0, 1)
                outputs.index_add_(0, rows.reshape(-1), product, alpha=scale)
                outputs[-1] = 0.0


@dataclass(frozen=True)
class Level:
    """All nodes of one level below the root.

    Attributes:
        ranks: skeleton rows of each node, (2^ℓ,).
        size_below: rows of a vector on the level below.
        bases: of nodes of positive rank, by shape.
        couplings: of pairs of nodes of positive rank, by shape; these are siblings in HSS form.
    """

    ranks: Tensor
    size_below: int
    bases: tuple[Basis, ...]
    couplings: tuple[Coupling, ...]

    @property
    def size(self) -> int:
        """Number of rows of a vector on this level."""
        return int(self.ranks.sum())

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        bases = sum(basis.num_stored for basis in self.bases)
        return bases + sum(coupling.num_stored for coupling in self.couplings)

    def gather(self, below: Tensor) -> Tensor:
        """Return Pᵀ times a vector of the level below."""
        here = below.new_zeros(self.size + 1, below.shape[1])
        for basis in self.bases:
            basis.gather(below, here)
        return here

    def spread(self, here: Tensor) -> Tensor:
        """Return P times a vector of this level."""
        below = here.new_zeros(self.size_below + 1, here.shape[1])
        for basis in self.bases:
            basis.spread(here, below)
        return below

    def add_couplings(self, inputs: Tensor, outputs: Tensor, scale: float = 1.0) -> None:
        """Add the couplings, scaled, times ``inputs`` to ``outputs``."""
        for coupling in self.couplings:
            coupling.add_product(inputs, outputs, scale)


def identity_bases(ranks: Tensor, dtype: torch.dtype) -> tuple[Basis, ...]:
    """Bases of nodes whose rows are all in their skeletons, (nodes,)."""
    nodes = ranks.nonzero().squeeze(1)
    if nodes.numel() == 0:
        return ()
    starts, width = ranks.cumsum(0) - ranks, int(ranks.max())
    table = row_table(starts[nodes], ranks[nodes], width, int(ranks.sum()))
    weights = torch.zeros(nodes.numel(), 0, width, dtype=dtype, device=ranks.device)
    return (Basis(nodes, table, table[:, :0], table, weights),)
