"""hcurv.compare: every method on one network, at one storage budget, side by side."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.baselines import KFAC, BlockDiagonal, Diagonal, LowRank, MatrixFree
from hcurv.batches import Data
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import CompressionWarning, HMatrix, compress
from hcurv.indexing import check_count
from hcurv.krylov import CGResult, cg, eigsh
from hcurv.losses import Loss
from hcurv.operators import PROBE_SEED, SymmetricOperator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ComparedMethod", "Comparison", "compare"]

_NUM_COLUMNS = 16  # of products and solves that are timed


@dataclass(frozen=True)
class ComparedMethod:
    """What one method reached.

    Attributes:
        name: of the method.
        error: relative error ‖H − A‖_F/‖H‖_F, estimated with random vectors.
        storage: stored floats over N².
        build_seconds: to build it, from the model or from the exact matrix.
        product_seconds: of a product with 16 columns.
        solve_residual: relative residual in the exact system of a solve with the method alone;
            None where it cannot solve.
        num_iterations: of conjugate gradients on the exact matrix with the method as
            preconditioner, to the tolerance of the comparison; None where it cannot solve.
        settings: what was chosen to fit the budget.
        residuals: relative residuals of these conjugate gradients, before the first and after
            each iteration; empty where it cannot solve.
    """

    name: str
    error: float
    storage: float
    build_seconds: float
    product_seconds: float
    solve_residual: float | None
    num_iterations: int | None
    settings: str
    residuals: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class ComparisonDetails:
    """What a report needs beyond the table.

    Attributes:
        matrix: the exact matrix.
        compressed: the hierarchical matrix.
        model: the model in words.
        loss: the loss in words.
        damping_is_default: whether the damping was left to the comparison.
        max_iterations: most iterations of conjugate gradients.
        num_probes: random vectors for the errors.
        seed: of everything else.
        finished: when the comparison was done.
    """

    matrix: GaussNewton
    compressed: HMatrix
    model: str
    loss: str
    damping_is_default: bool
    max_iterations: int
    num_probes: int
    seed: int
    finished: datetime


@dataclass(frozen=True)
class Comparison:
    """All methods on one matrix; prints as a table.

    Attributes:
        size: N.
        num_points: n.
        storage: budget, in floats over N².
        damping: of all solves.
        tolerance: of conjugate gradients.
        methods: what each one reached.
        details: the matrices themselves, kept for `save_report`; no part of `to_dict`.
    """

    size: int
    num_points: int
    storage: float
    damping: float
    tolerance: float
    methods: tuple[ComparedMethod, ...]
    details: ComparisonDetails | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """A table."""
        lines = [
            f"N = {self.size}, n = {self.num_points}, budget {self.storage:.3%} of N², damping"
            f" {self.damping:.2e}, conjugate gradients to {self.tolerance:.0e}",
            f"{'':26}{'error':>9}{'storage':>10}{'build':>10}{'product':>11}{'residual':>10}"
            f"{'iterations':>12}",
        ]
        for method in self.methods:
            residual = "–" if method.solve_residual is None else f"{method.solve_residual:.1e}"
            iterations = "–" if method.num_iterations is None else str(method.num_iterations)
            lines.append(
                f"{method.name:26}{method.error:>9.1e}{method.storage:>10.3%}"
                f"{method.build_seconds:>8.2f} s{1e3 * method.product_seconds:>8.1f} ms"
                f"{residual:>10}{iterations:>12}  {method.settings}".rstrip()
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings."""
        values = asdict(replace(self, details=None))
        del values["details"]
        return values

    def plot(self) -> Figure:
        """Error against storage."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        markers = "osD^v<>Phx*"
        for number, method in enumerate(m for m in self.methods if m.error > 0):
            axes.loglog(
                100 * method.storage,
                method.error,
                markers[number % len(markers)],
                markersize=9,
                label=method.name,
            )
        axes.axvline(100 * self.storage, color="gray", linestyle="--", label="budget")
        axes.set(xlabel="stored floats, % of N²", ylabel="relative error", title=f"N = {self.size}")
        axes.legend(fontsize=8)
        return figure

    def save_report(self, path: str | PathLike[str], *, curves: bool = True) -> None:
        """Write all of this as one HTML page with figures, which needs no network to be read.

        An existing file is replaced once the new one is complete.

        Args:
            path: of the page.
            curves: also measure the hierarchical matrix and low rank at a half and a quarter of
                the budget. This builds both of them twice.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: nothing can be written there.
            ImportError: matplotlib is missing.
        """
        from hcurv.report import save_report

        save_report(self, path, curves=curves)


def compare(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    *,
    storage: float = 0.02,
    damping: float | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    num_probes: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Comparison:
    """Compare all methods on the Gauss-Newton Hessian of a network.

    The hierarchical matrix and low rank are set to use as much of the budget as they can; the
    storage of the others is what it is.

    Args:
        model: as for `GaussNewton`.
        loss: as for `GaussNewton`.
        data: as for `GaussNewton`.
        storage: budget, stored floats over N².
        damping: of all solves; None for 1e-3 of the largest eigenvalue.
        tolerance: relative residual of conjugate gradients.
        max_iterations: most iterations of conjugate gradients.
        num_probes: random vectors for the errors.
        seed: of everything random.
        progress: show a progress bar over the methods.
    """
    if not 0 < storage < math.inf:
        raise ValueError(f"storage must be a positive fraction of N²; got {storage}")
    if damping is not None and not 0 < damping < math.inf:
        raise ValueError(f"damping must be positive; got {damping}")
    max_iterations = check_count(max_iterations, "max_iterations")
    num_probes = check_count(num_probes, "num_probes")
    start = time.perf_counter()
    matrix = GaussNewton(model, loss, data)
    precomputation = time.perf_counter() - start
    if not bool(matrix.diagonal().any()):
        raise ValueError("H is zero for this network and data: there is nothing to compare")
    damping_is_default = damping is None
    if damping is None:
        damping = 1e-3 * _largest_eigenvalue(matrix)
    run = _Run(matrix, storage, damping, tolerance, max_iterations, num_probes, seed)

    def kfac(**options: Any) -> Callable[[], tuple[SymmetricOperator, str]]:
        return lambda: (KFAC(model, loss, data, seed=seed, **options), "")

    builders: dict[str, Callable[[], tuple[SymmetricOperator, str]]] = {
        "hierarchical": run.hierarchical,
        "low rank": run.low_rank,
        "K-FAC block-diagonal": kfac(),
        "K-FAC block-tridiagonal": kfac(structure="block-tridiagonal"),
        "K-FAC full": kfac(structure="full"),
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
        matrix.shape[0], matrix.num_points, storage, damping, tolerance, tuple(found), details
    )


def _largest_eigenvalue(matrix: GaussNewton) -> float:
    if matrix.shape[0] < 8:
        return float(torch.linalg.eigvalsh(matrix.to_dense().double())[-1])
    return float(eigsh(matrix, 1, tolerance=1e-3).values[0])


class _Run:
    """What all methods share."""

    def __init__(
        self,
        matrix: GaussNewton,
        storage: float,
        damping: float,
        tolerance: float,
        max_iterations: int,
        num_probes: int,
        seed: int,
    ) -> None:
        self._matrix, self._storage, self._damping = matrix, storage, damping
        self._tolerance, self._max_iterations, self._seed = tolerance, max_iterations, seed
        generator = torch.Generator().manual_seed(PROBE_SEED + seed)
        shape = (matrix.shape[0], max(num_probes, _NUM_COLUMNS))
        probes = torch.randn(shape, dtype=matrix.dtype, generator=generator).to(matrix.device)
        self._probes, self._products = probes, matrix @ probes
        self._rhs = probes[:, 0].contiguous()

    def hierarchical(self) -> tuple[HMatrix, str]:
        """The most accurate that fits into the budget."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            found = compress(
                self._matrix,
                max_storage=self._storage,
                positive_definite=True,
                damping=self._damping,
                seed=self._seed,
            )
        leaves = f"leaves of {found.record.leaf_size}" if found.tree.num_kept else "no tree"
        return found, f"global rank {found.global_rank}, {leaves}"

    def low_rank(self) -> tuple[LowRank, str]:
        """As many eigenpairs as fit."""
        size = self._matrix.shape[0]
        rank = min(size, int(self._storage * size**2 / (size + 1)))
        return LowRank(self._matrix, rank, seed=self._seed), f"rank {rank}"

    def exact(self, build_seconds: float) -> ComparedMethod:
        """The exact matrix, solved with by plain conjugate gradients."""
        exact = MatrixFree(
            self._matrix, tolerance=self._tolerance, max_iterations=self._max_iterations
        )
        result = exact.iterate(self._rhs, self._damping)
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
        self, name: str, operator: SymmetricOperator, build_seconds: float, settings: str
    ) -> ComparedMethod:
        """Error, times and solves of one method."""
        error = _norm(self._products - operator @ self._probes) / _norm(self._products)
        solve = self._solver(operator)
        residual = iterations = None
        residuals: tuple[float, ...] = ()
        if solve is not None:
            solution = solve(self._rhs)
            product = self._matrix @ solution + self._damping * solution
            residual = _norm(self._rhs - product) / _norm(self._rhs)
            result = cg(
                self._matrix,
                self._rhs,
                damping=self._damping,
                preconditioner=lambda values: solve(values),
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
        )

    def _solver(self, operator: Any) -> Callable[[Tensor], Tensor] | None:
        if isinstance(operator, KFAC) and operator.structure == "full":
            return None
        if hasattr(operator, "factorize"):
            solve: Callable[[Tensor], Tensor] = operator.factorize(self._damping).solve
            return solve
        return lambda values: operator.solve(values, self._damping)

    def _time_product(self, operator: SymmetricOperator) -> float:
        columns = self._probes[:, :_NUM_COLUMNS].contiguous()
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            operator @ columns
            best = min(best, time.perf_counter() - start)
        return best


def _history(result: CGResult) -> tuple[float, ...]:
    """Of the one right-hand side."""
    return tuple(result.history[:, 0].tolist())


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
