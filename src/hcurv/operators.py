"""What a matrix is here: a symmetric operator; and what can be asked of one: products and entries.

`EntrySource` is the one protocol at which the two halves of the package meet: networks provide
entries, hierarchical matrices consume them.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import takes_arrays
from hcurv.indexing import check_count, check_seed, is_integer
from hcurv.memory import require_bytes
from hcurv.precision import FullPrecision

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator
    from typing_extensions import Self

    from hcurv.indexing import Index

__all__ = [
    "PROBE_SEED",
    "EntryOperator",
    "EntrySource",
    "RowPart",
    "RowSource",
    "SymmetricOperator",
    "as_number",
    "require_dense",
]

# This number is added to the seeds of random probes, so that no matrix is ever measured with the
# random numbers that it was built from.
PROBE_SEED = 2**31


@runtime_checkable
class EntrySource(Protocol):
    """A symmetric positive semi-definite matrix that can be asked for its entries.

    Any object with these five attributes can be compressed. If it also has a product
    (``source @ vectors``), compression is faster and can use a global low-rank part.

    Examples:
        A matrix that is never stored, given by a formula for its entries:

        >>> class Exponential:
        ...     shape, dtype, device = (100, 100), torch.float64, torch.device("cpu")
        ...     def diagonal(self):
        ...         return torch.ones(100, dtype=torch.float64)
        ...     def block(self, rows, cols):
        ...         rows, cols = torch.arange(100)[rows], torch.arange(100)[cols]
        ...         return torch.exp(-0.1 * (rows[:, None] - cols).abs().double())
        >>> isinstance(Exponential(), hcurv.EntrySource)
        True
        >>> hcurv.compress(Exponential(), leaf_size=10).shape
        (100, 100)
    """

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Device on which the entries are computed."""

    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,).

        Examples:
            >>> H.diagonal().shape
            torch.Size([51])
        """

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``.

        Args:
            rows: m integers in [0, N): a list, range, slice, array or tensor, or a mask (N,).
            cols: k integers, given in the same way.

        Returns:
            The entries, (m, k).

        Examples:
            >>> H.block([0, 5, 7], slice(0, 2)).shape
            torch.Size([3, 2])
        """


class RowPart(Protocol):
    """Some rows of a tall matrix."""

    @property
    def points(self) -> slice:
        """The range of the points that these rows belong to."""

    def to_dense(self) -> Tensor:
        """The rows themselves."""


@runtime_checkable
class RowSource(Protocol):
    """A tall matrix J, (n·q, N), that gives its rows for some points at a time, q for each."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(n·q, N)``."""

    @property
    def rows_per_point(self) -> int:
        """The number q of rows of a point."""

    def chunks(self, max_points: int | None = None, progress: bool = False) -> Iterator[RowPart]:
        """Yield the rows of a few points at a time."""


class SymmetricOperator(FullPrecision, ABC):
    """Base class of every matrix-like object of this package.

    The public methods check their arguments; subclasses implement the algebra in ``_matmat``.
    Operators can be multiplied with numbers and added to each other.

    Examples:
        >>> isinstance(H, hcurv.SymmetricOperator)
        True
        >>> (H @ b).shape, (H @ torch.ones(51, 3, dtype=torch.float64)).shape
        (torch.Size([51]), torch.Size([51, 3]))
        >>> torch.allclose((2 * H + hcurv.Diagonal(torch.ones_like(b))) @ b, 2 * (H @ b) + b)
        True
    """

    __array_ufunc__ = None  # NumPy's numbers leave ``number * operator`` to this class

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
        """Device on which the operator is stored and works."""

    @property
    @abstractmethod
    def num_stored(self) -> int:
        """Number of floating-point values that the operator stores."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the N diagonal entries, (N,).

        Examples:
            >>> torch.allclose(H.diagonal(), H.to_dense().diagonal())
            True
        """

    @abstractmethod
    def _matmat(self, rhs: Tensor) -> Tensor:
        """Return the product with ``rhs`` of shape (N, k), k > 0, which was already checked."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that the operator stores."""
        return self.num_stored * self.dtype.itemsize

    @property
    def compression_rate(self) -> float:
        """Number of stored floats divided by N² (the paper's %K, as a fraction)."""
        return self.num_stored / self.shape[0] ** 2

    def trace(self) -> float:
        """Return the sum of the diagonal entries, added in double precision.

        Examples:
            >>> round(H.trace() / float(H.diagonal().sum()), 10)
            1.0
        """
        return float(self.diagonal().sum(dtype=torch.float64))

    @takes_arrays
    def __matmul__(self, rhs: Tensor) -> Tensor:
        """Return the product with a vector (N,) or with the columns of a matrix (N, k).

        A NumPy array gives a NumPy array, in the precision of the operator.
        """
        self._check_vectors(rhs)
        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        with torch.no_grad():
            if rhs.ndim == 1:
                return self._matmat(rhs.detach()[:, None]).squeeze(1)
            return self._matmat(rhs.detach())

    def __mul__(self, factor: SupportsFloat) -> SymmetricOperator:
        """Return the operator times a number."""
        from hcurv.algebra import combine

        if (number := as_number(factor)) is None:
            return NotImplemented
        return combine([(number, self)])

    __rmul__ = __mul__

    def __truediv__(self, divisor: SupportsFloat) -> SymmetricOperator:
        """Return the operator divided by a number."""
        if (number := as_number(divisor)) is None:
            return NotImplemented
        return self * (1 / number)

    def __neg__(self) -> SymmetricOperator:
        """Return minus the operator."""
        return self * -1.0

    def __add__(self, other: SymmetricOperator | Tensor) -> SymmetricOperator:
        """Return the sum with another operator, or with a dense symmetric tensor (N, N)."""
        return self._plus(1.0, 1.0, other)

    def __radd__(self, other: SymmetricOperator | Tensor) -> SymmetricOperator:
        """Return ``other`` plus this operator."""
        return self._plus(1.0, 1.0, other)

    def __sub__(self, other: SymmetricOperator | Tensor) -> SymmetricOperator:
        """Return the difference to another operator, or to a dense symmetric tensor (N, N)."""
        return self._plus(1.0, -1.0, other)

    def __rsub__(self, other: SymmetricOperator | Tensor) -> SymmetricOperator:
        """Return ``other`` minus this operator."""
        return self._plus(-1.0, 1.0, other)

    def _plus(
        self, own: float, others: float, other: SymmetricOperator | Tensor
    ) -> SymmetricOperator:
        """Return own·(this operator) + others·(the other one)."""
        from hcurv.algebra import combine
        from hcurv.sources import as_operator

        if not isinstance(other, SymmetricOperator | Tensor):
            return NotImplemented
        return combine([(own, self), (others, as_operator(other))])

    def _check_vectors(self, rhs: Tensor, dtype: torch.dtype | None = None) -> None:
        """Raise unless ``rhs`` is a tensor (N,) or (N, k), of the right type and device.

        Args:
            rhs: what the user passed.
            dtype: the type that is expected; None for that of the operator.
        """
        size = self.shape[0]
        if not isinstance(rhs, Tensor):
            raise TypeError(
                "the right-hand side must be a torch.Tensor or a NumPy array; got"
                f" {type(rhs).__name__}"
            )
        if not rhs.is_meta:  # a wrong device is named as one, below
            check_dense(rhs, "the right-hand side")
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
        """Return the whole matrix as a tensor, (N, N).

        Examples:
            >>> dense = H.to_dense()
            >>> torch.equal(dense, dense.T), torch.allclose(dense @ b, H @ b)
            (True, True)
        """
        size = self.shape[0]
        require_dense(size, size, self, copies=2)
        return self @ torch.eye(size, dtype=self.dtype, device=self.device)

    @property
    def T(self) -> Self:  # noqa: N802 (the name that torch and NumPy use)
        """The transpose, which is the operator itself."""
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole matrix for ``np.asarray``, if there is memory for it."""
        if copy is False:
            raise ValueError("an operator has no array of its own: copy must not be False")
        return np.asarray(self.to_dense().cpu().numpy(), dtype=dtype)

    def to_scipy(self) -> LinearOperator:
        """Return this operator for SciPy: it takes and returns NumPy arrays.

        A complex vector is multiplied by its real and by its imaginary part.

        Examples:
            >>> linear = H.to_scipy()
            >>> linear.shape
            (51, 51)
            >>> (linear @ b.numpy()).shape
            (51,)
        """
        from scipy.sparse.linalg import LinearOperator

        def product(rhs: np.ndarray) -> np.ndarray:
            if np.iscomplexobj(rhs):
                return product(rhs.real) + 1j * product(rhs.imag)
            found: np.ndarray = self @ rhs
            return found

        return LinearOperator(
            shape=self.shape,
            dtype=torch.empty(0, dtype=self.dtype).numpy().dtype,
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
            reference: the exact operator, or a dense symmetric tensor (N, N), in either float type.
            num_probes: number of columns of X.
            seed: seed of X.

        Examples:
            >>> A.relative_error(H) < 2e-2
            True
            >>> H.relative_error(H.to_dense()) < 1e-12
            True
        """
        from hcurv.sources import as_operator

        exact = as_operator(reference, "the reference")
        if tuple(exact.shape) != self.shape:
            raise ValueError(
                f"the reference must have shape {self.shape}; got {tuple(exact.shape)}"
            )
        num_probes = check_count(num_probes, "num_probes")
        require_dense(self.shape[0], num_probes, self, copies=3)
        generator = torch.Generator().manual_seed(PROBE_SEED + check_seed(seed))
        probes = torch.randn(self.shape[0], num_probes, dtype=self.dtype, generator=generator)
        expected = exact @ probes.to(exact.device, exact.dtype)
        actual = (self @ probes.to(self.device)).to(expected.device)
        norm = torch.linalg.vector_norm(expected, dtype=torch.float64)
        error = torch.linalg.vector_norm(expected - actual, dtype=torch.float64)
        if norm == 0:
            return 0.0 if error == 0 else float("inf")
        return float(error / norm)


class EntryOperator(SymmetricOperator):
    """A symmetric operator that can also be asked for its entries, as ``A[rows, cols]``.

    Subclasses implement `block`.
    """

    @abstractmethod
    def block(self, rows: Index, cols: Index) -> Tensor:
        """Return the dense block ``rows`` x ``cols``, always with two dimensions.

        Args:
            rows: m integers in [0, N): a list, range, slice, array or tensor, or a mask (N,).
            cols: k integers, given in the same way.

        Returns:
            The entries, (m, k).

        Examples:
            >>> torch.allclose(A.block([0, 5], slice(None)), A.to_dense()[[0, 5]])
            True
        """

    def __getitem__(self, index: tuple[Index, Index]) -> Tensor:
        """Return one entry ``A[i, j]`` or the dense block ``A[rows, cols]``.

        Rows and cols are lists, ranges, slices, arrays, tensors or masks. As in NumPy, an integer
        drops its axis. Unlike in NumPy, two lists select a block, not pairs of indices.
        """
        if not isinstance(index, tuple) or len(index) != 2:
            raise TypeError("two indices are expected: H[i, j] or H[rows, cols]; for a row H[i, :]")
        rows, cols = index
        values = self.block(rows, cols)
        if is_integer(rows):
            return values[0, 0] if is_integer(cols) else values[0]
        return values[:, 0] if is_integer(cols) else values


def require_dense(
    num_rows: int, num_cols: int, operator: SymmetricOperator, copies: int = 1
) -> None:
    """Raise `InsufficientMemoryError` unless there is memory for a dense block of an operator.

    Args:
        num_rows: number of rows of the block.
        num_cols: number of its columns.
        operator: the matrix.
        copies: how many tensors of this size exist at the same time.
    """
    require_bytes(
        copies * num_rows * num_cols * operator.dtype.itemsize,
        operator.device,
        f"a dense block of {num_rows} x {num_cols} entries",
        ("ask for fewer rows or columns at a time", "use products, operator @ vectors"),
    )


def as_number(value: object) -> float | None:
    """Return a real number, or a tensor of one number, as a float; None for anything else."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return None
