"""Many blocks at once against the dense oracle, and orders that follow the network."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gauss_newton import random_cases
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hcurv
from cases import (
    CASES,
    Case,
    all_cases,
    all_forms,
    assert_close,
    both_dtypes,
    labels,
    normal,
    seeded,
)
from hcurv.network import block_batches
from hcurv.network.block_batches.tuning import BlockTuning
from hcurv.network.sampling import SampledEntries, Scheme
from peak_memory import peak_beyond_result

MB = 2**20
BY_OUTPUT, BY_INPUT = "layer-output-input", "layer-input-output"


def pick(num_blocks: int, width: int, size: int, seed: int) -> Tensor:
    """Random rows of blocks, with repetitions."""
    return labels(num_blocks * width, size, seed).view(num_blocks, width)


def leaves(order: Tensor, width: int) -> Tensor:
    """Consecutive rows of an order, cut into blocks; the last overlaps the one before."""
    starts = [*range(0, order.numel() - width, width), order.numel() - width]
    return torch.stack([order[start : start + width] for start in starts])


def expected_blocks(matrix: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    return matrix[rows[:, :, None], cols[:, None, :]]


def check_blocks(
    operator: hcurv.GaussNewton,
    matrix: Tensor,
    evaluate: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Blocks of every kind that compression asks for, by ``operator.blocks`` or ``evaluate``."""
    blocks = operator.blocks if evaluate is None else evaluate
    size = matrix.shape[0]
    rows, cols = pick(7, 9, size, 3), pick(7, 5, size, 4)
    wide = pick(3, 40, size, 5)
    for first, second in ((rows, cols), (cols[:1], rows[:1]), (wide, rows[:3, :1])):
        values = blocks(first, second)
        assert values.is_contiguous()
        assert_close(values, expected_blocks(matrix, first, second))
    for order in (*operator.orders().values(), wide.view(-1)):
        leaf = leaves(order, min(12, size))
        values = blocks(leaf, leaf.clone())
        assert_close(values, expected_blocks(matrix, leaf, leaf))
        assert torch.equal(values, values.mT)
    half = leaves(operator.orders()[BY_OUTPUT], min(12, size))[:, ::2]
    neighbour = half.roll(1, 0)
    assert_close(blocks(half, neighbour), expected_blocks(matrix, half, neighbour))


@both_dtypes
@all_cases
def test_blocks_equal_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check_blocks(case.operator(dtype), case.dense)


def check_tuned(name: str, tuning: BlockTuning) -> None:
    operator = CASES[name].operator()
    evaluate = functools.partial(
        block_batches.blocks, operator.root.factors, workspace=2**28, tuning=tuning
    )
    check_blocks(operator, CASES[name].dense, evaluate)


# With these costs one way is taken wherever it can be.
WAYS = {
    "tables": BlockTuning(look_up_flops=-1e12, look_up_zero_flops=-1e12),
    "factored": BlockTuning(
        look_up_flops=math.inf, look_up_zero_flops=math.inf, factored_weight=1e-12
    ),
    "stored Gram values": BlockTuning(
        look_up_flops=math.inf, look_up_zero_flops=math.inf, factored_weight=1e12
    ),
    "computed Gram values": BlockTuning(
        look_up_flops=math.inf,
        look_up_zero_flops=math.inf,
        factored_weight=1e12,
        gram_reuse=math.inf,
    ),
}


SOME_CASES = ("classifier", "regression", "some biases frozen", "autoencoder", "deep autoencoder")


@pytest.mark.parametrize("tuning", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("name", SOME_CASES)
def test_every_way_gives_the_same(name: str, tuning: BlockTuning) -> None:
    check_tuned(name, tuning)


@all_forms
def test_little_workspace_changes_nothing(case: Case) -> None:
    operator = case.operator()  # small blocks together, others alone
    evaluate = functools.partial(block_batches.blocks, operator.root.factors, workspace=8000)
    check_blocks(operator, case.dense, evaluate)


@pytest.mark.parametrize("name", SOME_CASES)
def test_small_steps_change_nothing(name: str) -> None:
    tuning = BlockTuning(
        chunk_entries=250,
        gram_floats=20,
        product_floats=200,
        large_sub_block=20,
        table_floats=50,
        table_tile=3,
        table_points=2,
        look_up_entries=50,
    )
    check_tuned(name, tuning)


def test_large_blocks_are_done_alone() -> None:
    for name in SOME_CASES:
        check_tuned(name, BlockTuning(large_block=1))


@given(random_cases(), st.integers(0, 2**16))
@settings(max_examples=25)
def test_random_networks_equal_the_oracle(case: Case, seed: int) -> None:
    expected, operator = case.dense, case.operator()
    size = expected.shape[0]
    rows, cols = pick(5, 8, size, seed), pick(5, 3, size, seed + 1)
    assert_close(operator.blocks(rows, cols), expected_blocks(expected, rows, cols), 1e3)
    values = operator.blocks(rows, rows)
    assert_close(values, expected_blocks(expected, rows, rows), 1e3)
    assert torch.equal(values, values.mT)


def larger(wide: bool, num_points: int = 60, **options: int) -> hcurv.GaussNewton:
    sizes = (40, 9, 50) if wide else (40, 12, 6)
    model = seeded(lambda: nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])))
    loss = nn.MSELoss() if wide else nn.CrossEntropyLoss()
    return hcurv.GaussNewton(model.double(), loss, normal(num_points, 40), **options)


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_larger_blocks_of_both_orders(wide: bool) -> None:
    operator = larger(wide)
    matrix = operator.to_dense()
    assert matrix.shape[0] > 500
    for order in operator.orders().values():
        for width in (20, 100, 300):
            rows = leaves(order, width)
            values = operator.blocks(rows, rows)
            assert torch.equal(values, values.mT)
            assert_close(values, expected_blocks(matrix, rows, rows))
            some = torch.argsort(normal(*rows.shape), 1)[:, : width // 2]
            rows, cols = rows.gather(1, some), rows.roll(1, 0).gather(1, some)
            assert_close(operator.blocks(rows, cols), expected_blocks(matrix, rows, cols))


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_number_of_operations_does_not_grow_with_the_blocks(wide: bool) -> None:
    operator = larger(wide)
    for order in operator.orders().values():
        rows = leaves(order, 25)
        with _Counter() as few:
            operator.blocks(rows, rows)
        with _Counter() as many:
            operator.blocks(rows.repeat(8, 1), rows.repeat(8, 1))
        assert many.count <= 1.3 * few.count


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["classifier", "regression", "autoencoder"])
def test_empty_blocks(name: str) -> None:
    operator = CASES[name].operator(torch.float32)
    sampled = operator.sample_entries(3)
    for num_blocks, num_rows, num_cols in ((0, 4, 3), (5, 0, 3), (5, 4, 0), (0, 0, 0), (1, 1, 1)):
        rows, cols = pick(num_blocks, num_rows, 20, 1), pick(num_blocks, num_cols, 20, 2)
        for source in (operator, sampled):
            values = source.blocks(rows, cols)
            assert values.shape == (num_blocks, num_rows, num_cols)
            assert values.dtype == torch.float32
    assert_close(operator.blocks(rows, cols)[0], operator.block(rows[0], cols[0]))
    negative = rows - operator.shape[0]
    assert torch.equal(operator.blocks(negative, cols.int()), operator.blocks(rows, cols))


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_bad_indices_are_refused(kind: str) -> None:
    operator = CASES["classifier"].operator()
    source = operator if kind == "exact" else operator.sample_entries(3)
    good = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(TypeError, match=r"rows must be a tensor of shape .*; got shape \(6,\)"):
        source.blocks(good.view(-1), good)
    with pytest.raises(TypeError, match=r"cols must be a tensor of shape .*; got list"):
        source.blocks(good, [[0]])  # type: ignore[arg-type]
    for bad in (good.double(), good.bool()):
        with pytest.raises(
            TypeError, match=f"cols must .*integers.*; got values of type {bad.dtype}"
        ):
            source.blocks(good, bad)
    with pytest.raises(ValueError, match="equally many blocks; got 2 and 1"):
        source.blocks(good, good[:1])
    with pytest.raises(IndexError, match=r"rows must lie in \[0, 79\); got 79"):
        source.blocks(good + 79, good)


def test_blocks_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = CASES["classifier"].operator()
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 2**28 + 1)
    with pytest.raises(hcurv.InsufficientMemoryError, match="3 blocks of 4 x 5 entries"):
        operator.blocks(pick(3, 4, 79, 1), pick(3, 5, 79, 2))


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_temporary_memory_stays_within_the_workspace(wide: bool) -> None:
    sizes = (300, 16, 600) if wide else (300, 40, 20)
    model = seeded(lambda: nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])))
    loss = nn.MSELoss() if wide else nn.CrossEntropyLoss()
    inputs = normal(300, 300).float()
    for workspace in (4 * MB, 32 * MB):
        operator = hcurv.GaussNewton(model, loss, inputs, workspace=workspace)
        size = operator.shape[0]
        pairs = [(pick(30, 50, size, 1), pick(30, 40, size, 2))]
        pairs += [(pick(3, 500, size, 1), pick(3, 8, size, 2)), (pick(1, 400, size, 3),) * 2]
        pairs += [(leaves(order, 60)[:40],) * 2 for order in operator.orders().values()]
        for rows, cols in pairs:
            peak = peak_beyond_result(functools.partial(operator.blocks, rows, cols))
            indices = 20 * (rows.numel() + cols.numel()) * 8
            assert peak <= 1.1 * workspace + indices, (rows.shape, cols.shape, peak / MB)


@pytest.mark.parametrize("scheme", ["importance", "stratified", "uniform"])
@pytest.mark.parametrize("name", ["classifier", "regression", "autoencoder", "deep autoencoder"])
def test_sampled_blocks_are_made_of_sampled_pairs(name: str, scheme: Scheme) -> None:
    sampled = CASES[name].operator(torch.float32).sample_entries(5, scheme, seed=3)
    size = sampled.shape[0]
    rows, cols = pick(6, 7, size, 1), pick(6, 4, size, 2)
    values = sampled.blocks(rows, cols)
    every = sampled.pairs(
        rows[:, :, None].expand(values.shape).reshape(-1),
        cols[:, None, :].expand(values.shape).reshape(-1),
    )
    assert torch.equal(values, every.view(values.shape))
    assert torch.equal(values[3], sampled.block(rows[3], cols[3]))
    square = sampled.blocks(rows, rows)
    assert torch.equal(square, square.mT)
    root = CASES[name].operator(torch.float32).root
    slow = SampledEntries(root, 5, scheme, seed=3, workspace=1500)
    assert torch.equal(slow.blocks(rows, cols), values)


@pytest.mark.parametrize(
    ("frozen", "by_output", "by_input"),
    [
        ((), [0, 1, 4, 2, 3, 5, 6, 7, 8], [0, 2, 1, 3, 4, 5, 6, 7, 8]),
        (("0.bias",), [0, 1, 2, 3, 4, 5, 6], [0, 2, 1, 3, 4, 5, 6]),
        (("0.weight",), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (("2.weight", "2.bias"), [0, 1, 4, 2, 3, 5], [0, 2, 1, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["narrow", "tail"])
def test_orders_of_a_small_network(
    frozen: tuple[str, ...], by_output: list[int], by_input: list[int], loss: nn.Module
) -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)),
        loss,
        normal(5, 2),
        normal(5, 1),
        frozen,
    )
    operator = case.operator()
    for source in (operator, operator.sample_entries(2)):
        orders = source.orders()
        assert set(orders) == {BY_OUTPUT, BY_INPUT}
        assert orders[BY_OUTPUT].tolist() == by_output
        assert orders[BY_INPUT].tolist() == by_input


def test_orders_follow_the_network_not_the_registration() -> None:
    operator = CASES["hand-written"].operator()
    last = torch.arange(12).view(3, 4), torch.arange(12, 15)[:, None]
    first = torch.arange(15, 45).view(5, 6), torch.arange(45, 50)[:, None]
    middle = torch.arange(50, 70).view(4, 5)
    layers = [torch.cat(first, 1), middle, torch.cat(last, 1)]
    orders = operator.orders()
    assert orders[BY_OUTPUT].tolist() == torch.cat([w.reshape(-1) for w in layers]).tolist()
    assert orders[BY_INPUT].tolist() == torch.cat([w.T.reshape(-1) for w in layers]).tolist()


@all_cases
def test_orders_are_permutations(case: Case) -> None:
    operator = case.operator(torch.float32)
    for order in operator.orders().values():
        assert order.dtype == torch.long
        assert torch.equal(order.sort().values, torch.arange(operator.shape[0]))
