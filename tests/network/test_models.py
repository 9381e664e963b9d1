"""Any model against the dense oracle."""

from __future__ import annotations

import torch

from cases import assert_close, normal
from models import ModelCase, all_layers
from odd_models import all_odd

# Rounding units of the largest entry: a relative error of 2e-12 in double precision.
ROUNDING = 1e4


def check_model(case: ModelCase) -> None:
    """Matrix, products, diagonal and gradient are those of autograd."""
    model = case.build()
    targets = case.targets_for(model)
    operator = case.operator(model, targets)
    expected = case.dense(model, targets)
    assert expected.abs().max() > 0
    assert operator.memory_plan().stored_bytes == operator.nbytes
    found = operator.to_dense()
    assert torch.equal(found, found.T)
    assert_close(found, expected, ROUNDING)
    for num_columns in (1, 3, 20):
        rhs = normal(len(expected), num_columns, seed=num_columns)
        assert_close(operator @ rhs, expected @ rhs, ROUNDING)
    assert_close(operator.diagonal(), expected.diagonal(), ROUNDING)
    assert_close(operator.gradient(), case.gradient(model, targets), ROUNDING)


@all_layers
def test_layers_equal_the_oracle(case: ModelCase) -> None:
    check_model(case)


@all_odd
def test_odd_models_equal_the_oracle(case: ModelCase) -> None:
    check_model(case)
