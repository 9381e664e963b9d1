"""A few eigenpairs of symmetric operators, by SciPy's methods."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hcurv.arguments import check_number
from hcurv.indexing import check_count, check_seed
from hcurv.operators import SymmetricOperator
from hcurv.precision import full_precision
from hcurv.sources import DenseMatrix, MatrixProduct, as_operator

__all__ = ["EigenResult", "eigsh"]

# A factorization is taken for one of another matrix if a residual is larger than this fraction of
# the distance from the eigenvalue to the shift, and larger than what the tolerance and this many
# units of rounding explain. With the right factorization residuals are near rounding.
_WRONG, _ROUNDING = 1e-3, 1e3


@dataclass(frozen=True)
class EigenResult:
    """Eigenpairs, as `eigsh` returns them.

    Attributes:
        values: eigenvalues θ, (k,), in double precision. The largest ones come in descending
            order, the smallest ones in ascending order, and those near a number with the nearest
            one first. So ``values[0]`` is the one that was asked for most.
        vectors: unit eigenvectors v in the same order, (N, k).
        residuals: ‖A v − θ v‖ of each pair, (k,).

    Examples:
        >>> top = hcurv.eigsh(H, 3)
        >>> top.values.shape, top.vectors.shape
        (torch.Size([3]), torch.Size([51, 3]))
        >>> bool(top.values[0] >= top.values[1] >= top.values[2])
        True
        >>> bool(top.residuals.max() < 1e-8 * top.values[0])
        True
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


@runtime_checkable
class _Solver(Protocol):
    """What solves with A + λI."""

    @property
    def damping(self) -> float | Tensor: ...

    def solve(self, rhs: Tensor, /) -> Tensor: ...


class _Settings(NamedTuple):
    """What both methods are told."""

    k: int
    which: str
    tolerance: float
    max_iterations: int | None
    generator: np.random.Generator


@full_precision
def eigsh(
    operator: SymmetricOperator | MatrixProduct | Tensor,
    k: int = 6,
    *,
    which: Literal["largest", "smallest"] = "largest",
    near: float | None = None,
    factorization: _Solver | None = None,
    method: Literal["lanczos", "lobpcg"] = "lanczos",
    tolerance: float = 0.0,
    max_iterations: int | None = None,
    seed: int = 0,
) -> EigenResult:
    """Find a few eigenpairs of a symmetric operator, by SciPy's ARPACK or LOBPCG.

    Args:
        operator: A, any `SymmetricOperator` or a dense symmetric tensor (N, N), in float32 or
            float64.
        k: number of eigenpairs, less than N.
        which: whether to find the algebraically largest or smallest eigenvalues.
        near: find the eigenvalues nearest to this number instead, by shift-invert. An `HMatrix` and
            a dense tensor are factorized for that; other operators need a ``factorization``, or
            must offer one themselves for a negative number.
        factorization: a factorization of A + λI with any λ at which it is regular. With it the
            smallest eigenvalues converge in a few steps: "lanczos" takes the eigenvalues nearest
            to −λ, and "lobpcg" takes it as a preconditioner, which may then belong to a matrix
            that only resembles A. With ``near``, λ must be −near.
        method: "lanczos" (ARPACK) or "lobpcg".
        tolerance: relative accuracy, of the eigenvalues for "lanczos" and of the residuals for
            "lobpcg". 0 means the precision of the operator, or its square root for "lobpcg".
        max_iterations: largest number of iterations; None for the default of the method.
        seed: seed of the first vectors.

    Returns:
        The eigenpairs. The largest come in descending order, the smallest in ascending order, and
        those near a number with the nearest one first.

    Raises:
        RuntimeError: the method did not converge; the message says what to try.

    Examples:
        >>> top = hcurv.eigsh(H, 2)
        >>> torch.allclose(H @ top.vectors, top.vectors * top.values)
        True
        >>> inner = hcurv.eigsh(A, 2, near=float(top.values[0]) / 2)
        >>> bool(inner.residuals.max() < 1e-8 * top.values[0])
        True
    """
    matrix = as_operator(operator)
    size = matrix.shape[0]
    k = check_count(k, "k")
    if which not in ("largest", "smallest"):
        raise ValueError(f'which must be "largest" or "smallest"; got {which!r}')
    if method not in ("lanczos", "lobpcg"):
        raise ValueError(f'method must be "lanczos" or "lobpcg"; got {method!r}')
    if k >= size:
        raise ValueError(
            f"k must be less than N = {size}; got {k} (for all eigenpairs use"
            " torch.linalg.eigh(A.to_dense()))"
        )
    if near is not None:
        near = check_number(near, "near")
    tolerance = check_number(tolerance, "tolerance", least=0)
    if max_iterations is not None:
        max_iterations = check_count(max_iterations, "max_iterations")
    if factorization is not None:
        _check_factorization(factorization, matrix)
    generator = np.random.default_rng(check_seed(seed) % 2**64)
    settings = _Settings(k, which, tolerance, max_iterations, generator)
    shift = None
    if method == "lobpcg":
        if near is not None:
            raise ValueError('near works with method="lanczos" only')
        values, vectors = _lobpcg(matrix, factorization, settings)
    else:
        if near is not None:
            factorization = _near_factorization(matrix, near, factorization)
        if factorization is not None and (near is not None or which == "smallest"):
            shift = -_one_damping(factorization)
        values, vectors = _arpack(matrix, shift, factorization, settings)
    order = np.argsort(values if near is None else abs(values - near))
    if near is None and which == "largest":
        order = order[::-1]
    found = torch.as_tensor(np.ascontiguousarray(vectors[:, order])).to(matrix.device, matrix.dtype)
    thetas = torch.as_tensor(np.ascontiguousarray(values[order]), device=matrix.device).double()
    errors = torch.linalg.vector_norm((matrix @ found).double() - found.double() * thetas, dim=0)
    if shift is not None:
        _check_residuals(thetas, errors, shift, tolerance, matrix)
    return EigenResult(thetas, found, errors)


def _arpack(
    operator: SymmetricOperator,
    shift: float | None,
    factorization: _Solver | None,
    settings: _Settings,
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence
    from scipy.sparse.linalg import eigsh as arpack

    linear = operator.to_scipy()
    options: dict[str, Any] = {"which": "LA" if settings.which == "largest" else "SA"}
    if shift is not None:
        assert factorization is not None
        inverse = _scipy_inverse(factorization, operator)
        # Eigenvalues nearest to the shift; if it lies below the spectrum these are the smallest.
        options = {"sigma": shift, "OPinv": inverse, "which": "LM"}
    first = settings.generator.standard_normal(operator.shape[0]).astype(linear.dtype)
    if not np.any(linear @ first):
        # A random vector is in the null space of no other matrix than 0, at which ARPACK fails.
        vectors = settings.generator.standard_normal((operator.shape[0], settings.k))
        return np.zeros(settings.k), np.linalg.qr(vectors)[0]
    try:
        values, vectors = arpack(
            linear,
            k=settings.k,
            v0=first,
            tol=settings.tolerance,
            maxiter=settings.max_iterations,
            **options,
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {settings.k} eigenvalues converged in"
            f" {settings.max_iterations or 'all'} iterations. Allow more iterations, a larger"
            " tolerance, or pass a factorization for small eigenvalues"
        ) from error
    except ArpackError as error:
        raise RuntimeError(
            f"ARPACK found no {settings.k} eigenvalues: {error} Ask for fewer, pass another seed,"
            " or use torch.linalg.eigh(A.to_dense())"
        ) from error
    return values, vectors


def _lobpcg(
    operator: SymmetricOperator, factorization: _Solver | None, settings: _Settings
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import lobpcg

    linear = operator.to_scipy()
    size = operator.shape[0]
    if 5 * settings.k > size:
        raise ValueError(
            f'method="lobpcg" needs N ≥ 5k; got N = {size}, k = {settings.k} (use "lanczos")'
        )
    first = settings.generator.standard_normal((size, settings.k)).astype(linear.dtype)
    # LOBPCG compares residuals, whose squares are the errors of eigenvalues.
    relative = settings.tolerance or float(np.finfo(linear.dtype).eps) ** 0.5
    values, vectors = lobpcg(
        linear,
        first,
        M=None if factorization is None else _scipy_inverse(factorization, operator),
        largest=settings.which == "largest",
        tol=relative * float(operator.diagonal().abs().max()),
        maxiter=200 if settings.max_iterations is None else settings.max_iterations,
    )[:2]
    return values, vectors


class _DenseFactors:
    """An LU factorization of a dense A + λI, which may be indefinite."""

    def __init__(self, dense: Tensor, damping: float) -> None:
        self.damping = damping
        self.shape, self.dtype = tuple(dense.shape), dense.dtype
        shifted = dense.clone()
        shifted.diagonal().add_(damping)
        self._factors = torch.linalg.lu_factor(shifted)

    def solve(self, rhs: Tensor) -> Tensor:
        """Solve for (N,) or (N, k)."""
        columns = rhs if rhs.ndim == 2 else rhs[:, None]
        solved: Tensor = torch.linalg.lu_solve(*self._factors, columns)
        return solved.view_as(rhs)


def _near_factorization(
    operator: SymmetricOperator, near: float, factorization: _Solver | None
) -> _Solver:
    """Return a factorization of A − near·I: the given one, or one that A offers."""
    if factorization is not None:
        damping = _one_damping(factorization)
        if not math.isclose(-damping, near, rel_tol=1e-6, abs_tol=1e-30):
            raise ValueError(f"the factorization must have damping {-near}; got {damping}")
        return factorization
    if isinstance(operator, DenseMatrix):
        return _DenseFactors(operator.to_dense(), -near)
    factorize: Callable[..., _Solver] | None = getattr(operator, "factorize", None)
    if factorize is not None and "definite" in inspect.signature(factorize).parameters:
        return factorize(-near, definite=False)
    if factorize is not None and near < 0:
        return factorize(-near)
    raise ValueError(
        f"eigenvalues near {near} of {type(operator).__name__} need a factorization: compress the"
        " matrix (hcurv.compress) and ask for those of the compressed one, or pass factorization="
    )


def _check_factorization(factorization: object, operator: SymmetricOperator) -> None:
    if not isinstance(factorization, _Solver):
        raise TypeError(
            "factorization must have a method solve and an attribute damping, as every"
            f" factorize(damping) returns them; got {type(factorization).__name__}"
        )
    shape = getattr(factorization, "shape", operator.shape)
    if tuple(shape) != operator.shape:
        raise ValueError(f"the factorization must have shape {operator.shape}; got {tuple(shape)}")


def _one_damping(factorization: _Solver) -> float:
    damping = factorization.damping
    if isinstance(damping, Tensor) and damping.numel() != 1:
        raise ValueError(
            "shift-invert needs a factorization with one damping for all rows; got a tensor of"
            f" shape {tuple(damping.shape)}"
        )
    return float(damping.detach() if isinstance(damping, Tensor) else damping)


def _scipy_inverse(factorization: _Solver, operator: SymmetricOperator) -> Any:
    """Return a factorization for SciPy, in the type of the operator."""
    from scipy.sparse.linalg import LinearOperator

    dtype = getattr(factorization, "dtype", operator.dtype)

    def solve(rhs: np.ndarray) -> np.ndarray:
        vectors = torch.as_tensor(np.ascontiguousarray(rhs), device=operator.device)
        with torch.no_grad():
            return factorization.solve(vectors.to(dtype)).to(operator.dtype).cpu().numpy()

    return LinearOperator(
        shape=operator.shape,
        dtype=torch.empty(0, dtype=operator.dtype).numpy().dtype,
        matvec=solve,
        matmat=solve,
    )


def _check_residuals(
    values: Tensor, residuals: Tensor, shift: float, tolerance: float, operator: SymmetricOperator
) -> None:
    """Raise if the eigenpairs of a factorization are not those of the operator."""
    # Residuals are at most ‖A − shift‖ times the tolerance; the trace bounds the norm.
    norm = float(operator.diagonal().abs().sum()) + abs(shift)
    explained = (10 * tolerance + _ROUNDING * torch.finfo(operator.dtype).eps) * norm
    allowed = (_WRONG * (values - shift).abs()).clamp(min=explained)
    if bool((residuals > allowed).any()):
        raise ValueError(
            "the factorization is not one of this operator: its eigenvectors have residuals of up"
            f" to {float(residuals.max()):.1e}. Pass one of the operator itself, or take it as a"
            ' preconditioner with method="lobpcg"'
        )
