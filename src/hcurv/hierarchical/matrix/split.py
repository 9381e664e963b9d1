"""The part of a whole matrix that a rank has, picked from files one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hcurv.hierarchical.matrix import storage
from hcurv.hierarchical.matrix.distributed import DistributedHMatrix, make_top
from hcurv.hierarchical.matrix.file_format import FLOAT_TYPES, make_tree
from hcurv.hierarchical.matrix.hmatrix import BuildRecord, HMatrix
from hcurv.hierarchical.matrix.sharding import level_offsets
from hcurv.hierarchical.parts.levels import (
    Basis,
    Coupling,
    LeafBlocks,
    Level,
    identity_bases,
)
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.ranks import OneRank

__all__ = ["OwnPart", "own_part"]


@dataclass
class OwnPart:
    """What a rank has of a matrix, in the numbering of the whole tree.

    Attributes:
        description: of the whole matrix.
        tree: its tree.
        nodes: the own nodes and rows.
        tensors: by name, as in `storage`, with the own nodes alone on levels below the cut.
    """

    description: Mapping[str, Any]
    tree: ClusterTree
    nodes: NodeShare
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return FLOAT_TYPES[self.description["dtype"]]

    @property
    def record(self) -> BuildRecord:
        """How the matrix was built."""
        return storage.make_record(self.description["record"])

    def matrix(self) -> DistributedHMatrix:
        """The matrix; all ranks have to ask for it."""
        tree, nodes, dtype = self.tree, self.nodes, self.dtype
        device, part = tree.permutation.device, None
        if "global.factor" in self.tensors:
            part = SharedPart(nodes.share, self.tensors["global.factor"], tree.size)
        if nodes.cut is None:
            parts = storage.matrix_parts(
                self.description, {k: v for k, v in self.tensors.items() if "global" not in k}
            )
            top = HMatrix(**{**parts, "record": None})
            return DistributedHMatrix(
                tree,
                top.leaves,
                (),
                self.record,
                dtype,
                part,
                nodes=nodes,
                node_ranks=(),
                top=top,
                num_tree_floats=top.num_stored,
            )
        node_ranks = tuple(
            self.tensors[f"levels.{number}.ranks"] for number in range(tree.depth - nodes.cut + 1)
        )
        levels = tuple(self._own_level(number, node_ranks) for number in range(len(node_ranks)))
        top = make_top(self._top_levels(len(node_ranks) - 1), dtype, device)
        leaves = LeafBlocks.of(nodes.leaf_bounds(tree), self.tensors["leaves.values"])
        own = leaves.num_stored + sum(level.num_stored for level in levels)
        return DistributedHMatrix(
            tree,
            leaves,
            levels,
            self.record,
            dtype,
            part,
            nodes=nodes,
            node_ranks=node_ranks,
            top=top,
            num_tree_floats=int(nodes.share.total(torch.tensor([own]))) + top.num_stored,
        )

    def _own_level(self, number: int, node_ranks: tuple[Tensor, ...]) -> Level:
        """A level of own nodes, in their own numbering."""
        nodes, depth = self.nodes, self.tree.depth - number
        offsets = level_offsets(nodes, self.tree.depth, node_ranks, number)
        first = nodes.first(depth)
        ranks = node_ranks[number][first : first + nodes.num_nodes(depth)]
        num_bases, num_couplings, *_ = self.description["levels"][number]
        bases, couplings = [], []
        for place in range(num_bases):
            name = f"levels.{number}.bases.{place}"
            skeleton, rest = (
                offsets.to_own(self.tensors[f"{name}.{part}"]) for part in ("skeleton", "rest")
            )
            members = self.tensors[f"{name}.nodes"] - first
            weights = self.tensors[f"{name}.weights"]
            bases.append(Basis.of(members, ranks, skeleton, rest, weights))
        for place in range(num_couplings if depth != nodes.cut else 0):
            name = f"levels.{number}.couplings.{place}"
            pairs = self.tensors[f"{name}.pairs"] - first
            couplings.append(Coupling.of(pairs, ranks, self.tensors[f"{name}.values"]))
        return Level(ranks, offsets.num_below, tuple(bases), tuple(couplings))

    def _top_levels(self, cut_number: int) -> tuple[Level, ...]:
        """The levels from the cut level up."""
        found: list[Level] = []
        described = self.description["levels"]
        for number in range(cut_number, len(described)):
            name, counts = f"levels.{number}", described[number]
            if found:
                found.append(storage.read_level(self.tensors, name, counts, found[-1].size))
                continue
            # On the cut level, skeletons are all rows, and bases belong to the ranks.
            level = storage.read_level(self.tensors, name, (0, counts[1]), 0)
            bases = identity_bases(level.ranks, self.dtype)
            found.append(Level(level.ranks, level.size, bases, level.couplings))
        return tuple(found)


def own_part(
    description: Mapping[str, Any],
    shards: Iterable[tuple[int, Mapping[str, Tensor]]],
    ranks: OneRank,
) -> OwnPart:
    """Pick the part of a rank from files, one after the other.

    Args:
        description: of the whole matrix.
        shards: the number of the first leaf, and the tensors, of each file. The first file holds
            what belongs to no subtree.
        ranks: the ranks.
    """
    result: OwnPart | None = None
    picked: dict[str, list[Tensor]] = {}
    for first_leaf, tensors in shards:
        if result is None:
            result = _started(description, tensors, ranks)
            common = ("permutation", *(n for n in tensors if n.endswith(".ranks")))
            result.tensors |= {name: tensors[name] for name in common}
        for name, tensor in _own(result, tensors, first_leaf).items():
            picked.setdefault(name, []).append(tensor)
    assert result is not None
    result.tensors |= {name: torch.cat(parts) for name, parts in picked.items()}
    if "global.rows" in result.tensors:
        _order_global(result)
    return result


def _started(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: OneRank
) -> OwnPart:
    tree = make_tree(description, tensors)
    depth = tree.depth if tree.num_kept else None
    rows = tree.permutation if tree.num_kept else tensors["rows"]
    share = RowShare(rows, ranks, None, depth)
    return OwnPart(description, tree, NodeShare.of_tree(share, tree))


def _own(part: OwnPart, tensors: Mapping[str, Tensor], first_leaf: int) -> dict[str, Tensor]:
    """Those of the tensors of a file that this rank needs, without the parts of other nodes."""
    nodes, depth = part.nodes, part.tree.depth
    found: dict[str, Tensor] = {}
    if "global.rows" in tensors:
        is_own = torch.isin(tensors["global.rows"], nodes.share.own_rows)
        found["global.rows"] = tensors["global.rows"][is_own]
        found["global.factor"] = tensors["global.factor"][is_own]
    if "leaves.values" in tensors:
        values = tensors["leaves.values"]
        first = max(0, nodes.first(depth) - first_leaf)
        last = max(first, nodes.first(depth) + nodes.num_nodes(depth) - first_leaf)
        found["leaves.values"] = values if nodes.cut is None else values[first:last]
    for name, tensor in tensors.items():
        if not name.endswith((".nodes", ".pairs")):
            continue
        group = name.rpartition(".")[0]
        level = depth - int(group.split(".")[1])
        members = tensor if tensor.ndim == 1 else tensor[:, 0]
        is_own = torch.ones_like(members, dtype=torch.bool)
        is_top = nodes.cut is None or level < nodes.cut
        if not is_top and not (level == nodes.cut and tensor.ndim == 2):
            start = nodes.first(level)
            is_own = (members >= start) & (members < start + nodes.num_nodes(level))
        for other, values in tensors.items():
            if other.rpartition(".")[0] == group:
                found[other] = values[is_own]
    return found


def _order_global(part: OwnPart) -> None:
    """Bring the own rows of V into the order of the own rows."""
    share, rows = part.nodes.share, part.tensors.pop("global.rows")
    factor = part.tensors.pop("global.factor")
    places = share.rows.new_full((part.tree.size,), -1)
    places[share.own_rows] = torch.arange(share.num_own, device=rows.device)
    ordered = factor.new_zeros(share.num_own, factor.shape[1])
    ordered[places[rows]] = factor
    part.tensors["global.factor"] = ordered
