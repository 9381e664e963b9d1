"""How far an inverse of H + D can be trusted, measured on probes that its build did not use.

Solves and variances are measured on rows b of the root S, which are what output variances are made
of: a solve x of b is improved by conjugate gradients on the exact H until it is ten times more
accurate, and the two are compared. The log-determinant and the KL divergence between the normal
distributions of both precision matrices come from Lanczos probes of Gᵀ(H + D)G = I + E, where
(A + D)⁻¹ = G Gᵀ is the inverse that is tested:

    log|H + D| − log|A + D| = tr log(I + E),      KL = ½ (tr E − tr log(I + E)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hcurv.damping import Damping, DampingLike, as_damping
from hcurv.factorized import Factorized
from hcurv.indexing import check_count, check_seed
from hcurv.inversion.iterative import IterativeFactorization
from hcurv.layout import layout_of
from hcurv.linalg.block_conjugate_gradients import block_cg
from hcurv.linalg.quadrature import Quadrature, preconditioned_quadrature
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.operators import PROBE_SEED, SymmetricOperator
from hcurv.precision import full_precision
from hcurv.sources import MatrixProduct, as_operator

__all__ = ["Accuracy", "Approximation", "Estimate", "certify", "measure_accuracy"]

# What is tested is compared with solutions whose error is at most this share of its own, as far as
# rounding allows, which stops at this many units. The first comparison is with this error.
_FINER, _ROUNDING, _FIRST = 0.1, 100.0, 0.1
# Products with H are in double precision where rounding is more than this share of the damping.
_PRECISE = 1e-2
_TINY = torch.finfo(torch.float64).tiny
# Conjugate gradients that make them stop after this many iterations; after fewer, where what is
# tested is of no help to them.
_MAX_ITERATIONS, _RETRY_ITERATIONS = 1000, 200


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated from random probes.

    Attributes:
        value: the estimate.
        uncertainty: its standard error.

    Examples:
        >>> print(hcurv.certify(A, H, damping=1e-2).logdet.uncertainty < 10)
        True
    """

    value: float
    uncertainty: float

    def __str__(self) -> str:
        """Both in a few digits."""
        return f"{self.value:.2g} ± {self.uncertainty:.1g}"


@dataclass(frozen=True)
class Accuracy:
    """Estimated errors of an inverse (A + D)⁻¹ that stands for (H + D)⁻¹.

    Attributes:
        solve: root mean square over the probes b of the relative error of solves, in the norm of
            H + D: ‖x − (H + D)⁻¹b‖/‖(H + D)⁻¹b‖.
        variance: root mean square of the relative error of bᵀ(A + D)⁻¹b.
        logdet: the error of the log-determinant, with its sign.
        kl: the KL divergence between N(0, (A + D)⁻¹) and N(0, (H + D)⁻¹), in nats; None where
            samples are made by solves on the exact H.

    Examples:
        >>> accuracy = hcurv.certify(hcurv.compress(H, damping=1e-2), H, damping=1e-2)
        >>> accuracy.variance.value < 2e-2
        True
    """

    solve: Estimate
    variance: Estimate
    logdet: Estimate
    kl: Estimate | None

    def __str__(self) -> str:
        """A small table."""
        return "\n".join(
            f"{name:<28}{'as that of solves' if value is None else value}"
            for name, value in (
                ("relative error of solves", self.solve),
                ("relative error of variances", self.variance),
                ("error of log-determinant", self.logdet),
                ("KL divergence", self.kl),
            )
        )


class Approximation(Protocol):
    """A matrix A that can be multiplied with vectors, and factorized with a damping."""

    def __matmul__(self, rhs: Tensor, /) -> Tensor:
        """A times (N, k)."""

    def factorize(self, damping: float) -> Factorized:
        """Factorize A + D."""


@full_precision
def certify(
    approximation: Approximation,
    matrix: SymmetricOperator | MatrixProduct | Tensor,
    damping: DampingLike,
    *,
    factorized: Factorized | None = None,
    num_probes: int = 16,
    seed: int = 0,
) -> Accuracy:
    """Estimate how wrong solves with an approximation of a matrix are, at a damping.

    It costs some products with H, the fewer the better the approximation is, and no dense matrix.

    Args:
        approximation: A, anything with products and ``factorize(damping)``: a compressed matrix, a
            low-rank one, K-FAC.
        matrix: H, the exact matrix.
        damping: D, positive: a number, a tensor (N,), or, where H has names, numbers by name.
        factorized: ``approximation.factorize(damping)``, if it is at hand.
        num_probes: the number of probes.
        seed: the seed of the probes, which differ from those of any build.

    Examples:
        >>> low_rank = hcurv.baselines.LowRank(H, rank=5)
        >>> hcurv.certify(low_rank, H, damping=1e-3).variance.value > 0.1  # far too rough
        True
        >>> better = hcurv.compress(H, damping=1e-2, tolerance=1e-2)
        >>> hcurv.certify(better, H, damping=1e-2).variance.value < 2e-2
        True
    """
    exact = as_operator(matrix, "the matrix")
    num_probes = check_count(num_probes, "num_probes", least=2)
    seed = check_seed(seed)
    resolved = as_damping(damping, exact.shape[0], layout_of(exact))
    resolved.require_positive("H may be singular")
    if factorized is None and not hasattr(approximation, "factorize"):
        raise TypeError(
            "approximation must be a matrix with a method factorize(damping), as hcurv.compress and"
            f" hcurv.baselines make; got {type(approximation).__name__}"
        )
    if factorized is not None and not isinstance(factorized, Factorized):
        raise TypeError(
            "factorized must be approximation.factorize(damping), a hcurv.Factorized; got"
            f" {type(factorized).__name__}"
        )
    factors = approximation.factorize(damping) if factorized is None else factorized  # type: ignore[arg-type]
    exact = _precise(exact, resolved, matrix)
    values = resolved.diagonal(exact.shape[0], exact.device)[:, None]

    def product(columns: Tensor) -> Tensor:
        return torch.addcmul(exact @ columns, columns, values.to(columns.dtype))

    def solve(columns: Tensor) -> Tensor:
        return (factors @ columns.to(factors.dtype)).to(columns.dtype)

    with torch.no_grad():
        probes = _probe_columns(exact, num_probes, seed)
        solves, variances = _solve_errors(product, solve, probes, solve(probes))
        noise = _noise(exact.shape[0], num_probes, factors.dtype, exact.device, seed + 1)
        start = factors.sqrt_solve(noise)
        dual = torch.addcmul(approximation @ start, start, values.to(start.dtype))
        quadrature = preconditioned_quadrature(
            product, solve, start.to(exact.dtype), dual.to(exact.dtype)
        )
    logdet, kl = _trace_estimates(quadrature)
    return Accuracy(solves, variances, Estimate(-logdet.value, logdet.uncertainty), kl)


def _precise(matrix: SymmetricOperator, damping: Damping, given: object) -> SymmetricOperator:
    """H in double precision, if rounding in its own would change H + D by much."""
    least = float(damping.tensor.detach().min())
    rounding = torch.finfo(matrix.dtype).eps * float(matrix.diagonal().double().sum()) / least
    if rounding <= _PRECISE:
        return matrix
    if isinstance(matrix, FactoredMatrix):
        return matrix.in_precision(torch.float64)
    return as_operator(given.double()) if isinstance(given, Tensor) else matrix


def measure_accuracy(
    matrix: FactoredMatrix, factorized: Factorized, rounding: float, num_probes: int, seed: int
) -> Accuracy:
    """How accurate an exact or iterative inverse is.

    Args:
        matrix: H, in the precision that is worked in.
        factorized: (H + D)⁻¹.
        rounding: the relative size of rounding errors, those of H over the damping.
        num_probes: the number of probes.
        seed: the seed of the probes.
    """
    values = factorized._damping.diagonal(matrix.shape[0], matrix.device)[:, None]

    def product(columns: Tensor) -> Tensor:
        return torch.addcmul(matrix @ columns, columns, values.to(columns.dtype))

    with torch.no_grad():
        probes = _probe_columns(matrix, num_probes, seed)
        solved = factorized.solve(probes.to(factorized.dtype)).to(matrix.dtype)
        if isinstance(factorized, IterativeFactorization):
            stand_in = factorized.stand_in.factorized
            logdet = Estimate(0.0, factorized.logdet_error)
        else:
            stand_in = factorized
            logdet = Estimate(0.0, rounding * math.sqrt(matrix.shape[0]))

        def precondition(columns: Tensor) -> Tensor:
            return (stand_in @ columns.to(stand_in.dtype)).to(columns.dtype)

        solves, variances = _solve_errors(product, precondition, probes, solved)
    return Accuracy(solves, variances, logdet, None)


def _trace_estimates(quadrature: Quadrature) -> tuple[Estimate, Estimate]:
    """tr log(I + E), and the KL divergence."""
    logdet = _mean_estimate(quadrature.traces(torch.log))
    kl = _mean_estimate(quadrature.traces(lambda nodes: (nodes - 1 - nodes.log()) / 2))
    return logdet, kl


def _mean_estimate(values: Tensor) -> Estimate:
    """The mean of independent estimates, and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(values.numel()))


def _root_mean_square(values: Tensor) -> Estimate:
    squares = _mean_estimate(values.double().square())
    root = math.sqrt(max(squares.value, 0.0))
    return Estimate(root, squares.uncertainty / (2 * root) if root > 0 else 0.0)


def _noise(size: int, count: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(PROBE_SEED + seed)
    return torch.randn(size, count, dtype=dtype, generator=generator).to(device)


def _probe_columns(matrix: SymmetricOperator, count: int, seed: int) -> Tensor:
    """Right-hand sides that are typical of outputs: rows of the root S, or H times noise, (N, k).

    Rows that are zero are replaced by noise.
    """
    noise = _noise(matrix.shape[0], count, matrix.dtype, matrix.device, seed)
    if isinstance(matrix, FactoredMatrix):
        generator = torch.Generator().manual_seed(PROBE_SEED + seed)
        rows = torch.randint(0, matrix.num_root_rows, (count,), generator=generator)
        units = torch.zeros(matrix.num_root_rows, count, dtype=matrix.dtype, device=matrix.device)
        units[rows.to(matrix.device), torch.arange(count, device=matrix.device)] = 1.0
        columns = matrix.root_transposed(units)
    else:
        columns = matrix @ noise
    lengths = torch.linalg.vector_norm(columns, dim=0)
    columns = torch.where(lengths > 0, columns, noise)
    return columns / torch.where(lengths > 0, lengths, 1.0)


def _solve_errors(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    probes: Tensor,
    solved: Tensor,
) -> tuple[Estimate, Estimate]:
    """Relative errors of solves and of variances, root mean squares over the probes.

    The solutions are improved until they are so much more accurate than what is tested that the
    difference is the error of the latter.

    Args:
        product: H + D times (N, k).
        precondition: an approximate inverse of it.
        probes: right-hand sides, (N, k).
        solved: their solutions, which are tested.
    """
    finest = _ROUNDING * torch.finfo(probes.dtype).eps
    tolerance, better = _FIRST, solved
    while True:
        result = block_cg(
            product,
            probes,
            precondition=precondition,
            tolerance=tolerance,
            max_iterations=_MAX_ITERATIONS,
            start=better,
        )
        if not result.converged:
            # The inverse that is tested is too bad to precondition with, or to start from.
            result = block_cg(
                product, probes, tolerance=tolerance, max_iterations=_RETRY_ITERATIONS
            )
        better = result.solution
        difference = (better - solved).double()
        energies = torch.linalg.vecdot(better.double(), probes.double(), dim=0).clamp(min=_TINY)
        errors = torch.linalg.vecdot(difference, product(better - solved).double(), dim=0)
        relative = _root_mean_square((errors.clamp(min=0) / energies).sqrt())
        if tolerance <= max(_FINER * relative.value, finest) or not result.converged:
            break
        tolerance = max(0.5 * _FINER * relative.value, finest)
    found = torch.linalg.vecdot(solved.double(), probes.double(), dim=0) / energies - 1
    return relative, _root_mean_square(found)
