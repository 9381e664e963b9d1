"""Layer Jacobians that are recomputed at each call are those that are kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hcurv
from cases import CASES, normal, seeded
from every_request import PROBLEMS, ask_everything
from hcurv.network.layered.stacked_jacobian import StackedJacobian
from oracles import gauss_newton
from peak_memory import peak_beyond_result

# A workspace that has room for a few points at a time.
_SMALL = 2**16


@pytest.mark.parametrize("name", PROBLEMS)
def test_recompute_gives_what_memory_gives(name: str) -> None:
    problem = PROBLEMS[name]
    stored = problem.matrix(factors="memory", workspace=_SMALL)
    again = problem.matrix(factors="recompute", workspace=_SMALL)
    assert (stored.factors, again.factors) == ("memory", "recompute")
    assert again.nbytes == 0
    expected, found = ask_everything(stored), ask_everything(again)
    for key, value in expected.items():
        scale = float(value.double().abs().max())
        tolerance = 1e-6 if key in ("solve by iterations", "in_precision") else 1e-11
        assert float((found[key] - value).double().abs().max()) <= tolerance * scale, key


@pytest.mark.parametrize(
    "name", ["one point", "dead units", "no biases", "middle layer frozen", "zero inputs"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recompute_is_the_dense_matrix(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    H = case.operator(dtype, factors="recompute", workspace=_SMALL)  # type: ignore[arg-type]
    exact = gauss_newton(case.build(), case.loss_of_outputs, case.inputs)
    error = (H.to_dense().double() - exact).norm() / exact.norm()
    assert float(error) <= 50 * torch.finfo(dtype).eps


def _batches() -> list[tuple[Tensor, Tensor]]:
    """The points of a problem in batches of unequal size, one of them empty."""
    problem = PROBLEMS["chain"]
    sizes = [1, 7, 0, 12, 3]
    return list(zip(problem.inputs.split(sizes), problem.targets.split(sizes), strict=True))


class _Readable(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that begins anew whenever it is read."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([batch for batch in _batches() if len(batch[0])])


class _Once:
    """Something that looks readable, and is empty the second time."""

    def __init__(self) -> None:
        self._batches = iter(_batches())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches


@pytest.mark.parametrize("name", ["list", "worker process", "stream"])
def test_any_data_that_can_be_read_again_will_do(name: str) -> None:
    problem = PROBLEMS["chain"]
    kinds: dict[str, Any] = {
        "list": _batches(),
        "worker process": DataLoader(
            TensorDataset(problem.inputs, problem.targets), batch_size=5, num_workers=1
        ),
        "stream": DataLoader(_Readable(), batch_size=None),
    }
    H = problem.matrix(kinds[name], factors="recompute", workspace=_SMALL)
    assert torch.allclose(H.to_dense(), problem.matrix().to_dense(), rtol=1e-10, atol=1e-13)
    assert torch.allclose(H.gradient(), problem.matrix().gradient(), rtol=1e-10, atol=1e-13)


def test_data_that_can_be_read_once_is_refused() -> None:
    problem = PROBLEMS["chain"]
    with pytest.raises(TypeError, match="data can be read only once"):
        problem.matrix((batch for batch in _batches()), factors="recompute")
    with pytest.raises(ValueError, match="no batches when it was read again"):
        problem.matrix(_Once(), factors="recompute")
    reshuffled = DataLoader(TensorDataset(problem.inputs, problem.targets), 5, shuffle=True)
    with pytest.raises(ValueError, match="the data differs between two passes"):
        problem.matrix(reshuffled, factors="recompute")


def test_each_request_takes_one_pass() -> None:
    H = PROBLEMS["convolution"].matrix(factors="recompute", workspace=_SMALL)
    index = torch.arange(H.shape[0])
    rows = index[:12].view(3, 4)
    for request in (
        lambda: H @ normal(H.shape[0], 9),
        lambda: H.root_product(normal(H.shape[0], 2)),
        lambda: H.root_transposed(normal(H.num_root_rows, 2)),
        lambda: H.blocks(rows, rows + 1),
        lambda: H.block(index, index[:3]),
        lambda: H.pairs(index, index),
        lambda: H.diagonal(),
        lambda: H.gradient(),
        lambda: H.subsample(3),
    ):
        before = H.num_passes
        request()
        passes = H.num_passes - before
        assert passes <= (2 if "subsample" in request.__code__.co_names else 1)
    before = H.num_passes
    H.diagonal()
    assert H.num_passes == before  # it is kept


def _convolutions() -> nn.Module:
    """Convolutions whose columns are multiplied out, two rows of R at a time for many units."""
    layers = (nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 90, 2), nn.Tanh(), nn.AvgPool2d(5))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(90, 5)).double()


def test_columns_of_several_rows_are_multiplied_out_together() -> None:
    model, inputs, targets = seeded(_convolutions), normal(7, 1, 8, 8), normal(7, 5)
    H = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, targets), factors="recompute")
    chosen = torch.arange(0, H.shape[0], 7)
    stacked = torch.autograd.functional.jacobian(
        lambda *values: torch.func.functional_call(
            model, dict(zip(dict(model.named_parameters()), values, strict=True)), inputs
        ),
        tuple(model.parameters()),
    )
    jacobian = torch.cat([part.flatten(2) for part in stacked], 2).flatten(0, 1)
    expected = jacobian.T @ jacobian * 2 / targets.numel()
    for _ in range(2):  # The second pass is not compared with automatic differentiation.
        found = H.block(chosen, chosen)
        assert torch.allclose(found, expected[chosen][:, chosen], rtol=1e-10, atol=1e-12)
    assert torch.allclose(H.diagonal(), expected.diagonal(), rtol=1e-10, atol=1e-12)


def test_the_first_pass_adds_up_the_diagonal() -> None:
    model, inputs, targets = seeded(_convolutions), normal(7, 1, 8, 8), normal(7, 5)
    stored, H = (
        hcurv.GaussNewton(model, nn.MSELoss(), (inputs, targets), factors=factors)
        for factors in ("memory", "recompute")
    )
    vector = normal(H.shape[0])
    assert torch.allclose(H @ vector, stored @ vector, rtol=1e-10, atol=1e-13)
    before = H.num_passes
    assert torch.allclose(H.diagonal(), stored.diagonal(), rtol=1e-10, atol=1e-13)
    assert H.num_passes == before


@pytest.mark.parametrize("choice", [{}, {"num_samples": 6}, {"fisher": "empirical"}], ids=str)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_columns_are_multiplied_without_reading_rows(
    choice: dict[str, Any], loss: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = seeded(_convolutions).to(dtype), normal(7, 1, 8, 8).to(dtype)
    is_regression = isinstance(loss, nn.MSELoss)
    targets = normal(7, 5).to(dtype) if is_regression else torch.arange(7) % 5
    H = hcurv.GaussNewton(model, loss, (inputs, targets), factors="recompute", **choice)
    vectors = normal(H.shape[0], 2).to(dtype)
    expected, before = H @ vectors, H.num_passes
    if choice.get("fisher") != "empirical":  # One row is read faster.
        monkeypatch.setattr(StackedJacobian, "apply", _refused)
    found = H @ vectors
    assert H.num_passes == before + 1
    tolerance = 100 * torch.finfo(dtype).eps
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


def _refused(*_: object) -> None:
    raise AssertionError("rows of S were read")


class _Cubes(torch.autograd.Function):
    """x³, without a forward derivative, or with a wrong one."""

    forward_factor: float | None = None

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        if _Cubes.forward_factor is None:
            raise NotImplementedError
        return _Cubes.forward_factor * ctx.saved_tensors[0] ** 2 * tangent


class _Cubic(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = _Cubes.apply(values)
        return result


@pytest.mark.parametrize("factor", [None, 2.0, 3.0])
def test_models_without_right_forward_derivatives_are_read(
    factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Cubes, "forward_factor", factor)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), _Cubic(), nn.Linear(6, 3))).double()
    data = (normal(9, 4), normal(9, 3))
    stored, H = (
        hcurv.GaussNewton(model, nn.MSELoss(), data, factors=factors)
        for factors in ("memory", "recompute")
    )
    vector = normal(H.shape[0])
    for _ in range(3):
        assert torch.allclose(H @ vector, stored @ vector, rtol=1e-10, atol=1e-12)


def test_a_global_part_takes_two_passes_beside_the_diagonal() -> None:
    model, inputs, targets = seeded(_convolutions), normal(40, 1, 8, 8), normal(40, 5)
    H = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, targets), factors="recompute")
    H.diagonal()
    before = H.num_passes
    A = hcurv.compress(H, tolerance=0.3)
    assert A.tree.depth == 0
    assert H.num_passes - before <= 3  # S, Sᵀ and the first products


def test_a_tree_is_built_in_about_as_many_passes_as_it_has_levels() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(24, 3), nn.Tanh(), nn.Linear(3, 24))).double()
    inputs = normal(30, 24)
    H = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, inputs), factors="recompute")
    before = H.num_passes
    A = hcurv.compress(
        H, tolerance=1e-3, global_rank=0, leaf_size=16, ordering="layer-output-input"
    )
    assert A.tree.depth >= 3
    # One for each level and the leaves, and those of the diagonal, a check and the sketch.
    assert H.num_passes - before <= A.tree.depth + 12


def test_samples_are_the_same_at_every_pass() -> None:
    H = PROBLEMS["sampled"].matrix(factors="recompute", workspace=_SMALL)
    assert torch.equal(H.to_dense(), H.to_dense())
    other = PROBLEMS["sampled"].matrix(factors="recompute", workspace=_SMALL, seed=1)
    assert not torch.equal(H.to_dense(), other.to_dense())


def test_auto_decides_by_free_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["convolution"]
    assert problem.matrix().factors == "memory"
    monkeypatch.setattr("hcurv.network.choose_root.available_bytes", lambda device: 10_000)
    H = problem.matrix()
    assert H.factors == "recompute"
    assert "factors='recompute'" in repr(H)
    assert "recomputed at each call (stored, they would take" in str(H.memory_plan())
    assert "10 kB is free" in str(H.memory_plan())
    assert H.memory_plan().stored_bytes == 0
    with pytest.raises(ValueError, match='factors must be "auto", "memory" or "recompute"'):
        problem.matrix(factors="disk")


def test_training_further_changes_nothing() -> None:
    problem = PROBLEMS["convolution"]
    model = seeded(problem.model).double().eval()
    data = (problem.inputs, problem.targets)
    H = hcurv.GaussNewton(model, problem.loss, data, factors="recompute")
    before = H.to_dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    assert torch.equal(H.to_dense(), before)


def test_memory_does_not_grow_with_the_number_of_points() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    inputs = torch.rand(40_000, 64, generator=torch.Generator().manual_seed(0))
    workspace = 2**23
    H = hcurv.GaussNewton(
        model, nn.CrossEntropyLoss(), inputs, factors="recompute", workspace=workspace
    )
    vector = torch.ones(H.shape[0])
    H @ vector
    stored = 40_000 * (64 * 10 + 64 + 65) * 4  # 123 MB
    assert peak_beyond_result(lambda: H @ vector) < 3 * workspace < 0.25 * stored
