"""Monte Carlo entries: the paper's fast sampling (Algorithm 3.1) and a stratified variant.

An entry is a sum over points, H_km = Σ_t v_k(t)ᵀ v_m(t). With P_km(t) = w(t)/S, where
w(t) = ‖v_k(t)‖ ‖v_m(t)‖ and S = Σ_t w(t) (Eq. 3.6), the estimator of Eq. 3.7 over c samples is

    H̃_km = (S/c) Σ_j ρ(t_j),    ρ(t) = v_k(t)ᵀ v_m(t) / w(t)  in [-1, 1].

For a chain of Linear layers norms are products, ‖v_k(t)‖ = ‖C_t[:, μ]‖ |x_t[ν]| (`chain_pairs`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hcurv.indexing import (
    Index,
    Indices,
    check_count,
    check_seed,
    resolve_blocks,
    resolve_indices,
    resolve_pairs,
)
from hcurv.memory import require_bytes
from hcurv.network.point_order import similarity_order
from hcurv.network.random_draws import hashed_uniforms, invert_cumulative
from hcurv.network.root import PairTerms, Root
from hcurv.network.sampling_accuracy import bound_factor
from hcurv.precision import FullPrecision

__all__ = ["SampledEntries", "Scheme"]

Scheme = Literal["importance", "stratified", "uniform"]
_SCHEMES = ("importance", "stratified", "uniform")
# Points are ordered by this many random projections of their derivatives. More projections tell
# points apart better, and sorting takes longer; it was set by hand.
_NUM_FEATURES = 12


class SampledEntries(FullPrecision):
    """An unbiased estimate H̃ of every entry of H, which depends on nothing but the seed.

    Entry (k, m) has the same value whichever call asks for it, and H̃ is symmetric. The diagonal
    is exact (paper, remark to Theorem 3.2), and so are entries whose probabilities all vanish.

    Made by `GaussNewton.sample_entries`.

    Args:
        root: the root S of the matrix.
        num_samples: c, the number of samples per entry.
        scheme: "importance" draws points independently from P_km. "stratified" draws from P_km,
            too, by one set of stratified uniform numbers for all entries, with the points ordered
            by similarity. "uniform" draws points with equal probability, for comparison.
        seed: the seed of all draws.
        workspace: bytes of temporary memory that one call may use beyond its result.
        cache_bytes: most bytes of temporaries in the loop over pairs. Temporaries that fit into
            the cache of the processor are faster; results do not depend on it.

    Attributes:
        num_samples: c.
        scheme: the scheme.
        seed: the seed.

    Raises:
        InsufficientMemoryError: the norms of all columns do not fit into free memory.

    Examples:
        >>> S = H.sample_entries(num_samples=500, scheme="stratified", seed=0)
        >>> S
        SampledEntries(N=51, num_samples=500, scheme='stratified', seed=0)
        >>> A = hcurv.compress(S, tolerance=1e-1)
        >>> A.shape
        (51, 51)
    """

    def __init__(
        self,
        root: Root,
        num_samples: int,
        scheme: Scheme,
        seed: int,
        workspace: int,
        cache_bytes: int = 2**24,
    ) -> None:
        self.num_samples = check_count(num_samples, "num_samples")
        if scheme not in _SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(_SCHEMES)}; got {scheme!r}")
        self.scheme: Scheme = scheme
        self.seed = check_seed(seed)
        require_bytes(
            32 * self.num_samples,
            root.device,
            f"drawing num_samples = {self.num_samples} points",
            ("choose a smaller num_samples", "use the exact entries"),
        )
        self._root = root
        self._workspace = workspace
        self._cache_bytes = cache_bytes
        generator = torch.Generator().manual_seed(self.seed)
        self._order: Tensor | None = None
        if scheme == "stratified":
            self._order = similarity_order(root.point_features(_NUM_FEATURES, generator))
            jitter = torch.rand(num_samples, dtype=torch.float64, generator=generator)
            strata = torch.arange(num_samples, dtype=torch.float64)
            self._uniforms = ((strata + jitter) / num_samples).to(self.device)
        self._terms: PairTerms = root.pair_terms(self._order, workspace)

    def __repr__(self) -> str:
        """Size and scheme in one line."""
        return (
            f"SampledEntries(N={self.shape[0]}, num_samples={self.num_samples},"
            f" scheme={self.scheme!r}, seed={self.seed})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._root.layout.size, self._root.layout.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self._root.dtype

    @property
    def device(self) -> torch.device:
        """The device on which entries are computed."""
        return self._root.device

    def diagonal(self) -> Tensor:
        """The N diagonal entries, exactly.

        Examples:
            >>> torch.allclose(H.sample_entries(10).diagonal(), H.diagonal())
            True
        """
        with torch.no_grad():
            return self._root.diagonal(self._workspace)

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols`` of H̃.

        Args:
            rows: a list, range, slice, array, tensor or mask.
            cols: the same for the columns.

        Examples:
            >>> H.sample_entries(10).block([0, 3], slice(None)).shape
            torch.Size([2, 51])
        """
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
        num_cols = col_index.numel()
        result = self._empty(row_index.numel(), num_cols)
        # Index tensors for all pairs take memory, so a few rows are evaluated at a time.
        step = max(1, self._workspace // (128 * max(1, num_cols)))
        for target, some in zip(result.split(step), row_index.split(step), strict=True):
            values = self._pairs(some.repeat_interleave(num_cols), col_index.repeat(some.numel()))
            target.copy_(values.view(target.shape))
        return result

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks H̃[rows[b], cols[b]] of equal size.

        Args:
            rows: integers, (B, m).
            cols: integers, (B, k).

        Returns:
            (B, m, k).

        Examples:
            >>> rows, cols = torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)
            >>> H.sample_entries(10).blocks(rows, cols).shape
            torch.Size([2, 3, 4])
        """
        rows, cols = resolve_blocks(rows, cols, self.shape[0], self.device)
        num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
        result = self._empty(num_blocks * num_rows, num_cols)
        # As in `block`, a few rows are evaluated at a time; they may belong to several blocks.
        step = max(1, self._workspace // (128 * max(1, num_cols)))
        for some in torch.arange(num_blocks * num_rows, device=self.device).split(step):
            first = rows.reshape(-1)[some].repeat_interleave(num_cols)
            second = cols[some.div(num_rows, rounding_mode="floor")].view(-1)
            result[some] = self._pairs(first, second).view(some.numel(), num_cols)
        return result.view(num_blocks, num_rows, num_cols)

    def orders(self) -> dict[str, Tensor]:
        """Orders of the parameters that follow the network, by name, as `GaussNewton.orders`.

        Examples:
            >>> sorted(H.sample_entries(10).orders())
            ['layer-input-output', 'layer-output-input']
        """
        return self._root.orders()

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """The entries H̃[rows[j], cols[j]], elementwise.

        Args:
            rows: indices, as a list, array or tensor.
            cols: as many indices.

        Examples:
            >>> S = H.sample_entries(10)
            >>> bool(S.pairs([3, 7], [7, 3]).diff() == 0)
            True
        """
        return self._pairs(*resolve_pairs(rows, cols, self.shape[0], self.device))

    def error_bound(self, rows: Index, cols: Index, delta: float) -> Tensor:
        """A bound that |H − H̃| exceeds with probability delta at most, for each entry.

        It is η/√c · ‖v_k‖ ‖v_m‖ with η = 1 + √(8 log(1/δ)) (paper, Eq. 3.9). The stratified scheme
        draws independently from strata of equal probability, so that the same proof covers it.

        Args:
            rows: rows of the block.
            cols: columns of the block.
            delta: δ, the probability of a larger error, in (0, 1).

        Returns:
            The bound for each entry of the block, (rows, cols); zero on the diagonal of H.

        Raises:
            ValueError: ``delta`` is not in (0, 1), or the scheme is "uniform", which has no bound.

        Examples:
            >>> few, many = H.sample_entries(100), H.sample_entries(10_000)
            >>> ratio = few.error_bound([0], [5], 0.1) / many.error_bound([0], [5], 0.1)
            >>> round(float(ratio), 6)
            10.0
        """
        if self.scheme == "uniform":
            raise ValueError("the bound holds for 'importance' and 'stratified', not 'uniform'")
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
        norms = self.diagonal().sqrt()
        factor = bound_factor(delta) / math.sqrt(self.num_samples)
        bound = factor * norms[row_index][:, None] * norms[col_index]
        return bound.masked_fill_(row_index[:, None] == col_index, 0.0)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        result = self._empty(rows.numel()).zero_()
        # The draws depend on the unordered pair: H̃ is symmetric.
        first, second = torch.minimum(rows, cols), torch.maximum(rows, cols)
        index = self._terms.nonzero(first, second).nonzero().squeeze(1)
        if not index.numel():
            return result
        # torch sums a single row in another order than several rows. An entry must not depend on
        # what else is asked for, so at least two rows are always evaluated together.
        if index.numel() == 1:
            index = index.expand(2)
        step = max(2, min(self._workspace, self._cache_bytes) // self._bytes_per_pair)
        if index.numel() % step == 1:
            index = torch.cat([index, index[-1:]])
        for some in index.split(step):
            result[some] = self._estimate(first[some], second[some])
        return result

    @property
    def _bytes_per_pair(self) -> int:
        per_point = 8 + self._terms.bytes_per_point
        return per_point * self._root.num_points + (48 + 4 * self.dtype.itemsize) * self.num_samples

    def _estimate(self, first: Tensor, second: Tensor) -> Tensor:
        """H̃ of some pairs; the value of a pair does not depend on the other pairs."""
        num_points = self._root.num_points
        self._terms.prepare(first, second)
        masses = self._terms.weights()
        cumulative = torch.cumsum(masses, 1, dtype=torch.float64)
        total = cumulative[:, -1]
        uniforms = self._draw(first, second)
        if self.scheme == "uniform":
            points = (uniforms * num_points).long()
        else:
            points = invert_cumulative(cumulative, uniforms)
        points.clamp_(max=num_points - 1)
        drawn = masses.gather(1, points)
        if self._order is not None:
            points = self._order[points]
        terms = self._terms.at(points)
        if self.scheme == "uniform":
            estimate = num_points * terms.mean(1, dtype=torch.float64)
        else:
            estimate = total * terms.div_(drawn).mean(1, dtype=torch.float64)
        estimate = torch.where(first == second, total, estimate)
        return torch.where(total > 0, estimate, 0.0).to(self.dtype)

    def _draw(self, first: Tensor, second: Tensor) -> Tensor:
        """Uniform numbers in [0, 1) for each pair, (pairs, c)."""
        if self.scheme == "stratified":
            return self._uniforms.expand(first.numel(), -1)
        return hashed_uniforms(self.seed, first, second, self.num_samples)
