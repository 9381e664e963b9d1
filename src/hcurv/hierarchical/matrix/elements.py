"""Entries of a compressed matrix: A[i, j] = u_iᵀ B u_j on the level where i and j part.

u_i is row i of the product of the bases from its leaf up to that level. Only the nodes on the way
are touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Coupling, Level

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = [
    "LeafRows",
    "Path",
    "add_coupled",
    "add_coupled_pairs",
    "block",
    "find_pairs",
    "leaf_paths",
    "locate",
    "pairs",
    "paths",
]

# Pairs of rows and columns are evaluated this many at a time, which bounds the memory.
_PAIRS = 2**14
# Bases and couplings are copied in batches of at most this many floats.
_GATHERED = 2**22


class Path(NamedTuple):
    """Nodes and coefficients of some rows on one level."""

    nodes: Tensor  # (P,)
    vectors: Tensor  # (P, largest rank)


class LeafRows(NamedTuple):
    """Where rows lie in their leaves; node -1 for a zero row."""

    nodes: Tensor  # (P,)
    local: Tensor  # (P,)


def pairs(matrix: HMatrix, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the entries A[rows[k], cols[k]], without the global part."""
    result = torch.zeros(rows.numel(), dtype=matrix.dtype, device=matrix.device)
    for start in range(0, rows.numel(), _PAIRS):
        part = slice(start, start + _PAIRS)
        row_leaf, col_leaf = locate(matrix, rows[part]), locate(matrix, cols[part])
        values = _same_leaf(matrix, row_leaf, col_leaf)
        row_paths = leaf_paths(matrix, row_leaf)
        col_paths = leaf_paths(matrix, col_leaf)
        add_coupled_pairs(matrix, row_paths, col_paths, values)
        result[part] = values
    return result


def add_coupled_pairs(
    matrix: HMatrix, row_paths: list[Path], col_paths: list[Path], values: Tensor
) -> None:
    """Add what couplings contribute to the entries of pairs of rows and columns."""
    for level, row, col in zip(matrix.levels, row_paths, col_paths, strict=True):
        for coupling in level.couplings:
            index, coupled = _couple(coupling, level.ranks.numel(), row.nodes, col)
            values[index] += torch.linalg.vecdot(row.vectors[index], coupled)


def block(matrix: HMatrix, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the block A[rows, cols] of an HSS matrix, without the global part."""
    result = torch.zeros(rows.numel(), cols.numel(), dtype=matrix.dtype, device=matrix.device)
    row_leaf, col_leaf = locate(matrix, rows), locate(matrix, cols)
    # Cells of a common leaf, a strip of rows at a time.
    for start in range(0, rows.numel(), 256):
        nodes = row_leaf.nodes[start : start + 256, None]
        row, col = ((nodes == col_leaf.nodes) & (nodes >= 0)).nonzero(as_tuple=True)
        row += start
        result[row, col] = _same_leaf(
            matrix,
            LeafRows(row_leaf.nodes[row], row_leaf.local[row]),
            LeafRows(col_leaf.nodes[col], col_leaf.local[col]),
        )
    add_coupled(matrix, leaf_paths(matrix, row_leaf), leaf_paths(matrix, col_leaf), result)
    return result


def add_coupled(
    matrix: HMatrix, row_paths: list[Path], col_paths: list[Path], result: Tensor
) -> None:
    """Add what couplings of siblings contribute to a block of rows and columns."""
    for level, row_path, col_path in zip(matrix.levels, row_paths, col_paths, strict=True):
        coupled = torch.zeros_like(col_path.vectors)
        siblings = torch.where(col_path.nodes >= 0, col_path.nodes ^ 1, -1)
        for coupling in level.couplings:
            index, values = _couple(coupling, level.ranks.numel(), siblings, col_path)
            coupled[index] = values
        meet = ((row_path.nodes ^ 1)[:, None] == col_path.nodes) & (row_path.nodes >= 0)[:, None]
        result += (row_path.vectors @ coupled.T).masked_fill_(~meet, 0.0)


def locate(matrix: HMatrix, index: Tensor) -> LeafRows:
    """Return the leaves that rows of the matrix belong to, and their places there."""
    tree = matrix.tree
    inverse = torch.full((tree.size,), -1, dtype=torch.long, device=index.device)
    inverse[tree.permutation] = torch.arange(tree.permutation.numel(), device=index.device)
    positions = inverse[index]
    bounds = tree.bounds(tree.depth)
    nodes = torch.searchsorted(bounds[1:].contiguous(), positions, right=True)
    zero = positions < 0
    nodes = nodes.clamp(max=bounds.numel() - 2)
    return LeafRows(nodes.masked_fill(zero, -1), (positions - bounds[nodes]).masked_fill(zero, 0))


def _same_leaf(matrix: HMatrix, rows: LeafRows, cols: LeafRows) -> Tensor:
    result = torch.zeros(rows.nodes.numel(), dtype=matrix.dtype, device=matrix.device)
    inside = (rows.nodes == cols.nodes) & (rows.nodes >= 0)
    index = inside.nonzero().squeeze(1)
    result[index] = matrix.leaves.values[rows.nodes[index], rows.local[index], cols.local[index]]
    return result


def _slots(nodes: Tensor, num_nodes: int) -> Tensor:
    """Return the place of every node in a batch, or -1 if the batch does not hold it."""
    slots = torch.full((num_nodes,), -1, dtype=torch.long, device=nodes.device)
    slots[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    return slots


def leaf_paths(matrix: HMatrix, leaf: LeafRows) -> list[Path]:
    """Return the coefficients of some rows on every level, from the leaves up."""
    local = leaf.local[:, None]
    return paths(matrix, leaf.nodes, local, torch.ones_like(local, dtype=matrix.dtype))


def paths(matrix: HMatrix, nodes: Tensor, local: Tensor, vectors: Tensor) -> list[Path]:
    """Return the coefficients of combinations of rows on every level, from the leaves up.

    Args:
        matrix: A.
        nodes: leaves, (P,); −1 for none.
        local: places of rows in these leaves, (P, k).
        vectors: their coefficients, (P, k).
    """
    if not matrix.levels:
        return []
    result: list[Path] = []
    starts = matrix.tree.bounds(matrix.tree.depth)[:-1]
    for level in matrix.levels:
        # A vector on the level below is at most as long as the node has rows there: `local` are
        # the places of its components within the node, `vectors` their values.
        vectors = _climb(level, nodes, starts, local, vectors)
        result.append(Path(nodes, vectors))
        offsets = level.ranks.cumsum(0) - level.ranks
        # Within the parent, a left child's skeleton comes first.
        siblings = (nodes ^ 1).clamp(0, level.ranks.numel() - 1)
        shift = torch.where(nodes % 2 == 1, level.ranks[siblings], 0)
        local = shift[:, None] + torch.arange(vectors.shape[1], device=nodes.device)
        nodes = torch.where(nodes >= 0, nodes // 2, -1)
        starts = offsets[::2]
    return result


def _climb(level: Level, nodes: Tensor, starts: Tensor, local: Tensor, vectors: Tensor) -> Tensor:
    """Return uᵀP for vectors with components at places ``local`` of their nodes' rows below."""
    largest = max([basis.weights.shape[2] for basis in level.bases], default=0)
    result = vectors.new_zeros(nodes.numel(), largest)
    for basis in level.bases:
        slots = _slots(basis.nodes, level.ranks.numel())[nodes]
        index = ((slots >= 0) & (nodes >= 0)).nonzero().squeeze(1)
        num_rest, rank = basis.weights.shape[1:]
        step = max(1, _GATHERED // max(1, num_rest * rank))
        width = num_rest + rank + vectors.shape[1] + 1
        for start in range(0, index.numel(), step):
            part = index[start : start + step]
            slot, first = slots[part], starts[nodes[part], None]
            # The vector over all rows of the node; components beyond its length are zero.
            whole = vectors.new_zeros(part.numel(), width)
            whole.scatter_add_(1, local[part].clamp(max=width - 1), vectors[part])
            skeleton = (basis.skeleton[slot] - first).clamp(max=width - 1)
            rest = (basis.rest[slot] - first).clamp(max=width - 1)
            inside = basis.rest[slot] < level.size_below
            known = whole.gather(1, rest) * inside
            own = whole.gather(1, skeleton) * (basis.skeleton[slot] < level.size_below)
            own += (known[:, None] @ basis.weights[slot]).squeeze(1)
            result[part[:, None], torch.arange(rank, device=nodes.device)] = own
    return result


def find_pairs(coupling: Coupling, num_nodes: int, first: Tensor, second: Tensor) -> Tensor:
    """Return the places of ordered pairs of nodes in a coupling, or -1 for no place."""
    if coupling.pairs.numel() == 0:
        return torch.full_like(first, -1)
    keys, order = (coupling.pairs[:, 0] * num_nodes + coupling.pairs[:, 1]).sort()
    wanted = first * num_nodes + second
    places = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
    known = (keys[places] == wanted) & (first >= 0) & (second >= 0)
    return torch.where(known, order[places], -1)


def _couple(coupling: Coupling, num_nodes: int, nodes: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """Return which vectors u of a path are coupled to the nodes, and B u for each of them."""
    found = []
    for values, places in (
        (coupling.values.transpose(1, 2), find_pairs(coupling, num_nodes, nodes, path.nodes)),
        (coupling.values, find_pairs(coupling, num_nodes, path.nodes, nodes)),
    ):
        index = (places >= 0).nonzero().squeeze(1)
        num_own, num_other = values.shape[1:]
        step = max(1, _GATHERED // max(1, num_own * num_other))
        coupled = path.vectors.new_zeros(index.numel(), path.vectors.shape[1])
        for start in range(0, index.numel(), step):
            part = index[start : start + step]
            own = path.vectors[part, :num_own]
            product = (own[:, None] @ values[places[part]]).squeeze(1)
            coupled[start : start + step, :num_other] = product
        found.append((index, coupled))
    return torch.cat([found[0][0], found[1][0]]), torch.cat([found[0][1], found[1][1]])
