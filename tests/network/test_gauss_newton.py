"""GaussNewton against the dense oracle over every case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hcurv
import oracles
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
from conformance import check_operator
from hcurv.network import entries, products
from hcurv.network.entries import EntrySizes
from hcurv.network.jacobians.narrow_jacobian import NarrowJacobian
from hcurv.network.jacobians.output_jacobian import CacheSizes, FactoredGram
from hcurv.network.jacobians.wide_jacobian import WideJacobian
from hcurv.network.precompute import compute_factors
from hcurv.network.problem import read_problem
from hcurv.network.products import ProductSizes
from hcurv.network.scratch import Scratch


@both_dtypes
@all_cases
def test_operator_is_the_gauss_newton_hessian(case: Case, dtype: torch.dtype) -> None:
    check_operator(case.operator(dtype), case.dense)


@both_dtypes
@all_cases
def test_entries_and_blocks_equal_the_oracle(case: Case, dtype: torch.dtype) -> None:
    expected, operator = case.dense, case.operator(dtype)
    size = expected.shape[0]
    rows, cols = labels(40, size, seed=3), labels(23, size, seed=4)  # with repetitions, unsorted
    assert_close(operator[rows, cols], expected[rows][:, cols])
    assert_close(operator[rows, rows], expected[rows][:, rows])
    assert_close(operator.pairs(rows[:23], cols), expected[rows[:23], cols])
    assert_close(operator.pairs(cols, rows[:23]), expected[cols, rows[:23]])
    assert_close(operator[:3, 1::2], expected[:3, 1::2])
    assert_close(operator[size - 1, 0], expected[size - 1, 0], 1e4)


@both_dtypes
@all_cases
def test_gradient_equals_autograd(case: Case, dtype: torch.dtype) -> None:
    expected = oracles.gradient(case.build(), case.loss_of_outputs, case.inputs)
    assert_close(case.operator(dtype).gradient(case.targets), expected)


class InSmallSteps(hcurv.SymmetricOperator):
    """The matrix of a case, by the inner functions of `GaussNewton` with odd sizes.

    Args:
        case: the case.
        workspace: bytes of temporary memory.
        entry_sizes: for blocks.
        product_sizes: for products.
        max_batch: most points that the precomputation takes at a time.
    """

    def __init__(
        self,
        case: Case,
        workspace: int,
        entry_sizes: EntrySizes,
        product_sizes: ProductSizes,
        max_batch: int = 512,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        targets = case.targets.to(dtype) if case.targets.is_floating_point() else case.targets
        data = (case.inputs.to(dtype), targets)
        problem = read_problem(case.build(dtype), case.loss, data)
        self.workspace, self.entry_sizes, self.product_sizes = workspace, entry_sizes, product_sizes
        with torch.no_grad():
            self.factors = compute_factors(problem, workspace, max_batch=max_batch)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.factors.num_parameters, self.factors.num_parameters)

    @property
    def dtype(self) -> torch.dtype:
        return self.factors.inputs.dtype

    @property
    def device(self) -> torch.device:
        return self.factors.inputs.device

    @property
    def num_stored(self) -> int:
        return self.factors.num_stored

    def _matmat(self, rhs: torch.Tensor) -> torch.Tensor:
        return products.product(self.factors, rhs, self.workspace, self.product_sizes)

    def diagonal(self) -> torch.Tensor:
        return products.diagonal(self.factors, self.workspace)

    def to_dense(self) -> torch.Tensor:
        every = torch.arange(self.shape[0])
        return entries.block(self.factors, every, every, self.workspace, sizes=self.entry_sizes)


@all_forms
def test_little_workspace_changes_nothing(case: Case) -> None:
    operator = InSmallSteps(
        case,
        workspace=1000,
        entry_sizes=EntrySizes(cache_floats=3, cache_points=3, tile=5),
        product_sizes=ProductSizes(
            stream_floats=7, min_points=2, caches=CacheSizes(sum_floats=5, output_floats=5)
        ),
        max_batch=3,
    )
    expected = case.dense
    check_operator(operator, expected)
    rows, cols = labels(40, len(expected), seed=3), labels(40, len(expected), seed=4)
    values = entries.pairs(operator.factors, rows, cols, 1000, operator.entry_sizes)
    assert_close(values, expected[rows, cols])


@all_cases
def test_memory_is_known_before_it_is_taken(case: Case) -> None:
    operator = case.operator()
    root = hcurv.losses.as_loss(case.loss).hessian_sqrt(
        case.build()(case.inputs).detach(), case.targets
    )
    plan = hcurv.network.precompute.plan_factors(
        operator.network, operator.num_points, root.shape[1], diagonal=root.ndim == 2
    )
    assert plan.num_floats == operator.num_stored


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("classifier", NarrowJacobian),
        ("regression", NarrowJacobian),
        ("autoencoder", WideJacobian),
        ("deep autoencoder", WideJacobian),
        ("autoencoder, decoder frozen", WideJacobian),
    ],
)
def test_wide_outputs_are_stored_in_gram_form(name: str, kind: type) -> None:
    assert isinstance(CASES[name].operator().root.factors.jacobian, kind)


@all_cases
def test_inner_products_of_columns_are_the_gram_values(case: Case) -> None:
    factors = case.operator().root.factors
    jacobian, points = factors.jacobian, slice(0, min(3, factors.num_points))
    columns, num_floats = {}, 0
    for group in jacobian.groups:
        rows = jacobian.column_rows(slice(group.start, group.stop), points)
        columns[group] = torch.diag_embed(rows) if rows.ndim == 2 else rows
        num_floats += rows.numel()
    assert jacobian.row_floats * points.stop == num_floats
    for first, second in jacobian.group_pairs():
        expected = torch.einsum("bqu,bqv->uvb", columns[first], columns[second])
        units, others = (torch.arange(group.start, group.stop) for group in (first, second))
        pairs = torch.cartesian_prod(units, others).T
        for one, other in (pairs, pairs.flip(0)):
            assert_close(jacobian.gram(one, other, points), expected.flatten(0, 1))
        for some in (units, units[-1:]):
            check_factored(jacobian.factored(first, second), some, others, expected[-len(some) :])


def check_factored(
    gram: FactoredGram | None, first: torch.Tensor, second: torch.Tensor, expected: torch.Tensor
) -> None:
    """Whether the sums of a factored form are the Gram values (first, second, points)."""
    if gram is None:
        return
    gram, num_points = gram.simplified(first), expected.shape[2]
    points, scratch = slice(0, num_points), Scratch(expected)
    left = gram.left(first, expected.new_ones(len(first), num_points), points, scratch)
    right = gram.right(second, expected.new_ones(len(second), num_points), points, scratch)
    assert left.shape == (len(first), gram.depth, num_points)
    values = torch.einsum("urb,vrb->buv", left, right)
    gram.finish(values, first.expand(num_points, -1), second.expand(num_points, -1))
    assert_close(values.permute(1, 2, 0), expected)


@both_dtypes
@pytest.mark.parametrize("output", [nn.Identity, nn.Sigmoid])
@pytest.mark.parametrize(
    "frozen",
    [(), ("2.weight",), ("2.bias",), ("2.weight", "2.bias"), ("0.weight", "0.bias")],
    ids=lambda names: " ".join(names) or "none",
)
def test_products_through_wide_outputs(
    frozen: tuple[str, ...],
    output: type[nn.Module],
    dtype: torch.dtype,
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(15, 4), nn.Tanh(), nn.Linear(4, 33), output())

    case = Case(model, nn.MSELoss(), normal(30, 15), normal(30, 33, seed=1), frozen)
    expected = case.dense
    sizes = ProductSizes(
        max_points=13,  # several ranges of points
        caches=CacheSizes(output_floats=100),  # and of outputs
    )
    operator = InSmallSteps(case, 2**28, EntrySizes(), sizes, dtype=dtype)
    for num_columns in (1, 3, 20, 70):
        columns = normal(expected.shape[0], num_columns, seed=2)
        assert_close(operator @ columns.to(dtype), expected @ columns)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Networks of one to four layers, some without bias or frozen, on one to eight points."""
    widths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    if draw(st.booleans()):
        widths[-1] = 16  # wide enough for the Gram form
    biases = [draw(st.booleans()) for _ in widths[1:]]
    activations = [
        draw(st.sampled_from([nn.ReLU, nn.Softplus, nn.Tanh, nn.Identity])) for _ in widths[1:]
    ]

    def model() -> nn.Module:
        modules: list[nn.Module] = []
        for index, bias in enumerate(biases):
            modules += [nn.Linear(widths[index], widths[index + 1], bias), activations[index]()]
        return nn.Sequential(*modules)

    names = [name for name, _ in model().named_parameters()]
    frozen = draw(st.lists(st.sampled_from(names), max_size=len(names) - 1, unique=True))
    num_points = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**16))
    inputs = normal(num_points, widths[0], seed=seed)
    if draw(st.booleans()):
        loss, targets = nn.CrossEntropyLoss(), labels(num_points, widths[-1])
    else:
        loss, targets = nn.MSELoss(), normal(num_points, widths[-1])
    return Case(model, loss, inputs, targets, tuple(frozen), seed=seed)


@given(random_cases(), st.integers(0, 2**16))
def test_random_networks_equal_the_oracle(case: Case, seed: int) -> None:
    expected, operator = case.dense, case.operator()
    size = expected.shape[0]
    rows, cols = labels(7, size, seed), labels(9, size, seed + 1)
    assert_close(operator.to_dense(), expected)
    assert_close(operator[rows, cols], expected[rows][:, cols], 1e3)
    assert_close(operator.pairs(rows, cols[:7]), operator.block(rows, cols[:7]).diagonal(), 1e3)
    rhs = normal(size, 2, seed=seed)
    assert_close(operator @ rhs, expected @ rhs, 1e3)
    assert_close(operator.diagonal(), expected.diagonal())
    gradient = oracles.gradient(case.build(), case.loss_of_outputs, case.inputs)
    assert_close(operator.gradient(case.targets), gradient, 1e3)


@given(random_cases(), st.floats(-3, 3), st.integers(0, 2**16))
def test_symmetric_semidefinite_and_linear(case: Case, factor: float, seed: int) -> None:
    operator = case.operator()
    matrix = operator.to_dense()
    assert torch.equal(matrix, matrix.T)
    spectrum = torch.linalg.eigvalsh(matrix)
    assert spectrum.min() >= -1e-13 * spectrum.max()
    first, second = normal(2, matrix.shape[0], seed=seed)
    combined = operator @ (first + factor * second)
    scale = matrix.norm() * (first.norm() + abs(factor) * second.norm())
    assert (combined - operator @ first - factor * (operator @ second)).norm() <= 1e-13 * scale


@settings(max_examples=20)
@given(random_cases(), st.data())
def test_order_and_batches_of_the_data_do_not_matter(case: Case, data: st.DataObject) -> None:
    num_points = case.inputs.shape[0]
    order = torch.tensor(data.draw(st.permutations(range(num_points))))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_points), max_size=3)))
    batches = list(torch.tensor_split(case.inputs[order], cuts))
    pairs = list(zip(batches, torch.tensor_split(case.targets[order], cuts), strict=True))
    expected = case.operator().to_dense()
    model = case.build()
    # A list of two tensors of one shape may as well be inputs and targets, and is refused.
    alone = [(batch,) for batch in batches] if len(batches) == 2 else batches
    assert_close(hcurv.GaussNewton(model, case.loss, alone).to_dense(), expected)
    assert_close(hcurv.GaussNewton(model, case.loss, pairs).to_dense(), expected)


def test_data_loader_gives_what_the_tensor_gives() -> None:
    case = CASES["class weights"]
    data = torch.utils.data.TensorDataset(case.inputs, case.targets)
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # 4 + 4 + 3 points
    operator = hcurv.GaussNewton(case.build(), case.loss, loader)
    assert_close(operator.to_dense(), case.dense)
    assert_close(operator.gradient(), case.operator().gradient())


def test_training_further_does_not_change_the_matrix() -> None:
    case = CASES["hand-written"]
    model = case.build()
    operator = hcurv.GaussNewton(model, case.loss, case.inputs)
    before, gradient = operator.to_dense(), operator.gradient(case.targets)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.slope.fill_(5.0)
    assert torch.equal(operator.to_dense(), before)
    assert torch.equal(operator.gradient(case.targets), gradient)


def test_dead_units_and_blank_inputs_give_exact_zeros() -> None:
    for name in ("dead units", "blank inputs"):
        expected = CASES[name].dense
        zero = expected.diagonal() == 0
        assert zero.any()
        assert torch.equal(CASES[name].operator().diagonal() == 0, zero)
        assert (CASES[name].operator()[zero, :] == 0).all()


def test_subnormal_numbers_are_flushed() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 9), nn.Sigmoid())
    )
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-100.0, -60.0, 0.0]))
        model[2].bias.copy_(torch.linspace(-110, 0, 9))
    inputs = normal(6, 4).float() * torch.tensor([1.0, 1e-41, 1e-20, 1.0])
    factors = hcurv.GaussNewton(model, nn.MSELoss(), inputs).root.factors
    tiny = torch.finfo(torch.float32).tiny
    for tensor in (factors.inputs, *factors.jacobian.tensors):
        assert ((tensor == 0) | (tensor.abs() >= tiny)).all()
    assert (factors.inputs == 0).any()


def test_no_autograd_graph_and_no_global_state() -> None:
    case = CASES["classifier"]
    state = torch.get_rng_state()
    operator = case.operator()
    vector = normal(operator.shape[0]).requires_grad_()
    for result in (operator @ vector, operator[0, 0], operator.diagonal(), operator.to_dense()):
        assert not result.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_bar_is_shown_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["classifier"]
    hcurv.GaussNewton(case.build(), case.loss, case.inputs)
    assert capsys.readouterr() == ("", "")
    hcurv.GaussNewton(case.build(), case.loss, case.inputs, progress=True)
    assert "11/11" in capsys.readouterr().err


def test_operator_describes_itself() -> None:
    operator = CASES["classifier"].operator()
    assert repr(operator) == (
        f"GaussNewton(N=79, num_points=11, loss=CrossEntropy, dtype=torch.float64,"
        f" nbytes={operator.nbytes})"
    )
    assert isinstance(operator, hcurv.EntrySource)
