"""A.refresh(H): a matrix that has changed a little, in the form of the one before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import normal
from matrices import kernel_matrix


def networks(change: float, dtype: torch.dtype = torch.float64) -> list[hcurv.GaussNewton]:
    """A classifier before and after a small step, on the same points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6)).to(dtype)
    inputs = torch.randn(60, 12, dtype=dtype)
    targets = torch.randint(0, 6, (60,))
    found = []
    for scale in (1.0, 1.0 + change):
        with torch.no_grad():
            model[0].weight *= scale
        found.append(hcurv.GaussNewton(model, nn.CrossEntropyLoss(), (inputs, targets)))
    return found


def relative(matrix: hcurv.HMatrix, dense: Tensor) -> float:
    return float((matrix.to_dense() - dense).norm() / dense.norm())


@pytest.mark.parametrize(
    "options",
    [
        {"global_rank": 0},
        {"global_rank": 5},
        {"global_rank": "auto"},
        {"global_rank": 0, "near_budget": 0.3},
        {"damping": 1e-2},
    ],
    ids=str,
)
def test_the_error_stays_what_it_was(options: dict[str, object]) -> None:
    before, after = networks(0.03)
    old = hcurv.compress(before, tolerance=1e-2, **options)
    new = old.refresh(after)
    exact = after.to_dense()
    assert relative(new, exact) < 1.5 * relative(old, before.to_dense())
    assert relative(new, exact) < relative(old, exact)
    assert new.estimated_error == pytest.approx(relative(new, exact), rel=0.5)
    assert new.num_stored == old.num_stored
    assert torch.equal(new.tree.permutation, old.tree.permutation)
    assert all(torch.equal(a, b) for a, b in zip(new.ranks, old.ranks, strict=True))
    assert type(new) is type(old)
    assert new.layout == after.layout
    rhs = normal(after.shape[0], 3)
    assert torch.allclose(new @ rhs, new.to_dense() @ rhs, atol=1e-12)


def test_a_matrix_that_did_not_change_keeps_its_error() -> None:
    dense = kernel_matrix("gaussian", 150, 2)
    for rank in (0, 8):
        old = hcurv.compress(dense, tolerance=1e-3, leaf_size=16, global_rank=rank)
        assert relative(old.refresh(dense), dense) < 1.5 * relative(old, dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_interpolations_follow_the_matrix(dtype: torch.dtype) -> None:
    """After steps of training, entries in the old interpolations would leave ten times as much."""
    torch.manual_seed(0)
    sizes = (nn.Linear(30, 12), nn.Softplus(), nn.Linear(12, 5), nn.Softplus(), nn.Linear(5, 30))
    model = nn.Sequential(*sizes).to(dtype)
    inputs = torch.rand(100, 30, dtype=dtype) ** 3
    before = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, inputs))
    old = hcurv.compress(before, tolerance=1e-2, global_rank=0, leaf_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()
    after = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, inputs))
    stale = relative(old, after.to_dense())
    error = relative(old.refresh(after), after.to_dense())
    assert error < 1.5 * relative(old, before.to_dense())
    assert stale > 5 * error


def test_solves_with_a_damping_stay_definite() -> None:
    before, after = networks(0.02)
    old = hcurv.compress(before, damping=1e-3, tolerance=1e-2)
    new = old.refresh(after)
    assert new.variance_error is not None
    assert new.variance_error < 0.05
    rhs = normal(after.shape[0])
    wrong = []
    for matrix, operator in ((old, before), (new, after)):
        exact = operator.to_dense()
        exact.diagonal().add_(1e-3)
        solved = matrix.factorize(1e-3).solve(exact @ rhs)
        wrong.append(float((solved - rhs).norm() / rhs.norm()))
    assert wrong[1] < 2 * wrong[0]


def test_zero_rows_and_low_rank() -> None:
    factor = normal(80, 3)
    factor[:10] = 0
    old = hcurv.compress(factor @ factor.T, tolerance=1e-4)
    moved = 1.01 * factor
    assert relative(old.refresh(moved @ moved.T), moved @ moved.T) < 1e-6
    assert float(old.refresh(torch.zeros(80, 80, dtype=torch.float64)).to_dense().norm()) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_global_part_follows_a_matrix_that_goes_on_changing(dtype: torch.dtype) -> None:
    """Eigenvectors turn a little with each step, so that columns of V are not quite orthogonal."""
    decay = torch.logspace(0, -4, 40, dtype=torch.float64)
    factor, turn = normal(120, 40), normal(120, 40, seed=5)

    def dense(step: int) -> Tensor:
        columns = (factor + 0.05 * step * turn) * decay
        return (columns @ columns.T).to(dtype)

    old = hcurv.compress(dense(0), tolerance=1e-3)
    assert old.global_rank
    assert not old.tree.num_kept
    new = old
    for step in range(1, 7):
        new = new.refresh(dense(step))
    exact = dense(6).double()
    values = torch.linalg.eigvalsh(exact)
    best = float(values[: -old.global_rank].norm() / values.norm())
    rounding = 100 * torch.finfo(dtype).eps
    assert relative(new, exact) < 1.2 * best + rounding
    # What is left is positive semi-definite.
    left = torch.linalg.eigvalsh(exact - new.to_dense().double())
    assert float(left[0]) > -rounding * float(values[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_global_part_far_from_the_old_one_is_exact_if_its_rank_suffices(
    dtype: torch.dtype,
) -> None:
    first, second = normal(80, 6).to(dtype), normal(80, 6, seed=9).to(dtype)
    old = hcurv.compress(first @ first.T, tolerance=1e-4)
    new = old.refresh(second @ second.T)
    assert relative(new, second @ second.T) < 1e3 * torch.finfo(dtype).eps


def test_too_large_a_change_warns() -> None:
    old = hcurv.compress(kernel_matrix("gaussian", 150, 2), tolerance=1e-3)
    other = normal(150, 150)
    with pytest.warns(hcurv.CompressionWarning, match="compress it anew"):
        old.refresh(other @ other.T)


def test_other_shapes_and_types_are_refused() -> None:
    old = hcurv.compress(kernel_matrix("gaussian", 50, 2), tolerance=1e-2)
    with pytest.raises(ValueError, match=r"refresh needs a matrix like the old one, \(50, 50\)"):
        old.refresh(kernel_matrix("gaussian", 40, 2))
    with pytest.raises(ValueError, match=r"of torch\.float64; got"):
        old.refresh(kernel_matrix("gaussian", 50, 2).float())
