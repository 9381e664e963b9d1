"""Check what a file says about a matrix or a factorization, wholly, before it is used.

Checksums find damage. A file that was written by another program, or by one with a fault, can have
right checksums and still describe something that does not exist. What is checked here is all that
products, solves and entries rely on: shapes, types, and that every index lies where it must. Only
the values of the floats are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, row_table
from hcurv.hierarchical.solving.elimination import Elimination
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.memory import require_bytes

__all__ = [
    "ReadOnce",
    "check_couplings",
    "check_dtype",
    "check_elimination",
    "check_finite",
    "check_group",
    "check_groups",
    "check_leaves",
    "check_number",
    "check_pairs",
    "check_part",
    "check_tree",
    "check_types",
    "require",
]


class ReadOnce(Mapping[str, Tensor]):
    """The tensors of a file by name, which remember which of them were read.

    Attributes:
        unread: names of the tensors that nobody asked for.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.unread = set(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self.unread.discard(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Group(Protocol):
    """Nodes of one level and of like shape: a `Basis` or an `Elimination`."""

    @property
    def nodes(self) -> Tensor: ...
    @property
    def skeleton(self) -> Tensor: ...
    @property
    def rest(self) -> Tensor: ...
    @property
    def target(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


def require(is_right: bool, what: str) -> None:
    """Raise a ValueError that says what is wrong, unless all is right."""
    if not is_right:
        raise ValueError(what)


def check_number(value: object, name: str, least: int = 0, most: int = 2**62) -> int:
    """Return an integer of the description if it lies in a range."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer and least <= value <= most, f"{name} is {value!r}")  # type: ignore[operator]
    return value  # type: ignore[return-value]


def check_types(value: object, hint: Any, name: str) -> None:
    """Check that what JSON gave has the types that a dataclass declares, at any depth."""
    if isinstance(hint, UnionType):
        fitting = (part for part in get_args(hint) if _is_container(part) == _is_container(value))
        require(any(_conforms(value, part, name) for part in fitting), f"{name} is {value!r}")
    else:
        require(_conforms(value, hint, name), f"{name} is {value!r}")


def _is_container(part: object) -> bool:
    """Whether a value or a type consists of parts that have types of their own."""
    return is_dataclass(part) or get_origin(part) is not None or isinstance(part, dict | list)


def _conforms(value: object, hint: Any, name: str) -> bool:
    """Whether a value is of a type; parts of it that are not raise."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is dict and isinstance(value, dict):
        for key, item in value.items():
            check_types(key, arguments[0], name)
            check_types(item, arguments[1], name)
        return True
    if origin in (tuple, list) and isinstance(value, origin):
        for item in value:
            check_types(item, arguments[0], name)
        return True
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, hint):
        hints = get_type_hints(hint)
        for field in fields(hint):
            check_types(getattr(value, field.name), hints[field.name], f"{name}.{field.name}")
        return True
    if origin is not None or isinstance(value, bool):
        return origin is None and hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def check_dtype(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Check the type of a tensor; torch.long stands for integers."""
    require(tensor.dtype == dtype, f"{name} holds values of type {tensor.dtype}")


def check_tree(tree: ClusterTree) -> None:
    """Check a tree: its size, its depth, and that it holds rows of the matrix, each once."""
    size = check_number(tree.size, "size", least=1)
    depth = check_number(tree.depth, "depth", most=62)
    check_types(tree.ordering, str, "ordering")
    check_types(tree.scores, dict[str, float], "scores")
    rows = tree.permutation
    check_dtype(rows, torch.long, "permutation")
    require(rows.ndim == 1 and rows.numel() <= size, f"permutation has {tuple(rows.shape)} entries")
    # The smallest leaves have one row, zero rows included.
    require(1 << depth <= max(1, 2 * size) and depth <= 40, f"depth is {depth} for {size} rows")
    require_bytes(
        8 * size, rows.device, f"the rows of a matrix of N = {size}", ("use a larger machine",)
    )
    require(_are_distinct(rows, size), "permutation is no order of rows")


def _are_distinct(rows: Tensor, size: int) -> bool:
    if rows.numel() == 0:
        return True
    inside = int(rows.min()) >= 0 and int(rows.max()) < size
    return inside and rows.unique().numel() == rows.numel()


def check_leaves(values: Tensor, tree: ClusterTree, dtype: torch.dtype) -> LeafBlocks:
    """Return the blocks of the leaves if they are symmetric and as large as the leaves."""
    check_dtype(values, dtype, "leaves.values")
    number = 1 << tree.depth
    is_right = values.ndim == 3 and values.shape[0] == number and values.shape[1] == values.shape[2]
    require(is_right, f"leaves.values has shape {tuple(values.shape)} for {number} leaves")
    bounds = tree.bounds(tree.depth)
    require(int(bounds.diff().max()) <= values.shape[1], "leaves.values has too few rows")
    largest = float(values.abs().max()) if values.numel() else 0.0
    asymmetry = float((values - values.mT).abs().max()) if values.numel() else 0.0
    rounding = 1e3 * torch.finfo(dtype).eps
    require(not asymmetry > rounding * largest, "leaves are not symmetric")
    return LeafBlocks.of(bounds, values)


def check_group(
    nodes: Tensor,
    skeleton: Tensor,
    rest: Tensor,
    weights: Tensor,
    num_nodes: int,
    dtype: torch.dtype,
) -> None:
    """Check that nodes of a level are nodes, and that the parts of their bases have equal sizes."""
    for indices in (nodes, skeleton, rest):
        check_dtype(indices, torch.long, "a basis")
    check_dtype(weights, dtype, "a basis")
    fits = nodes.ndim == 1 and weights.ndim == 3 and weights.shape[0] == nodes.numel() > 0
    require(fits and _are_distinct(nodes, num_nodes), "a basis is one of nodes that do not exist")
    shapes = (tuple(rest.shape), tuple(skeleton.shape))
    wanted = (tuple(weights.shape[:2]), tuple(weights.shape[::2]))
    require(shapes == wanted, "parts of a basis do not fit together")


def check_elimination(
    parts: Mapping[str, Tensor | None], num_nodes: int, dtype: torch.dtype
) -> Elimination:
    """Return an elimination of nodes of a level, if its parts fit together."""
    require(not {n for n, part in parts.items() if part is None} - {"signs"}, "parts are missing")
    step = Elimination(**parts)  # type: ignore[arg-type]
    check_group(step.nodes, step.skeleton, step.rest, step.weights, num_nodes, dtype)
    check_dtype(step.target, torch.long, "a target")
    number, size, rank = step.weights.shape
    for name, values, shape in (
        ("target", step.target, (number, rank)),
        ("root", step.root, (number, size, size)),
        ("cross", step.cross, (number, size, rank)),
        ("signs", step.signs, (number, size)),
    ):
        if values is not None:
            require(tuple(values.shape) == shape, f"{name} has shape {tuple(values.shape)}")
            require(name == "target" or values.dtype == dtype, f"{name} is {values.dtype}")
    return step


def check_groups(
    groups: Sequence[_Group], starts: Tensor, counts: Tensor, ranks: Tensor, wanted: Tensor
) -> None:
    """Check that groups of nodes divide the rows of their nodes into skeletons and the rest.

    Args:
        groups: the bases or eliminations of a level.
        starts: first row of every node on the level below.
        counts: number of its rows.
        ranks: number of its skeleton rows.
        wanted: which nodes have to be in a group, a mask.
    """
    size_below, size = int(counts.sum()), int(ranks.sum())
    none = torch.zeros(0, dtype=torch.long, device=counts.device)
    nodes = torch.cat([none, *(group.nodes for group in groups)])
    require(torch.equal(nodes.sort().values, wanted.nonzero().squeeze(1)), "nodes are missing")
    firsts = ranks.cumsum(0) - ranks
    for group in groups:
        of, shape = group.nodes, group.weights.shape
        rest, rank = shape[1:]
        own = torch.cat([group.skeleton, group.rest], 1).sort(1).values
        lies = row_table(starts[of], counts[of], rank + rest, size_below)
        require(torch.equal(own, lies), "rows of a node are not its own")
        places = torch.arange(rank, device=of.device)
        is_row = group.skeleton < size_below
        require(torch.equal(is_row, places < ranks[of, None]), "a skeleton does not fit its rank")
        target = row_table(firsts[of], ranks[of], rank, size)
        require(torch.equal(group.target, target), "skeletons do not follow each other")


def check_couplings(
    couplings: Sequence[Coupling], counts: Tensor, dtype: torch.dtype, siblings: bool
) -> None:
    """Check that couplings are blocks between two nodes of a level, at most one for each pair.

    Args:
        couplings: the blocks.
        counts: number of rows of every node.
        dtype: type of the values.
        siblings: whether only siblings are coupled.
    """
    for coupling in couplings:
        pairs, values = coupling.pairs, coupling.values
        check_dtype(values, dtype, "a coupling")
        first, second = pairs.T
        require(not siblings or torch.equal(first + 1, second), "couplings of other nodes")
        require(not siblings or not bool((first % 2).any()), "couplings of other nodes")
        wide = (int(counts[nodes].max()) if nodes.numel() else 0 for nodes in (first, second))
        fits = all(width <= have for width, have in zip(wide, values.shape[1:], strict=True))
        require(fits and pairs.shape[0] == values.shape[0], "a coupling is too small")
        most = int(counts.max()) if counts.numel() else 0
        require(max(values.shape[1:]) <= most, "a coupling is larger than all nodes")
    if couplings:
        every = torch.cat([coupling.pairs for coupling in couplings])
        ordered = bool((every[:, 0] < every[:, 1]).all())
        distinct = every.unique(dim=0).shape[0] == every.shape[0]
        require(ordered and distinct, "two nodes are coupled twice")


def check_pairs(pairs: Tensor, values: Tensor, num_nodes: int) -> None:
    """Check, before a coupling is made, that its pairs are pairs of nodes."""
    check_dtype(pairs, torch.long, "pairs of a coupling")
    require(pairs.ndim == 2 and pairs.shape[1] == 2, f"pairs has shape {tuple(pairs.shape)}")
    require(values.ndim == 3, f"a coupling has shape {tuple(values.shape)}")
    inside = not pairs.numel() or (int(pairs.min()) >= 0 and int(pairs.max()) < num_nodes)
    require(inside, "a coupling is one of nodes that do not exist")


def check_part(rows: Tensor, factor: Tensor, size: int, dtype: torch.dtype) -> None:
    """Check that a tall factor has one row for each of some rows of the matrix, ascending."""
    check_dtype(rows, torch.long, "rows of a global part")
    check_dtype(factor, dtype, "a global part")
    fits = rows.ndim == 1 and factor.ndim == 2 and factor.shape[0] == rows.numel()
    require(fits, f"rows {tuple(rows.shape)} and factor {tuple(factor.shape)} do not fit")
    inside = not rows.numel() or (int(rows[0]) >= 0 and int(rows[-1]) < size)
    require(inside and bool((rows.diff() > 0).all()), "rows of a global part are not ascending")


def check_finite(value: object, name: str) -> float:
    """Return a number of the description that is finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and math.isfinite(value), f"{name} is {value!r}")  # type: ignore[arg-type]
    return float(value)  # type: ignore[arg-type]
