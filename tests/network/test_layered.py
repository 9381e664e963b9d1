"""Every form of a layer's Jacobian against the columns that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import assert_close, labels, normal
from conformance import check_operator
from hcurv.layout import ParameterLayout
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.layered import LayeredRoot
from hcurv.network.layered.dense_jacobian import DenseJacobian
from hcurv.network.layered.layer_jacobian import LayerJacobian, LinearShape, ZeroJacobian
from hcurv.network.layered.lookup_jacobian import LookupJacobian
from hcurv.network.layered.plain_jacobian import PlainJacobian
from hcurv.network.layered.position_jacobian import PositionJacobian
from hcurv.network.layered.stacked_jacobian import StackedJacobian

# Points, rows, units, inputs, positions.
B, Q, U, D, T = 5, 3, 2, 4, 6


def columns_of(
    factors: Tensor, inputs: Tensor, by_input: bool, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Σ_t C[i, a, μ, t] x[i, ν, t], (p, q, b)."""
    found = torch.einsum("bqut,bdt->duqb" if by_input else "bqut,bdt->udqb", factors, inputs)
    return found.flatten(0, 1)


def plain(by_input: bool, count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    factors, inputs = normal(count, Q, U, 1, seed=seed), normal(count, D, 1, seed=seed + 1)
    jacobian = PlainJacobian(
        factors[..., 0].permute(2, 1, 0).contiguous(), inputs[..., 0].T.contiguous(), by_input
    )
    return jacobian, columns_of(factors, inputs, by_input)


def positions(by_input: bool, count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    factors, inputs = normal(count, Q, U, T, seed=seed), normal(count, D, T, seed=seed + 1)
    return PositionJacobian(factors, inputs, by_input), columns_of(factors, inputs, by_input)


def look_up(count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    factors, rows = normal(count, Q, T, D, seed=seed), labels(count * T, 7, seed).view(count, T)
    inputs = torch.nn.functional.one_hot(rows, 7).mT.double()
    expected = columns_of(factors.mT, inputs, True)
    return LookupJacobian(factors, rows, 7), expected


def dense(count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    values = normal(9, Q, count, seed=seed)
    return DenseJacobian(values), values


def dense_by_point(count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    values = normal(count, Q, 9, seed=seed).permute(2, 1, 0)
    return DenseJacobian(values), values


def zero(count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    expected = torch.zeros(4, Q, count).double()
    return ZeroJacobian(4, Q, expected[0, 0]), expected


def stacked(count: int = B, seed: int = 0) -> tuple[LayerJacobian, Tensor]:
    empty = ZeroJacobian(0, Q, torch.zeros(count).double())
    inner = StackedJacobian([look_up(count, seed + 20)[0], empty, dense(count, seed + 30)[0]])
    kinds = [plain(True, count, seed), zero(count), positions(False, count, seed)]
    parts = [empty, *(part for part, _ in kinds), inner, empty]
    expected = [values for _, values in kinds]
    expected += [look_up(count, seed + 20)[1], dense(count, seed + 30)[1]]
    return StackedJacobian(parts), torch.cat(expected)


FORMS: dict[str, Callable[..., tuple[LayerJacobian, Tensor]]] = {
    "plain": lambda *args: plain(False, *args),
    "plain, by input": lambda *args: plain(True, *args),
    "positions": lambda *args: positions(False, *args),
    "positions, by input": lambda *args: positions(True, *args),
    "look-up": look_up,
    "dense": dense,
    "dense, point by point": dense_by_point,
    "zero": zero,
    "stacked": stacked,
}

all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
panel_sizes = pytest.mark.parametrize("panel", [1, 50, 2**22])


@pytest.fixture
def panel_floats(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def change(size: int) -> None:
        for module in ("layer_jacobian", "lookup_jacobian", "position_jacobian"):
            monkeypatch.setattr(f"hcurv.network.layered.{module}.PANEL_FLOATS", size)

    return change


def check_jacobian(jacobian: LayerJacobian, expected: Tensor, rounding: float = 100) -> None:
    """Compare all that a Jacobian can do with its columns (p, q, b)."""
    size, rows, count = expected.shape
    kind = jacobian.tensors[0].dtype
    assert (jacobian.num_parameters, jacobian.num_rows, jacobian.num_points) == expected.shape
    index = torch.cat([labels(2 * size, size, seed=4), torch.arange(size)])
    for points in (slice(0, count), slice(count // 2, count), slice(count - 1, count)):
        assert_close(jacobian.columns(index, points), expected[index][:, :, points], rounding)
        assert jacobian.columns(index[:0], points).shape == (0, rows, points.stop - points.start)
        covered = torch.zeros(size, rows, points.stop - points.start, dtype=kind)
        for numbers, columns in jacobian.panels(points):
            covered[numbers] = columns
        assert_close(covered, expected[:, :, points], rounding)
    for num_columns in (1, 3, 20):
        flat = normal(size, num_columns, seed=5).to(kind)
        # Right-hand sides may be stored column by column, and results may hold something already.
        for given_flat in (flat, flat.mT.contiguous().mT):
            result = torch.ones(count, rows, num_columns, dtype=kind)
            jacobian.apply(given_flat, result)
            product = torch.einsum("pqb,pk->bqk", expected, flat.double())
            assert_close(result, 1 + product, rounding)
        values = normal(count, rows, num_columns, seed=6).to(kind)
        found = torch.einsum("pqb,bqk->pk", expected, values.double())
        assert_close(jacobian.apply_transposed(values), found, rounding)
        strided = values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert_close(jacobian.apply_transposed(strided), found, rounding)
    ready = jacobian.multiplied(20, 2**20)
    assert_close(ready.columns(index, slice(0, count)), expected[index], rounding)
    assert_close(jacobian.square_sums(), expected.square().sum((1, 2)), rounding)
    norms = jacobian.point_norms()
    assert norms.dtype == torch.float64
    assert_close(norms.to(kind), expected.square().sum((0, 1)), rounding)


@panel_sizes
@all_forms
def test_forms_stand_for_their_columns(
    form: Callable[..., tuple[LayerJacobian, Tensor]],
    panel: int,
    panel_floats: Callable[[int], None],
) -> None:
    panel_floats(panel)
    check_jacobian(*form())
    check_jacobian(*form(1))


@all_forms
def test_selected_points_are_scaled(form: Callable[..., tuple[LayerJacobian, Tensor]]) -> None:
    jacobian, expected = form()
    points, scale = torch.tensor([3, 0, 3]), torch.tensor([2.0, 0.5, -1.0]).double()
    check_jacobian(jacobian.select(points, scale), expected[:, :, points] * scale)


@all_forms
def test_other_precision(form: Callable[..., tuple[LayerJacobian, Tensor]]) -> None:
    jacobian, expected = form()
    narrow = jacobian.to(torch.float32)
    check_jacobian(narrow, expected)
    assert narrow.num_floats == jacobian.num_floats


@panel_sizes
@all_forms
def test_gram_is_the_sum_over_parameters(
    form: Callable[..., tuple[LayerJacobian, Tensor]],
    panel: int,
    panel_floats: Callable[[int], None],
) -> None:
    panel_floats(panel)
    (jacobian, left), (other, right) = form(), form(4, 7)
    size = left.shape[0]
    by_input = torch.arange(size, dtype=torch.float64)
    for weights in (torch.ones(size).double(), normal(size).abs(), 1 + by_input % D):
        for first, second in ((slice(0, B), slice(0, 4)), (slice(2, 3), slice(1, 4))):
            shape = (Q * (first.stop - first.start), Q * (second.stop - second.start))
            result = torch.ones(shape, dtype=torch.float64)
            jacobian.gram(first, other, second, weights, result)
            expected = torch.einsum(
                "pqb,p,prc->qbrc", left[:, :, first], weights, right[:, :, second]
            )
            assert_close(result, 1 + expected.reshape(shape))


def test_gram_of_two_forms_of_the_same_columns() -> None:
    for form in (FORMS["plain"], FORMS["positions, by input"], stacked):
        jacobian, expected = form()
        other = DenseJacobian(expected)
        weights = normal(len(expected)).abs()
        everywhere = slice(0, B)
        for first, second in ((jacobian, other), (other, jacobian)):
            result = torch.zeros(Q * B, Q * B).double()
            first.gram(everywhere, second, everywhere, weights, result)
            assert_close(result, torch.einsum("px,p,py->xy", *_thrice(expected, weights)))


def _thrice(columns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return columns.flatten(1), weights, columns.flatten(1)


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_entries_of_a_weight_are_numbered_both_ways(
    num_units: int, num_inputs: int, by_input: bool, num_columns: int
) -> None:
    shape = LinearShape(num_units, num_inputs, by_input)
    index = torch.arange(shape.size)
    units, inputs = shape.locate(index)
    assert torch.equal(shape.number(slice(0, num_units))[units, inputs], index)
    flat = normal(shape.size, num_columns)
    rows = shape.rows(flat)
    assert torch.equal(shape.flat(rows), flat)
    table = rows.view(num_columns, num_units, num_inputs)
    assert torch.equal(table[:, units, inputs].T, flat)


def root_of(counts: list[int]) -> tuple[LayeredRoot, Tensor]:
    """A root of several chunks, and S, (n·q, N)."""
    chunks = [stacked(count, 40 * i) for i, count in enumerate(counts)]
    size = chunks[0][0].num_parameters
    layout = ParameterLayout({"weights": (size,)})
    dense = torch.cat([columns.permute(2, 1, 0).flatten(0, 1) for _, columns in chunks])
    return LayeredRoot(tuple(chunk for chunk, _ in chunks), layout, {}), dense


@pytest.mark.parametrize("workspace", [1, 2**12, 2**28])
@pytest.mark.parametrize("counts", [[5], [1, 4, 2]], ids=str)
def test_roots_of_several_chunks(counts: list[int], workspace: int) -> None:
    root, dense = root_of(counts)
    expected = dense.T @ dense
    matrix = FactoredMatrix(root, workspace)
    check_operator(matrix, expected)
    size, num_points = len(expected), sum(counts)
    rows, cols = labels(60, size, seed=3).view(6, 10), labels(24, size, seed=4).view(6, 4)
    assert_close(
        matrix.blocks(rows, cols),
        torch.stack([expected[r][:, c] for r, c in zip(rows, cols, strict=True)]),
    )
    same = matrix.blocks(rows, rows)
    assert torch.equal(same, same.mT)
    assert_close(same, torch.stack([expected[r][:, r] for r in rows]))
    one, other = rows.reshape(-1), rows.flip(1).reshape(-1)
    assert_close(matrix.pairs(one, other), expected[one, other])
    assert torch.equal(matrix.pairs(one, other), matrix.pairs(other, one))
    assert_close(matrix.root_columns(one), dense[:, one])
    assert_close(matrix[rows[0, ::2], rows[:, 1]], expected[rows[0, ::2]][:, rows[:, 1]])
    damping = 0.5 + normal(size).abs()
    kernel = dense @ (dense / damping).T
    check_operator(matrix.kernel(damping), kernel)
    picked = labels(8, len(kernel), seed=7).view(2, 4)
    found = matrix.kernel(damping).blocks(picked, picked.flip(0))
    assert_close(found, torch.stack([kernel[picked[i]][:, picked[1 - i]] for i in range(2)]))
    for order in matrix.kernel().orders().values():
        assert torch.equal(order.sort().values, torch.arange(len(kernel)))
    points = labels(4, num_points, seed=8)  # unsorted, with repetitions
    weights = normal(4, seed=9).square()
    chosen = (dense.view(num_points, -1, size)[points] * weights.sqrt()[:, None, None]).flatten(
        0, 1
    )
    check_operator(matrix.of_points(points, weights), chosen.T @ chosen)
    check_operator(matrix.in_precision(torch.float32), expected)
