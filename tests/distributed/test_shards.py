"""A GaussNewton whose points lie on several ranks is the one of all points in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from every_request import PROBLEMS, SmallProblem, ask_everything
from several_ranks import run_ranks, values_of

# The points of each rank, as shares of 23: uneven, and with ranks that have none.
_SHARDS = {1: [23], 2: [20, 3], 3: [5, 0, 18], 4: [1, 0, 15, 7]}


def _shard(problem: SmallProblem) -> tuple[Tensor, Tensor]:
    """The inputs and targets of this rank."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    count = len(problem.inputs)
    bounds = [0]
    for share in _SHARDS[size]:
        bounds.append(min(count, bounds[-1] + share))
    bounds[-1] = count
    own = slice(bounds[rank], bounds[rank + 1])
    return problem.inputs[own], problem.targets[own]


def _ask(name: str, factors: str) -> dict[str, Tensor]:
    problem = PROBLEMS[name]
    H = problem.matrix(
        _shard(problem),
        process_group=distributed.group.WORLD,
        factors=factors,
        workspace=2**16 if factors == "recompute" else 2**28,
    )
    assert H.factors == factors
    return ask_everything(H)


def _ask_all(names: list[str]) -> dict[str, dict[str, Tensor]]:
    found = {f"{name}, memory": _ask(name, "memory") for name in names}
    return found | {f"{names[0]}, recompute": _ask(names[0], "recompute")}


def _close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        scale = float(value.double().abs().max())
        tolerance = 1e-6 if key in ("solve by iterations", "in_precision") else 1e-11
        assert float((found[key] - value).double().abs().max()) <= tolerance * scale, key


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (1, ["chain", "sampled"]),
        (2, ["chain", "autoencoder", "convolution", "empirical"]),
        (3, ["convolution"]),
        (4, ["chain"]),
    ],
)
def test_every_request_is_answered_as_by_one_process(size, names):
    expected = {name: ask_everything(PROBLEMS[name].matrix()) for name in names}
    values: list[Any] = values_of(run_ranks(size, _ask_all, names))
    for rank, value in enumerate(values):
        for key, found in value.items():
            for name, tensor in found.items():
                assert torch.equal(tensor, values[0][key][name]), (rank, key, name)
            _close(found, expected[key.split(",")[0]])


def _traffic() -> dict[str, tuple[int, int]]:
    """The messages and bytes of this rank for each request."""
    problem = PROBLEMS["chain"]
    H = problem.matrix(_shard(problem), process_group=distributed.group.WORLD)
    index = torch.arange(H.shape[0])
    rows, vectors = index[:12].view(3, 4), torch.ones(H.shape[0], 5, dtype=H.dtype)
    requests: dict[str, Callable[[], object]] = {
        "product": lambda: H @ vectors,
        "partial_product": lambda: H.partial_product(vectors),
        "diagonal": lambda: H.diagonal(),
        "pairs": lambda: H.pairs(index, index),
        "block": lambda: H.block(index[:2], index[:7]),
        "blocks": lambda: H.blocks(rows, rows[:, :2]),
        "gradient": lambda: H.gradient(),
        "root_product": lambda: H.root_product(vectors),
        "root_transposed": lambda: H.root_transposed(torch.ones(H.num_root_rows, 5, dtype=H.dtype)),
    }
    found = {}
    for name, request in requests.items():
        H.ranks.traffic.clear()
        request()
        sent = H.ranks.traffic.values()
        found[name] = (sum(t.messages for t in sent), sum(t.num_bytes for t in sent))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_bytes_are_those_of_the_cost_model(size):
    """The table of docs/scale.md."""
    N, q, longest = 74, 3, max(_SHARDS[size])
    expected = {
        "product": (2, 16 * size + 8 * N * 5),
        "partial_product": (1, 16 * size),
        "diagonal": (2, 16 * size + 8 * N),
        "pairs": (2, 16 * size + 8 * N),
        "block": (3, 32 * size + 8 * 2 * 7),
        "blocks": (3, 32 * size + 8 * 3 * 4 * 2),
        "gradient": (3, 32 * size + 8 * N),
        "root_product": (3, 16 * size + 8 + 8 * q * 5 * longest),
        "root_transposed": (2, 16 * size + 8 * N * 5),
    }
    for value in values_of(run_ranks(size, _traffic)):
        assert value == expected
