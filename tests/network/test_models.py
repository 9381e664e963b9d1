"""Any model against the dense oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
import oracles
from cases import assert_close, both_dtypes, labels, normal, seeded
from conformance import check_operator
from hcurv.network.model.per_point import PerPointColumns, levels_restored
from models import LAYERS, VECTORS, Call, ModelCase, all_layers, parameter
from odd_models import ODD, all_odd

# Rounding units of the largest entry: a relative error of 2e-12 in double precision.
ROUNDING = 1e4

# Every form of a Jacobian, every kind of output and input.
SOME = (
    "conv 2d, groups",
    "up 2d, groups",
    "embedding, repeated tokens",
    "batch norm 2d",
    "lstm, two layers, both ways",
    "transformer, norm last",
    "heads of their own",
    "slices of a weight",
    "unused parameters",
    "spectral and weight norm",
    "segmentation",
    "two inputs",
    "named inputs",
)
some_models = pytest.mark.parametrize("case", [{**LAYERS, **ODD}[name] for name in SOME], ids=SOME)


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


def test_compiled_models_equal_the_oracle() -> None:
    model = ODD["residual blocks"].build()
    case = ModelCase(lambda: torch.compile(model, backend="eager"), ODD["residual blocks"].inputs)
    compiled = case.build()
    operator = hcurv.GaussNewton(compiled, nn.MSELoss(), case.inputs)
    expected = case.dense(model, case.targets_for(model))
    assert_close(operator.to_dense(), expected, ROUNDING)


@both_dtypes
@some_models
def test_everything_that_a_matrix_can_do(case: ModelCase, dtype: torch.dtype) -> None:
    model = case.build()
    targets = case.targets_for(model)
    # Single precision is compared with the same model, rounded.
    expected = case.dense(model, targets)
    operator = case.operator(model.to(dtype), targets, dtype)
    slack = 1e3 if dtype == torch.float32 else ROUNDING
    size, n = len(expected), operator.num_points
    assert_close(operator.to_dense(), expected, slack)
    dense = operator.to_dense().double()
    check_operator(operator, dense)
    rows, cols = labels(40, size, seed=3), labels(40, size, seed=4)
    assert_close(operator[rows, cols[:9]], expected[rows][:, cols[:9]], slack)
    assert_close(operator.pairs(rows, cols), expected[rows, cols], slack)
    found = operator.blocks(rows.view(8, 5), cols.view(8, 5))
    assert_close(found, dense[rows.view(8, 5, 1), cols.view(8, 1, 5)])
    root = operator.root_columns(slice(None)).double()
    assert_close((root.T @ root).to(dtype), expected, slack)
    rhs, values = normal(size, 3), normal(len(root), 2)
    assert_close(operator.root_product(rhs.to(dtype)), root @ rhs, 300)
    assert_close(operator.root_transposed(values.to(dtype)), root.T @ values, 300)
    check_operator(operator.kernel(), root @ root.T)
    for order in (*operator.orders().values(), *operator.kernel().orders().values()):
        assert torch.equal(order.sort().values, torch.arange(len(order)))
    by_point = root.view(n, -1, size)
    points, weights = torch.tensor([n - 1, 0, 0]), torch.tensor([0.5, 2.0, 1.0])
    chosen = (by_point[points] * weights.sqrt()[:, None, None]).flatten(0, 1)
    assert_close(operator.of_points(points, weights).to_dense(), chosen.T @ chosen, 300)
    fewer = operator.subsample(3, seed=1)
    assert fewer.num_points == len(fewer.points) <= 3
    assert fewer.trace() == pytest.approx(operator.trace(), rel=1e-4)
    other = torch.float32 if dtype == torch.float64 else torch.float64
    assert_close(operator.in_precision(other).to_dense().float(), expected, 1e3)


@some_models
def test_estimated_gradients_of_fewer_points_are_unbiased(case: ModelCase) -> None:
    model = case.build()
    targets = case.targets_for(model)
    operator = case.operator(model, targets)
    draws = torch.stack([operator.subsample(4, seed=seed).gradient() for seed in range(100)])
    error = (draws.mean(0) - operator.gradient()).norm()
    assert error <= 4 * (draws.var(0).sum() / len(draws)).sqrt()


@pytest.mark.parametrize("scheme", ["importance", "stratified", "uniform"])
def test_sampled_entries_tend_to_the_entries(scheme: Any) -> None:
    for name in ("conv 2d, groups", "embedding, repeated tokens", "transformer, norm last"):
        model = LAYERS[name].build()
        operator = LAYERS[name].operator(model, LAYERS[name].targets_for(model))
        dense = operator.to_dense()
        rows = labels(30, len(dense), seed=3)
        sampled = operator.sample_entries(num_samples=4000, scheme=scheme)
        error = (sampled.block(rows, rows) - dense[rows][:, rows]).norm() / dense[rows][
            :, rows
        ].norm()
        assert error <= 0.1


@some_models
def test_chunks_and_batches_do_not_change_the_matrix(case: ModelCase) -> None:
    model = case.build()
    targets = case.targets_for(model)
    operator = case.operator(model, targets)
    tight = case.operator(model, targets, workspace=2**16)
    cuts = [0, 1, 3, 5]
    batches = [(_some(case.inputs, slice(a, b)), targets[a:b]) for a, b in pairwise(cuts)]
    parts = hcurv.GaussNewton(model, case.loss, batches, forward_fn=case.forward_fn)
    for same in (tight, parts):
        assert_close(same.to_dense(), operator.to_dense(), ROUNDING)
        assert_close(same.gradient(), operator.gradient(), ROUNDING)
        assert same.memory_plan().stored_bytes == same.nbytes
        assert_close(same.kernel().to_dense(), operator.kernel().to_dense(), ROUNDING)
    assert len(parts.root.chunks) == 3


def test_little_workspace_makes_several_chunks() -> None:
    case = LAYERS["conv 2d, reflect"]
    inputs = normal(64, 4, 6, 5)
    model = case.build()
    roomy = hcurv.GaussNewton(model, case.loss, inputs)
    tight = hcurv.GaussNewton(model, case.loss, inputs, workspace=2**16)
    assert len(tight.root.chunks) > 3 > len(roomy.root.chunks)
    assert_close(tight.to_dense(), roomy.to_dense(), ROUNDING)
    assert tight.memory_plan().stored_bytes == tight.nbytes == roomy.nbytes


def _some(inputs: Any, points: slice) -> Any:
    if isinstance(inputs, dict):
        return {name: value[points] for name, value in inputs.items()}
    return inputs[points] if isinstance(inputs, Tensor) else tuple(x[points] for x in inputs)


_BY_RULES = (
    *(name for name in LAYERS if name.startswith(("conv", "up", "linear", "batch", "group"))),
    *("embedding", "layer norm", "instance norm 2d", "attention", "attention, time first"),
    *("lstm", "lstm, two layers, both ways", "gru cells", "transformer, norm first"),
    *("residual blocks", "tied embedding", "heads of their own", "slices of a weight", "hooks"),
    *("adapters, all else frozen", "weight on the left", "straight through", "segmentation"),
)


@pytest.mark.parametrize("name", _BY_RULES)
def test_common_layers_are_read_by_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PerPointColumns, names: list[str], *args: Any) -> None:
        raise AssertionError(f"{names} are read one point at a time")

    monkeypatch.setattr(PerPointColumns, "of", refuse)
    for dtype in (torch.float64, torch.float32):
        case = {**LAYERS, **ODD}[name]
        model = case.build()
        targets = case.targets_for(model)
        case.operator(model.to(dtype), targets, dtype)


def check_shapes(model: nn.Module, inputs: Tensor, cuts: list[int]) -> None:
    """A model whose outputs are summed to two numbers a point, on batches of several sizes."""
    model = model.double()
    batches = [(inputs[a:b],) for a, b in pairwise(sorted({0, len(inputs), *cuts}))]
    operator = hcurv.GaussNewton(model, nn.MSELoss(), batches)
    targets = torch.zeros_like(oracles.call(model, inputs))
    expected = oracles.gauss_newton_of_model(
        model, lambda outputs: nn.functional.mse_loss(outputs, targets), inputs
    )
    assert_close(operator.to_dense(), expected, ROUNDING)
    assert operator.memory_plan().stored_bytes == operator.nbytes


_small = st.integers(1, 3)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2))
def test_convolutions_of_any_shape(data: st.DataObject, count: int, cuts: list[int]) -> None:
    dim, groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    channels, units = groups * data.draw(st.integers(1, 2)), groups * data.draw(_small)
    kernel, stride, dilation = (tuple(data.draw(_small) for _ in range(dim)) for _ in range(3))
    sizes = [
        data.draw(st.integers(d * (k - 1) + 1, 7)) for k, d in zip(kernel, dilation, strict=True)
    ]
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if data.draw(st.booleans()):
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dim - 1]
        options["padding"] = tuple(
            data.draw(st.integers(0, min(2, d * (k - 1) // 2)))
            for k, d in zip(kernel, dilation, strict=True)
        )
        options["output_padding"] = tuple(
            data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    else:
        kind = (nn.Conv1d, nn.Conv2d)[dim - 1]
        options["padding"] = tuple(data.draw(st.integers(0, 2)) for _ in range(dim))
    options["bias"] = data.draw(st.booleans())
    model = seeded(
        lambda: Call(
            lambda self, x: torch.stack([z := self.f(x).flatten(1).tanh().sum(1), z**2], 1),
            f=kind(channels, units, kernel, **options),
        )
    )
    check_shapes(model, normal(count, channels, *sizes), [c for c in cuts if c < count])


def _sequences(self: Any, x: Tensor) -> Tensor:
    x = (x.transpose(0, 1) if self.time_first else x) + self.shift
    z = self.second(self.first(x).tanh() * self.scale).tanh()
    return z.sum(0) if self.time_first else z[:, 0] + z[:, -1]


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_sequences_of_any_shape(
    count: int, length: int, cuts: list[int], time_first: bool, bias: bool
) -> None:
    model = seeded(
        lambda: Call(
            _sequences,
            first=nn.Linear(2, 3, bias),
            second=nn.Linear(3, 2),
            shift=parameter(2),
            scale=parameter(1),
            time_first=time_first,
        )
    )
    check_shapes(model, normal(count, length, 2), [c for c in cuts if c < count])


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(1, 4), max_size=2))
def test_recurrence_of_any_shape(count: int, length: int, cuts: list[int]) -> None:
    model = seeded(
        lambda: Call(lambda self, x: self.f(x.transpose(0, 1))[0].sum(0), f=nn.GRU(2, 2))
    )
    check_shapes(model, normal(count, length, 2), [c for c in cuts if c < count])


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_slope_of_prelu_is_shared_by_all_units(outputs: int) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU(), nn.Linear(3, outputs)))
    case = ModelCase(lambda: model, VECTORS)
    model = case.build()
    targets = case.targets_for(model)
    expected = case.dense(model, targets)
    assert (case.operator(model, targets).to_dense() - expected).norm() < 1e-12 * expected.norm()


def test_an_interruption_leaves_no_level_of_vmap_behind() -> None:
    def enter_a_level() -> None:
        with levels_restored():
            torch._C._functorch._vmap_increment_nesting(3, "error")
            raise KeyboardInterrupt  # before the level would be left

    with pytest.raises(KeyboardInterrupt):
        enter_a_level()
    torch.randn(2)  # is refused within vmap
