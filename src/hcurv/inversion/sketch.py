"""A growing sketch of D^-½ H D^-½: what the spectrum looks like, and a low-rank stand-in for H.

Columns that are added later are sketched alone; nothing is computed twice. One Nyström step at the
end gives leading eigenpairs (Tropp, Yurtsever, Udell & Cevher 2017), without power iterations: a
preconditioner does not need the leading eigenvectors to many digits.
"""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hcurv.baselines.low_rank import LowRankFactorization
from hcurv.damping import Damping
from hcurv.inversion.iterative import StandIn
from hcurv.linalg.nystrom import nystrom_of_sketch
from hcurv.operators import SymmetricOperator

__all__ = ["GrowingSketch", "Spectrum"]

# A Gaussian matrix with at most this ratio of columns to rows is well conditioned, as the Nyström
# step needs it.
_TALL = 1 / 16
# A sketch never has more columns than this.
_MOST_COLUMNS = 2048
# A sketch of this many columns finds the largest eigenvalue to about a tenth.
_ENOUGH = 16
# Of r sketched columns, about this share of the leading eigenvalues is taken away by the stand-in
# (fitted on three networks, with ranks from 32 to 1000).
_TAKEN_SHARE = 0.6


@dataclass(frozen=True)
class Spectrum:
    """What a sketch and the trace tell of the eigenvalues of D^-½ H D^-½.

    Attributes:
        values: the eigenvalues that the sketch found, descending. Later ones are too small.
        trace: the sum of all eigenvalues.
        size: the largest number of eigenvalues that are not zero.
    """

    values: Tensor
    trace: float
    size: int

    @property
    def largest(self) -> float:
        """The largest eigenvalue, λ₁/λ for a damping λ: never less than the truth by much.

        A narrow sketch can miss most of it. The trace is then taken, which is never less.
        """
        if self.values.numel() < min(_ENOUGH, self.size):
            return self.trace
        return float(self.values[0]) if self.values.numel() else 0.0

    def eigenvalue(self, index: int) -> float:
        """An estimate of an eigenvalue, counted from 0.

        Those beyond the sketch follow a power law, which goes on from the middle of the sketch,
        and whose sum is what the trace leaves.
        """
        index = min(index, self.size - 1)
        known = self._num_trusted
        if index < known:
            return float(self.values[index])
        if known == 0:
            return self.trace / max(self.size, 1)
        last = float(self.values[known - 1])
        return last * math.exp(-self._decay * math.log((index + 1) / known))

    @cached_property
    def effective_dimension(self) -> float:
        """An estimate of d = Σ μ/(1 + μ)."""
        return sum(
            share * self.eigenvalue(index) / (1 + self.eigenvalue(index))
            for index, share in _geometric(self.size)
        )

    @cached_property
    def _num_trusted(self) -> int:
        positive = int((self.values > 0).sum())
        return math.ceil(_TAKEN_SHARE * positive) if positive < self.size else positive

    @cached_property
    def _decay(self) -> float:
        """The exponent of the power law, by bisection."""
        known = self._num_trusted
        left = self.trace - float(self.values[:known].double().sum())
        last = float(self.values[known - 1])
        if left <= 0 or last <= 0:
            return 20.0
        low, high = 0.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            total = sum(
                share * last * ((index + 1) / known) ** -middle
                for index, share in _geometric(self.size)
                if index >= known
            )
            low, high = (middle, high) if total > left else (low, middle)
        return (low + high) / 2


def _geometric(size: int) -> list[tuple[int, int]]:
    """Positions in [0, size) at growing distances, and how many positions each stands for."""
    result, start = [], 0
    while start < size:
        count = min(max(1, start // 16), size - start)
        result.append((start + count // 2, count))
        start += count
    return result


class GrowingSketch:
    """Ω and D^-½ H D^-½ Ω, for a Gaussian Ω that can grow.

    Args:
        matrix: H.
        damping: D.
        seed: of Ω.

    Attributes:
        seconds_per_column: time of a product with one of many columns, measured as it grew.
    """

    def __init__(self, matrix: SymmetricOperator, damping: Damping, seed: int = 0) -> None:
        self._matrix, self._damping = matrix, damping
        self._roots = damping.diagonal(matrix.shape[0], matrix.device).rsqrt().to(matrix.dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._start = self._roots.new_zeros(matrix.shape[0], 0)
        self._image = self._start
        self._eigenpairs: tuple[Tensor, Tensor] | None = None
        self.seconds_per_column = 0.0

    def of(self, matrix: SymmetricOperator) -> GrowingSketch:
        """The same columns, and further ones of the same H in another precision."""
        if matrix.dtype == self._start.dtype:
            return self
        other = copy(self)
        other._matrix, other._roots = matrix, self._roots.to(matrix.dtype)
        other._start, other._image = self._start.to(matrix.dtype), self._image.to(matrix.dtype)
        other._eigenpairs = None
        return other

    @property
    def width(self) -> int:
        """The number of columns."""
        return self._start.shape[1]

    @property
    def max_width(self) -> int:
        """The largest number of columns that it can grow to."""
        return max(1, min(_MOST_COLUMNS, int(_TALL * self._matrix.shape[0])))

    def grow(self, width: int) -> None:
        """Add columns until there are ``width`` of them, or as many as there can be."""
        count = min(width, self.max_width) - self.width
        if count <= 0:
            return
        size = self._matrix.shape[0]
        fresh = torch.randn(size, count, dtype=self._matrix.dtype, generator=self._generator)
        fresh = fresh.to(self._matrix.device) / math.sqrt(size)
        began = time.perf_counter()
        image = self._matrix @ (self._roots[:, None] * fresh)
        self.seconds_per_column = (time.perf_counter() - began) / count
        image *= self._roots[:, None]
        is_first = self.width == 0
        self._start = fresh if is_first else torch.cat([self._start, fresh], 1)
        self._image = image if is_first else torch.cat([self._image, image], 1)
        self._eigenpairs = None

    def _leading(self) -> tuple[Tensor, Tensor]:
        """The leading eigenpairs, computed once for each width."""
        if self._eigenpairs is None:
            self._eigenpairs = nystrom_of_sketch(self._start, self._image)
        return self._eigenpairs

    def spectrum(self, trace: float, num_nonzero: int) -> Spectrum:
        """What is known of the eigenvalues, given the trace of D^-½ H D^-½."""
        values, _ = self._leading()
        return Spectrum(values[values > 0].double().cpu(), trace, max(1, num_nonzero))

    def relative_error(self, other: SymmetricOperator) -> float:
        """The error of another matrix in place of H, on the columns that are known."""
        rows = self._roots[:, None]
        wrong = self._image - rows * (other @ (rows * self._start))
        return float(wrong.norm() / self._image.norm())

    def stand_in(self) -> StandIn:
        """The leading eigenpairs, and D for everything else."""
        values, vectors = self._leading()
        keep = values > 0
        values, vectors = values[keep].double(), vectors[:, keep].contiguous()
        factorized = LowRankFactorization(vectors, values, self._damping)

        def product(columns: Tensor) -> Tensor:
            scaled = columns / self._roots[:, None]
            mixed = values[:, None].to(columns.dtype) * (vectors.T @ scaled)
            return torch.addmm(scaled, vectors, mixed) / self._roots[:, None]

        return StandIn(f"rank {values.numel()}", product, factorized)
