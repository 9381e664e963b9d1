"""Choose an ordering: score the candidates on a few runs of rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, cluster
from hcurv.hierarchical.sketch import random_products
from hcurv.interpolative import interpolate_rows
from hcurv.operators import EntrySource
from hcurv.sources import blocks, has_product, structural_orders

__all__ = ["choose_tree"]

_COLUMNS = 64  # of the samples
_SHARE = 8  # rows of a run per skeleton row
_RUNS = ((64, 32), (256, 8))  # (rows, number) of the runs that are looked at


def choose_tree(source: EntrySource, leaf_size: int, diagonal: Tensor, seed: int) -> ClusterTree:
    """The tree of the best ordering: structural ones if the source offers any, else by distance.

    The score of an order is how much of the matrix is left outside of blocks of consecutive rows
    when these rows are interpolated from an eighth of them (energy, relative to the best rank 0).
    """
    names = list(structural_orders(source)) or ["natural", "angle", "gram"]
    trees = {
        name: cluster(source, leaf_size=leaf_size, ordering=name, seed=seed, diagonal=diagonal)
        for name in names
    }
    rows = trees[names[0]].permutation.sort().values
    generator = torch.Generator(source.device).manual_seed(seed)
    if has_product(source):
        inputs, outputs = random_products(source, rows, _COLUMNS, generator)
    else:
        inputs, outputs = None, None
    scores = {
        name: _score(source, tree.permutation, rows, inputs, outputs, generator)
        for name, tree in trees.items()
    }
    best = min(names, key=lambda name: scores[name])
    return replace(trees[best], scores=scores)


def _score(
    source: EntrySource,
    order: Tensor,
    rows: Tensor,
    inputs: Tensor | None,
    outputs: Tensor | None,
    generator: torch.Generator,
) -> float:
    left, total = 0.0, 0.0
    for length, number in _RUNS:
        length = min(length, max(1, order.numel() // 2))
        number = min(number, order.numel() // length)
        if number == 0:
            continue
        starts = torch.linspace(0, order.numel() - length, number, device=order.device).long()
        index = order[starts[:, None] + torch.arange(length, device=order.device)]
        if inputs is not None and outputs is not None:
            places = torch.searchsorted(rows, index)
            samples = outputs[places] - blocks(source, index, index) @ inputs[places]
            total += float(outputs[places].double().square().sum())
        else:
            samples = _outside(source, order, starts, index, generator)
            total += float(samples.double().square().sum())
        found = interpolate_rows(samples, max(1, length // _SHARE))
        left += float(found.errors.double().square().sum())
    return left / total if total > 0 else 0.0


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
