"""Measure how wrong the inverse of a method is: its solves, variances and log-determinant.

The Frobenius error of a matrix A says how good its products are. It says little about (A + λI)⁻¹,
which depends on the eigenvalues near the damping λ. So the inverse is measured by itself, against
(H + λI)⁻¹, at several dampings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.factorized import AccuracyWarning, Factorized, NotFactorizableError
from hcurv.hierarchical import NotPositiveDefiniteError
from hcurv.inversion.dense import DenseFactorization
from hcurv.inversion.iterative import IterativeFactorization
from hcurv.inversion.sample_space import SampleSpaceFactorization
from hcurv.memory import available_bytes
from hcurv.network.gauss_newton import GaussNewton

__all__ = ["RATIOS", "ExactInverses", "InverseError", "InverseMeasurement", "is_exact", "percent"]

# Inverses are measured at these dampings, divided by the largest eigenvalue.
RATIOS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# The rounding of the largest eigenvalue may be this share of the damping, and no more.
_ROUNDING_SHARE = 0.05
# Variances are measured with this many rows of the root S, and errors of solves, which cost
# a product with H each, with the first of them.
_NUM_ROWS, _NUM_SOLVES = 32, 8
# H or its kernel is formed, and factorized anew for each damping, up to this many rows.
_DENSE = 8000
# The share of free memory that this may take.
_MEMORY_SHARE = 0.5
# The dense factorization is made in single precision if rounding changes H by less than this,
# relative to λ. Its solves are refined in double precision. Its log-determinant was then off by
# 4e-4, with 5,771 rows and a log-determinant of -41,081.
_SINGLE = 2e-3
# The relative error of the solves of a larger matrix, which have to be iterative.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class InverseError:
    """How wrong (A + λI)⁻¹ is, compared with (H + λI)⁻¹. Errors of zero are exact.

    The vectors b are random rows of the root S of H = SᵀS: gradients of outputs, weighted by the
    loss.

    Attributes:
        damping: λ.
        variance: The median relative error of the variances bᵀ(A + λI)⁻¹b; None if the method has
            no inverse at this damping.
        solve: The median relative error of the solutions (A + λI)⁻¹b, in the norm of H + λI.
        logdet: log|A + λI| − log|H + λI|; None if it was not measured, because one of them is not
            known or would take a factorization of its own.
        logdet_deviation: The standard error of the log-determinant that this one was compared
            with, if that was estimated from random probes; zero if it was exact.
        failure: Why there is no inverse at this damping, in a few words; empty if there is one.

    Examples:
        >>> errors = {method.name: method.inverse for method in comparison.methods}
        >>> errors["H.factorize"].variance < 1e-6 < errors["diagonal"].variance
        True
        >>> errors["K-FAC full"].failure
        'no cheap inverse'
    """

    damping: float
    variance: float | None = None
    solve: float | None = None
    logdet: float | None = None
    logdet_deviation: float = 0.0
    failure: str = ""


def percent(value: float) -> str:
    """Write an error as a percentage that is at most eight letters long."""
    shown = 100 * value
    if shown >= 1e5 or 0 < shown < 1e-3:
        return f"{value:.0e}"
    return f"{shown:.0f} %" if shown >= 100 else f"{shown:.2g} %"


@dataclass(frozen=True, eq=False)
class _Truth:
    """What (H + λI)⁻¹ makes of the vectors b.

    Attributes:
        solutions: (H + λI)⁻¹b, (N, k), in double precision.
        variances: bᵀ(H + λI)⁻¹b, (k,).
        logdet: log|H + λI|; None if it is an estimate of unknown error.
        logdet_deviation: Its standard error, zero if it is exact.
    """

    solutions: Tensor
    variances: Tensor
    logdet: float | None
    logdet_deviation: float


class ExactInverses:
    """(H + λI)⁻¹ for several λ. A small matrix is formed once, in parameter or in sample space.

    Args:
        matrix: H.
    """

    def __init__(self, matrix: GaussNewton) -> None:
        self._matrix = matrix
        self._double = matrix.in_precision(torch.float64)
        self._rows = matrix.diagonal().nonzero().squeeze(1)
        size = min(self._rows.numel(), matrix.num_root_rows)
        free = available_bytes(matrix.device)
        fits = free is None or 16 * size**2 <= _MEMORY_SHARE * free
        self.is_dense = size <= _DENSE and fits
        self._in_samples = matrix.num_root_rows < self._rows.numel()

    @cached_property
    def _dense(self) -> Tensor:
        if self._in_samples:
            return self._double.kernel(1.0).to_dense()
        return self._double.block(self._rows, self._rows)

    def rows_of_root(self, num: int, seed: int) -> Tensor:
        """Some random rows of S that are not zero, as columns (N, k), in double precision."""
        total = self._double.num_root_rows
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:num]
        units = torch.zeros(total, order.numel(), dtype=torch.float64, device=self._double.device)
        units[order.to(units.device), torch.arange(order.numel(), device=units.device)] = 1.0
        columns = self._double.root_transposed(units)
        return columns[:, columns.any(0)].contiguous()

    def _product(self, columns: Tensor) -> Tensor:
        """Multiply H by columns (N, k)."""
        if not self.is_dense or self._in_samples:
            return self._double @ columns
        product = self._dense @ columns[self._rows]
        return torch.zeros_like(columns).index_copy_(0, self._rows, product)

    def norms(self, columns: Tensor, damping: float) -> Tensor:
        """The norms of columns (N, k) that belong to H + λI."""
        squares = (columns * self._product(columns)).sum(0)
        return (squares + damping * columns.square().sum(0)).clamp(min=0).sqrt()

    def truth(self, columns: Tensor, damping: float, largest: float) -> _Truth | None:
        """Solve for columns (N, k). None if this damping is beyond the precision of the matrix."""
        try:
            factorized = self._factorize(damping, largest)
        except ValueError:
            return None
        solved = factorized.solve(columns.to(factorized.dtype)).double()
        if self.is_dense:
            residual = columns - self._product(solved) - damping * solved
            solved = solved + factorized.solve(residual.to(factorized.dtype)).double()
        logdet, deviation = None, 0.0
        if self.is_dense or is_exact(factorized):
            logdet = float(factorized.logdet())
        elif isinstance(factorized, IterativeFactorization):
            logdet, deviation = float(factorized.logdet()), factorized.logdet_error
        return _Truth(solved, (columns * solved).sum(0), logdet, deviation)

    def _factorize(self, damping: float, largest: float) -> Factorized:
        if not self.is_dense:
            return self._matrix.factorize(damping, _TOLERANCE)
        rounding = torch.finfo(torch.float32).eps * largest / damping
        dtype = torch.float32 if rounding <= _SINGLE else torch.float64
        number = Damping(torch.tensor(damping, dtype=torch.float64))
        size = self._matrix.shape[0]
        if not self._in_samples:
            block = self._dense.to(dtype, copy=True)
            return DenseFactorization.of(block, self._rows, number, size, dtype)
        one = Damping(torch.ones((), dtype=torch.float64))
        rows = torch.arange(self._dense.shape[0], device=self._dense.device)
        inner = DenseFactorization.of(self._dense / damping, rows, one, rows.numel(), torch.float64)
        return SampleSpaceFactorization(self._double, inner, number, torch.float64)


class InverseMeasurement:
    """Measures inverses at one damping and over a range of others, all with the same vectors.

    Args:
        matrix: H.
        largest: Its largest eigenvalue.
        damping: The damping that all methods are compared at.
        ratios: Other dampings, divided by the largest eigenvalue. None takes those that the
            precision allows if H, or its kernel, can be formed, and none otherwise.
        seed: The seed of the choice of rows.
    """

    def __init__(
        self,
        matrix: GaussNewton,
        largest: float,
        damping: float,
        ratios: Sequence[float] | None,
        seed: int,
    ) -> None:
        self._exact, self._largest = ExactInverses(matrix), largest
        if ratios is None:
            least = torch.finfo(matrix.dtype).eps / _ROUNDING_SHARE
            wanted = RATIOS if self._exact.is_dense else ()
            ratios = [ratio for ratio in wanted if ratio >= least]
        self.damping = damping
        # The comparison's own damping is often one of these, up to rounding.
        self.dampings = tuple(
            damping if abs(ratio * largest / damping - 1) < 1e-6 else ratio * largest
            for ratio in sorted(ratios, reverse=True)
        )
        self._columns = self._exact.rows_of_root(_NUM_ROWS, seed)
        self._truths: dict[float, _Truth | None] = {}

    def _truth(self, damping: float) -> _Truth | None:
        if damping not in self._truths:
            self._truths[damping] = self._exact.truth(self._columns, damping, self._largest)
        return self._truths[damping]

    @property
    def logdet(self) -> float | None:
        """log|H + λI| at the comparison's damping, if it is known."""
        truth = self._truth(self.damping)
        return None if truth is None else truth.logdet

    def measure(
        self,
        factorize: Callable[[float], Factorized],
        has_logdet: Callable[[Factorized], bool] = lambda _: True,
    ) -> tuple[InverseError, tuple[InverseError, ...]]:
        """Measure a method at the damping of the comparison, and at the others.

        Args:
            factorize: Makes the inverse for a damping.
            has_logdet: Whether the log-determinant is to be measured.
        """
        found = {
            damping: self._measure_at(damping, factorize, has_logdet)
            for damping in dict.fromkeys((self.damping, *self.dampings))
        }
        return found[self.damping], tuple(found[damping] for damping in self.dampings)

    def _measure_at(
        self,
        damping: float,
        factorize: Callable[[float], Factorized],
        has_logdet: Callable[[Factorized], bool],
    ) -> InverseError:
        truth = self._truth(damping)
        if truth is None:
            return InverseError(damping, failure="the truth is beyond this precision")
        with warnings.catch_warnings():
            # That a matrix is too rough for a damping is what is measured here.
            warnings.simplefilter("ignore", AccuracyWarning)
            try:
                factorized = factorize(damping)
            except NotFactorizableError:
                return InverseError(damping, failure="no cheap inverse")
            except NotPositiveDefiniteError:
                return InverseError(damping, failure="not positive definite")
            except ValueError:
                return InverseError(damping, failure="beyond this precision")
            solved = factorized.solve(self._columns.to(factorized.dtype)).double()
            variances = (self._columns * solved).sum(0)
            wrong = (solved - truth.solutions)[:, :_NUM_SOLVES].contiguous()
            errors = self._exact.norms(wrong, damping) / truth.variances[:_NUM_SOLVES].sqrt()
            logdet = None
            if truth.logdet is not None and has_logdet(factorized):
                logdet = _logdet(factorized)
        return InverseError(
            damping,
            float((variances / truth.variances - 1).abs().median()),
            float(errors.median()),
            None if logdet is None or truth.logdet is None else logdet - truth.logdet,
            truth.logdet_deviation,
        )


def is_exact(factorized: Factorized) -> bool:
    """Whether `GaussNewton.factorize` has made a dense factorization."""
    return factorized.plan.chosen.name in ("parameters", "samples")


def _logdet(factorized: Factorized) -> float | None:
    try:
        return float(factorized.logdet())
    except NotFactorizableError:
        return None
