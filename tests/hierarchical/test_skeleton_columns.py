"""Samples on the upper levels: all entries of a level, or random sums of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import normal
from hcurv.hierarchical.building.sampler import LevelRows, num_columns_for
from hcurv.hierarchical.building.skeleton_columns import SkeletonSampler
from hcurv.hierarchical.parts.levels import row_table
from hcurv.hierarchical.tree.block_pattern import SiblingPattern


def sampler(values: Tensor, counts: list[int]) -> tuple[SkeletonSampler, LevelRows]:
    sizes = torch.tensor(counts)
    scales = torch.cat([torch.linspace(1, 2, int(sizes.sum())), torch.ones(1)]).to(values)
    rows = LevelRows(torch.arange(int(sizes.sum())), sizes.cumsum(0) - sizes, sizes, scales)
    depth = len(counts).bit_length() - 1
    pattern = SiblingPattern(values.device)
    return SkeletonSampler(values, rows, rows, pattern, None, depth), rows


def samples_of(own: SkeletonSampler, rows: LevelRows, width: int) -> Tensor:
    nodes = torch.arange(rows.counts.numel())
    return own.samples(nodes, row_table(rows.starts, rows.counts, width, rows.size))


COUNTS = [8, 5, 8, 8, 3, 8, 8, 8] * 8


def test_random_sums_keep_norms_and_linear_relations() -> None:
    size = sum(COUNTS)
    factor = normal(size, 40)
    values = factor @ factor.T
    own, rows = sampler(values, COUNTS)
    found = samples_of(own, rows, 8)
    assert found.shape == (64, 8, num_columns_for(8))
    assert own.num_random(8) == num_columns_for(8)
    for node, (start, count) in enumerate(zip(rows.starts.tolist(), COUNTS, strict=True)):
        block = values[start : start + count] * rows.scales[:-1]
        block[:, start : start + count] = 0
        exact = block.square().sum()
        assert float(found[node].square().sum() / exact) == pytest.approx(1, abs=0.6)
        assert not found[node, count:].any()
    ratios = torch.stack(
        [
            found[k].square().sum()
            / (
                (values[s : s + c] * rows.scales[:-1]).square().sum()
                - (values[s : s + c, s : s + c] * rows.scales[s : s + c]).square().sum()
            )
            for k, (s, c) in enumerate(zip(rows.starts.tolist(), COUNTS, strict=True))
        ]
    )
    assert float(ratios.mean()) == pytest.approx(1, abs=0.1)
    # Rows that depend on each other do so in the samples: here all of a node have rank 1.
    twice = values.clone()
    twice[0:8] = torch.arange(1, 9)[:, None] * values[0]
    own, rows = sampler(twice, COUNTS)
    ranks = torch.linalg.matrix_rank(samples_of(own, rows, 8))
    assert int(ranks[0]) == 1
    assert int(ranks[2]) == 8


def test_columns_of_a_node_itself_are_left_out() -> None:
    size = sum(COUNTS)
    values = torch.zeros(size, size, dtype=torch.float64)
    starts = torch.tensor(COUNTS).cumsum(0) - torch.tensor(COUNTS)
    for start, count in zip(starts.tolist(), COUNTS, strict=True):
        values[start : start + count, start : start + count] = 1e6
    own, rows = sampler(values, COUNTS)
    assert not samples_of(own, rows, 8).any()


def test_few_columns_are_taken_as_they_are() -> None:
    values = normal(20, 20)
    own, rows = sampler(values + values.T, [5, 5, 5, 5])
    assert own.num_random(5) is None
    found = samples_of(own, rows, 5)
    assert found.shape == (4, 5, 15)
    expected = ((values + values.T) * rows.scales[:-1])[5:10]
    assert torch.allclose(found[1], torch.cat([expected[:, :5], expected[:, 10:]], 1))
