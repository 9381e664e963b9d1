"""Everything that may stand between brackets, and what may not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import CASES

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
