"""What every matrix here is: a symmetric operator; and what a matrix can be asked for: entries.

`EntrySource` is the one protocol at which the two halves of the package meet: networks provide
entries, hierarchical matrices consume them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

    from hcurv.indexing import Index

__all__ = ["PROBE_SEED", "EntrySource", "SymmetricOperator"]

PROBE_SEED = 2**31  # added to seeds of probes: nothing may be measured by what it was built from


@runtime_checkable
class EntrySource(Protocol):
    """A symmetric positive semi-definite matrix that can be asked for its entries."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""

    @property
    def device(self) -> torch.device:
        """Where the entries are computed."""

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols``."""


class SymmetricOperator(ABC):
    """Base of every matrix-like object: checks in the public methods, algebra in ``_matmat``."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the entries and of the vectors that the operator takes."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the operator lives."""

    @property
    @abstractmethod
    def num_stored(self) -> int:
        """Number of floating-point values that the operator stores."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The N diagonal entries."""

    @abstractmethod
    def _matmat(self, rhs: Tensor) -> Tensor:
        """Product with ``rhs`` of shape (N, k), k > 0, already checked."""

    @property
    def nbytes(self) -> int:
        """Bytes that the operator stores."""
        return self.num_stored * self.dtype.itemsize

    @property
    def compression_rate(self) -> float:
        """Stored floats divided by N² (the paper's %K, as a fraction)."""
        return self.num_stored / self.shape[0] ** 2

    def __matmul__(self, rhs: Tensor) -> Tensor:
        """Product with a vector (N,) or the columns of a matrix (N, k)."""
        self._check_vectors(rhs)
        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        with torch.no_grad():
            if rhs.ndim == 1:
                return self._matmat(rhs.detach()[:, None]).squeeze(1)
            return self._matmat(rhs.detach())

    def _check_vectors(self, rhs: Tensor, dtype: torch.dtype | None = None) -> None:
        """Raise unless ``rhs`` is (N,) or (N, k), of ``dtype`` or the operator's, on its device."""
        size = self.shape[0]
        if not isinstance(rhs, Tensor):
            raise TypeError(
                f"the right-hand side must be a torch.Tensor; got {type(rhs).__name__}"
                " (for NumPy arrays use to_scipy())"
            )
        if rhs.ndim not in (1, 2) or rhs.shape[0] != size:
            raise ValueError(
                f"the right-hand side must have shape ({size},) or ({size}, k);"
                f" got {tuple(rhs.shape)}"
            )
        dtype = self.dtype if dtype is None else dtype
        if rhs.dtype != dtype:
            raise TypeError(
                f"the right-hand side must be {dtype}, like the operator; got {rhs.dtype}"
                f" (convert it with .to({dtype}))"
            )
        if rhs.device != self.device:
            raise ValueError(
                f"the right-hand side must be on {self.device}, like the operator;"
                f" got {rhs.device} (move it with .to('{self.device}'))"
            )

    def to_dense(self) -> Tensor:
        """The whole matrix, (N, N)."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> LinearOperator:
        """This operator for SciPy: NumPy arrays in, NumPy arrays out."""
        from scipy.sparse.linalg import LinearOperator

        def product(rhs: np.ndarray) -> np.ndarray:
            converted = torch.as_tensor(np.ascontiguousarray(rhs), device=self.device)
            return (self @ converted.to(self.dtype)).cpu().numpy()

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(
            shape=self.shape,
            dtype=kind,
            matvec=product,
            rmatvec=product,
            matmat=product,
            rmatmat=product,
        )

    def relative_error(
        self, reference: SymmetricOperator | Tensor, num_probes: int = 128, seed: int = 0
    ) -> float:
        """Estimate ‖B − A‖_F / ‖B‖_F of this operator A against a reference B.

        The estimate is ‖BX − AX‖_F / ‖BX‖_F with a Gaussian X of ``num_probes`` columns: the
        paper's ε_F. Norms accumulate in double precision.

        Args:
            reference: the exact operator, or a dense (N, N) tensor.
            num_probes: number of columns of X.
            seed: seed of X.
        """
        if tuple(reference.shape) != self.shape:
            raise ValueError(
                f"the reference must have shape {self.shape}; got {tuple(reference.shape)}"
            )
        if num_probes < 1:
            raise ValueError(f"num_probes must be at least 1; got {num_probes}")
        generator = torch.Generator().manual_seed(PROBE_SEED + seed)
        probes = torch.randn(self.shape[0], num_probes, dtype=self.dtype, generator=generator).to(
            self.device
        )
        expected = reference @ probes
        norm = torch.linalg.vector_norm(expected, dtype=torch.float64)
        error = torch.linalg.vector_norm(expected - self @ probes, dtype=torch.float64)
        if norm == 0:
            return 0.0 if error == 0 else float("inf")
        return float(error / norm)
