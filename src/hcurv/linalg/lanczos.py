"""Plain Lanczos iteration: approximate eigenpairs from a few products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["lanczos"]


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
