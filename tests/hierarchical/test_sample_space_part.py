"""Global parts of matrices that are too large for trees: a basis in sample space."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hcurv


def _matrix(dtype: torch.dtype, num_points: int = 24) -> tuple[hcurv.GaussNewton, Tensor]:
    """A matrix of fast falling spectrum with n·q < N, and its dense form from other code."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_points, 4, generator=generator) @ torch.randn(
        4, 40, generator=generator
    )
    inputs += 0.03 * torch.randn(num_points, 40, generator=generator)
    inputs[:, 7] = 0  # rows of zeros
    inputs = inputs.to(dtype)
    wide = model.double()
    parameters = list(wide.parameters())
    outputs = wide(inputs.double())
    rows = [
        torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(value, parameters, retain_graph=True)]
        )
        for value in outputs.reshape(-1)
    ]
    jacobian = torch.stack(rows).view(num_points, 5, -1)
    p = torch.softmax(outputs.detach(), 1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    dense = torch.einsum("nai,nab,nbj->ij", jacobian, inner, jacobian) / num_points
    return hcurv.GaussNewton(model.to(dtype), nn.CrossEntropyLoss(), inputs), dense


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tolerance", [0.1, 1e-2])
def test_the_part_is_nearly_the_best_of_its_rank(dtype: torch.dtype, tolerance: float) -> None:
    H, dense = _matrix(dtype)
    A = hcurv.compress(H, tolerance=tolerance, workspace=300 * H.shape[0] * dtype.itemsize)
    values = torch.linalg.eigvalsh(dense).flip(0)
    tails = values.square().flip(0).cumsum(0).flip(0).sqrt() / dense.norm()
    best = int((tails > tolerance).sum())
    assert A.plan is not None
    assert A.plan.chosen.ordering == "none"
    assert best <= A.global_rank <= 1.2 * best + 2
    left = dense - A.to_dense().double()
    assert left.norm() <= tolerance * dense.norm()
    assert A.estimated_error == pytest.approx(float(left.norm() / dense.norm()), rel=0.5)
    least = torch.linalg.eigvalsh(left)[0]
    assert least > -100 * torch.finfo(dtype).eps * values[0]


def test_a_damped_build_keeps_the_diagonal() -> None:
    H, dense = _matrix(torch.float64)
    damping = 0.1 * float(torch.linalg.eigvalsh(dense)[-1])
    A = hcurv.compress(H, damping=damping, tolerance=0.1, workspace=300 * H.shape[0] * 8)
    assert A.global_rank > 0
    assert torch.allclose(A.diagonal(), dense.diagonal(), rtol=1e-6, atol=1e-9)
    identity = torch.eye(H.shape[0], dtype=torch.float64)
    solved = torch.linalg.solve(dense + damping * identity, identity)
    assert (A.factorize(damping).to_dense() - solved).norm() <= 0.1 * solved.norm()


def test_too_small_a_workspace_is_refused_in_words() -> None:
    H, _ = _matrix(torch.float64)
    with pytest.raises(hcurv.InsufficientMemoryError, match="larger workspace= or tolerance="):
        hcurv.compress(H, tolerance=1e-6, workspace=40 * H.shape[0] * 8)


def test_the_same_seed_gives_the_same_bits() -> None:
    H, _ = _matrix(torch.float32)
    first, again = (
        hcurv.compress(H, tolerance=0.1, workspace=300 * H.shape[0] * 4, seed=3) for _ in range(2)
    )
    assert torch.equal(first.to_dense(), again.to_dense())
