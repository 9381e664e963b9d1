"""Matrix-free: no approximation at all, conjugate gradients for every solve."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.krylov import CGResult, cg
from hcurv.operators import SymmetricOperator

__all__ = ["MatrixFree"]


class MatrixFree(SymmetricOperator):
    """An exact matrix that is solved with by plain conjugate gradients.

    Args:
        matrix: exact products.
        tolerance: relative residual of solves.
        max_iterations: most iterations of a solve.
    """

    def __init__(
        self, matrix: SymmetricOperator, *, tolerance: float = 1e-6, max_iterations: int = 1000
    ) -> None:
        self._matrix = matrix
        self._tolerance, self._max_iterations = tolerance, max_iterations

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
        """The N diagonal entries."""
        return self._matrix.diagonal()

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._matrix @ rhs

    def iterate(self, rhs: Tensor, damping: float) -> CGResult:
        """Solve, with iteration counts and residuals."""
        return cg(
            self._matrix,
            rhs,
            damping=damping,
            tolerance=self._tolerance,
            max_iterations=self._max_iterations,
        )

    def solve(self, rhs: Tensor, damping: float) -> Tensor:
        """Solve (H + damping·I) x = rhs.

        Raises:
            RuntimeError: it did not converge.
        """
        result = self.iterate(rhs, damping)
        if not result.converged:
            raise RuntimeError(f"conjugate gradients: {result.message}")
        return result.solution
