"""Rows of derivatives at other inputs, against automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import pairwise
from hcurv.inversion.ways import WayName


def _chain(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3))


def _no_bias(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False))


def _frozen(dtype: torch.dtype) -> nn.Module:
    model = _chain(dtype)
    model.get_parameter("2.weight").requires_grad_(False)
    return model


def _normalised(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


MODELS = (_chain, _no_bias, _frozen, _normalised)
LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": (nn.CrossEntropyLoss(), lambda o, y: nn.functional.cross_entropy(o, y)),
    "half squares": (
        hcurv.losses.HalfSquaredError(reduction="sum"),
        lambda o, y: 0.5 * (o - y).square().sum(),
    ),
    "squares": (nn.MSELoss(), lambda o, y: (o - y).square().sum()),
}


def _flat(values: Tensor, model: nn.Module) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(values, parameters, retain_graph=True)
    return torch.cat([g.reshape(-1) for g in found])


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__.strip("_"))
def model(request: pytest.FixtureRequest, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param(dtype)
    return made.to(dtype)


@pytest.fixture(params=(torch.float64, torch.float32), ids=("float64", "float32"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def _points(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype)


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 40 * torch.finfo(found.dtype).eps * expected.norm())


@pytest.mark.parametrize("count", [1, 7])
def test_jacobian_is_that_of_autograd(model: nn.Module, dtype: torch.dtype, count: int) -> None:
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), _points(9, dtype))
    others = _points(count, dtype, seed=2)
    J = H.jacobian(others)
    expected = torch.stack([_flat(value, model) for value in model(others).reshape(-1)])
    assert J.shape == tuple(expected.shape)
    assert _close(J.to_dense(), expected)
    vectors = torch.randn(J.shape[1], 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert _close(J @ vectors, expected @ vectors)
    assert _close(J @ vectors[:, 0], expected @ vectors[:, 0])
    assert _close(J.T @ (J @ vectors), expected.T @ (expected @ vectors))
    assert _close(J.outputs(), model(others).detach())


@pytest.mark.parametrize("kind", LOSSES)
def test_point_gradients_are_those_of_single_losses(
    model: nn.Module, dtype: torch.dtype, kind: str
) -> None:
    loss, single = LOSSES[kind]
    inputs = _points(8, dtype)
    targets = torch.arange(8) % 3 if kind == "classes" else _points(8, dtype, 5)[:, :3]
    H = hcurv.GaussNewton(model, loss, (inputs, targets))
    rows = [_flat(single(model(inputs[i : i + 1]), targets[i : i + 1]), model) for i in range(8)]
    assert _close(H.point_gradients(inputs, targets).to_dense(), torch.stack(rows))
    batches = [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]
    assert _close(H.point_gradients(batches).to_dense(), torch.stack(rows))


def test_small_workspaces_change_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    ).to(dtype)
    inputs = _points(300, dtype)
    whole = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    small = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs, workspace=2**17)
    J, again = whole.jacobian(inputs), small.jacobian([inputs[:77], inputs[77:]])
    assert len(list(again.chunks())) > 4
    vector = torch.ones(J.shape[1], dtype=dtype)
    assert _close(again @ vector, J @ vector)
    assert _close(again.T @ (J @ vector), J.T @ (J @ vector))
    assert [c.points.start for c in J.chunks(100)] == [0, 100, 200]


def test_rows_belong_to_the_weights_of_the_matrix() -> None:
    model = _chain(torch.float64).double()
    inputs = _points(5, torch.float64)
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    before = H.jacobian(inputs).to_dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(H.jacobian(inputs).to_dense(), before)


METHODS = get_args(WayName)


@pairwise(method=METHODS, kind=("one", "layers", "all"), make=(_chain, _normalised))
def test_covariances_of_outputs(
    make: Callable[[torch.dtype], nn.Module], kind: str, method: str
) -> None:
    torch.manual_seed(0)
    model = make(torch.float64).double()
    inputs, others = _points(12, torch.float64), _points(6, torch.float64, 2)
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(reduction="sum"), inputs)
    size = H.shape[0]
    damping: object = 0.3
    diagonal = torch.full((size,), 0.3, dtype=torch.float64)
    if kind == "layers":
        diagonal = torch.linspace(0.1, 1, len(H.layout.names)).double()[
            H.layout.locate(torch.arange(size))[0]
        ]
        damping = diagonal
    elif kind == "all":
        damping = diagonal = torch.linspace(0.1, 1, size).double()
    rows = torch.stack([_flat(value, model) for value in model(others).reshape(-1)])
    truth = rows @ torch.linalg.solve(H.to_dense() + torch.diag(diagonal), rows.T)
    F = H.factorize(damping, tolerance=1e-9, method=method)  # type: ignore[arg-type]
    J = H.jacobian(others)
    assert torch.allclose(F.quadratic(J), truth, rtol=1e-7)
    assert torch.allclose(F.quadratic(J, diagonal=True), truth.diagonal(), rtol=1e-7)
    blocks = truth.view(6, 3, 6, 3).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    found = F.point_covariances(J)
    assert torch.allclose(found, blocks, rtol=1e-7, atol=1e-10)


def test_wide_outputs_in_sample_space() -> None:
    """Both sides have diagonal C_i in the last layer, or one of them has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 40)).double()
    inputs, others = _points(3, torch.float64), _points(2, torch.float64, 2)
    for loss in (nn.MSELoss(), nn.CrossEntropyLoss()):
        H = hcurv.GaussNewton(model, loss, inputs)
        F = H.factorize(1e-2, method="samples")
        J = H.jacobian(others)
        truth = J.to_dense() @ torch.linalg.solve(
            H.to_dense() + 1e-2 * torch.eye(H.shape[0]).double(), J.to_dense().T
        )
        assert torch.allclose(F.quadratic(J, diagonal=True), truth.diagonal())


def test_bad_inputs_are_refused() -> None:
    model = _chain(torch.float64).double()
    inputs = _points(5, torch.float64)
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    with pytest.raises(ValueError, match="cannot read these inputs"):
        H.jacobian(inputs[:, :2])
    with pytest.raises(TypeError, match="float64"):
        H.jacobian(inputs.float())
    with pytest.raises(ValueError, match="targets"):
        H.point_gradients(inputs)
    with pytest.raises(ValueError, match="labels"):
        H.point_gradients(inputs, torch.full((5,), 7))
    J = H.jacobian(inputs)
    with pytest.raises(ValueError, match="shape"):
        J @ torch.ones(3).double()
    with pytest.raises(ValueError, match="float64"):
        J.T @ torch.ones(15)
    with pytest.raises(TypeError, match="tensor"):
        J @ [1.0]  # type: ignore[operator]
    with pytest.raises(ValueError, match="operator of shape"):
        H.factorize(1e-2).point_covariances(torch.ones(2, 3))  # type: ignore[arg-type]
