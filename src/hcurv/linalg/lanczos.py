"""Plain Lanczos iteration: eigenpairs and sums over the spectrum, from a few products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["lanczos", "spectral_sample"]

# An eigenvalue has converged once its residual is below this share of it.
_CONVERGED = 1e-2
# The weight that a random vector gives to a simple eigenvalue is the square of a normal number. A
# larger one than this belongs to an eigenvalue of higher multiplicity, or to a cluster.
_SIMPLE = 12.0


def lanczos(
    product: Callable[[Tensor], Tensor],
    size: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Approximate eigenpairs of a symmetric operator, with full reorthogonalization.

    Args:
        product: multiplies the operator with a vector (N,).
        size: N.
        num_steps: number k of steps; at most N are made.
        dtype: type of the vectors.
        device: device of the vectors.
        seed: seed of the first vector.

    Returns:
        Approximate eigenvalues in ascending order (k,), vectors (N, k), and residual norms (k,).
        Values and norms are in double precision. An eigenvalue lies within the residual norm of
        each value.
    """
    basis, values, mixing, last = _tridiagonalize(product, size, num_steps, dtype, device, seed)
    residuals = (last * mixing[-1]).abs()
    vectors = basis.T @ mixing.to(basis)
    return values.to(device), vectors, residuals.to(device)


def spectral_sample(
    product: Callable[[Tensor], Tensor],
    size: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Points θ and weights w with tr f(H) ≈ Σ w f(θ), for functions with f(0) = 0.

    This is the Gauss quadrature that belongs to one Lanczos iteration from a random vector. The
    random vector sees an eigenvalue with a random weight; where a simple eigenvalue has converged,
    its weight is known to be one, and this is used instead.

    Args:
        product: multiplies the positive semi-definite operator with a vector (N,).
        size: N.
        num_steps: number k of steps; at most N are made.
        dtype: type of the vectors.
        device: device of the vectors.
        seed: seed of the first vector.

    Returns:
        θ in ascending order and w, (k,) each, in double precision on the CPU.
    """
    _, values, mixing, last = _tridiagonalize(product, size, num_steps, dtype, device, seed)
    weights = size * mixing[0].square()
    converged = (last * mixing[-1]).abs() <= _CONVERGED * values
    simple = converged & (weights < _SIMPLE)
    return values, torch.where(simple, torch.ones_like(weights), weights)


def _tridiagonalize(
    product: Callable[[Tensor], Tensor],
    size: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Run the iteration.

    Returns:
        The orthonormal basis (k, N), the eigenvalues (k,) and eigenvectors (k, k) of the operator
        in it, both in double precision on the CPU, and the norm of the last remainder.
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
        for _ in range(2):  # one pass leaves rounding errors that grow; after two there are none
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        # In double precision: squares of small and of large numbers leave the range of float32.
        beside.append(float(torch.linalg.vector_norm(image, dtype=torch.float64)))
        if beside[-1] <= torch.finfo(dtype).eps * max(map(abs, diagonal)):
            break
        vector = image / beside[-1]
    count = len(diagonal)
    projected = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[: count - 1], dtype=torch.float64)
    projected += torch.diag(off, 1) + torch.diag(off, -1)
    values, mixing = torch.linalg.eigh(projected)
    return basis[:count], values, mixing, beside[-1]
