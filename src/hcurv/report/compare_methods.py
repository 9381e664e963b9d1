"""hcurv.compare: measure every method on one network, at one storage budget."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.arguments import check_number
from hcurv.baselines import KFAC, BlockDiagonal, Diagonal, LowRank, MatrixFree
from hcurv.factorized import AccuracyWarning, Factorized, NotFactorizableError
from hcurv.hierarchical import CompressionWarning, HMatrix, compress
from hcurv.indexing import check_count, check_seed
from hcurv.linalg import CGResult, cg, eigsh
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.operators import PROBE_SEED, SymmetricOperator
from hcurv.precision import full_precision
from hcurv.report.comparison import ComparedMethod, Comparison, ComparisonDetails
from hcurv.report.inverse_errors import InverseMeasurement, is_exact

__all__ = ["compare"]

# Products are timed with this many columns.
_NUM_COLUMNS = 16


@full_precision
def compare(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    *,
    storage: float = 0.02,
    damping: float | None = None,
    damping_ratios: Sequence[float] | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    num_probes: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Compare all methods on the Gauss-Newton Hessian of a network.

    The hierarchical matrix and low rank use as much of the budget as they can. The other methods
    have no setting for their storage: they store what they store. `GaussNewton.factorize` is there
    as well: it inverts the exact matrix, at the price of what it stores.

    Errors of matrices are relative to H, and those of inverses, in solves, variances and
    log-determinants, relative to (H + λI)⁻¹. See `InverseError`.

    Args:
        model: The network, as for `GaussNewton`.
        loss: The loss, as for `GaussNewton`.
        data: The data, as for `GaussNewton`.
        storage: The budget: stored floats divided by N².
        damping: The damping of all solves. None takes a thousandth of the largest eigenvalue.
        damping_ratios: Other dampings at which inverses are measured, divided by the largest
            eigenvalue. None takes 1e-1, 1e-2, … 1e-6, as far as the precision of the model allows,
            if the smaller of N and n·q is at most 8,000, and none if it is larger, because each of
            them costs an exact inverse.
        tolerance: The relative residual at which conjugate gradients stop.
        max_iterations: The largest number of iterations of conjugate gradients.
        num_probes: The number of random vectors from which errors are estimated.
        seed: The seed of everything random.
        progress: Whether to show a progress bar over the methods.

    Returns:
        What was measured for each method; printing it shows a table.

    Examples:
        >>> comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
        >>> [method.name for method in comparison.methods][:3]
        ['matrix-free', 'hierarchical', 'low rank']
        >>> low_rank = comparison.methods[2]
        >>> low_rank.settings, low_rank.storage <= 0.5
        ('rank 25', True)
    """
    storage = check_number(storage, "storage", above=0)
    if damping is not None:
        damping = check_number(damping, "damping", above=0)
    tolerance = check_number(tolerance, "tolerance", above=0)
    max_iterations = check_count(max_iterations, "max_iterations")
    num_probes = check_count(num_probes, "num_probes")
    seed = check_seed(seed)
    if damping_ratios is not None and not all(0 < ratio < math.inf for ratio in damping_ratios):
        raise ValueError(
            "damping_ratios must be positive dampings over the largest eigenvalue, such as 1e-3;"
            f" got {damping_ratios}"
        )
    start = time.perf_counter()
    matrix = GaussNewton(model, loss, data)
    precomputation = time.perf_counter() - start
    if not bool(matrix.diagonal().any()):
        raise ValueError(
            "H is zero for this network and data, so there is nothing to compare: use other data"
            " or a loss whose Hessian is not zero"
        )
    damping_is_default = damping is None
    largest = _largest_eigenvalue(matrix)
    if damping is None:
        damping = 1e-3 * largest
    inverses = InverseMeasurement(matrix, largest, damping, damping_ratios, seed)
    run = _Run(matrix, storage, damping, tolerance, max_iterations, num_probes, seed, inverses)

    def kfac(**options: Any) -> Callable[[], tuple[SymmetricOperator, str]]:
        return lambda: (KFAC(model, loss, data, seed=seed, **options), "")

    neighbours = {}
    if matrix.network is not None:  # Only layers of a chain have neighbours.
        neighbours["K-FAC block-tridiagonal"] = kfac(structure="block-tridiagonal")
        neighbours["K-FAC full"] = kfac(structure="full")
    builders: dict[str, Callable[[], tuple[SymmetricOperator, str]]] = {
        "hierarchical": run.hierarchical,
        "low rank": run.low_rank,
        "K-FAC block-diagonal": kfac(),
        **neighbours,
        "EKFAC": kfac(ekfac=True),
        "diagonal": lambda: (Diagonal(matrix), ""),
        "blocks per unit": lambda: (BlockDiagonal(matrix, "unit"), ""),
    }
    found, compressed = [run.exact(precomputation)], None
    for name, build in tqdm(builders.items(), unit="method", disable=not progress):
        start = time.perf_counter()
        operator, settings = build()
        compressed = operator if isinstance(operator, HMatrix) else compressed
        found.append(run.measure(name, operator, time.perf_counter() - start, settings))
    found += run.factorized()
    assert compressed is not None
    details = ComparisonDetails(
        matrix,
        compressed,
        str(model),
        f"{type(loss).__name__}, reduction {loss.reduction}",
        damping_is_default,
        max_iterations,
        num_probes,
        seed,
        datetime.now(timezone.utc),
    )
    return Comparison(
        matrix.shape[0],
        matrix.num_points,
        storage,
        damping,
        largest,
        inverses.logdet,
        tolerance,
        tuple(found),
        details,
    )


def _largest_eigenvalue(matrix: GaussNewton) -> float:
    if matrix.shape[0] < 8:
        return float(torch.linalg.eigvalsh(matrix.to_dense().double())[-1])
    return float(eigsh(matrix, 1, tolerance=1e-3).values[0])


class _Run:
    """Measures methods on one matrix, all with the same random vectors and the same damping."""

    def __init__(
        self,
        matrix: GaussNewton,
        storage: float,
        damping: float,
        tolerance: float,
        max_iterations: int,
        num_probes: int,
        seed: int,
        inverses: InverseMeasurement,
    ) -> None:
        self._inverses = inverses
        self._matrix, self._storage, self._damping = matrix, storage, damping
        self._tolerance, self._max_iterations, self._seed = tolerance, max_iterations, seed
        generator = torch.Generator().manual_seed(PROBE_SEED + seed)
        shape = (matrix.shape[0], max(num_probes, _NUM_COLUMNS))
        probes = torch.randn(shape, dtype=matrix.dtype, generator=generator).to(matrix.device)
        self._probes, self._products = probes, matrix @ probes
        self._rhs = probes[:, 0].contiguous()

    def hierarchical(self) -> tuple[HMatrix, str]:
        """Build the most accurate hierarchical matrix that fits into the budget."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            found = compress(
                self._matrix,
                max_storage=self._storage,
                damping=self._damping,
                seed=self._seed,
            )
        leaves = f"leaves of {found.record.leaf_size}" if found.tree.has_clusters else "a diagonal"
        return found, f"global rank {found.global_rank}, {leaves}"

    def low_rank(self) -> tuple[LowRank, str]:
        """Compute as many leading eigenpairs as fit into the budget."""
        size = self._matrix.shape[0]
        rank = min(size, int(self._storage * size**2 / (size + 1)))
        return LowRank(self._matrix, rank, seed=self._seed), f"rank {rank}"

    def exact(self, build_seconds: float) -> ComparedMethod:
        """Measure the exact matrix, with conjugate gradients that have no preconditioner."""
        exact = MatrixFree(
            self._matrix, tolerance=self._tolerance, max_iterations=self._max_iterations
        )
        result = exact.factorize(self._damping).iterate(self._rhs)
        return ComparedMethod(
            "matrix-free",
            0.0,
            exact.compression_rate,
            build_seconds,
            self._time_product(exact),
            float(result.residuals.max()),
            int(result.num_iterations.max()),
            "",
            _history(result),
        )

    def measure(
        self, name: str, operator: Any, build_seconds: float, settings: str
    ) -> ComparedMethod:
        """Measure error, times and solves of one method."""
        error = _norm(self._products - operator @ self._probes) / _norm(self._products)
        residual = iterations = None
        residuals: tuple[float, ...] = ()
        try:
            factorized = operator.factorize(self._damping)
        except NotFactorizableError:
            factorized = None
        if factorized is not None:
            residual = self._residual(factorized)
            result = cg(
                self._matrix,
                self._rhs,
                damping=self._damping,
                preconditioner=factorized,
                tolerance=self._tolerance,
                max_iterations=self._max_iterations,
            )
            iterations = int(result.num_iterations.max())
            residuals = _history(result)
        return ComparedMethod(
            name,
            error,
            operator.compression_rate,
            build_seconds,
            self._time_product(operator),
            residual,
            iterations,
            settings,
            residuals,
            *self._inverses.measure(operator.factorize),
        )

    def _residual(self, factorized: Factorized) -> float:
        """Compute the relative residual of a solve, in the exact system."""
        solution = factorized.solve(self._rhs)
        product = self._matrix @ solution + self._damping * solution
        return _norm(self._rhs - product) / _norm(self._rhs)

    def factorized(self) -> list[ComparedMethod]:
        """Measure what `GaussNewton.factorize` chooses; nothing if the precision is too low."""
        start = time.perf_counter()
        try:
            factorized = self._matrix.factorize(self._damping, seed=self._seed)
        except ValueError:  # the damping is beyond the precision of the matrix
            return []
        seconds = time.perf_counter() - start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)
            residual = self._residual(factorized)

        def again(damping: float) -> Factorized:
            if damping == self._damping:
                return factorized
            return self._matrix.factorize(damping, seed=self._seed)

        # An iterative inverse would make an exact one for each log-determinant, which takes long.
        errors = self._inverses.measure(again, has_logdet=is_exact)
        method = ComparedMethod(
            "H.factorize",
            0.0,
            factorized.compression_rate,
            seconds,
            None,
            residual,
            None,
            factorized.plan.chosen.description,
            (),
            *errors,
        )
        return [method]

    def _time_product(self, operator: SymmetricOperator) -> float:
        columns = self._probes[:, :_NUM_COLUMNS].contiguous()
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            operator @ columns
            best = min(best, time.perf_counter() - start)
        return best


def _history(result: CGResult) -> tuple[float, ...]:
    """Return the residuals of the only right-hand side."""
    return tuple(result.history[:, 0].tolist())


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
