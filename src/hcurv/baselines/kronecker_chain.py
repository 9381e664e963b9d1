"""Kronecker blocks along a chain of layers, and the inverse of such a matrix.

Blocks act on matrices V (units, columns) of the parameters of a layer: (G ⊗ A) V = G V Aᵀ.

The block-tridiagonal inverse is that of Martens and Grosse (2015), §4.3 and appendix B. With
Ψ = F_{ℓ,ℓ+1} F_{ℓ+1,ℓ+1}⁻¹ = Ψ_G ⊗ Ψ_A, the matrix whose inverse is ΞᵀΛΞ, where
Ξ = I − (Ψ above the diagonal), Λ = diag(Σ_1⁻¹, …, Σ_{L-1}⁻¹, F_LL⁻¹) and
Σ_ℓ = F_ℓℓ − Ψ F_{ℓ+1,ℓ+1} Ψᵀ, agrees with F on the diagonal and next to it. Σ_ℓ is a difference of
two Kronecker products, which is inverted in a basis that diagonalises both. A block-diagonal matrix
is a chain without Ψ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.baselines.kronecker_moments import Moments

__all__ = [
    "Chain",
    "Identity",
    "InverseBlock",
    "InverseChain",
    "KroneckerPair",
    "damped",
    "eigenvectors",
]


@dataclass(frozen=True)
class KroneckerPair:
    """The two factors of a block G ⊗ A, of any shape.

    Attributes:
        inputs: A, which acts on columns.
        gradients: G, which acts on rows.
    """

    inputs: Tensor
    gradients: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Compute G V Aᵀ for V of shape (k, units, columns)."""
        return self.gradients @ values @ self.inputs.T

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Compute Gᵀ V A for V of shape (k, units, columns)."""
        return self.gradients.T @ values @ self.inputs

    def apply_squared(self, values: Tensor) -> Tensor:
        """Compute G² V (A²)ᵀ, with the squares of all entries, for V of shape (units, columns)."""
        return self.gradients.square() @ values @ self.inputs.square().T

    @property
    def num_stored(self) -> int:
        """The number of floats of both factors."""
        return self.inputs.numel() + self.gradients.numel()

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> KroneckerPair:
        """Return this pair on another device or in another precision."""
        return KroneckerPair(self.inputs.to(device, dtype), self.gradients.to(device, dtype))


@dataclass(frozen=True)
class Identity:
    """The eigenvectors of a block that is diagonal as it is; used like a `KroneckerPair`."""

    num_stored = 0

    def apply(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    apply_transposed = apply_squared = apply

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Identity:
        """Return this."""
        return self


def damped(pair: KroneckerPair, damping: float) -> tuple[KroneckerPair, tuple[float, float]]:
    """Add a factored damping λ to a block: (G + √λ/π I) ⊗ (A + π√λ I).

    π² is the ratio of the mean eigenvalues of A and G (Martens and Grosse 2015, §6.3).

    Args:
        pair: G and A.
        damping: λ.

    Returns:
        The damped pair, and what was added to the diagonals of A and of G.
    """
    means = [float(factor.trace()) / factor.shape[0] for factor in (pair.inputs, pair.gradients)]
    ratio = math.sqrt(means[0] / means[1]) if min(means) > 0 else 1.0
    shifts = (ratio * math.sqrt(damping), math.sqrt(damping) / ratio)
    inputs, gradients = pair.inputs.clone(), pair.gradients.clone()
    inputs.diagonal().add_(shifts[0])
    gradients.diagonal().add_(shifts[1])
    return KroneckerPair(inputs, gradients), shifts


def eigenvectors(moments: Moments) -> list[KroneckerPair]:
    """Find the eigenvectors of A and G of each diagonal block."""
    return [
        KroneckerPair(
            *(
                torch.linalg.eigh(factor.double()).eigenvectors.to(factor)
                for factor in (moments.inputs[pair], moments.gradients[pair])
            )
        )
        for pair in moments.inputs
    ]


@dataclass(frozen=True)
class KroneckerDifference:
    """Σ = G ⊗ A − G' ⊗ A', or G ⊗ A alone.

    Attributes:
        whole: G ⊗ A.
        removed: G' ⊗ A', or None.
    """

    whole: KroneckerPair
    removed: KroneckerPair | None

    def apply(self, values: Tensor) -> Tensor:
        """Compute Σ V for V of shape (k, units, columns)."""
        result = self.whole.apply(values)
        return result if self.removed is None else result - self.removed.apply(values)

    def to(self, dtype: torch.dtype) -> KroneckerDifference:
        """Return this block in another precision."""
        removed = None if self.removed is None else self.removed.to(None, dtype)
        return KroneckerDifference(self.whole.to(None, dtype), removed)


@dataclass(frozen=True)
class Chain:
    """A matrix with the Kronecker blocks of neighbouring layers: Ξ⁻¹ Λ⁻¹ Ξ⁻ᵀ.

    Attributes:
        blocks: Σ_ℓ.
        links: Ψ_ℓ; there are none if the matrix is block-diagonal.
    """

    blocks: Sequence[KroneckerDifference]
    links: Sequence[KroneckerPair]

    @classmethod
    def of(cls, diagonal: Sequence[KroneckerPair], moments: Moments | None) -> Chain:
        """Link the diagonal blocks of neighbouring layers.

        Args:
            diagonal: the diagonal blocks F_ℓℓ, in double precision.
            moments: the moments of neighbouring layers; None for a block-diagonal matrix.
        """
        if moments is None:
            return cls([KroneckerDifference(pair, None) for pair in diagonal], [])
        links: list[KroneckerPair] = []
        blocks: list[KroneckerDifference] = []
        for number, following in enumerate(diagonal[1:]):
            across = KroneckerPair(
                moments.inputs[number, number + 1].double(),
                moments.gradients[number, number + 1].double(),
            )
            link = KroneckerPair(
                _divide(across.inputs, following.inputs),
                _divide(across.gradients, following.gradients),
            )
            removed = KroneckerPair(
                link.inputs @ across.inputs.T, link.gradients @ across.gradients.T
            )
            links.append(link)
            blocks.append(KroneckerDifference(diagonal[number], removed))
        blocks.append(KroneckerDifference(diagonal[-1], None))
        return cls(blocks, links)

    def apply(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Multiply matrices (k, units, columns), one for each layer."""
        current = list(values)
        for number, link in enumerate(self.links):
            current[number + 1] = current[number + 1] + link.apply_transposed(current[number])
        current = [block.apply(value) for block, value in zip(self.blocks, current, strict=True)]
        for number in reversed(range(len(self.links))):
            current[number] = current[number] + self.links[number].apply(current[number + 1])
        return current

    def to(self, dtype: torch.dtype) -> Chain:
        """Return this chain in another precision."""
        return Chain(
            [block.to(dtype) for block in self.blocks],
            [link.to(None, dtype) for link in self.links],
        )

    def invert(self) -> InverseChain:
        """Invert all blocks."""
        return InverseChain([_invert(block) for block in self.blocks], self.links)


@dataclass(frozen=True)
class InverseBlock:
    """Σ⁻¹ V = K_G ((K_Gᵀ V K_A) / D) K_Aᵀ.

    Attributes:
        basis: K_A and K_G; or the identity, for a diagonal Σ.
        scale: D, (units, columns), or None if all of its entries are one, which those of a
            diagonal Σ are not.
        logdet: log det Σ, in double precision.
    """

    basis: KroneckerPair | Identity
    scale: Tensor | None
    logdet: Tensor

    @classmethod
    def of(cls, basis: KroneckerPair | Identity, values: Tensor) -> InverseBlock:
        """Invert a block with these eigenvectors and eigenvalues, (units, columns)."""
        return cls(basis, values, values.double().log().sum())

    @property
    def like(self) -> Tensor:
        """A tensor with the type and the device of this block."""
        if isinstance(self.basis, KroneckerPair):
            return self.basis.inputs
        assert self.scale is not None
        return self.scale

    @cached_property
    def _product(self) -> KroneckerPair:
        """K_A K_Aᵀ and K_G K_Gᵀ, which halve the work of solves where D is one."""
        assert isinstance(self.basis, KroneckerPair)
        inputs, gradients = self.basis.inputs, self.basis.gradients
        return KroneckerPair(inputs @ inputs.T, gradients @ gradients.T)

    def solve(self, values: Tensor) -> Tensor:
        """Compute Σ⁻¹ V for V of shape (k, units, columns)."""
        if self.scale is None:
            return self._product.apply(values)
        inner = self.basis.apply_transposed(values)
        return self.basis.apply(inner / self.scale)

    def half_solve(self, values: Tensor) -> Tensor:
        """Compute K_G (V / √D) K_Aᵀ: a square root of Σ⁻¹ times V."""
        return self.basis.apply(values if self.scale is None else values / self.scale.sqrt())

    def diagonal(self, link: KroneckerPair | None = None) -> Tensor:
        """Compute the diagonal of Σ⁻¹, or of Ψᵀ Σ⁻¹ Ψ, in double precision, (units, columns)."""
        if isinstance(self.basis, Identity):
            assert self.scale is not None
            return 1 / self.scale.double()
        inputs, gradients = self.basis.inputs.double(), self.basis.gradients.double()
        if link is not None:
            inputs = link.inputs.double().T @ inputs
            gradients = link.gradients.double().T @ gradients
        if self.scale is None:
            return torch.outer(gradients.square().sum(1), inputs.square().sum(1))
        return gradients.square() @ (1 / self.scale.double()) @ inputs.square().T

    @property
    def num_stored(self) -> int:
        """The number of floats of the basis and the scale."""
        return self.basis.num_stored + (0 if self.scale is None else self.scale.numel())

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> InverseBlock:
        """Return this block on another device or in another precision."""
        scale = None if self.scale is None else self.scale.to(device, dtype)
        return InverseBlock(self.basis.to(device, dtype), scale, self.logdet)


def _invert(block: KroneckerDifference) -> InverseBlock:
    """Invert Σ = G ⊗ A − G' ⊗ A'.

    With the Cholesky factors A = LLᵀ and the eigenvectors E of L⁻¹A'L⁻ᵀ, the matrix K_A = L⁻ᵀE
    turns A into the identity and A' into a diagonal matrix; likewise K_G.
    """
    bases, shares, logs = [], [], []
    for name in ("inputs", "gradients"):
        whole = getattr(block.whole, name)
        factor = torch.linalg.cholesky(whole)
        logs.append(2 * factor.diagonal().log().sum())
        identity = torch.eye(whole.shape[0], dtype=whole.dtype, device=whole.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        if block.removed is None:
            bases.append(inverse.T)
            continue
        inner = inverse @ getattr(block.removed, name) @ inverse.T
        values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
        bases.append(inverse.T @ vectors)
        shares.append(values.clamp(0.0, 1.0))
    basis = KroneckerPair(*bases)
    logdet = basis.gradients.shape[0] * logs[0] + basis.inputs.shape[0] * logs[1]
    if not shares:
        return InverseBlock(basis, None, logdet)
    # Σ is positive semi-definite; rounding must not make an entry of D zero or negative.
    scale = (1 - torch.outer(shares[1], shares[0])).clamp_(min=torch.finfo(torch.float64).eps)
    return InverseBlock(basis, scale, logdet + scale.log().sum())


class InverseChain:
    """The inverse of a chain: ΞᵀΛΞ.

    Args:
        blocks: Σ_ℓ⁻¹.
        links: Ψ_ℓ; none if the matrix is block-diagonal.
    """

    def __init__(self, blocks: Sequence[InverseBlock], links: Sequence[KroneckerPair] = ()) -> None:
        self.blocks, self.links = tuple(blocks), tuple(links)

    def solve(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Compute ΞᵀΛΞ times matrices (k, units, columns), one for each layer."""
        current = list(values)
        for number, link in enumerate(self.links):
            current[number] = current[number] - link.apply(current[number + 1])
        current = [block.solve(value) for block, value in zip(self.blocks, current, strict=True)]
        return self._apply_links_transposed(current)

    def half_solve(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Compute Ξᵀ√Λ times matrices: a square root of the inverse."""
        roots = [block.half_solve(value) for block, value in zip(self.blocks, values, strict=True)]
        return self._apply_links_transposed(roots)

    def _apply_links_transposed(self, values: list[Tensor]) -> list[Tensor]:
        """Compute Ξᵀ times matrices."""
        for number in reversed(range(len(self.links))):
            back = self.links[number].apply_transposed(values[number])
            values[number + 1] = values[number + 1] - back
        return values

    def diagonals(self) -> Iterator[Tensor]:
        """Yield the diagonal of the inverse for each layer, (units, columns), in double."""
        for number, block in enumerate(self.blocks):
            result = block.diagonal()
            if number > 0 and self.links:
                result = result + self.blocks[number - 1].diagonal(self.links[number - 1])
            yield result

    def logdet(self) -> Tensor:
        """Compute log det of the matrix, in double precision: Ξ has determinant 1."""
        total = torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            total = total + block.logdet.cpu()
        return total

    @property
    def num_stored(self) -> int:
        """The number of floats of all blocks and links."""
        blocks = sum(block.num_stored for block in self.blocks)
        return blocks + sum(link.num_stored for link in self.links)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> InverseChain:
        """Return this chain on another device or in another precision."""
        return InverseChain(
            [block.to(device, dtype) for block in self.blocks],
            [link.to(device, dtype) for link in self.links],
        )


def _divide(left: Tensor, right: Tensor) -> Tensor:
    """Compute left right⁻¹ for a positive semi-definite right; null directions are left out."""
    values, vectors = torch.linalg.eigh(right)
    floor = right.shape[0] * torch.finfo(torch.float32).eps * values[-1:].clamp(min=0.0)
    inverse = torch.where(values > floor, 1 / values, 0.0)
    quotient: Tensor = (left @ vectors * inverse) @ vectors.T
    return quotient
