"""Matrices go to curvlinops, and its operators come here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hcurv

curvlinops = pytest.importorskip(
    "curvlinops", reason="curvlinops is not installed", exc_type=ImportError
)
pytest.importorskip("curvlinops._torch_base", reason="curvlinops is older than version 3")
# torch itself uses torch.jit.script when forward derivatives are first asked for.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

from hcurv.interop.curvlinops import SymmetricLinearOperator, as_curvlinops  # noqa: E402

Problem = tuple[nn.Module, Tensor, Tensor, hcurv.GaussNewton]


@pytest.fixture(scope="module")
def problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    inputs = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (30,), generator=generator)
    return model, inputs, targets, hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)


def ggn(problem: Problem) -> object:
    model, inputs, targets, _ = problem
    return curvlinops.GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(inputs, targets)]
    )


def test_products_take_tensors_and_lists_like_theirs(problem: Problem) -> None:
    model, _, _, H = problem
    own, theirs = as_curvlinops(H), ggn(problem)
    vectors = torch.randn(H.shape[0], 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(own @ vectors, theirs @ vectors)
    lists = [p.detach() for p in model.parameters()]
    for left, right in zip(own @ lists, theirs @ lists, strict=True):
        torch.testing.assert_close(left, right)
    assert own.adjoint() is own
    torch.testing.assert_close((own + theirs) @ vectors, 2 * (H @ vectors))
    torch.testing.assert_close(
        torch.from_numpy(own.to_scipy() @ vectors[:, 0].numpy()), H @ vectors[:, 0]
    )


def test_their_estimators_take_our_matrices(problem: Problem) -> None:
    H = problem[3]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trace = curvlinops.hutchpp_trace(as_curvlinops(H), num_matvecs=60)
    assert abs(float(trace) - H.trace()) < 1e-2 * H.trace()


def test_a_dense_matrix_and_a_factorization_become_operators(problem: Problem) -> None:
    H = problem[3]
    F = H.factorize(0.1)
    b = torch.ones(H.shape[0], dtype=torch.float64)
    torch.testing.assert_close(as_curvlinops(F) @ b, F.solve(b))
    torch.testing.assert_close(as_curvlinops(H.to_dense()) @ b, H @ b)


def test_compress_takes_their_operator_and_finds_its_low_rank_part(problem: Problem) -> None:
    dense = problem[3].to_dense()
    A = hcurv.compress(ggn(problem), tolerance=1e-4)
    error = float((A.to_dense() - dense).norm() / dense.norm())
    assert error < 1.5e-4
    assert error / 3 < A.estimated_error < 3 * error
    assert A.global_rank < A.shape[0]
    largest = hcurv.eigsh(ggn(problem), 3).values
    expected = torch.linalg.eigvalsh(dense)[-3:]
    torch.testing.assert_close(largest.sort().values.to(expected), expected)


def test_a_negative_matrix_is_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match="positive semi-definite"):
        hcurv.compress(-1.0 * ggn(problem))


def test_options_that_need_entries_are_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"no entries.*leaf_size, damping"):
        hcurv.compress(ggn(problem), leaf_size=8, damping=0.1)


def test_a_factorization_preconditions_their_conjugate_gradients(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    H = problem[3]
    damping, b = 1e-3, torch.ones(H.shape[0], dtype=torch.float64)
    system = as_curvlinops(H + hcurv.Diagonal(torch.full_like(b, damping)))
    near = hcurv.compress(ggn(problem), tolerance=1e-5).factorize(damping)
    count, products, multiply = 0, [], type(system)._matmat

    def counted(operator: SymmetricLinearOperator, vectors: list[Tensor]) -> list[Tensor]:
        nonlocal count
        count += 1
        return multiply(operator, vectors)

    monkeypatch.setattr(type(system), "_matmat", counted)
    for options in ({}, {"preconditioner": near.solve}):
        count = 0
        solver = curvlinops.CGInverseLinearOperator(
            system, tolerance=1e-4, max_iter=500, max_tridiag_iter=0, **options
        )
        found = solver @ b
        products.append(count)
        residual = H @ found + damping * found - b
        assert float(residual.norm()) < 2e-4 * float(b.norm())
    assert products[1] < 0.5 * products[0]
