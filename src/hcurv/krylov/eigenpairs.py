"""A few eigenpairs of symmetric operators: SciPy's methods, and plain Lanczos."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hcurv.indexing import check_count
from hcurv.operators import SymmetricOperator

__all__ = ["EigenResult", "eigsh", "lanczos"]


@dataclass(frozen=True)
class EigenResult:
    """Eigenpairs.

    Attributes:
        values: in ascending order, (k,), double precision.
        vectors: unit vectors, (N, k).
        residuals: ‖A v − θ v‖ of each, (k,).
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


def eigsh(
    operator: SymmetricOperator,
    k: int = 6,
    *,
    which: Literal["largest", "smallest"] = "largest",
    near: float | None = None,
    factorization: Any = None,
    method: Literal["lanczos", "lobpcg"] = "lanczos",
    tolerance: float = 0.0,
    max_iterations: int | None = None,
    seed: int = 0,
) -> EigenResult:
    """A few eigenpairs of an operator, by SciPy's ARPACK or LOBPCG.

    Args:
        operator: any `SymmetricOperator`.
        k: number of eigenpairs, less than N.
        which: the algebraically largest or smallest.
        near: find the eigenvalues nearest to this number instead, by shift-invert.
        factorization: of ``operator`` + λI, with any λ at which it is regular. With it the smallest
            eigenvalues converge in a few steps ("lanczos": shift-invert at −λ; "lobpcg":
            preconditioner). With ``near``, λ must be −near; an `HMatrix` makes its own.
        method: "lanczos" (ARPACK) or "lobpcg".
        tolerance: relative; "lanczos": of the eigenvalues, "lobpcg": of the residuals. 0 for the
            precision of the operator and its square root.
        max_iterations: of the method; None for its default.
        seed: of the first vectors.

    Raises:
        RuntimeError: it did not converge; the message says what to try.
    """
    k = check_count(k, "k")
    size = operator.shape[0]
    if which not in ("largest", "smallest"):
        raise ValueError(f'which must be "largest" or "smallest"; got {which!r}')
    if method not in ("lanczos", "lobpcg"):
        raise ValueError(f'method must be "lanczos" or "lobpcg"; got {method!r}')
    if k >= size:
        raise ValueError(
            f"k must be less than N = {size}; got {k} (for all eigenpairs use"
            " torch.linalg.eigh(A.to_dense()))"
        )
    generator = np.random.default_rng(seed)
    if method == "lobpcg":
        if near is not None:
            raise ValueError('near works with method="lanczos" only')
        values, vectors = _lobpcg(
            operator, k, which, factorization, tolerance, max_iterations, generator
        )
    else:
        values, vectors = _arpack(
            operator, k, which, near, factorization, tolerance, max_iterations, generator
        )
    order = np.argsort(values)
    found = torch.as_tensor(np.ascontiguousarray(vectors[:, order])).to(
        operator.device, operator.dtype
    )
    thetas = torch.as_tensor(np.ascontiguousarray(values[order]), device=operator.device).double()
    errors = torch.linalg.vector_norm((operator @ found).double() - found.double() * thetas, dim=0)
    return EigenResult(thetas, found, errors)


def _arpack(
    operator: SymmetricOperator,
    k: int,
    which: str,
    near: float | None,
    factorization: Any,
    tolerance: float,
    max_iterations: int | None,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import ArpackNoConvergence
    from scipy.sparse.linalg import eigsh as arpack

    linear = operator.to_scipy()
    options: dict[str, Any] = {"which": "LA" if which == "largest" else "SA"}
    if near is not None and factorization is None:
        if not hasattr(operator, "factorize"):
            raise ValueError(
                f"eigenvalues near {near} need a factorization: compress the matrix"
                " (hcurv.compress) and ask for those of the compressed one"
            )
        factorization = operator.factorize(-near, definite=False)
    if factorization is not None and (near is not None or which == "smallest"):
        shift = -factorization.damping
        if near is not None and not math.isclose(shift, near, rel_tol=1e-6, abs_tol=1e-30):
            raise ValueError(
                f"the factorization must have damping {-near}; got {factorization.damping}"
            )
        # Eigenvalues nearest to the shift; below the spectrum these are the smallest.
        options = {"sigma": shift, "OPinv": factorization.to_scipy(), "which": "LM"}
    first = generator.standard_normal(operator.shape[0]).astype(linear.dtype)
    try:
        values, vectors = arpack(
            linear, k=k, v0=first, tol=tolerance, maxiter=max_iterations, **options
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {k} eigenvalues converged in {max_iterations or 'all'}"
            " iterations. Allow more iterations, a larger tolerance, or pass a factorization for"
            " small eigenvalues"
        ) from error
    return values, vectors


def _lobpcg(
    operator: SymmetricOperator,
    k: int,
    which: str,
    factorization: Any,
    tolerance: float,
    max_iterations: int | None,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import lobpcg

    linear = operator.to_scipy()
    if 5 * k > operator.shape[0]:
        raise ValueError(
            f'method="lobpcg" needs N ≥ 5k; got N = {operator.shape[0]}, k = {k} (use "lanczos")'
        )
    first = generator.standard_normal((operator.shape[0], k)).astype(linear.dtype)
    # LOBPCG compares residuals, whose squares are the errors of eigenvalues.
    relative = tolerance or float(np.finfo(linear.dtype).eps) ** 0.5
    values, vectors = lobpcg(
        linear,
        first,
        M=None if factorization is None else factorization.to_scipy(),
        largest=which == "largest",
        tol=relative * float(operator.diagonal().abs().max()),
        maxiter=200 if max_iterations is None else max_iterations,
    )[:2]
    return values, vectors


def lanczos(
    product: Callable[[Tensor], Tensor],
    size: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz pairs of a symmetric operator after some steps, with full reorthogonalization.

    Args:
        product: of the operator with a vector (N,).
        size: N.
        num_steps: at most N are made.
        dtype: of vectors.
        device: of vectors.
        seed: of the first vector.

    Returns:
        Values in ascending order, vectors (N, k), and residual norms, in double precision but the
        vectors. An eigenvalue lies within the residual of each value.
    """
    num_steps = min(num_steps, size)
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, dtype=dtype, generator=generator).to(device)
    basis = torch.zeros(num_steps, size, dtype=dtype, device=device)
    diagonal: list[float] = []
    beside: list[float] = []
    vector /= vector.norm()
    for step in range(num_steps):
        basis[step] = vector
        image = product(vector)
        diagonal.append(float(torch.dot(image.double(), vector.double())))
        for _ in range(2):  # once is not always enough
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        beside.append(float(image.norm()))
        if beside[-1] <= torch.finfo(dtype).eps * max(map(abs, diagonal)):
            break
        vector = image / beside[-1]
    count = len(diagonal)
    projected = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[: count - 1], dtype=torch.float64)
    projected += torch.diag(off, 1) + torch.diag(off, -1)
    values, mixing = torch.linalg.eigh(projected)
    residuals = (beside[-1] * mixing[-1]).abs()
    vectors = basis[:count].T @ mixing.to(basis)
    return values.to(device), vectors, residuals.to(device)
