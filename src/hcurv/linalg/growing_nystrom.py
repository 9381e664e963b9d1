"""Leading eigenpairs of a positive semi-definite H from a basis that grows, and is never rebuilt.

With a basis Q and Y = HQ, Nyström's approximation Y T⁻¹ Yᵀ, T = QᵀY, is at most H. With a root S of
H = SᵀS and a basis Q of the range of S, it is Y = SᵀQ and T = QᵀQ. In both cases it does not depend
on the choice of the basis, so that Q has to be well conditioned, not orthonormal. New directions
are made orthogonal to the old ones; T and YᵀY grow by blocks. With T = LLᵀ, the eigenvectors of
L⁻¹ YᵀY L⁻ᵀ give those of the approximation (Tropp, Yurtsever, Udell, Cevher 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.linalg.nystrom import double_gram, orthonormal, tall_qr, whitening
from hcurv.ranks import OneRank

__all__ = ["GrowingNystrom"]

# Directions that are smaller than this multiple of the rounding of what they are left of are none.
_ROUNDING = 8.0


class GrowingNystrom:
    """Nyström's approximation V Vᵀ of a matrix, for a growing basis.

    Args:
        multiply: Y from new directions (M', k): (M, k).
        is_root: whether ``multiply`` is Sᵀ, not H.
        ranks: each of them has some rows of Q and Y, and of all tall matrices that come in or go
            out. What is small is on all of them. None for one process.
    """

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        is_root: bool = False,
        ranks: OneRank | None = None,
    ) -> None:
        self._multiply, self._is_root = multiply, is_root
        self._ranks = OneRank() if ranks is None else ranks
        self._basis: list[Tensor] = []  # Q
        self._images: list[Tensor] = []  # Y
        self._core = torch.zeros(0, 0, dtype=torch.float64)  # T
        self._gram = torch.zeros(0, 0, dtype=torch.float64)  # YᵀY
        self._shift = 0.0
        self._spectrum: tuple[Tensor, Tensor] | None = None
        self._num_passed_on = 0  # images that were given out as further directions

    @property
    def width(self) -> int:
        """The number of directions."""
        return self._core.shape[0]

    @property
    def num_images(self) -> int:
        """Number of images Y that were not given out yet."""
        return self.width - self._num_passed_on

    def images(self, count: int) -> Tensor:
        """The next images Y, at most ``count``, as a copy: directions of a Krylov space."""
        found, start = [], 0
        for block in self._images:
            first = max(0, self._num_passed_on - start)
            if first < block.shape[1] and count > 0:
                found.append(block[:, first : first + count])
                count -= found[-1].shape[1]
            start += block.shape[1]
        result = torch.cat(found, 1)
        self._num_passed_on += result.shape[1]
        return result

    def extend(self, columns: Tensor, *, is_basis: bool = False) -> int:
        """Add the directions of some columns that are new; return how many.

        Args:
            columns: (M', k). They are overwritten.
            is_basis: they are nearly orthonormal, and to all directions so far.
        """
        fresh = columns if is_basis else self._new_directions(columns)
        count = fresh.shape[1]
        if count == 0:
            return 0
        images = self._multiply(fresh)
        if not self._is_root:
            if not self._basis:
                # A small shift of H makes T positive definite in floating point.
                norm = float(torch.linalg.vector_norm(self._column_norms(images)))
                self._shift = 1.5 * torch.finfo(images.dtype).eps * norm
            images.add_(fresh, alpha=self._shift)
        self._basis.append(fresh)
        self._images.append(images)
        right = fresh if self._is_root else images
        column = [(left.T @ right).double() for left in self._basis]
        self._core = _bordered(self._core, self._total(column))
        if images.dtype != torch.float64:
            column = [double_gram(left, images) for left in self._images]
            self._gram = _bordered(self._gram, self._total(column))
        self._spectrum = None
        return count

    def _new_directions(self, columns: Tensor) -> Tensor:
        """A well-conditioned basis of what the basis leaves of some columns."""
        eps = torch.finfo(columns.dtype).eps
        before = self._column_norms(columns)
        after = before
        if self._basis:
            for _ in range(2):
                for block in self._basis:
                    columns.addmm_(block, self._ranks.sum(block.T @ columns), alpha=-1)
                after = self._column_norms(columns)
                if bool((after >= math.sqrt(eps) * before).all()):
                    break
        keep = after > _ROUNDING * eps * before
        if not bool(keep.any()):
            return columns[:, :0]
        if not bool(keep.all()):
            columns, before, after = columns[:, keep], before[keep], after[keep]
        rounding = _ROUNDING * eps * float((before / after).median())
        if columns.dtype == torch.float64:
            return orthonormal(columns, negligible=rounding, ranks=self._ranks)
        gram = double_gram(columns, columns, self._ranks)
        norms = gram.diagonal().sqrt()
        mixing = whitening(gram / norms / norms[:, None], rounding**2) / norms[:, None]
        return columns @ mixing.to(columns.dtype)

    def _column_norms(self, columns: Tensor) -> Tensor:
        """Norms of tall columns, (k,)."""
        norms: Tensor = torch.linalg.vector_norm(columns, dim=0)
        if self._ranks.size == 1:
            return norms
        return self._ranks.sum(norms.double().square()).sqrt().to(norms.dtype)

    def _total(self, parts: list[Tensor]) -> list[Tensor]:
        """Sums over all ranks, in one message."""
        if self._ranks.size == 1:
            return parts
        return list(self._ranks.sum(torch.cat(parts)).split([part.shape[0] for part in parts]))

    def _solved(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the approximation, descending, and M with V = Y M."""
        if not self._images:
            return self._core.new_zeros(0), self._core
        if self._spectrum is None:
            white = self._whitening()
            if self._images[0].dtype == torch.float64:
                # The squares in YᵀY would halve the number of digits.
                tall = torch.cat(self._images, 1) @ white
                if self._ranks.size > 1:
                    triangle = tall_qr(tall, self._ranks)[1]
                else:
                    triangle = torch.linalg.qr(tall, mode="r").R
                _, roots, rotation = torch.linalg.svd(triangle, full_matrices=False)
                values, rotation = roots.square(), rotation.T
            else:
                inner = white.T @ self._gram @ white
                values, rotation = torch.linalg.eigh((inner + inner.T) / 2)
                values, rotation = values.flip(0), rotation.flip(1)
            keep = values > self._shift
            values, rotation = values[keep], rotation[:, keep]
            # Take the shift off again.
            rotation = rotation * ((values - self._shift) / values).sqrt()
            self._spectrum = values - self._shift, white @ rotation
        return self._spectrum

    def _whitening(self) -> Tensor:
        """W with WᵀTW = I, without directions in which T is rounding."""
        factor, failed = torch.linalg.cholesky_ex(self._core)
        if not bool(failed):
            identity = torch.eye(self.width, dtype=factor.dtype, device=factor.device)
            white: Tensor = torch.linalg.solve_triangular(factor.T, identity, upper=True)
            return white
        values, vectors = torch.linalg.eigh(self._core)
        keep = values > max(0.25 * self._shift, torch.finfo(values.dtype).eps * float(values[-1]))
        white = vectors[:, keep] * values[keep].rsqrt()
        return white

    @property
    def values(self) -> Tensor:
        """Eigenvalues of the approximation, descending, in double precision."""
        return self._solved()[0]

    def rows(self, take: Callable[[Tensor], Tensor], rank: int) -> Tensor:
        """Some rows of V with ``rank`` columns, (…, rank).

        Args:
            take: takes these rows of a tall matrix (M, k): (…, k).
            rank: number of columns.
        """
        found = torch.cat([take(block) for block in self._images], -1)
        return found @ self._mixing(rank, found)

    def mix(self, columns: Tensor, rank: int) -> Tensor:
        """Vᵀ times (M, k), for V with ``rank`` columns."""
        mixed = self._ranks.sum(torch.cat([block.T @ columns for block in self._images]))
        return self._mixing(rank, mixed).T @ mixed

    def remainder(self, columns: Tensor, products: Tensor) -> Tensor:
        """HX − V VᵀX for all of V, from columns X and their products HX."""
        mixing = self._mixing(self.values.numel(), columns)
        coefficients = mixing @ self.mix(columns, mixing.shape[1])
        result = products.clone()
        start = 0
        for block in self._images:
            stop = start + block.shape[1]
            result.addmm_(block, coefficients[start:stop], alpha=-1)
            start = stop
        return result

    def factor(self, rank: int) -> Tensor:
        """V, (M, rank), stored by columns: orthogonal, in the order of eigenvalues."""
        first = self._images[0]
        mixing = self._mixing(rank, first)
        result = first.new_zeros(rank, first.shape[0]).T
        start = 0
        for block in self._images:
            stop = start + block.shape[1]
            result.addmm_(block, mixing[start:stop])
            start = stop
        return result

    def _mixing(self, rank: int, like: Tensor) -> Tensor:
        return self._solved()[1][:, :rank].to(like)


def _bordered(known: Tensor, column: list[Tensor]) -> Tensor:
    """A symmetric matrix with another block column, and the row that mirrors it."""
    size = known.shape[0]
    border = torch.cat(column)
    corner = border[size:]
    result = border.new_empty(border.shape[0], border.shape[0])
    result[:size, :size] = known
    result[:size, size:] = border[:size]
    result[size:, :size] = border[:size].T
    result[size:, size:] = (corner + corner.T) / 2
    return result
