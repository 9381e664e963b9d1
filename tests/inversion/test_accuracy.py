"""F.accuracy and hcurv.certify against true errors from dense linear algebra in float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import hcurv
from cases import DTYPES, Case, labels, normal, pairwise, seeded
from hcurv.inversion.ways import WayName
from matrices import kernel_matrix

NUM_PROBLEMS = 200


@dataclass
class Problem:
    """A random matrix H, one of its approximations, and the truth about both.

    Attributes:
        matrix: H, as it is given to `hcurv.certify`.
        dense: H in double precision.
        probes: columns over which true errors are averaged, (N, k), of length 1.
        approximation: A.
        damping: λ.
    """

    matrix: Any
    dense: Tensor
    probes: Tensor
    approximation: Any
    damping: float

    @property
    def damped(self) -> Tensor:
        return self.dense + self.damping * torch.eye(len(self.dense), dtype=torch.float64)

    def solve_errors(self, factorized: hcurv.Factorized) -> tuple[float, float]:
        """Root mean squares of the relative errors of solves and of variances."""
        exact = torch.linalg.solve(self.damped, self.probes)
        # Accuracies are measured on 16 columns at a time, which matters where solves are iterative.
        parts = self.probes.to(factorized.dtype).split(16, 1)
        found = torch.cat([factorized.solve(part.contiguous()) for part in parts], 1).double()
        energies = (exact * self.probes).sum(0)
        wrong = found - exact
        solves = (wrong * (self.damped @ wrong)).sum(0).clamp(min=0) / energies
        variances = (found * self.probes).sum(0) / energies - 1
        return float(solves.mean().sqrt()), float(variances.square().mean().sqrt())

    def trace_errors(self) -> tuple[float, float]:
        """The error of the log-determinant, and the KL divergence."""
        size = len(self.dense)
        own = self.approximation.to_dense().double()
        own = own + self.damping * torch.eye(size, dtype=torch.float64)
        difference = (
            torch.linalg.slogdet(own).logabsdet - torch.linalg.slogdet(self.damped).logabsdet
        )
        trace = torch.linalg.solve(own, self.damped).trace()
        return float(difference), float((trace - size + difference) / 2)


def random_network(numbers: list[float], seed: int, dtype: torch.dtype) -> tuple[Any, Tensor, Any]:
    """A network of 15 to 110 parameters, the root of its H by autograd, and K-FAC of it."""
    sizes = 3 + int(6 * numbers[1]), 3 + int(5 * numbers[2]), 1 + int(4 * numbers[3])
    num_points = 5 + int(40 * numbers[4])
    activation = (nn.Tanh, nn.ReLU, nn.Softplus)[int(3 * numbers[5])]
    model = seeded(
        lambda: nn.Sequential(nn.Linear(*sizes[:2]), activation(), nn.Linear(*sizes[1:])), seed
    )
    decay = torch.arange(1, sizes[0] + 1) ** (2 * numbers[6])
    inputs = (normal(num_points, sizes[0], seed=seed) / decay).float()
    classes = sizes[2] > 1 and numbers[7] < 0.6
    targets = labels(num_points, sizes[2]) if classes else normal(num_points, sizes[2]).to(dtype)
    loss = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    root = root_by_autograd(model.double(), inputs.double(), classes)
    model, data = model.to(dtype), (inputs.to(dtype), targets)
    matrix = hcurv.GaussNewton(model, loss, data)
    return matrix, root, lambda: hcurv.baselines.KFAC(model, loss, data)


def root_by_autograd(model: nn.Module, inputs: Tensor, classes: bool) -> Tensor:
    """Rows R_i J_i of the root, (n·q, N), for the mean loss over points."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    outputs = model(inputs).detach()
    jacobians = jacrev(lambda given: functional_call(model, given, (inputs,)))(parameters)
    jacobian = torch.cat([part.flatten(2) for part in jacobians.values()], 2)
    identity = torch.eye(outputs.shape[1], dtype=torch.float64)
    if classes:
        shares = outputs.softmax(1)
        weights = shares.sqrt()[:, :, None] * (identity - shares[:, None])
    else:
        weights = identity * (2 / outputs.shape[1]) ** 0.5
    return (weights @ jacobian).flatten(0, 1) / len(inputs) ** 0.5


def random_problem(index: int) -> Problem:
    """Three networks for each kernel matrix, in both precisions, by five kinds of approximation."""
    generator = torch.Generator().manual_seed(index)
    numbers = torch.rand(8, generator=generator).tolist()
    dtype = torch.float32 if index % 2 else torch.float64
    # Compressing takes longest: an eighth of the problems, for one or the other kind of it.
    kinds = ("low rank", "diagonal", "K-FAC", "low rank", "K-FAC", "diagonal", "low rank")
    compressed = "compressed" if index % 16 < 8 else "damped"
    kind = (*kinds, compressed)[(index + index // 8) % 8]
    if index % 8 < 6:
        matrix, root, kfac = random_network(numbers, index, dtype)
        dense, probes = root.T @ root, root.T
    else:
        size = 30 + int(100 * numbers[1])
        given = kernel_matrix("gaussian", size, 1 + int(3 * numbers[2]), 0.2 + numbers[3]).to(dtype)
        matrix, dense, kfac = given, given.double(), None
        probes = dense @ normal(size, 400, seed=index)
    damping = 10 ** (-1 - 7 * numbers[0]) * float(torch.linalg.eigvalsh(dense)[-1])
    tolerance = 10 ** (-1 - 2 * numbers[4])
    if kind == "compressed":
        # Compressed for a damping that is three times as large.
        options: Any = {"tolerance": tolerance, "leaf_size": 16}
        approximation: Any = hcurv.compress(matrix, damping=3 * damping, **options)
        try:
            approximation.factorize(damping)
        except hcurv.NotPositiveDefiniteError:
            approximation = hcurv.compress(matrix, damping=damping, **options)
    elif kind == "damped":
        approximation = hcurv.compress(matrix, damping=damping, tolerance=tolerance, leaf_size=16)
    elif kind == "diagonal":
        approximation = hcurv.Diagonal(matrix.diagonal().clone())
    elif kind == "K-FAC" and kfac is not None:
        approximation = kfac()
    else:
        rank = 1 + int(numbers[5] * len(dense) / 2)
        approximation = hcurv.baselines.LowRank(matrix, rank)
    lengths = probes.norm(dim=0)
    probes = probes[:, lengths > 0] / lengths[lengths > 0]
    return Problem(matrix, dense, probes, approximation, damping)


def covers(estimate: hcurv.Estimate, truth: float, rounding: float) -> bool:
    """Within a factor of 2, and twice the stated uncertainty."""
    slack = 2 * estimate.uncertainty + rounding
    return estimate.value / 2 - slack <= truth <= 2 * estimate.value + slack


def test_estimates_cover_the_true_errors_in_95_per_cent_of_200_problems() -> None:
    """λ/λ₁ from 1e-1 to 1e-8, networks and kernel matrices, both float types."""
    hits: dict[str, list[bool]] = {"solve": [], "variance": [], "logdet": [], "kl": []}
    for index in range(NUM_PROBLEMS):
        with warnings.catch_warnings():
            # Many of these approximations are too rough for their damping, or for single precision.
            warnings.simplefilter("ignore")
            problem = random_problem(index)
            factorized = problem.approximation.factorize(problem.damping)
            found = hcurv.certify(
                problem.approximation,
                problem.matrix,
                problem.damping,
                factorized=factorized,
                seed=index,
            )
        size = len(problem.dense)
        solve, variance = problem.solve_errors(factorized)
        logdet, kl = problem.trace_errors()
        condition = float(torch.linalg.cond(problem.damped))
        # Rounding of the entries of S changes solves by about this much.
        rounding = 10 * torch.finfo(problem.matrix.dtype).eps * condition**0.5
        rounding += 10 * torch.finfo(torch.float64).eps * condition  # of the truth
        assert found.kl is not None
        hits["solve"].append(covers(found.solve, solve, rounding))
        hits["variance"].append(covers(found.variance, variance, rounding))
        allowed = 3 * found.logdet.uncertainty + 0.02 * abs(logdet) + rounding * size
        hits["logdet"].append(abs(found.logdet.value - logdet) <= allowed)
        # Quadratures end at residuals of 1e-3, which leaves a square of that for every row.
        hits["kl"].append(covers(found.kl, kl, (rounding + 1e-6) * size))
    shares = {name: sum(values) / NUM_PROBLEMS for name, values in hits.items()}
    assert min(shares.values()) >= 0.95, shares


def network_problem(num_points: int, dtype: torch.dtype, ratio: float) -> Problem:
    case = Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(),
        normal(num_points, 5),
        labels(num_points, 3),
    )
    root = root_by_autograd(case.build(), case.inputs, classes=True)
    dense = root.T @ root
    damping = ratio * float(torch.linalg.eigvalsh(dense)[-1])
    probes = root.T / root.norm(dim=1)
    return Problem(case.operator(dtype), dense, probes, None, damping)


@pairwise(
    method=get_args(WayName),
    ratio=(1e-1, 1e-4),
    dtype=DTYPES,
)
def test_every_way_states_errors_that_cover_the_true_ones(
    method: str, ratio: float, dtype: torch.dtype
) -> None:
    problem = network_problem(40, dtype, ratio)
    factorized = problem.matrix.factorize(problem.damping, 1e-2, method=method)
    accuracy = factorized.accuracy
    solve, variance = problem.solve_errors(factorized)
    rounding = 10 * torch.finfo(dtype).eps * ratio**-0.5
    # Iterations end somewhere below the tolerance, on other columns elsewhere than on the probes.
    least = 0.0 if method in ("parameters", "samples") else 1e-2
    stated, spread = accuracy.solve, accuracy.variance
    assert solve <= 2 * max(stated.value, least) + 2 * stated.uncertainty + rounding
    assert variance <= 2 * max(spread.value, least) + 2 * spread.uncertainty + rounding
    assert accuracy.solve.value < 1e-2
    assert accuracy.kl is None
    assert accuracy.logdet.value == 0
    logdet = float(torch.linalg.slogdet(problem.damped).logabsdet)
    allowed = 3 * accuracy.logdet.uncertainty + rounding * len(problem.dense)
    assert abs(float(factorized.logdet()) - logdet) <= allowed
    assert "relative error of solves" in str(accuracy)
    assert factorized.accuracy is accuracy  # measured once


def test_accuracy_is_reproducible_and_uses_probes_of_its_own() -> None:
    problem = network_problem(40, torch.float64, 1e-3)
    rough = hcurv.baselines.LowRank(problem.matrix, 5)
    first, again, other = (
        hcurv.certify(rough, problem.matrix, problem.damping, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.solve.value != other.solve.value


def test_more_probes_make_estimates_more_certain() -> None:
    """The standard error falls like the root of the number of probes."""
    problem = network_problem(40, torch.float64, 1e-3)
    rough = hcurv.baselines.LowRank(problem.matrix, 5)
    few, many = (
        hcurv.certify(rough, problem.matrix, problem.damping, num_probes=count)
        for count in (16, 400)
    )
    ratio = few.logdet.uncertainty / many.logdet.uncertainty
    assert 5 / 2 < ratio < 5 * 2
    problem.approximation = rough
    logdet, kl = problem.trace_errors()
    assert abs(many.logdet.value - logdet) < 4 * many.logdet.uncertainty
    assert many.kl is not None
    assert abs(many.kl.value - kl) < 4 * many.kl.uncertainty


@pytest.mark.parametrize("damping", ["tensor", "names"])
def test_dampings_for_each_parameter_are_certified(damping: str) -> None:
    problem = network_problem(40, torch.float64, 1e-3)
    names = {"0": 0.1, "2": 0.02}
    values = problem.matrix.layout.expand(names).double()
    approximation = hcurv.baselines.LowRank(problem.matrix, 5)
    given: Any = names if damping == "names" else values
    found = hcurv.certify(approximation, problem.matrix, given, num_probes=100)
    own = approximation.to_dense() + values.diag()
    exact = problem.dense + values.diag()
    logdet = torch.linalg.slogdet(own).logabsdet - torch.linalg.slogdet(exact).logabsdet
    assert abs(found.logdet.value - float(logdet)) < 4 * found.logdet.uncertainty


def test_the_exact_matrix_is_certified_as_exact() -> None:
    problem = network_problem(40, torch.float64, 1e-3)
    found = hcurv.certify(hcurv.compress(problem.dense, tolerance=1e-13), problem.dense, 1e-3)
    rounding = 1e3 * torch.finfo(torch.float64).eps / 1e-3
    assert found.solve.value < rounding
    assert found.variance.value < rounding
    assert abs(found.logdet.value) < rounding * len(problem.dense)


def test_factorizations_of_approximations_send_to_certify() -> None:
    problem = network_problem(40, torch.float64, 1e-2)
    for approximation in (
        hcurv.compress(problem.matrix, tolerance=1e-3),
        hcurv.baselines.LowRank(problem.matrix, 39),
    ):
        factorized = approximation.factorize(problem.damping)
        with pytest.raises(hcurv.NotFactorizableError, match=r"use hcurv\.certify\("):
            _ = factorized.accuracy


def test_bad_input_is_refused() -> None:
    problem = network_problem(5, torch.float64, 1e-2)
    approximation = hcurv.Diagonal(problem.matrix.diagonal())
    with pytest.raises(ValueError, match="damping must be positive: H may be singular; got 0"):
        hcurv.certify(approximation, problem.matrix, 0.0)
    with pytest.raises(ValueError, match="num_probes must be"):
        hcurv.certify(approximation, problem.matrix, 1.0, num_probes=1)
