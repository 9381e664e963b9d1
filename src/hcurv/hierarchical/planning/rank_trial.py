"""Ranks that a tree would need, found by building a few of its subtrees.

This is the build itself (see `level_step`), on few nodes and without keeping anything: rows of the
leaves are interpolated from samples of what lies outside of them, their skeletons are the rows of
their parents, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.hierarchical.building.error_budget import ErrorBudget
from hcurv.hierarchical.building.level_step import choose_skeletons
from hcurv.hierarchical.planning.sampled_matrix import SampledMatrix
from hcurv.operators import EntrySource
from hcurv.sources import blocks

__all__ = ["Subtrees", "TrialLevel"]


@dataclass(frozen=True)
class TrialLevel:
    """Ranks of some nodes of one level.

    Attributes:
        length: number of matrix rows of a node.
        ranks: rank of each node, (B,).
    """

    length: int
    ranks: Tensor


class Subtrees:
    """A few subtrees of an order.

    Args:
        source: the matrix.
        order: its rows in tree order.
        places: where rows of the matrix lie in sketches and global factors, (N,).
        length: number of rows of a subtree.
        leaf_length: number of rows of a leaf; ``length`` is a power of two times as large.
        number: number of subtrees.
    """

    def __init__(
        self,
        source: EntrySource,
        order: Tensor,
        places: Tensor,
        length: int,
        leaf_length: int,
        number: int,
    ) -> None:
        self._source, self._places, self.leaf_length = source, places, leaf_length
        number = max(1, min(number, order.numel() // length))
        last = order.numel() - length
        starts = torch.linspace(0, last, number, dtype=torch.float64, device=order.device).long()
        index = order[starts[:, None] + torch.arange(length, device=order.device)]
        self._leaves = index.view(-1, leaf_length)
        self._num_levels = (length // leaf_length).bit_length()
        self._blocks = blocks(source, self._leaves, self._leaves)

    def ranks(self, known: SampledMatrix, rank: int, tolerance: float) -> Iterator[TrialLevel]:
        """Build the subtrees from the leaves up, one level whenever it is asked for.

        Args:
            known: random products, in the order of ``places``.
            rank: rank of a global part, which is subtracted from the matrix.
            tolerance: relative error of the whole matrix.

        Yields:
            The ranks of each level.
        """
        inputs, outputs = known.columns(rank)
        norm = known.norm * math.sqrt(inputs.shape[1])
        num_rows = known.rows.numel()
        depth = max(1.0, math.log2(num_rows / self.leaf_length))
        budget = ErrorBudget(tolerance, depth)
        rows = self._leaves
        index = self._places[rows]
        vectors = known.share.at(inputs, index)
        samples = torch.baddbmm(known.share.at(outputs, index), self._blocks, vectors, alpha=-1)
        local = vectors
        if rank:
            local = known.factor_rows(index, rank)
            outside = known.mix(inputs[:-1], rank) - local.transpose(1, 2) @ vectors
            samples.baddbmm_(local, outside, alpha=-1)
        scales = torch.ones(rows.shape, dtype=samples.dtype, device=rows.device)
        present = torch.ones_like(rows, dtype=torch.bool)
        length = rows.shape[1]
        for level in range(self._num_levels):
            if level:
                rows, present, scales = (_pair(part) for part in (rows, present, scales))
                half = rows.shape[1] // 2
                entries = blocks(self._source, rows[:, :half], rows[:, half:])
                if rank:
                    local = _pair(local)
                    entries.baddbmm_(local[:, :half], local[:, half:].transpose(1, 2), alpha=-1)
                entries *= present[:, :half, None] & present[:, None, half:]
                samples, vectors = _pair(samples), _pair(vectors)
                samples[:, :half].baddbmm_(entries, vectors[:, half:], alpha=-1)
                samples[:, half:].baddbmm_(entries.transpose(1, 2), vectors[:, :half], alpha=-1)
            allowed = budget.node_error(max(1.0, depth - level)) * norm
            nodes = choose_skeletons(samples.clone(), scales, allowed, None, samples.shape[2])
            errors = nodes.errors / norm
            budget.spend(float(errors.square().mean()) * num_rows / length)
            yield TrialLevel(length, nodes.ranks)
            length *= 2
            skeleton, scales = nodes.skeleton, nodes.scales
            present = torch.arange(skeleton.shape[1], device=rows.device) < nodes.ranks[:, None]
            vectors = nodes.weights.transpose(1, 2) @ vectors
            samples = _rows_of(samples, skeleton) * present[:, :, None]
            if rank:
                local = _rows_of(local, skeleton)
            rows = rows.gather(1, skeleton)


def _rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Some rows of each matrix, (B, m, k) by (B, r) → (B, r, k)."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _pair(values: Tensor) -> Tensor:
    """Join every two neighbours: (2B, m, …) → (B, 2m, …)."""
    return values.reshape(values.shape[0] // 2, 2 * values.shape[1], *values.shape[2:])
