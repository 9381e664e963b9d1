"""NumPy in, NumPy out; and SciPy's solvers with the matrices of this library."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import nn

import hcurv


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def problem(request: pytest.FixtureRequest) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(request.param)
    random = np.random.default_rng(0)
    return model, random.standard_normal((40, 5)), random.integers(3, size=40)


@pytest.fixture(scope="module", name="H")
def make_matrix(problem: tuple[nn.Module, np.ndarray, np.ndarray]) -> hcurv.GaussNewton:
    model, inputs, labels = problem
    return hcurv.GaussNewton(model, nn.CrossEntropyLoss(), (inputs, labels))


def check(found: object, expected: torch.Tensor) -> None:
    assert isinstance(found, np.ndarray)
    assert torch.equal(torch.from_numpy(found), expected)


def test_vectors_of_numpy_give_vectors_of_numpy(
    problem: tuple[nn.Module, np.ndarray, np.ndarray], H: hcurv.GaussNewton
) -> None:
    kfac = hcurv.baselines.KFAC(problem[0], nn.CrossEntropyLoss(), problem[1:])
    size = H.shape[0]
    array = np.random.default_rng(1).standard_normal((size, 4))
    tensor = torch.from_numpy(array).to(H.dtype)
    A = hcurv.compress(H, tolerance=1e-3)
    F = A.factorize(0.1)
    for operator in (H, A, F, H.kernel(), 2 * H, kfac, hcurv.Diagonal(H)):
        rows = operator.shape[0]
        own = np.resize(array, (rows, 4))
        check(operator @ own, operator @ torch.from_numpy(own).to(H.dtype))
        check(operator @ own[:, 1], operator @ torch.from_numpy(own[:, 1].copy()).to(H.dtype))
    for factorized in (F, H.factorize(0.1), kfac.factorize(0.1)):
        check(factorized.solve(array), factorized.solve(tensor))
    check(F.sqrt_solve(array), F.sqrt_solve(tensor))
    check(F.quadratic(array.T), F.quadratic(tensor.T))
    check(F.solve(array, operator=H), F.solve(tensor, operator=H))
    check(H.root_product(array), H.root_product(tensor))
    J = H.jacobian(np.ones((2, 5)))
    check(J @ array, J @ tensor)
    check(J.T @ np.ones(6), J.T @ torch.ones(6, dtype=H.dtype))


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array[::-1],
        np.asfortranarray,
        lambda array: array.astype(">f8"),
        lambda array: (10 * array).astype(np.int32),
        lambda array: np.broadcast_to(array[:, :1], array.shape),
        lambda array: array[:, :0],
    ],
    ids=["reversed", "fortran", "big-endian", "integers", "read-only", "empty"],
)
def test_any_real_array_is_taken(H: hcurv.GaussNewton, change: object) -> None:
    array = change(np.random.default_rng(1).standard_normal((H.shape[0], 2)))
    before = array.copy()
    check(H @ array, H @ torch.from_numpy(before.astype(np.float64)).to(H.dtype))
    assert np.array_equal(array, before)


def test_arrays_that_do_not_fit_are_refused(H: hcurv.GaussNewton) -> None:
    with pytest.raises(TypeError, match="real numbers; got complex128"):
        H @ np.ones(H.shape[0], dtype=complex)
    with pytest.raises(TypeError, match="real numbers; got object"):
        H @ np.array([None] * H.shape[0])
    with pytest.raises(ValueError, match=r"must have shape \(75,\)"):
        H @ np.ones(3)
    with pytest.raises(TypeError, match=r"torch.Tensor or a NumPy array; got list"):
        H @ [1.0]


def test_data_of_numpy_gives_the_matrix_of_tensors(
    problem: tuple[nn.Module, np.ndarray, np.ndarray], H: hcurv.GaussNewton
) -> None:
    model, inputs, labels = problem
    tensors = torch.from_numpy(inputs).to(H.dtype), torch.from_numpy(labels)
    loss = nn.CrossEntropyLoss()
    expected = hcurv.GaussNewton(model, loss, tensors)
    halves = [(inputs[:7], labels[:7]), (inputs[7:], labels[7:])]
    for data in (inputs, (inputs, labels), halves):
        found = hcurv.GaussNewton(model, loss, data)
        torch.testing.assert_close(found.to_dense(), expected.to_dense())
    torch.testing.assert_close(H.gradient(), expected.gradient())
    torch.testing.assert_close(H.gradient(labels), expected.gradient())
    torch.testing.assert_close(
        H.point_gradients(inputs, labels).to_dense(), expected.point_gradients(tensors).to_dense()
    )
    predicted = [
        hcurv.laplace(model, loss, data).predict(queries).variances
        for data, queries in (((inputs, labels), inputs[:4]), (tensors, tensors[0][:4]))
    ]
    torch.testing.assert_close(*predicted)
    scored = [
        hcurv.influence(model, loss, data, damping=0.1, check_damping=False).scores(data)
        for data in ((inputs, labels), tensors)
    ]
    torch.testing.assert_close(*scored)


def test_dampings_and_dense_matrices_of_numpy(H: hcurv.GaussNewton) -> None:
    dense, damping = H.to_dense(), np.linspace(0.1, 1.0, H.shape[0])
    b = torch.ones(H.shape[0], dtype=H.dtype)
    torch.testing.assert_close(
        H.factorize(damping).solve(b), H.factorize(torch.from_numpy(damping)).solve(b)
    )
    A = hcurv.compress(dense.numpy(), tolerance=1e-3)
    assert A.relative_error(dense.numpy()) < 2e-3
    assert torch.equal(A.to_dense(), hcurv.compress(dense, tolerance=1e-3).to_dense())
    result = hcurv.cg(dense.numpy(), b.numpy(), damping=0.1)
    assert isinstance(result.solution, np.ndarray)
    torch.testing.assert_close(
        torch.from_numpy(result.solution), hcurv.cg(dense, b, damping=0.1).solution
    )


def test_scipy_solves_with_a_factorization_as_preconditioner(H: hcurv.GaussNewton) -> None:
    damping, tolerance = 1e-3, 1e-5 if H.dtype == torch.float32 else 1e-10
    system = (H + hcurv.Diagonal(torch.full((H.shape[0],), damping, dtype=H.dtype))).to_scipy()
    near = hcurv.compress(H, damping=damping).factorize(damping).to_scipy()
    b = np.random.default_rng(2).standard_normal(H.shape[0])
    dense = H.to_dense().double().numpy() + damping * np.eye(len(b))
    for solver in (scipy.sparse.linalg.cg, scipy.sparse.linalg.gmres):
        steps = []
        options = {"rtol": tolerance, "callback": steps.append, "M": near}
        if solver is scipy.sparse.linalg.gmres:
            options["callback_type"] = "pr_norm"
        found, info = solver(system, b, **options)
        assert info == 0
        assert np.linalg.norm(dense @ found - b) < 20 * tolerance * np.linalg.norm(b)
        assert len(steps) < 12


def test_scipy_finds_eigenvalues(H: hcurv.GaussNewton) -> None:
    expected = np.linalg.eigvalsh(H.to_dense().double().numpy())
    precision = 1e-4 if H.dtype == torch.float32 else 1e-10
    largest = scipy.sparse.linalg.eigsh(H.to_scipy(), k=3, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(largest), expected[-3:], rtol=precision)
