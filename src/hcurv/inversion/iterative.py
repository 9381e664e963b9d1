"""(H + D)⁻¹ by conjugate gradients on the exact H, with an approximate inverse as preconditioner.

The approximation, a *stand-in* (A + D)⁻¹ = G Gᵀ, decides how long a solve takes, not how right it
is: every solve runs until its residual and its estimated error are below the tolerance.
Log-determinants are those of A + D, corrected by Lanczos probes of Gᵀ(H + D)G, with an error bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.damping import Damping, DeviceLike
from hcurv.factorized import Factorized, NotFactorizableError, check_float_type, warn_of_accuracy
from hcurv.linalg.block_conjugate_gradients import BLOCK_COLUMNS, BlockResult, block_cg
from hcurv.linalg.quadrature import Quadrature, preconditioned_quadrature
from hcurv.memory import require_bytes
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.operators import PROBE_SEED, SymmetricOperator
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AIM", "IterativeFactorization", "StandIn", "estimate_diagonal"]

# Log-determinants and diagonals of the inverse are estimated from this many probes at a time.
_NUM_PROBES = 16
# At most this many probes are used, however far the error bar is from what was asked for.
_MAX_PROBES = 128
# The error bar of a log-determinant shall be this share of N for a tolerance of 1: two standard
# errors are then at most 0.001·N for the default tolerance of 1e-2.
_LOGDET_SHARE = 0.05
# Solves aim at this share of the tolerance. Errors of single columns are estimated to a factor of
# two or three, and rank correlations of influence scores fall below 0.999 with errors of 1e-2.
AIM = 0.3
# While a block of columns is solved for, about this many blocks of vectors like it exist at a time.
_BLOCK_VECTORS = 12
# Iterations of a solve before it gives up with a warning.
_MAX_ITERATIONS = 5000
# A diagonal entry of the inverse is at least this share of what the stand-in says.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class StandIn:
    """An approximation A of H for which A + D is factorized.

    Attributes:
        name: what it is, in a few words.
        product: (A + D) times (N, k).
        factorized: (A + D)⁻¹.
    """

    name: str
    product: Callable[[Tensor], Tensor]
    factorized: Factorized


def estimate_diagonal(
    product: Callable[[Tensor], Tensor], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An unbiased estimate of the diagonal of a matrix, from products with random signs."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    total = torch.zeros(size, dtype=torch.float64, device=device)
    for _ in range(_MAX_PROBES // _NUM_PROBES):
        signs = 2 * torch.randint(0, 2, (size, _NUM_PROBES), generator=generator) - 1
        columns = signs.to(device, dtype)
        total += (columns * product(columns)).double().sum(1)
    return total / _MAX_PROBES


class IterativeFactorization(Factorized):
    """(H + D)⁻¹ by preconditioned block conjugate gradients. Made by `GaussNewton.factorize`.

    `solve`, `quadratic` and `sample` are right to the tolerance. `logdet` and `inverse_diagonal`
    come from an exact factorization, made when they are first asked for, where there is one to be
    had; elsewhere they are estimated from random probes, and ``logdet_error`` is the standard error
    of the first. `sqrt_solve` needs the exact factorization.

    Args:
        matrix: H, in the precision to work in.
        stand_in: the preconditioner.
        damping: D.
        tolerance: relative residual and relative error of solves.
        dtype: type of right-hand sides and solutions.
        exact: makes an exact factorization, or None where that would take too long or too much.
        precise: makes H in double precision, for solves that rounding keeps from the tolerance;
            None if there is no need.
    """

    def __init__(
        self,
        matrix: SymmetricOperator,
        stand_in: StandIn,
        damping: Damping,
        tolerance: float,
        dtype: torch.dtype,
        exact: Callable[[], Factorized] | None = None,
        precise: Callable[[], SymmetricOperator] | None = None,
    ) -> None:
        super().__init__(damping)
        self._matrix, self._stand_in, self._tolerance = matrix, stand_in, tolerance
        self._dtype, self._make_exact, self._make_precise = dtype, exact, precise
        self._diagonal = damping.diagonal(matrix.shape[0], matrix.device).to(matrix.dtype)[:, None]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of right-hand sides and solutions."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the matrix lives."""
        return self._matrix.device

    @property
    def num_stored(self) -> int:
        """The preconditioner, and what products with H need."""
        return self._matrix.num_stored + self._stand_in.factorized.num_stored

    @property
    def stand_in(self) -> StandIn:
        """The approximation that preconditions."""
        return self._stand_in

    @property
    def tolerance(self) -> float:
        """Relative residual and error of solves."""
        return self._tolerance

    def product(self, columns: Tensor) -> Tensor:
        """(H + D) times (N, k), in the precision that is worked in."""
        return torch.addcmul(self._matrix @ columns, columns, self._diagonal)

    def iterate(
        self, rhs: Tensor, tolerance: float | None = None, start: Tensor | None = None
    ) -> BlockResult:
        """Solve for columns (N, k), in the precision that is worked in.

        Products Sᵀ(S v) in single precision change a solution by about eps·√(λ₁/λ) in the norm of
        H + D, but a residual by up to eps·λ₁/λ. So most right-hand sides reach the tolerance even
        where λ₁/λ is beyond 1/eps. Those that do not are finished in double precision.
        """
        aim = AIM * self._tolerance if tolerance is None else tolerance
        found = block_cg(
            self.product,
            rhs.to(self._matrix.dtype),
            precondition=self._precondition,
            tolerance=aim,
            max_iterations=_MAX_ITERATIONS,
            start=start,
        )
        if found.converged or self._precise is None:
            return found
        return self._precise.iterate(rhs, aim, found.solution.to(self._precise._matrix.dtype))

    @cached_property
    def _precise(self) -> IterativeFactorization | None:
        """The same in double precision, made when a solve first needs it."""
        if self._make_precise is None:
            return None
        return IterativeFactorization(
            self._make_precise(), self._stand_in, self._damping, self._tolerance, self._dtype
        )

    def _precondition(self, columns: Tensor) -> Tensor:
        factorized = self._stand_in.factorized
        return (factorized @ columns.to(factorized.dtype)).to(columns.dtype)

    def _block_floats(self, num_columns: int) -> int:
        """Floats that a solve takes beside the solutions: the vectors of a block of columns."""
        return _BLOCK_VECTORS * min(num_columns, BLOCK_COLUMNS) * self.shape[0]

    def _covariance_floats(self, num_rows: int) -> int:
        return super()._covariance_floats(num_rows) + self._block_floats(num_rows)

    def _matmat(self, rhs: Tensor) -> Tensor:
        if rhs.shape[1] == 0:
            return torch.zeros_like(rhs)
        ranks = getattr(self._matrix, "ranks", OneRank())
        with ranks.agreed():
            require_bytes(
                (rhs.numel() + self._block_floats(rhs.shape[1])) * self._matrix.dtype.itemsize,
                self.device,
                f"solving for {rhs.shape[1]} columns of {self.shape[0]} numbers",
                ("solve for fewer columns at a time",),
            )
        found = self.iterate(rhs)
        worst = max(float(found.residuals.max()), float(found.errors.max()))
        if not worst <= self._tolerance and self._may_warn:
            self._warn(found)
        return found.solution.to(rhs.dtype)

    @property
    def _may_warn(self) -> bool:
        """Whether this process is the one that warns, if several have the points of the matrix."""
        ranks = getattr(self._matrix, "ranks", None)
        return ranks is None or bool(ranks.first)

    def _warn(self, found: BlockResult) -> None:
        warn_of_accuracy(
            f"conjugate gradients stopped after {found.num_iterations} iterations at a relative"
            f" residual of {float(found.residuals.max()):.1e} and an estimated error of"
            f" {float(found.errors.max()):.1e}, where {self._tolerance:.1e} was asked for. Use a"
            " larger damping or tolerance, a model in float64, or another method="
        )

    @cached_property
    def exact(self) -> Factorized | None:
        """The exact factorization, made when it is first asked for; None if there is none."""
        return None if self._make_exact is None else self._make_exact()

    def _half_solve(self, rhs: Tensor) -> Tensor:
        if self.exact is None:
            raise NotFactorizableError(
                "conjugate gradients have no square root G with G Gᵀ = (H + D)⁻¹: use sample() for"
                ' samples, or method="parameters" or "samples" where they fit into memory'
            )
        return self.exact._half_solve(rhs)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from N(0, (H + D)⁻¹), (num, N): perturb the right-hand side, then solve.

        With H = SᵀS and standard normal ε and δ, the vector Sᵀε + D^½δ has the covariance H + D,
        so that (H + D)⁻¹ times it has the covariance (H + D)⁻¹, up to the tolerance of solves.
        """
        num = self._check_draws(num, generator)
        if not isinstance(self._matrix, FactoredMatrix):
            return super().sample(num, generator)
        with torch.no_grad():
            noise = self._noise(self._matrix.num_root_rows, num, generator)
            prior = self._noise(self.shape[0], num, generator).to(self._matrix.dtype)
            perturbed = self._matrix.root_transposed(noise.to(self._matrix.dtype))
            perturbed += self._diagonal.sqrt() * prior
            return self._matmat(perturbed).to(self.dtype).T.contiguous()

    def quadrature(self, num_probes: int, seed: int) -> Quadrature:
        """Quadratures of Gᵀ(H + D)G for some random probes."""
        if self._precise is not None:
            return self._precise.quadrature(num_probes, seed)
        factorized = self._stand_in.factorized
        generator = torch.Generator().manual_seed(PROBE_SEED + seed)
        noise = torch.randn(
            self.shape[0], num_probes, dtype=factorized.dtype, generator=generator
        ).to(self.device)
        start = factorized.sqrt_solve(noise)
        dual = self._stand_in.product(start)
        working = self._matrix.dtype
        return preconditioned_quadrature(
            self.product, self._precondition, start.to(working), dual.to(working)
        )

    @cached_property
    def _logdet_estimate(self) -> tuple[float, float]:
        """The log-determinant and its standard error."""
        if self.exact is not None:
            return float(self.exact.logdet().detach()), 0.0
        base = float(self._stand_in.factorized.logdet().detach())
        wanted = _LOGDET_SHARE * self._tolerance * self.shape[0]
        corrections = torch.zeros(0, dtype=torch.float64)
        error = math.inf
        while error > wanted and corrections.numel() < _MAX_PROBES:
            # The second call asks for as many probes as the spread of the first ones calls for.
            known = corrections.numel()
            needed = _NUM_PROBES if not known else math.ceil(1.1 * known * (error / wanted) ** 2)
            count = min(max(needed - known, _NUM_PROBES), _MAX_PROBES - known)
            found = [
                self.quadrature(min(_NUM_PROBES, count - first), known + first).traces(torch.log)
                for first in range(0, count, _NUM_PROBES)
            ]
            corrections = torch.cat([corrections, *(part.cpu() for part in found)])
            error = float(corrections.std()) / math.sqrt(corrections.numel())
        if error > 2 * wanted and self._may_warn:
            warn_of_accuracy(
                f"the log-determinant, {base + float(corrections.mean()):.6g}, has a standard error"
                f" of {error:.2g} after {corrections.numel()} probes, where {wanted:.2g} was"
                " aimed at. F.accuracy shows it; a larger damping makes it smaller"
            )
        return base + float(corrections.mean()), error

    @property
    def logdet_error(self) -> float:
        """The standard error of the log-determinant; zero if it is exact."""
        return self._logdet_estimate[1]

    def _logdet(self) -> Tensor:
        return torch.tensor(self._logdet_estimate[0], dtype=torch.float64)

    def _inverse_diagonal(self) -> Tensor:
        if self.exact is not None:
            return self.exact._inverse_diagonal()
        # The stand-in's diagonal, plus an unbiased estimate of the difference from random signs.
        base = self._stand_in.factorized.inverse_diagonal().double()
        correction = estimate_diagonal(
            lambda columns: self._matmat(columns) - self._precondition(columns),
            self.shape[0],
            self._matrix.dtype,
            self.device,
        )
        ceiling = 1 / self._damping.diagonal(self.shape[0], self.device)
        return torch.minimum(torch.maximum(base + correction, _LEAST_SHARE * base), ceiling)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This solver with right-hand sides of another precision, on the same device."""
        check_float_type(dtype, device)
        if device is not None and torch.device(device) != self.device:
            raise NotFactorizableError(
                f"a solver by conjugate gradients is on {self.device}, as its matrix: build the"
                " matrix again from a model on the other device"
            )
        return type(self)(
            self._matrix,
            self._stand_in,
            self._damping,
            self._tolerance,
            self._dtype if dtype is None else dtype,
            self._make_exact,
            self._make_precise,
        )
