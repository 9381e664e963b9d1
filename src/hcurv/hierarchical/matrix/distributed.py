"""DistributedHMatrix: an HMatrix whose subtrees lie on different ranks.

A tree is cut at a level with at least as many nodes as there are ranks. Each rank has some of these
nodes with everything below them: rows of vectors, leaf blocks, bases and couplings. The couplings
of the cut level and everything above are small, and on all ranks. So a product goes up the own
subtrees, exchanges the skeleton rows of the cut level, and comes down again: one message, whose
length does not grow with N. Of a global part V Vᵀ each rank has its own rows of V.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor

from hcurv.damping import DeviceLike
from hcurv.factorized import check_float_type
from hcurv.hierarchical.matrix import elements
from hcurv.hierarchical.matrix.hmatrix import BuildRecord, HMatrix
from hcurv.hierarchical.parts.levels import LeafBlocks, Level
from hcurv.hierarchical.parts.nested_tensors import map_tensors, tensors_of
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, SubtreeForest
from hcurv.operators import EntrySource

__all__ = ["DistributedHMatrix", "make_top"]

# As in `hmatrix`: vectors are taken some columns at a time.
_COLUMN_FLOATS = 2**23


class DistributedHMatrix(HMatrix):
    """A compressed symmetric matrix that is spread over ranks. `hcurv.compress` makes it.

    Every rank has to make the same calls in the same order, with the same arguments, and gets the
    same results. Vectors are whole on every rank; `own_product` takes and returns own rows.

    Attributes:
        tree: order and clusters of all rows.
        nodes: which nodes are those of this rank, and which rows.
        leaves: diagonal blocks of this rank.
        levels: bases and couplings of this rank, from the level of the leaves to the cut level,
            where there are no couplings. None if the tree has too few leaves to be cut.
        node_ranks: the ranks of all nodes of these levels.
        top: the couplings of the cut level and the levels above it, as a matrix over the skeleton
            rows of the cut level; or all of the tree, if that has too few leaves to be cut.
        global_part: the own rows of V, or None.
    """

    nodes: NodeShare

    def __init__(
        self,
        tree: ClusterTree,
        leaves: LeafBlocks,
        levels: tuple[Level, ...],
        record: BuildRecord | None,
        dtype: torch.dtype,
        global_part: SharedPart | None = None,
        *,
        nodes: NodeShare,
        node_ranks: tuple[Tensor, ...],
        top: HMatrix,
        num_tree_floats: int,
    ) -> None:
        super().__init__(tree, leaves, levels, record, dtype)
        self.global_part: SharedPart | None = global_part  # type: ignore[assignment]
        self.nodes, self.node_ranks, self.top = nodes, node_ranks, top
        self._num_tree_floats = num_tree_floats

    def __repr__(self) -> str:
        """Size, storage, error and rank in one line."""
        ranks = self.share.ranks
        text = super().__repr__().removeprefix("HMatrix(").removesuffix(")")
        return f"DistributedHMatrix({text}, rank={ranks.rank} of {ranks.size})"

    @property
    def share(self) -> RowShare:
        """The rows that are not zero, and which of them are this rank's."""
        return self.nodes.share

    @property
    def own_rows(self) -> Tensor:
        """The rows of the matrix that this rank has, in the order of `own_product`, (m,).

        Rows of zeros belong to no rank.
        """
        return self.share.own_rows

    @property
    def num_stored(self) -> int:
        """Number of stored floats, with padding, of all ranks together.

        What all ranks have is counted once.
        """
        shared = 0 if self.global_part is None else self.share.num_rows * self.global_part.rank
        return self._num_tree_floats + shared

    @property
    def num_own_stored(self) -> int:
        """Number of floats that this rank stores."""
        own = 0 if self.global_part is None else self.global_part.num_stored
        return own + self.top.num_stored + (self._num_own_tree if self.nodes.is_shared else 0)

    @property
    def _num_own_tree(self) -> int:
        return self.leaves.num_stored + sum(level.num_stored for level in self.levels)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all floats and indices that this rank stores."""
        factor = 0 if self.global_part is None else self.global_part.factor.nbytes
        own = tensors_of((self.leaves, self.levels)) if self.nodes.is_shared else []
        own += [self.tree.permutation, *self.node_ranks]
        return factor + sum(t.untyped_storage().nbytes() for t in own) + self.top.nbytes

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """Ranks of all nodes of each level, from the two below the root down to the leaves."""
        lower = self.node_ranks[:-1] if self.nodes.is_shared else ()
        return (*self.top.ranks, *reversed(lower))

    @property
    def own_matrix(self) -> HMatrix:
        """The subtrees of this rank as a matrix, whose rows of other ranks are zero."""
        bounds = self.nodes.leaf_bounds(self.tree)
        depth = len(self.levels)
        forest = SubtreeForest(self.shape[0], self.own_rows, depth, "given", {}, bounds)
        return HMatrix(forest, self.leaves, self.levels, None, self.dtype)

    @property
    def cut_counts(self) -> list[int]:
        """How many rows each rank gives to `top`."""
        if not self.nodes.is_shared:
            return self.share.counts
        assert self.nodes.cut is not None
        return self.nodes.row_counts(self.node_ranks[-1], self.nodes.cut)

    def own_product(self, own: Tensor) -> Tensor:
        """The own rows of the product with a matrix (N, k), from the own rows of it, (m, k).

        The order of the rows is that of `own_rows`.
        """
        result = self._own_tree_product(own)
        return result if self.global_part is None else result + self.global_part.own_product(own)

    def _matmat(self, rhs: Tensor) -> Tensor:
        own = self.own_product(rhs[self.own_rows])
        return self.share.spread(self.share.whole(own), self.shape[0])

    def _own_tree_product(self, own: Tensor) -> Tensor:
        """Multiply by what the tree stores, some columns at a time."""
        result = torch.zeros_like(own, memory_format=torch.contiguous_format)
        step = max(1, _COLUMN_FLOATS // (self.share.num_rows + 1))
        for start in range(0, own.shape[1] if self.tree.num_kept else 0, step):
            columns = slice(start, start + step)
            result[:, columns] = self._apply(padded(own[:, columns]))[:-1]
        return result

    def _apply(self, inputs: Tensor) -> Tensor:
        """Multiply in tree order: up the own subtrees, all of the top, and down again."""
        levels = self.levels if self.nodes.is_shared else ()
        gathered = [inputs]
        for level in levels:
            gathered.append(level.gather(gathered[-1]))
        whole, own = self.exchange(gathered[-1])
        outputs = padded(self.top._apply(whole)[own])
        for level, values in zip(reversed(levels), reversed(gathered), strict=False):
            level.add_couplings(values, outputs)
            outputs = level.spread(outputs)
        if levels:
            self.leaves.add_product(inputs, outputs)
        return outputs

    def exchange(self, own: Tensor) -> tuple[Tensor, slice]:
        """Vectors of the top on every rank, from those of each rank, with a last row of zeros.

        Returns:
            The vectors, and which of their rows are this rank's.
        """
        counts, ranks = self.cut_counts, self.share.ranks
        start = sum(counts[: ranks.rank])
        whole = padded(ranks.collect(own[:-1], counts))
        return whole, slice(start, start + counts[ranks.rank])

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,)."""
        if not self.nodes.is_shared:
            result = self.top.diagonal()
        else:
            ordered = torch.zeros(self.share.num_own + 1, dtype=self.dtype, device=self.device)
            ordered[self.leaves.rows] = self.leaves.values.diagonal(dim1=1, dim2=2)
            whole = self.share.whole(ordered[:-1, None])[:, 0]
            result = whole.new_zeros(self.shape[0]).index_copy_(0, self.share.rows, whole)
        return result if self.global_part is None else result + self.global_part.diagonal()

    def _tree_block(self, rows: Tensor, cols: Tensor) -> Tensor:
        if not self.nodes.is_shared:
            return self.top._tree_block(rows, cols)
        own = self.own_matrix
        values = self.share.total(elements.block(own, rows, cols))
        elements.add_coupled(self.top, self._top_paths(rows), self._top_paths(cols), values)
        return values

    def _tree_pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        if not self.nodes.is_shared:
            return self.top._tree_pairs(rows, cols)
        values = self.share.total(elements.pairs(self.own_matrix, rows, cols))
        elements.add_coupled_pairs(self.top, self._top_paths(rows), self._top_paths(cols), values)
        return values

    def _top_paths(self, rows: Tensor) -> list[elements.Path]:
        """Coefficients of some rows on the levels of the top, on every rank."""
        own, cut = self.own_matrix, self.nodes.cut
        assert cut is not None
        leaf = elements.locate(own, rows)
        found = elements.leaf_paths(own, leaf)[-1]
        is_own = found.nodes >= 0
        width = int(self.node_ranks[-1].max()) if self.node_ranks[-1].numel() else 0
        # The node of each row, plus one, and its coefficients; zeros for rows of other ranks.
        values = found.vectors.new_zeros(rows.numel(), width + 1)
        # Bases of all ranks are padded alike, so that a rank may have more columns than it needs.
        values[:, 1 : found.vectors.shape[1] + 1] = found.vectors[:, :width]
        values[:, 0] = found.nodes + self.nodes.first(cut) + 1
        values = self.share.total(values.masked_fill_(~is_own[:, None], 0.0))
        nodes = values[:, 0].long() - 1
        local = torch.arange(width, device=rows.device).expand(rows.numel(), -1)
        return elements.paths(self.top, nodes, local, values[:, 1:])

    def gather(self) -> HMatrix:
        """Return the whole matrix as an ordinary one, on every rank.

        It is the one that one process would have built.
        """
        part = None if self.global_part is None else self.global_part.gathered()
        whole = self.top
        if self.nodes.is_shared:
            leaves, levels = self._gathered_tree()
            whole = HMatrix(self.tree, leaves, levels, None, self.dtype)
        result = HMatrix(self.tree, whole.leaves, whole.levels, self._record, self.dtype, part)
        return result.with_layout(self.layout)

    def _gathered_tree(self) -> tuple[LeafBlocks, tuple[Level, ...]]:
        from hcurv.hierarchical.matrix.sharding import gathered_tree

        return gathered_tree(self)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> HMatrix:
        """Return this matrix on another device or in another precision."""
        check_float_type(dtype)
        dtype = self.dtype if dtype is None else dtype

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        share = RowShare(move(self.share.rows), self.share.ranks, self.share.bounds)
        names = ("tree", "leaves", "levels", "node_ranks")
        parts = {name: map_tensors(move, getattr(self, name)) for name in names}
        part = self.global_part
        moved = None if part is None else SharedPart(share, move(part.factor), part.size)
        return self._with(
            **parts,
            nodes=NodeShare(share, self.nodes.cut),
            top=self.top.to(device, dtype),
            global_part=moved,
            dtype=dtype,
        )

    def refresh(self, matrix: EntrySource | Tensor, seed: int = 0) -> NoReturn:
        """Refuse: this is for matrices of one process."""
        raise ValueError("a matrix on several ranks is not refreshed: compress again, or gather it")

    def plot(self, max_levels: int = 6) -> NoReturn:
        """Refuse: this is for matrices of one process."""
        raise ValueError("a matrix on several ranks is not drawn: use A.gather().plot()")

    def with_leaves(self, leaves: LeafBlocks) -> HMatrix:
        """Return this matrix with other diagonal blocks of this rank."""
        if self.nodes.is_shared:
            return self._with(leaves=leaves)
        return self._with(leaves=leaves, top=self.top.with_leaves(leaves))

    def _parts(self) -> dict[str, Any]:
        return {
            **super()._parts(),
            "nodes": self.nodes,
            "node_ranks": self.node_ranks,
            "top": self.top,
            "num_tree_floats": self._num_tree_floats,
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write this matrix to a folder, one file for each rank, which `hcurv.load` reads.

        The files can be read by any number of ranks. A folder that was written before is replaced
        once the new files are complete.
        """
        from hcurv.hierarchical.matrix.sharded_files import save_shards

        save_shards(self, path)


def padded(values: Tensor) -> Tensor:
    """Values with a last row of zeros."""
    return torch.cat([values, values.new_zeros(1, values.shape[1])])


def make_top(levels: tuple[Level, ...], dtype: torch.dtype, device: torch.device) -> HMatrix:
    """The levels that are on every rank, as a matrix over the skeleton rows of the cut level.

    Its leaf blocks are empty.
    """
    ranks = levels[0].ranks
    bounds = torch.cat([ranks.new_zeros(1), ranks.cumsum(0)])
    size = int(bounds[-1])
    rows = torch.arange(size, device=device)
    tree = SubtreeForest(size, rows, len(levels), "given", {}, bounds)
    none = torch.zeros(ranks.numel(), 0, 0, dtype=dtype, device=device)
    return HMatrix(tree, LeafBlocks.of(bounds, none), levels, None, dtype)
