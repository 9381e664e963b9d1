"""The collective operations that everything distributed stands on."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from hcurv.memory import InsufficientMemoryError
from hcurv.ranks import OneRank, RanksError, ranks_of
from several_ranks import die, run_ranks, values_of


def _collectives() -> dict[str, object]:
    ranks = ranks_of(distributed.group.WORLD)
    rank, size = ranks.rank, ranks.size
    counts = [3 * (r % 2) for r in range(size)]  # Rank 0 has no rows.
    rows = torch.arange(2.0 * sum(counts)).view(-1, 2) * (rank + 1)
    transposed = torch.full((2, 3), float(rank)).T
    result = {
        "sum": ranks.sum(torch.tensor([1.0, rank])),
        "sum of a transpose": ranks.sum(transposed),
        "gather": ranks.gather(torch.full((rank, 2), rank)),
        "gather nothing": ranks.gather(torch.zeros(0, 2)),
        "scatter_sum": ranks.scatter_sum(rows, counts),
        "broadcast": ranks.broadcast(torch.tensor([rank]), size - 1),
    }
    ranks.same(seed=0, weights=torch.ones(3))
    ranks.agree()
    return result | {
        "traffic": {name: (t.messages, t.num_bytes) for name, t in ranks.traffic.items()}
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_are_what_their_names_say(size):
    counts = [3 * (r % 2) for r in range(size)]
    rows = torch.arange(2.0 * sum(counts)).view(-1, 2) * sum(range(1, size + 1))
    for rank, value in enumerate(values_of(run_ranks(size, _collectives))):
        assert torch.equal(value["sum"], torch.tensor([size, sum(range(size))]).float())
        assert torch.equal(
            value["sum of a transpose"], torch.full((3, 2), sum(range(size))).float()
        )
        assert [tuple(piece.shape) for piece in value["gather"]] == [(r, 2) for r in range(size)]
        assert all(bool((piece == r).all()) for r, piece in enumerate(value["gather"]))
        assert [tuple(piece.shape) for piece in value["gather nothing"]] == [(0, 2)] * size
        assert torch.equal(value["scatter_sum"], rows.split(counts)[rank])
        assert value["broadcast"].item() == size - 1
        if size > 1:
            assert value["traffic"]["sum"] == (2, 2 * 4 + 6 * 4)
            assert value["traffic"]["scatter_sum"] == (1, rows.numel() * 4)
        else:
            assert value["traffic"] == {}


def _one_fails(kind: type[Exception]) -> None:
    ranks = ranks_of(distributed.group.WORLD)
    with ranks.agreed():
        if ranks.rank == 1:
            raise kind("the disk is full")
    ranks.sum(torch.ones(1))


@pytest.mark.parametrize("kind", [ValueError, InsufficientMemoryError, ZeroDivisionError])
def test_an_error_of_one_rank_is_raised_on_all(kind):
    outcomes = run_ranks(3, _one_fails, kind)
    assert type(outcomes[1].error) is kind
    raised = ArithmeticError if kind is ZeroDivisionError else kind
    for rank in (0, 2):
        assert type(outcomes[rank].error) is raised
        assert str(outcomes[rank].error) == "rank 1: the disk is full"


def _other_arguments() -> None:
    ranks = ranks_of(distributed.group.WORLD)
    ranks.same(seed=ranks.rank // 2, tolerance=0.1, weights=torch.ones(2))


def test_ranks_with_other_arguments_are_named():
    for outcome in run_ranks(3, _other_arguments):
        assert isinstance(outcome.error, RanksError)
        assert "seed is 0 on ranks 0, 1, but 1 on ranks 2" in str(outcome.error)
        assert "tolerance" not in str(outcome.error)


def _one_dies() -> None:
    ranks = ranks_of(distributed.group.WORLD)
    ranks.sum(torch.ones(1))
    if ranks.rank == 0:
        die()
    ranks.sum(torch.ones(1))


def test_a_dead_rank_ends_the_others():
    outcomes = run_ranks(3, _one_dies, group_timeout=5, time_limit=30)
    assert outcomes[0].code == -9
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, RanksError)
        assert "lost the others" in str(outcome.error)


def test_without_a_group_there_is_one_rank():
    ranks = ranks_of(None)
    assert type(ranks) is OneRank
    tensor = torch.ones(2)
    assert ranks.sum(tensor) is tensor
    assert ranks.scatter_sum(tensor, [2]) is tensor
    with pytest.raises(ValueError, match="own"), ranks.agreed():
        raise ValueError("own")
    with pytest.raises(TypeError, match="must be a torch"):
        ranks_of("gloo")
