"""Everything that may stand between brackets, and what may not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import hcurv
from cases import CASES
from hcurv.baselines import KFAC, LowRank
from hcurv.indexing import check_seed

OPERATOR = CASES["classifier"].operator()
DENSE = OPERATOR.to_dense()
SIZE = DENSE.shape[0]


@pytest.mark.parametrize(
    "rows",
    [
        [3, 1, 1],
        [],
        range(4, 0, -1),
        slice(None, None, 7),
        slice(70, None),
        np.array([0, 5]),
        torch.tensor([2, -1]),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.arange(SIZE) % 3 == 0,
        (5, 6),
    ],
    ids=str,
)
def test_index_sets_select_blocks(rows: object) -> None:
    index = torch.arange(SIZE)[list(rows) if isinstance(rows, range | tuple) else rows]
    cols = [7, 0]
    atol = 1e-15
    assert torch.allclose(OPERATOR[rows, cols], DENSE[index][:, cols], atol=atol)
    assert torch.allclose(OPERATOR[cols, rows], DENSE[cols][:, index], atol=atol)
    assert torch.allclose(OPERATOR[rows, 4], DENSE[index, 4], atol=atol)
    assert torch.allclose(OPERATOR[4, rows], DENSE[4, index], atol=atol)


def test_integers_drop_their_axis() -> None:
    assert OPERATOR[3, 17].shape == ()
    assert OPERATOR[torch.tensor(3), np.int64(-1)].shape == ()
    assert OPERATOR[3, :].shape == (SIZE,)
    assert OPERATOR.block(3, 17).shape == (1, 1)
    assert OPERATOR.pairs([], []).shape == (0,)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, TypeError, r"two indices are expected: H\[i, j\]"),
        ((1, 2, 3), TypeError, "two indices are expected"),
        ((0, SIZE), IndexError, rf"cols must lie in \[0, {SIZE}\); got {SIZE}"),
        (([0, -SIZE - 1], 0), IndexError, rf"rows must lie in \[0, {SIZE}\); got -{SIZE + 1}"),
        ((1.5, 0), TypeError, "rows must be integers.*got values of type torch.float32"),
        (("a", 0), TypeError, "rows must be integers.*got str"),
        ((None, 0), TypeError, "rows must be integers.*got NoneType"),
        ((0, torch.ones(3)), TypeError, "cols must be integers.*got values of type torch.float32"),
        (([[0, 1]], 0), TypeError, r"rows must be one-dimensional; got shape \(1, 2\)"),
        (([True, False], 0), IndexError, rf"mask for rows must have shape \({SIZE},\); got \(2,\)"),
    ],
)
def test_bad_indices_are_refused(index: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OPERATOR[index]  # type: ignore[index]


def test_pairs_need_equal_lengths() -> None:
    with pytest.raises(ValueError, match="same length; got 2 and 3"):
        OPERATOR.pairs([0, 1], [0, 1, 2])
    with pytest.raises(IndexError, match="cols must lie in"):
        OPERATOR.pairs([0], [SIZE])


CASE = CASES["classifier"]
SEEDED: dict[str, Callable[[object], object]] = {
    "compress": lambda seed: hcurv.compress(DENSE, seed=seed),
    "eigsh": lambda seed: hcurv.eigsh(OPERATOR, 2, seed=seed),
    "nearest_neighbors": lambda seed: hcurv.nearest_neighbors(OPERATOR, 2, seed=seed),
    "sample_entries": lambda seed: OPERATOR.sample_entries(10, seed=seed),
    "subsample": lambda seed: OPERATOR.subsample(5, seed=seed),
    "relative_error": lambda seed: OPERATOR.relative_error(DENSE, 4, seed=seed),
    "sampling_error": lambda seed: hcurv.sampling_error(OPERATOR, OPERATOR, 10, seed=seed),
    "compare": lambda seed: hcurv.compare(CASE.build(), CASE.loss, CASE.inputs, seed=seed),
    "LowRank": lambda seed: LowRank(DENSE, 3, seed=seed),
    "KFAC": lambda seed: KFAC(CASE.build(), CASE.loss, CASE.inputs, seed=seed),
}


@pytest.mark.parametrize("function", SEEDED.values(), ids=SEEDED.keys())
@pytest.mark.parametrize("seed", [1.5, "a", None, np.float64(2.0)])
def test_seeds_that_are_no_integers_are_refused(
    function: Callable[[object], object], seed: object
) -> None:
    with pytest.raises(TypeError, match="seed must be an integer; got"):
        function(seed)


@pytest.mark.parametrize("name", [name for name in SEEDED if name != "compare"])
def test_seeds_of_any_integer_type_and_sign_are_taken(name: str) -> None:
    for seed in (np.int32(3), np.uint64(2**63 - 1), torch.tensor(4), -1):
        SEEDED[name](seed)


def test_a_seed_keeps_its_value() -> None:
    assert check_seed(np.int8(-7)) == -7
    assert type(check_seed(np.uint8(7))) is int
    with pytest.raises(ValueError, match=r"seed must lie between -2\*\*63 and 2\*\*63 - 1"):
        check_seed(2**64)
