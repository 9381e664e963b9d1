"""Matrix-free: no approximation at all, conjugate gradients for every solve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from hcurv.arguments import check_number
from hcurv.damping import Damping, DampingLike, DeviceLike, as_damping
from hcurv.factorized import Factorized, NotFactorizableError, check_float_type
from hcurv.indexing import check_count
from hcurv.layout import layout_of
from hcurv.linalg import CGResult, cg
from hcurv.operators import SymmetricOperator
from hcurv.sources import as_operator

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MatrixFree", "MatrixFreeSolver"]

# `inverse_diagonal` solves for this many unit vectors at a time.
_COLUMNS = 256


class MatrixFree(SymmetricOperator):
    """An exact matrix that is solved with by plain conjugate gradients.

    Args:
        matrix: exact products.
        tolerance: relative residual of solves.
        max_iterations: most iterations of a solve.

    Examples:
        >>> M = hcurv.baselines.MatrixFree(H, tolerance=1e-10)
        >>> x = M.factorize(0.1).solve(b)
        >>> torch.allclose(H @ x + 0.1 * x, b)
        True
    """

    def __init__(
        self, matrix: SymmetricOperator, *, tolerance: float = 1e-6, max_iterations: int = 1000
    ) -> None:
        self._matrix = as_operator(matrix, "the matrix")
        self._tolerance = check_number(tolerance, "tolerance", above=0)
        self._max_iterations = check_count(max_iterations, "max_iterations")
        self.layout = layout_of(matrix)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrix lives."""
        return self._matrix.device

    @property
    def num_stored(self) -> int:
        """What the products need."""
        return self._matrix.num_stored

    def diagonal(self) -> Tensor:
        """The N diagonal entries.

        Examples:
            >>> torch.equal(hcurv.baselines.MatrixFree(H).diagonal(), H.diagonal())
            True
        """
        return self._matrix.diagonal()

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._matrix @ rhs

    def factorize(self, damping: DampingLike) -> MatrixFreeSolver:
        """Nothing is computed: every solve will be a run of conjugate gradients.

        Args:
            damping: a number, a tensor (N,), or numbers by the names of parameters or layers.

        Examples:
            >>> hcurv.baselines.MatrixFree(H).factorize(0.1).iterate(b).converged
            True
        """
        resolved = as_damping(damping, self.shape[0], self.layout)
        return MatrixFreeSolver(self._matrix, resolved, self._tolerance, self._max_iterations)


class MatrixFreeSolver(Factorized):
    """(A + D)⁻¹ by conjugate gradients. Made by `MatrixFree.factorize`.

    It solves, gives the diagonal of the inverse by N solves, and samples where the matrix has a
    root, A = SᵀS, as a `GaussNewton` has. It has no log-determinant and no square root.
    """

    def __init__(
        self, matrix: SymmetricOperator, damping: Damping, tolerance: float, max_iterations: int
    ) -> None:
        super().__init__(damping)
        self._matrix = matrix
        self._tolerance, self._max_iterations = tolerance, max_iterations

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return self._matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of right-hand sides and solutions."""
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrix lives."""
        return self._matrix.device

    @property
    def num_stored(self) -> int:
        """What the products need."""
        return self._matrix.num_stored

    def iterate(self, rhs: Tensor) -> CGResult:
        """Solve, with iteration counts and residuals."""
        return cg(
            self._matrix,
            rhs,
            damping=self._damping,
            tolerance=self._tolerance,
            max_iterations=self._max_iterations,
        )

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = self.iterate(rhs)
        if not result.converged:
            raise RuntimeError(f"conjugate gradients: {result.message}")
        return result.solution

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from N(0, (A + D)⁻¹), (num, N): perturb the right-hand side, then solve.

        With A = SᵀS and standard normal ε and δ, the vector Sᵀε + D^½δ has the covariance A + D,
        so that (A + D)⁻¹ times it has the covariance (A + D)⁻¹.
        """
        num = self._check_draws(num, generator)
        if not isinstance(self._matrix, _Rooted):
            raise NotFactorizableError(
                "samples need a matrix with a root, A = SᵀS, as a GaussNewton has;"
                f" {type(self._matrix).__name__} has none"
            )
        noise = self._noise(self._matrix.num_root_rows, num, generator)
        perturbed = self._matrix.root_transposed(noise)
        roots = self._damping.diagonal(self.shape[0], self.device).sqrt().to(self.dtype)
        perturbed += roots[:, None] * self._noise(self.shape[0], num, generator)
        return self.solve(perturbed).T.contiguous()

    def _logdet(self) -> Tensor:
        raise NotFactorizableError(
            "conjugate gradients give no log-determinant: compress the matrix and factorize that"
        )

    def _inverse_diagonal(self) -> Tensor:
        size = self.shape[0]
        result = torch.empty(size, dtype=torch.float64, device=self.device)
        for rows in torch.arange(size, device=self.device).split(_COLUMNS):
            columns = torch.zeros(size, rows.numel(), dtype=self.dtype, device=self.device)
            places = rows - rows[0]
            columns[rows, places] = 1.0
            result[rows] = self._matmat(columns)[rows, places].double()
        return result

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Self:
        """This solver, as it is: its matrix belongs to a model of one type on one device."""
        check_float_type(dtype, device)
        if (device is None or torch.device(device) == self.device) and dtype in (None, self.dtype):
            return self
        raise NotFactorizableError(
            f"a solver by conjugate gradients is {self.dtype} on {self.device}, as its matrix:"
            " build the matrix again from a model of the other type or device"
        )


@runtime_checkable
class _Rooted(Protocol):
    """A matrix A = SᵀS that can be multiplied by Sᵀ."""

    @property
    def num_root_rows(self) -> int: ...

    def root_transposed(self, values: Tensor) -> Tensor: ...
