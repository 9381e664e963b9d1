"""Which rows belong to which point, where the first points do not show it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hcurv
import oracles
from cases import assert_close, normal, seeded
from models import Call, tokens


def check_batches(model: nn.Module, batches: list[Any], rounding: float = 1e4) -> None:
    """The matrix over batches of inputs is the sum of those of all points, one at a time."""
    model = model.double()
    operator = hcurv.GaussNewton(model, nn.MSELoss(reduction="sum"), batches)
    expected = torch.zeros(operator.shape, dtype=torch.float64)
    for inputs, _ in batches:
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        for point in range(len(parts[0])):
            single = tuple(part[point : point + 1] for part in parts)
            jacobian = oracles.jacobian_of_model(model, single)[1]
            expected += 2 * jacobian.T @ jacobian
    assert_close(operator.to_dense(), expected, rounding)


def with_targets(model: nn.Module, *batches: Any) -> list[tuple[Any, Tensor]]:
    with torch.no_grad():
        return [(batch, oracles.call(model.double(), batch)) for batch in batches]


def _time_first(self: Any, x: Tensor) -> Tensor:
    return self.last(torch.relu(self.first(x.transpose(0, 1)) - 0.8)).sum(0)


def _last_token(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    z = self.first(x.transpose(0, 1)).tanh()
    return self.last(z[lengths - 1, torch.arange(len(lengths))])


def _layer_of_table(self: Any, words: Tensor) -> Tensor:
    return self.first(self.table).tanh()[words[:, 0]] @ self.out


def _either_way(self: Any, x: Tensor) -> Tensor:
    if float(x[0, 0, 0]) > 0:
        return self.first(x.transpose(0, 1)).tanh().transpose(0, 1).sum(1)
    return self.first(x).tanh().sum(1)


def two_layers(forward: Any) -> nn.Module:
    return seeded(lambda: Call(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2))).double()


def test_first_points_without_derivatives_do_not_decide_the_order() -> None:
    model = two_layers(_time_first)
    with torch.no_grad():
        model.first.bias.fill_(-1.0)
    blank, rest = torch.zeros(4, 3, 3).double(), 2 * normal(7, 3, 3)
    check_batches(model, with_targets(model, torch.cat([blank, rest])))
    check_batches(model, with_targets(model, blank, rest[:4], rest[4:]))


def test_derivatives_that_fit_two_orders_do_not_decide() -> None:
    # Each of the first four points depends on the row where both orders of rows agree.
    model = two_layers(_last_token)
    lengths = torch.tensor([1, 2, 3, 4, 4, 1, 3, 2, 2])
    inputs = normal(9, 4, 3)
    check_batches(model, with_targets(model, (inputs, lengths)))
    batches = [(inputs[:4], lengths[:4]), (inputs[4:8], lengths[4:8])]
    check_batches(model, with_targets(model, *batches))


def test_rows_that_points_share_are_found_in_later_batches() -> None:
    # In the first batch, point i looks up row i, as if the rows were those of the points.
    model = seeded(
        lambda: Call(
            _layer_of_table,
            first=nn.Linear(2, 3),
            table=nn.Parameter(torch.randn(4, 2)),
            out=nn.Parameter(torch.randn(3, 2)),
        )
    )
    words = torch.tensor([[0], [1], [2], [3]])
    check_batches(model, with_targets(model, words, words.flip(0), tokens(4, 1, num=4)))


def test_order_may_differ_between_batches_of_one_size() -> None:
    model = two_layers(_either_way)
    inputs = normal(8, 4, 3)
    inputs[:, 0, 0] = inputs[:, 0, 0].abs()
    inputs[4:, 0, 0] *= -1
    check_batches(model, with_targets(model, inputs[:4], inputs[4:]))


def test_two_points_show_the_order() -> None:
    model = two_layers(_last_token)
    lengths = torch.full((2,), 3)
    check_batches(model, with_targets(model, (normal(2, 3, 3), lengths)))


def test_a_first_batch_of_one_point() -> None:
    model = two_layers(_time_first)
    inputs = 3 * normal(6, 3, 3)
    check_batches(model, with_targets(model, inputs[:1], inputs[1:]))
