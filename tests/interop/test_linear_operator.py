"""Matrices of this library pass linear_operator's own suite, and serve GPyTorch.

The suite is the one that linear_operator ships for its own operators, with its own tolerances. Its
cases for batches of matrices do not apply: a matrix here is always one.
"""

from __future__ import annotations

import unittest
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hcurv

pytest.importorskip("linear_operator", reason="linear_operator is not installed")

from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from hcurv.interop.linear_operator import (
    CurvatureOperator,
    InverseOperator,
    as_linear_operator,
)

# linear_operator warns of what its own suite does on purpose: dense results, jitter, few probes.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


@cache
def network(dtype: torch.dtype = torch.float32) -> hcurv.GaussNewton:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    inputs = torch.randn(12, 3, generator=generator, dtype=dtype)
    targets = torch.randn(12, 2, generator=generator, dtype=dtype)
    return hcurv.GaussNewton(model.to(dtype), torch.nn.MSELoss(), (inputs, targets))


@cache
def smooth(size: int = 12, dtype: torch.dtype = torch.float32) -> hcurv.HMatrix:
    places = torch.linspace(0, 1, size, dtype=torch.float64)
    dense = torch.exp(-3 * (places[:, None] - places).abs()).to(dtype)
    return hcurv.compress(dense, tolerance=1e-3, leaf_size=3)


class Suite(LinearOperatorTestCase):
    """The shipped suite on scale·A + D. Systems are solved by this library, without their CG."""

    seed = 0
    should_call_cg = False
    should_test_sample = True

    def matrix(self) -> Any:
        raise NotImplementedError

    def create_linear_op(self) -> Any:
        matrix = self.matrix()
        damping = torch.linspace(0.5, 1.5, matrix.shape[0])
        return as_linear_operator(matrix, damping, torch.tensor(2.0))

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        scale, damping = linear_op.representation()
        dense = self.matrix().to_dense().to(scale.dtype)
        return scale * dense + torch.diag_embed(damping.expand(dense.shape[0]))


class TestCompressed(Suite, unittest.TestCase):
    def matrix(self) -> Any:
        return smooth()

    def create_linear_op(self) -> Any:  # a damping that is one number
        return as_linear_operator(self.matrix(), torch.tensor(0.7), torch.tensor(1.5))


class TestGaussNewton(Suite, unittest.TestCase):
    def matrix(self) -> Any:
        return network()


class TestKernel(Suite, unittest.TestCase):
    def matrix(self) -> Any:
        return network().kernel()


class TestPreconditioned(Suite, unittest.TestCase):
    should_call_cg = True

    def matrix(self) -> Any:
        return network()

    def create_linear_op(self) -> Any:
        matrix = self.matrix()
        near = hcurv.baselines.LowRank(matrix, 8)
        damping = torch.linspace(0.5, 1.5, matrix.shape[0])
        return as_linear_operator(matrix, damping, torch.tensor(2.0), preconditioner=near)


class TestInverse(Suite, unittest.TestCase):
    """(A + D)⁻¹, of which solves are left to linear_operator."""

    should_call_cg = True

    def matrix(self) -> Any:
        return smooth().factorize(0.5)

    def create_linear_op(self) -> Any:
        return as_linear_operator(self.matrix(), scale=torch.tensor(2.0))

    def evaluate_linear_op(self, linear_op: Any) -> Tensor:
        (scale,) = linear_op.representation()
        return scale * self.matrix().to_dense().to(scale.dtype)


del LinearOperatorTestCase, Suite  # they are no tests themselves


def dense_system() -> tuple[hcurv.GaussNewton, Tensor, Tensor]:
    H = network(torch.float64)
    return H, H.to_dense(), torch.linspace(0.1, 0.3, H.shape[0], dtype=torch.float64)


def test_gradients_of_solve_and_logdet_are_those_of_the_dense_matrix() -> None:
    H, dense, values = dense_system()
    rhs = torch.randn(H.shape[0], 3, generator=torch.Generator().manual_seed(1)).double()
    found, expected = [], []
    for results, make in (
        (found, lambda s, d: as_linear_operator(H, d, s)),
        (expected, lambda s, d: s * dense + torch.diag(d)),
    ):
        scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
        damping = values.clone().requires_grad_(True)
        matrix = make(scale, damping)
        value = torch.linalg.solve(matrix, rhs).square().sum() + torch.logdet(matrix)
        value.backward()
        results += [value.detach(), scale.grad, damping.grad]
    for own, true in zip(found, expected, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-9, atol=1e-10)


def test_one_operator_can_be_differentiated_twice_in_a_row() -> None:
    H, _, values = dense_system()
    damping = values.clone().requires_grad_(True)
    operator = as_linear_operator(H, damping)
    operator.logdet().backward()
    first = damping.grad.clone()
    operator.logdet().backward()
    torch.testing.assert_close(damping.grad, 2 * first)


def test_diagonals_and_factors_are_absorbed() -> None:
    H, dense, values = dense_system()
    operator = (2.0 * as_linear_operator(H, values)).add_diagonal(torch.tensor(0.5).double())
    assert isinstance(operator, CurvatureOperator)
    eye = torch.eye(H.shape[0], dtype=torch.float64)
    torch.testing.assert_close(operator.to_dense(), 2 * (dense + torch.diag(values)) + 0.5 * eye)
    torch.testing.assert_close(operator[3:5, [1, 3]].to_dense(), operator.to_dense()[3:5, [1, 3]])


def test_a_preconditioner_saves_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    import linear_operator

    H, dense, _ = dense_system()
    b = torch.ones(H.shape[0], dtype=torch.float64)
    products = 0
    multiply = CurvatureOperator._matmul

    def counted(self: CurvatureOperator, rhs: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return multiply(self, rhs)

    monkeypatch.setattr(CurvatureOperator, "_matmul", counted)
    needed = []
    for rank in (1, 20):
        near, products = hcurv.baselines.LowRank(H, rank), 0
        operator = as_linear_operator(H, 1e-3, preconditioner=near)
        with (
            linear_operator.settings.max_cholesky_size(0),
            linear_operator.settings.cg_tolerance(1e-6),
        ):
            found = operator.solve(b)
        residual = dense @ found + 1e-3 * found - b
        assert torch.linalg.vector_norm(residual) < 1e-5 * torch.linalg.vector_norm(b)
        needed.append(products)
    assert needed[1] < 0.8 * needed[0]


def test_the_inverse_has_the_logdet_and_the_samples_of_the_posterior() -> None:
    A = smooth(12, torch.float64)
    factors = A.factorize(0.5)
    operator = as_linear_operator(factors)
    assert isinstance(operator, InverseOperator)
    covariance = torch.linalg.inv(A.to_dense() + 0.5 * torch.eye(12).double())
    torch.testing.assert_close(operator.logdet(), torch.logdet(covariance))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        samples = operator.zero_mean_mvn_samples(100_000)
    torch.testing.assert_close(torch.cov(samples.T), covariance, rtol=0.02, atol=0.02)


def test_unusable_arguments_are_refused() -> None:
    A = smooth()
    with pytest.raises(ValueError, match="scale must be one positive number"):
        as_linear_operator(A, scale=-1.0)
    with pytest.raises(ValueError, match="has its own damping"):
        as_linear_operator(A.factorize(0.5), damping=0.5)
    with pytest.raises(TypeError, match="factorize"):
        as_linear_operator(A, 0.5, preconditioner=network() + network())
    with pytest.raises(TypeError, match="the matrix must be"):
        as_linear_operator("matrix")


def test_a_gpytorch_model_with_the_tangent_kernel_as_covariance() -> None:
    """Evidence, its gradients and predictions are those of the dense Gaussian process."""
    gpytorch = pytest.importorskip("gpytorch", reason="gpytorch is not installed")
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = model.double()
    inputs = torch.randn(30, 2, generator=generator).double()
    targets = torch.sin(inputs.sum(1))
    loss = hcurv.losses.HalfSquaredError(reduction="sum")
    K = hcurv.GaussNewton(model, loss, (inputs, targets[:, None])).kernel()
    dense, train, test = K.to_dense(), torch.arange(24), torch.arange(24, 30)

    class TangentGP(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(train.double(), targets[:24], likelihood)
            self.log_scale = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, places: Tensor) -> Any:
            index = places.long().flatten()
            kernel = as_linear_operator(K, scale=1.0)[index][:, index]
            mean = torch.zeros(index.numel(), dtype=torch.float64)
            return gpytorch.distributions.MultivariateNormal(mean, self.log_scale.exp() * kernel)

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.1
    process = TangentGP(likelihood)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)
    value = evidence(process(train.double()), targets[:24])
    value.backward()

    noisy = dense[:24, :24] + 0.1 * torch.eye(24).double()
    solved = torch.linalg.solve(noisy, targets[:24])
    truth = -0.5 * (
        targets[:24] @ solved + torch.logdet(noisy) + 24 * torch.log(torch.tensor(2 * torch.pi))
    )
    torch.testing.assert_close(value.detach(), truth.double() / 24, rtol=1e-6, atol=0.0)
    slope = 0.5 * (
        solved @ dense[:24, :24] @ solved - torch.linalg.solve(noisy, dense[:24, :24]).trace()
    )
    torch.testing.assert_close(process.log_scale.grad, slope / 24, rtol=1e-6, atol=1e-9)
    process.eval(), likelihood.eval()
    with torch.no_grad():
        prediction = process(test.double())
    torch.testing.assert_close(prediction.mean, dense[24:, :24] @ solved, rtol=1e-6, atol=1e-9)
    covariance = dense[24:, 24:] - dense[24:, :24] @ torch.linalg.solve(noisy, dense[:24, 24:])
    torch.testing.assert_close(prediction.covariance_matrix, covariance, rtol=1e-5, atol=1e-7)


def test_a_gpytorch_likelihood_keeps_the_solves_of_a_compressed_kernel() -> None:
    gpytorch = pytest.importorskip("gpytorch", reason="gpytorch is not installed")
    A = smooth(40, torch.float64)
    normal = gpytorch.distributions.MultivariateNormal(
        torch.zeros(40).double(), as_linear_operator(A)
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.2
    noisy = likelihood(normal)
    assert isinstance(noisy.lazy_covariance_matrix, CurvatureOperator)
    target = torch.linspace(-1, 1, 40).double()
    dense = torch.distributions.MultivariateNormal(
        torch.zeros(40).double(), A.to_dense() + 0.2 * torch.eye(40).double()
    )
    torch.testing.assert_close(noisy.log_prob(target), dense.log_prob(target))
