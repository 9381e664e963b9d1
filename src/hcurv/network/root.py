"""The root S of H = SᵀS: what every matrix of a network is made of, however it is stored.

S has a row for each point i and each row a of the loss's square root R_i, and a column for each
parameter: S = [R_1 J_1; …; R_n J_n], (n·q, N). Row i·q + a belongs to point i and row a.

Chains of Linear layers have a root of their own (`ChainRoot`), with the fast forms of the paper.
All other models have a `LayeredRoot`, with one `LayerJacobian` for each parameter. The matrices
(`FactoredMatrix`, `TangentKernel`, `SampledEntries`) know neither: they ask a `Root`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.ranks import OneRank

__all__ = ["KernelParts", "PairTerms", "Root"]

# Dense rows of this many points are multiplied at a time.
_CROSS_POINTS = 64
_ALONE = OneRank()


class KernelParts(Protocol):
    """What the entries of K = S D⁻¹ Sᵀ are made of, for a fixed D."""

    @property
    def tile_points(self) -> int:
        """The number of points of a tile that suits `tile` best."""

    def diagonal(self) -> Tensor:
        """The n·q diagonal entries."""

    def tile(self, first: slice, second: slice, out: Tensor, space: Tensor) -> None:
        """Write K between all rows of some points and all rows of others.

        Args:
            first: a range of points.
            second: another one.
            out: what is written to, (rows of the first, rows of the second). Neighbours within a
                row are neighbours in memory.
            space: memory for one tile, in the precision of ``out``, to be overwritten.
        """

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Blocks between any rows (B, m) and columns (B, k): (B, m, k)."""

    def batch_floats(self, num_rows: int, num_cols: int) -> int:
        """Floats that one block of that size takes in `entries`, besides the result."""


class PairTerms(Protocol):
    """The terms v_k(t)ᵀ v_m(t) of entries H_km, one by one, for Monte Carlo entries."""

    @property
    def bytes_per_point(self) -> int:
        """Bytes for each pair and point that `prepare` and `weights` take."""

    def nonzero(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Which pairs are not known to be zero, a mask."""

    def prepare(self, rows: Tensor, cols: Tensor) -> None:
        """Look at some pairs; the other methods are then about these."""

    def weights(self) -> Tensor:
        """w(t) = ‖v_k(t)‖ ‖v_m(t)‖ of all points, in the order in which they are drawn, (m, n)."""

    def at(self, points: Tensor) -> Tensor:
        """The terms at some points of each pair, numbered as the data is, (m, c)."""


class Root(ABC):
    """S, (n·q) x N."""

    @property
    @abstractmethod
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""

    @property
    @abstractmethod
    def num_points(self) -> int:
        """The number n of points."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number q of rows of each point."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type of the entries."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are stored."""

    @property
    @abstractmethod
    def num_stored(self) -> int:
        """The number of floats that are stored at this time."""

    @property
    def num_stored_with_entries(self) -> int:
        """The number of floats that are stored once entries were asked for."""
        return self.num_stored

    @property
    @abstractmethod
    def kernel_flops(self) -> float:
        """Flops for each entry of a dense kernel, for predictions of time."""

    @property
    def has_quick_diagonal(self) -> bool:
        """Whether the diagonal costs less than making the root."""
        return False

    @property
    def ranks(self) -> OneRank:
        """The processes that have the points; this one alone, as a rule."""
        return _ALONE

    @abstractmethod
    def product(self, rhs: Tensor, workspace: int) -> Tensor:
        """SᵀS times (N, k)."""

    @abstractmethod
    def apply(self, rhs: Tensor, workspace: int) -> Tensor:
        """S times (N, k): (n·q, k)."""

    @abstractmethod
    def apply_transposed(self, values: Tensor, workspace: int) -> Tensor:
        """Sᵀ times (n·q, k): (N, k)."""

    @abstractmethod
    def columns(self, index: Tensor) -> Tensor:
        """Columns of S, (n·q, k)."""

    @abstractmethod
    def diagonal(self, workspace: int) -> Tensor:
        """The diagonal of SᵀS, (N,)."""

    @abstractmethod
    def block(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """A block of SᵀS; symmetric to the last bit where rows and columns are the same."""

    def block_bytes(self, rows: Tensor, cols: Tensor, workspace: int) -> int:
        """Bytes of temporary memory that `block` takes beyond its result."""
        return workspace

    @abstractmethod
    def blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of equal size, (B, m), (B, k) → (B, m, k)."""

    def partial_product(self, rhs: Tensor, workspace: int) -> Tensor:
        """The term of this rank's points in SᵀS, times (N, k)."""
        return self.product(rhs, workspace)

    def partial_blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of the term of this rank's points in SᵀS."""
        return self.blocks(rows, cols, workspace)

    @abstractmethod
    def pairs(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Entries of SᵀS, one for each pair of indices, (m,)."""

    @abstractmethod
    def orders(self) -> dict[str, Tensor]:
        """Orders of the parameters that follow the network, by name, each a permutation (N,)."""

    @abstractmethod
    def point_norms(self) -> Tensor:
        """‖S_i‖_F², the share of each point in the trace, (n,), in double precision."""

    @abstractmethod
    def point_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Random numbers that are alike for points whose rows are alike, (features, n)."""

    @abstractmethod
    def select(self, points: Tensor, scale: Tensor) -> Root:
        """The rows of some points, multiplied by a number for each of them."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Root:
        """The same root in another precision."""

    @abstractmethod
    def kernel_parts(self, inverse_damping: Tensor) -> KernelParts:
        """What S D⁻¹ Sᵀ is made of, for 1/D (N,)."""

    def cross(self, other: Root, inverse_damping: Tensor, workspace: int) -> Tensor:
        """S D⁻¹ S'ᵀ with the root S' of other points, for 1/D (N,): (n·q, n'·q')."""
        index = torch.arange(self.layout.size, device=self.device)
        scale = inverse_damping.to(self.dtype)[:, None]
        parts = []
        for points in torch.arange(other.num_points, device=self.device).split(_CROSS_POINTS):
            some = other.select(points, torch.ones(len(points)).to(index.device, other.dtype))
            parts.append(self.apply(some.columns(index).T.to(self.dtype) * scale, workspace))
        return torch.cat(parts, 1)

    @abstractmethod
    def pair_terms(self, order: Tensor | None, workspace: int) -> PairTerms:
        """Terms of single entries, with weights in an order of the points (None: their own)."""
