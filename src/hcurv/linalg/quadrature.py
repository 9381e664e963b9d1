"""Traces of functions of a preconditioned matrix: stochastic Lanczos quadrature.

With A + D = (G Gᵀ)⁻¹, a factorized stand-in for P = H + D, the matrix Gᵀ P G = I + E is near the
identity. For a random z with E[zzᵀ] = I, zᵀ f(I + E) z is an unbiased estimate of tr f(I + E), and
m steps of conjugate gradients from r = G⁻ᵀz give a Gauss quadrature of it with m nodes (Ubaru,
Chen & Saad 2017). With f = log this corrects a log-determinant,

    log|P| = log|A + D| + tr log(I + E),

and the better the stand-in, the smaller are the correction and its standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Quadrature", "preconditioned_quadrature"]

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Quadrature:
    """Gauss quadratures of zᵀ f(I + E) z, one for each probe z with ‖z‖² = N.

    Attributes:
        nodes: approximate eigenvalues of I + E, (probes, m), in double precision.
        weights: their weights, which add up to N for each probe, (probes, m).
    """

    nodes: Tensor
    weights: Tensor

    def traces(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """An estimate of tr f(I + E) from each probe, (probes,)."""
        return (self.weights * function(self.nodes)).sum(1)

    def join(self, other: Quadrature) -> Quadrature:
        """The quadratures of both, with the shorter ones padded by nodes of no weight."""
        longest = max(self.nodes.shape[1], other.nodes.shape[1])
        return Quadrature(
            torch.cat([_pad(part.nodes, longest, 1.0) for part in (self, other)]),
            torch.cat([_pad(part.weights, longest, 0.0) for part in (self, other)]),
        )


def _pad(values: Tensor, count: int, fill: float) -> Tensor:
    extra = values.new_full((values.shape[0], count - values.shape[1]), fill)
    return torch.cat([values, extra], 1)


def preconditioned_quadrature(
    product: Product,
    solve: Product,
    start: Tensor,
    dual: Tensor,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 100,
) -> Quadrature:
    """Gauss quadratures for Gᵀ P G, from conjugate gradients on P.

    Args:
        product: P times (N, k).
        solve: (A + D)⁻¹ = G Gᵀ times (N, k).
        start: G z, (N, k).
        dual: (A + D) G z = G⁻ᵀ z, (N, k).
        tolerance: the iteration ends when all residuals, in the norm of (A + D)⁻¹, have fallen by
            this factor. The quadrature of a smooth function is then right to about its square.
        max_steps: most steps.
    """
    size, num_probes = start.shape
    residual, direction = dual.clone(), start.clone()
    energy = _dots(residual, direction)
    first = energy.clone()
    # A probe that is finished gets the node 1 with no weight from then on.
    active = energy > 0
    lengths: list[Tensor] = []
    ratios: list[Tensor] = []
    for _ in range(min(max_steps, size)):
        if not bool(active.any()):
            break
        image = product(direction)
        curvature = _dots(direction, image)
        length = torch.where(active & (curvature > 0), energy / curvature, 1.0)
        residual = residual - image * length.to(image.dtype)
        preconditioned = solve(residual)
        following = _dots(residual, preconditioned).clamp(min=0)
        ratio = torch.where(active & (energy > 0), following / energy, 0.0)
        active = active & (following > tolerance**2 * first)
        ratio = torch.where(active, ratio, 0.0)
        lengths.append(length)
        ratios.append(ratio)
        direction = preconditioned + direction * ratio.to(direction.dtype)
        residual = residual * active.to(residual.dtype)
        direction = direction * active.to(direction.dtype)
        energy = torch.where(active, following, 0.0)
    if not lengths:
        ones = torch.ones(num_probes, 1, dtype=torch.float64, device=start.device)
        return Quadrature(ones, size * ones)
    return _gauss(torch.stack(lengths, 1), torch.stack(ratios, 1), size)


def _gauss(lengths: Tensor, ratios: Tensor, size: int) -> Quadrature:
    """Nodes and weights from the coefficients of conjugate gradients, (probes, m) each.

    They are the entries of the Cholesky factors of the tridiagonal Lanczos matrix.
    """
    diagonal = 1 / lengths
    diagonal[:, 1:] += ratios[:, :-1] / lengths[:, :-1]
    beside = ratios[:, :-1].sqrt() / lengths[:, :-1]
    matrix = torch.diag_embed(diagonal)
    matrix += torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    floor = torch.finfo(torch.float64).tiny
    return Quadrature(nodes.clamp(min=floor), size * vectors[:, 0, :].square())


def _dots(left: Tensor, right: Tensor) -> Tensor:
    dots: Tensor = torch.linalg.vecdot(left.double(), right.double(), dim=0)
    return dots
