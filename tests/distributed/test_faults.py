"""What goes wrong on one rank is said on all of them, and nobody waits for ever."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed, nn

import hcurv
from cases import labels, normal, seeded
from hcurv.ranks import RanksError
from several_ranks import Outcome, die, run_ranks

_INPUTS, _TARGETS = normal(9, 6), labels(9, 3)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


class _Loader:
    """Batches, one of which cannot be read from the given pass on."""

    def __init__(self, broken_pass: int) -> None:
        self._left = broken_pass

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._left -= 1
        yield _INPUTS[:5], _TARGETS[:5]
        if self._left == 0:
            raise OSError("the disk is gone")
        yield _INPUTS[5:], _TARGETS[5:]


def _matrix(data: object = None, **changes: object) -> hcurv.GaussNewton:
    settings = {"model": seeded(_model), "loss": nn.CrossEntropyLoss(), "seed": 0}
    settings |= {"data": (_INPUTS, _TARGETS) if data is None else data} | changes
    return hcurv.GaussNewton(process_group=distributed.group.WORLD, **settings)  # type: ignore[arg-type]


def _odd() -> bool:
    """Whether this is the rank on which something is wrong."""
    return distributed.get_rank() == 1


def _nan_inputs() -> None:
    _matrix((_INPUTS * float("nan"), _TARGETS) if _odd() else None)


def _one_shot_data() -> None:
    _matrix(iter([(_INPUTS, _TARGETS)]) if _odd() else None)


def _broken_loader() -> None:
    _matrix(_Loader(1) if _odd() else None)


def _broken_later() -> None:
    H = _matrix(_Loader(3) if _odd() else None, factors="recompute")
    vectors = torch.ones(H.shape[0], dtype=H.dtype)
    H @ vectors
    H @ vectors


def _bad_option() -> None:
    _matrix(num_samples=-1 if _odd() else None)


def _no_memory() -> None:
    if _odd():
        from hcurv import memory

        memory.available_bytes = lambda device: 1000  # type: ignore[assignment]
    _matrix(factors="memory")


def _no_memory_later() -> None:
    H = _matrix()
    if _odd():
        from hcurv import memory

        memory.available_bytes = lambda device: 1000  # type: ignore[assignment]
    H.to_dense()


def _other_weights() -> None:
    _matrix(model=seeded(_model, seed=int(_odd())))


def _other_layers() -> None:
    wide = nn.Sequential(nn.Linear(6, 3)).double()
    _matrix(model=wide if _odd() else seeded(_model))


def _other_loss() -> None:
    _matrix(loss=nn.CrossEntropyLoss(reduction="sum" if _odd() else "mean"))


def _other_seed() -> None:
    _matrix(num_samples=2, seed=int(_odd()))


def _other_factors() -> None:
    _matrix(factors="recompute" if _odd() else "memory")


def _other_vectors() -> None:
    H = _matrix()
    H @ torch.full((H.shape[0],), 1.0 + _odd(), dtype=H.dtype)


def _way_for_one_process() -> None:
    _matrix().factorize(0.1, method="kronecker")


def _no_targets() -> None:
    _matrix(_INPUTS if _odd() else None)


_ERRORS: dict[Callable[[], None], tuple[type[Exception], str]] = {
    _nan_inputs: (ValueError, "NaN or infinite"),
    _one_shot_data: (TypeError, "can be read only once"),
    _broken_loader: (OSError, "the disk is gone"),
    _broken_later: (OSError, "the disk is gone"),
    _bad_option: (ValueError, "num_samples"),
    _no_memory: (hcurv.InsufficientMemoryError, "the precomputation for"),
    _no_memory_later: (hcurv.InsufficientMemoryError, "a dense block"),
}
_DIFFERENCES: dict[Callable[[], None], str] = {
    _other_weights: "'0.weight' is a tensor",
    _other_layers: "the model is",
    _other_loss: "CrossEntropy.reduction is 'mean' on ranks 0, 2, but 'sum' on ranks 1",
    _other_seed: "seed is 0 on ranks 0, 2, but 1 on ranks 1",
    _other_factors: "factors is 'memory' on ranks 0, 2, but 'recompute' on ranks 1",
    _other_vectors: "the same vectors; those of ranks 1 differ",
}


def _one_after_the_other(functions: list[Callable[[], None]]) -> list[Exception | None]:
    """Run all of them in the same processes: after an error, the ranks still work together."""
    warnings.simplefilter("error")
    found: list[Exception | None] = []
    from hcurv import memory

    available = memory.available_bytes
    for function in functions:
        try:
            function()
            found.append(None)
        except Exception as error:
            found.append(error)
        memory.available_bytes = available
    return found


def test_an_error_of_one_rank_is_raised_on_all():
    functions = list(_ERRORS)
    outcomes = run_ranks(3, _one_after_the_other, functions)
    for number, function in enumerate(functions):
        kind, text = _ERRORS[function]
        for rank, outcome in enumerate(outcomes):
            error = _found(outcome)[number]
            assert isinstance(error, kind), (function.__name__, rank, error)
            assert text in str(error)
            assert ("rank 1: " in str(error)) == (rank != 1)


def test_differences_between_ranks_are_named():
    functions = list(_DIFFERENCES)
    outcomes = run_ranks(3, _one_after_the_other, [*functions, _way_for_one_process])
    for number, function in enumerate(functions):
        for outcome in outcomes:
            error = _found(outcome)[number]
            assert isinstance(error, RanksError), (function.__name__, error)
            assert _DIFFERENCES[function] in str(error)
    for outcome in outcomes:
        with pytest.raises(ValueError, match="needs the data of all points in one process"):
            raise _found(outcome)[-1] or AssertionError("nothing was refused")


def test_targets_on_some_ranks_alone_are_refused():
    for outcome in run_ranks(3, _no_targets):
        assert isinstance(outcome.error, ValueError)
        assert "the data of ranks [0, 2] has targets, that of the others not" in str(outcome.error)


def _found(outcome: Outcome) -> list[Exception | None]:
    assert outcome.error is None, outcome.trace
    assert isinstance(outcome.value, list)
    return outcome.value


def _dies() -> None:
    H = _matrix(factors="recompute")
    if _odd():
        die()
    H.diagonal()


def test_a_rank_that_dies_ends_the_others_with_a_message():
    outcomes = run_ranks(3, _dies, group_timeout=10, time_limit=120)
    assert outcomes[1].code == -9
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RanksError)
        assert "lost the others" in str(outcomes[rank].error)


def _nobody_has_points() -> None:
    _matrix((_INPUTS[:0], _TARGETS[:0]))


def test_no_points_at_all_are_refused():
    for outcome in run_ranks(2, _nobody_has_points):
        assert isinstance(outcome.error, ValueError)
        assert "data is empty on all ranks" in str(outcome.error)


def test_one_process_refuses_empty_data():
    with pytest.raises(ValueError, match="data is empty: at least one point"):
        hcurv.GaussNewton(seeded(_model), nn.CrossEntropyLoss(), _INPUTS[:0])
