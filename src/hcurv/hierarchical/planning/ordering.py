"""Choose an ordering from entries alone, by scores on a few runs of consecutive rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hcurv.hierarchical.tree.cluster_tree import ClusterTree, cluster
from hcurv.linalg.interpolative import interpolate_rows
from hcurv.operators import EntrySource
from hcurv.sources import blocks

__all__ = ["choose_tree", "default_leaf_size"]

# Samples have this many random columns: enough for the ranks of runs of 64 rows.
_COLUMNS = 128
# 32 runs of 64 rows and 8 runs of 256 rows are looked at, to see small and larger nodes.
_RUNS = ((64, 32), (256, 8))  # (rows, number)
# For a tolerance of 0, orderings are compared at this one.
_DEFAULT_TOLERANCE = 1e-2


def default_leaf_size(tolerance: float) -> int:
    """A size of leaves that suits most networks; finer tolerances need larger leaves."""
    return 128 if tolerance >= 1e-2 else 512


def choose_tree(
    source: EntrySource,
    leaf_size: int,
    tolerance: float,
    diagonal: Tensor,
    seed: int,
    orders: Mapping[str, Tensor],
) -> ClusterTree:
    """The tree of the best ordering: one that the source offers, or else one by distance.

    The score of an order is the share of rows from which runs of consecutive rows have to be
    interpolated, if the error outside of their own blocks shall be as small as the tolerance asks
    of nodes of that size.

    Args:
        source: the matrix.
        leaf_size: largest leaf.
        tolerance: relative error of the matrix.
        diagonal: diagonal of the matrix.
        seed: seed of everything random.
        orders: orders of the rows that the source offers, by name.
    """
    names = list(orders) or ["natural", "angle", "gram"]
    trees = {
        name: cluster(
            source,
            leaf_size=leaf_size,
            ordering=name,
            seed=seed,
            diagonal=diagonal,
            orders=orders,
        )
        for name in names
    }
    generator = torch.Generator(source.device).manual_seed(seed)
    scores = {
        name: _score(source, tree.permutation, tolerance, generator) for name, tree in trees.items()
    }
    best = min(names, key=lambda name: scores[name])
    return replace(trees[best], scores=scores)


def _score(
    source: EntrySource, order: Tensor, tolerance: float, generator: torch.Generator
) -> float:
    shares = []
    for length, number in _RUNS:
        length = min(length, order.numel() // 2)
        if length == 0:
            continue
        number = min(number, order.numel() // length)
        last = order.numel() - length
        starts = torch.linspace(0, last, number, dtype=torch.float64, device=order.device).long()
        index = order[starts[:, None] + torch.arange(length, device=order.device)]
        samples = _outside(source, order, starts, index, generator)
        norm = torch.linalg.vector_norm(samples, dtype=torch.float64)
        norm = norm * (order.numel() / index.numel()) ** 0.5
        num_nodes = 2 * order.numel() / length
        allowed = (tolerance or _DEFAULT_TOLERANCE) * float(norm) / (2 * num_nodes) ** 0.5
        found = interpolate_rows(samples, None, allowed, random_columns=True)
        shares.append(float(found.ranks.double().mean()) / length)
    return sum(shares)


def _outside(
    source: EntrySource, order: Tensor, starts: Tensor, index: Tensor, generator: torch.Generator
) -> Tensor:
    """Entries of runs of rows in random columns outside of them."""
    length = index.shape[1]
    span = order.numel() - length
    if span == 0:
        return torch.zeros(*index.shape, 0, dtype=source.dtype, device=source.device)
    columns = torch.randint(
        span, (index.shape[0], _COLUMNS), device=order.device, generator=generator
    )
    columns = columns + torch.where(columns >= starts[:, None], length, 0)
    return blocks(source, index, order[columns])
