"""Kronecker blocks along a chain of layers, with a block-tridiagonal inverse.

Martens and Grosse (2015), §4.3 and appendix B: with Ψ = F_{ℓ,ℓ+1} F_{ℓ+1,ℓ+1}⁻¹ = Ψ_G ⊗ Ψ_A, the
matrix whose inverse is ΞᵀΛΞ, Ξ = I − (Ψ above the diagonal), Λ = diag(Σ_1⁻¹, …, Σ_{L-1}⁻¹, F_LL⁻¹)
and Σ_ℓ = F_ℓℓ − Ψ F_{ℓ+1,ℓ+1} Ψᵀ, agrees with F on the diagonal and next to it. Σ_ℓ is a difference
of two Kronecker products, inverted in a basis that diagonalises both. A block-diagonal matrix is
the chain without Ψ. Blocks act on matrices V (units, columns), (G ⊗ A) V = G V Aᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.baselines.kronecker_moments import Moments

__all__ = ["Chain", "KroneckerPair"]


@dataclass(frozen=True)
class KroneckerPair:
    """Two factors of a block, of any shape.

    Attributes:
        inputs: acts on columns.
        gradients: acts on rows.
    """

    inputs: Tensor
    gradients: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """G V Aᵀ, (k, units, columns)."""
        return self.gradients.to(values) @ values @ self.inputs.to(values).T

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Gᵀ V A."""
        return self.gradients.to(values).T @ values @ self.inputs.to(values)


@dataclass(frozen=True)
class _Difference:
    """Σ = G ⊗ A − G' ⊗ A', or just G ⊗ A, and its inverse in a common basis.

    Attributes:
        whole: G ⊗ A.
        taken: G' ⊗ A', or None.
    """

    whole: KroneckerPair
    taken: KroneckerPair | None

    def apply(self, values: Tensor) -> Tensor:
        result = self.whole.apply(values)
        return result if self.taken is None else result - self.taken.apply(values)


@dataclass(frozen=True)
class _Inverse:
    """Σ⁻¹ V = K_G ((K_Gᵀ V K_A) / D) K_Aᵀ.

    Attributes:
        basis: K_A and K_G.
        scale: D, (units, columns).
        log_determinant: of Σ.
    """

    basis: KroneckerPair
    scale: Tensor
    log_determinant: Tensor

    @classmethod
    def of(cls, block: _Difference) -> _Inverse:
        """From Cholesky factors, A = LLᵀ, and the eigenvectors E of L⁻¹A'L⁻ᵀ: K = L⁻ᵀE."""
        parts, shares, logs = [], [], []
        for name in ("inputs", "gradients"):
            whole = getattr(block.whole, name)
            factor = torch.linalg.cholesky(whole)
            logs.append(2 * factor.diagonal().log().sum())
            identity = torch.eye(whole.shape[0], dtype=whole.dtype, device=whole.device)
            inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
            if block.taken is None:
                parts.append(inverse.T)
                shares.append(torch.zeros_like(whole[0]))
                continue
            inner = inverse @ getattr(block.taken, name) @ inverse.T
            values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
            parts.append(inverse.T @ vectors)
            shares.append(values.clamp(0.0, 1.0))
        scale = 1 - torch.outer(shares[1], shares[0])
        scale = scale.clamp_(min=torch.finfo(scale.dtype).eps)
        log_determinant = shares[1].numel() * logs[0] + shares[0].numel() * logs[1]
        log_determinant = log_determinant + scale.log().sum()
        return cls(KroneckerPair(*parts), scale, log_determinant)

    def apply(self, values: Tensor) -> Tensor:
        inner = self.basis.apply_transposed(values)
        return self.basis.apply(inner / self.scale.to(inner))


class Chain:
    """Σ_ℓ and Ψ_ℓ of a chain of layers.

    Args:
        blocks: Σ_ℓ.
        links: Ψ_ℓ, empty if the matrix is block-diagonal.
    """

    def __init__(self, blocks: list[_Difference], links: list[KroneckerPair]) -> None:
        self._blocks, self._links = blocks, links
        self._inverses: list[_Inverse] = []

    @classmethod
    def of(cls, diagonal: list[KroneckerPair], moments: Moments | None) -> Chain:
        """From (damped) diagonal blocks and the moments of neighbouring layers."""
        if moments is None:
            return cls([_Difference(pair, None) for pair in diagonal], [])
        links, blocks = [], []
        for number in range(len(diagonal) - 1):
            following = diagonal[number + 1]
            across = KroneckerPair(
                moments.inputs[number, number + 1].double(),
                moments.gradients[number, number + 1].double(),
            )
            link = KroneckerPair(
                _divide(across.inputs, following.inputs),
                _divide(across.gradients, following.gradients),
            )
            taken = KroneckerPair(
                link.inputs @ across.inputs.T, link.gradients @ across.gradients.T
            )
            links.append(link)
            blocks.append(_Difference(diagonal[number], taken))
        blocks.append(_Difference(diagonal[-1], None))
        return cls(blocks, links)

    def apply(self, values: list[Tensor]) -> list[Tensor]:
        """The matrix, Ξ⁻¹ Λ⁻¹ Ξ⁻ᵀ, times values."""
        values = list(values)
        for number, link in enumerate(self._links):
            values[number + 1] = values[number + 1] + link.apply_transposed(values[number])
        values = [block.apply(value) for block, value in zip(self._blocks, values, strict=True)]
        for number in reversed(range(len(self._links))):
            values[number] = values[number] + self._links[number].apply(values[number + 1])
        return values

    def solve(self, values: list[Tensor]) -> list[Tensor]:
        """The inverse, ΞᵀΛΞ, times values."""
        values = list(values)
        for number, link in enumerate(self._links):
            values[number] = values[number] - link.apply(values[number + 1])
        values = [
            inverse.apply(value) for inverse, value in zip(self._inverted(), values, strict=True)
        ]
        for number in reversed(range(len(self._links))):
            back = self._links[number].apply_transposed(values[number])
            values[number + 1] = values[number + 1] - back
        return values

    def logdet(self) -> Tensor:
        """log det of the matrix: Ξ has determinant 1."""
        total: Tensor = torch.zeros((), dtype=torch.float64)
        for inverse in self._inverted():
            total = total + inverse.log_determinant.cpu()
        return total

    def _inverted(self) -> list[_Inverse]:
        if not self._inverses:
            self._inverses = [_Inverse.of(block) for block in self._blocks]
        return self._inverses


def _divide(left: Tensor, right: Tensor) -> Tensor:
    """left right⁻¹ for symmetric positive semi-definite right; null directions are left out."""
    values, vectors = torch.linalg.eigh(right)
    floor = right.shape[0] * torch.finfo(torch.float32).eps * values[-1:].clamp(min=0.0)
    inverse = torch.where(values > floor, 1 / values, 0.0)
    quotient: Tensor = (left @ vectors * inverse) @ vectors.T
    return quotient
