"""Monte Carlo entries: the paper's fast sampling (Algorithm 3.1) and a stratified variant.

An entry is a sum over points, H_km = Σ_t v_k(t)ᵀ v_m(t). With P_km(t) = w(t)/S, where
w(t) = ‖v_k(t)‖ ‖v_m(t)‖ and S = Σ_t w(t) (Eq. 3.6), the estimator of Eq. 3.7 over c samples is

    H̃_km = (S/c) Σ_j ρ(t_j),    ρ(t) = v_k(t)ᵀ v_m(t) / w(t)  in [-1, 1].

Norms factorise, ‖v_k(t)‖ = ‖C_t[:, μ]‖ |x_t[ν]|, so that O(n Σ d_ℓ) numbers describe them all.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hcurv.entry_batches import resolve_blocks
from hcurv.indexing import Index, Indices, check_count, resolve_indices, resolve_pairs
from hcurv.layer_factors import LayerFactors
from hcurv.memory import require_bytes
from hcurv.point_order import similarity_order
from hcurv.products import diagonal

__all__ = [
    "SampledEntries",
    "SamplingError",
    "Scheme",
    "draw_points",
    "num_samples_for",
    "sampling_error",
]

Scheme = Literal["importance", "stratified", "uniform"]
_SCHEMES = ("importance", "stratified", "uniform")
_NUM_FEATURES = 12
_CACHE_BYTES = 2**24  # of temporaries in the loop over pairs


class SampledEntries:
    """H̃, an unbiased estimate of every entry of H; a deterministic function of the seed.

    Entry (k, m) has the same value whichever call asks for it, and H̃ is symmetric. The diagonal
    is exact (paper, remark to Theorem 3.2), and so are entries whose probabilities all vanish.

    Made by `GaussNewton.sample_entries`.

    Attributes:
        num_samples: c, the samples per entry.
        scheme: "importance": independent draws from P_km. "stratified": from P_km too, by one set
            of stratified uniform numbers for all entries, over points ordered by similarity.
            "uniform": independent draws of equal probability, for comparison.
        seed: of all draws.
    """

    def __init__(
        self, factors: LayerFactors, num_samples: int, scheme: Scheme, seed: int, workspace: int
    ) -> None:
        self.num_samples = check_count(num_samples, "num_samples")
        if scheme not in _SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(_SCHEMES)}; got {scheme!r}")
        self.scheme: Scheme = scheme
        self.seed = seed
        self._factors = factors
        self._workspace = workspace
        stored = (factors.num_units + factors.inputs.shape[0]) * factors.num_points
        require_bytes(
            stored * self.dtype.itemsize + workspace,
            self.device,
            f"sampling from {factors.num_points} points",
            ("use fewer data points", "use H.subsample(num_points) instead"),
        )
        generator = torch.Generator().manual_seed(seed)
        self._order: Tensor | None = None
        if scheme == "stratified":
            features = factors.jacobian.direction_features(_NUM_FEATURES, generator)
            self._order = similarity_order(features)
            jitter = torch.rand(num_samples, dtype=torch.float64, generator=generator)
            strata = torch.arange(num_samples, dtype=torch.float64)
            self._uniforms = ((strata + jitter) / num_samples).to(self.device)
        self._unit_norms = self._in_order(factors.jacobian.column_norms())
        self._input_norms = self._in_order(factors.inputs).abs()

    def __repr__(self) -> str:
        """Size and scheme in one line."""
        return (
            f"SampledEntries(N={self.shape[0]}, num_samples={self.num_samples},"
            f" scheme={self.scheme!r}, seed={self.seed})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._factors.num_parameters, self._factors.num_parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._factors.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Where the entries are computed."""
        return self._factors.inputs.device

    def diagonal(self) -> Tensor:
        """The N diagonal entries, exactly."""
        with torch.no_grad():
            return diagonal(self._factors, self._workspace)

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols`` of H̃."""
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
        num_cols = col_index.numel()
        result = self._factors.inputs.new_empty(row_index.numel(), num_cols)
        # The pairs take some index tensors; rows are taken in groups so that these stay small.
        group = max(1, self._workspace // (128 * max(1, num_cols)))
        for start in range(0, row_index.numel(), group):
            part = row_index[start : start + group]
            values = self._pairs(part.repeat_interleave(num_cols), col_index.repeat(part.numel()))
            result[start : start + group] = values.view(part.numel(), num_cols)
        return result

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks H̃[rows[b], cols[b]] of equal size: (B, m), (B, k) → (B, m, k)."""
        rows, cols = resolve_blocks(rows, cols, self.shape[0], self.device)
        num_blocks, num_rows, num_cols = *rows.shape, cols.shape[1]
        result = self._factors.inputs.new_empty(num_blocks * num_rows, num_cols)
        # As in `block`, in groups of rows, which may be of several blocks.
        group = max(1, self._workspace // (128 * max(1, num_cols)))
        places = torch.arange(num_blocks * num_rows, device=self.device)
        for part in places.split(group):
            first = rows.reshape(-1)[part].repeat_interleave(num_cols)
            second = cols[part.div(num_rows, rounding_mode="floor")].view(-1)
            result[part] = self._pairs(first, second).view(part.numel(), num_cols)
        return result.view(num_blocks, num_rows, num_cols)

    def orders(self) -> dict[str, Tensor]:
        """Orders of the parameters that follow the network, as `GaussNewton.orders`."""
        return self._factors.structural_orders()

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """The entries H̃[rows[j], cols[j]], elementwise."""
        return self._pairs(*resolve_pairs(rows, cols, self.shape[0], self.device))

    def error_bound(self, rows: Index, cols: Index, delta: float) -> Tensor:
        """|H − H̃| on ``rows`` x ``cols`` stays below this with probability 1 − delta each.

        It is η/√c · ‖v_k‖ ‖v_m‖ with η = 1 + √(8 log(1/δ)) (paper, Eq. 3.9); the stratified scheme
        draws independently from strata of equal probability, so the same proof covers it.

        Raises:
            ValueError: ``delta`` is not in (0, 1), or the scheme is "uniform", which has no bound.
        """
        if self.scheme == "uniform":
            raise ValueError("the bound holds for 'importance' and 'stratified', not 'uniform'")
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
        norms = self.diagonal().sqrt()
        factor = _eta(delta) / math.sqrt(self.num_samples)
        bound = factor * norms[row_index][:, None] * norms[col_index]
        return bound.masked_fill_(row_index[:, None] == col_index, 0.0)

    def _in_order(self, values: Tensor) -> Tensor:
        return values if self._order is None else values[:, self._order]

    def _pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        factors = self._factors
        result = factors.inputs.new_zeros(rows.numel())
        # The draws depend on the unordered pair: H̃ is symmetric.
        first = _Parameters.locate(factors, torch.minimum(rows, cols))
        second = _Parameters.locate(factors, torch.maximum(rows, cols))
        index = (~factors.jacobian.orthogonal(first.units, second.units)).nonzero().squeeze(1)
        if not index.numel():
            return result
        if index.numel() == 1:  # torch adds up a single row in another order than several
            index = index.expand(2)
        step = max(2, min(self._workspace, _CACHE_BYTES) // self._bytes_per_pair)
        # A last part of one row would again be added up in another order.
        if index.numel() % step == 1:
            index = torch.cat([index, index[-1:]])
        weights = _Weights(self._unit_norms, self._input_norms, min(step, index.numel()))
        for part in index.split(step):
            result[part] = self._estimate(first.select(part), second.select(part), weights)
        return result

    @property
    def _bytes_per_pair(self) -> int:
        size = self.dtype.itemsize
        return (8 + 2 * size) * self._factors.num_points + (48 + 4 * size) * self.num_samples

    def _estimate(self, first: _Parameters, second: _Parameters, weights: _Weights) -> Tensor:
        """H̃ of some pairs, row by row the same whatever the other rows are."""
        factors, num_points = self._factors, self._factors.num_points
        masses, cumulative = weights.of(first, second)
        total = cumulative[:, -1]
        uniforms = self._draw(first.flat, second.flat)
        if self.scheme == "uniform":
            points = (uniforms * num_points).long()
        else:
            points = _invert(cumulative, uniforms)
        points.clamp_(max=num_points - 1)
        drawn = masses.gather(1, points)
        if self._order is not None:
            points = self._order[points]
        terms = factors.jacobian.gram_at(first.units, second.units, points)
        for parameters in (first, second):
            terms *= factors.inputs.view(-1).take(parameters.inputs[:, None] * num_points + points)
        if self.scheme == "uniform":
            estimate = num_points * terms.mean(1, dtype=torch.float64)
        else:
            estimate = total * terms.div_(drawn).mean(1, dtype=torch.float64)
        estimate = torch.where(first.flat == second.flat, total, estimate)
        return torch.where(total > 0, estimate, 0.0).to(self.dtype)

    def _draw(self, first: Tensor, second: Tensor) -> Tensor:
        """Uniform numbers in [0, 1) for each pair, (pairs, c)."""
        if self.scheme == "stratified":
            return self._uniforms.expand(first.numel(), -1)
        return _hashed_uniforms(self.seed, first, second, self.num_samples)


class _Parameters(NamedTuple):
    """Flat indices with the units and inputs that they join."""

    flat: Tensor
    units: Tensor
    inputs: Tensor

    @classmethod
    def locate(cls, factors: LayerFactors, index: Tensor) -> _Parameters:
        return cls(index, *factors.locate(index))

    def select(self, part: Tensor) -> _Parameters:
        return _Parameters(*(values[part] for values in self))


class _Weights:
    """w(t) = ‖v_k(t)‖ ‖v_m(t)‖ and its running sums, in buffers that are used again and again."""

    def __init__(self, unit_norms: Tensor, input_norms: Tensor, num_pairs: int) -> None:
        self._tables = (unit_norms, input_norms)
        shape = (num_pairs, unit_norms.shape[1])
        self._weights, self._factor = unit_norms.new_empty(2, *shape)
        self._sums = torch.empty(shape, dtype=torch.float64, device=unit_norms.device)

    def of(self, first: _Parameters, second: _Parameters) -> tuple[Tensor, Tensor]:
        """Weights and running sums of some pairs, (pairs, n); valid until the next call."""
        count = first.flat.numel()
        weights, factor, sums = self._weights[:count], self._factor[:count], self._sums[:count]
        units, inputs = self._tables
        torch.index_select(units, 0, first.units, out=weights)
        for table, index in (
            (units, second.units),
            (inputs, first.inputs),
            (inputs, second.inputs),
        ):
            weights.mul_(torch.index_select(table, 0, index, out=factor))
        return weights, torch.cumsum(weights, 1, dtype=torch.float64, out=sums)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _FIRST, _SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(state: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on int64 with wrap-around."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * _FIRST
    state = (state ^ ((state >> 27) & (2**37 - 1))) * _SECOND
    return state ^ ((state >> 31) & (2**33 - 1))


def _hashed_uniforms(seed: int, first: Tensor, second: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1) that depend on seed and pair alone: no random state, any order of calls."""
    base = _mix(torch.tensor(_signed(seed % 2**64), device=first.device))
    key = _mix(_mix(base + first * _GOLDEN) + second * _GOLDEN)
    counter = torch.arange(1, count + 1, device=first.device) * _GOLDEN
    bits = _mix(key[:, None] + counter)
    return ((bits >> 11) & (2**53 - 1)).double().mul_(2.0**-53)


def _eta(delta: float) -> float:
    """η of the paper's Theorem 3.2."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1); got {delta}")
    return 1 + math.sqrt(8 * math.log(1 / delta))


def num_samples_for(epsilon: float, delta: float) -> int:
    """Samples c for |H_km − H̃_km| ≤ ε ‖v_k‖ ‖v_m‖ with probability 1 − δ: c ≥ η²/ε².

    Args:
        epsilon: the error wanted, relative to ‖v_k‖ ‖v_m‖.
        delta: the probability of failure allowed, in (0, 1).
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive; got {epsilon}")
    return math.ceil((_eta(delta) / epsilon) ** 2)


def draw_points(factors: LayerFactors, num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points drawn with probability p_t = ‖V(t)‖_F² / trace(H), merged, and their weights.

    A point drawn m times out of c has the weight m/(c·p_t): Σ weights · V(t)V(t)ᵀ is unbiased.

    Returns:
        Distinct points in increasing order, and the weight of each, in double precision.
    """
    norms = factors.point_norms()
    trace = norms.sum()
    if trace == 0:  # the matrix is zero: one point says it all
        return torch.zeros(1, dtype=torch.long, device=norms.device), norms.new_ones(1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_points, generator=generator, dtype=torch.float64).to(norms.device)
    points, counts = torch.unique(_invert(norms.cumsum(0), draws), return_counts=True)
    return points, counts * trace / (num_points * norms[points])


def _invert(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first positions where the cumulative weights exceed the given shares of the total.

    Such a position has a positive weight, also where rounding would reach the end.
    """
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    draws = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulative, draws, right=True)


class SamplingError(NamedTuple):
    """An estimate of ‖H̃ − H‖_F / ‖H‖_F and its standard error."""

    value: float
    standard_error: float


class _PairSource(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...

    def diagonal(self) -> Tensor: ...

    def pairs(self, rows: Tensor, cols: Tensor) -> Tensor: ...


def sampling_error(
    sampled: _PairSource, exact: _PairSource, num_pairs: int = 10_000, seed: int = 0
) -> SamplingError:
    """Estimate ‖H̃ − H‖_F / ‖H‖_F without forming either matrix.

    Both squared norms are estimated from the same entries (k, m), drawn with probability
    H_kk H_mm / trace(H)²; since H_km² ≤ H_kk H_mm, no draw can dominate ‖H‖_F².

    Args:
        sampled: the approximation, with ``pairs``.
        exact: the matrix, with ``pairs`` and ``diagonal``.
        num_pairs: entries to look at.
        seed: of the draw.

    Returns:
        The estimate, and its standard error by the delta method for a ratio.
    """
    check_count(num_pairs, "num_pairs", least=2)
    if sampled.shape != exact.shape:
        raise ValueError(f"the shapes differ: {sampled.shape} and {exact.shape}")
    weights = exact.diagonal().double()
    trace = weights.sum()
    if trace == 0:
        return SamplingError(0.0, 0.0)
    generator = torch.Generator(weights.device).manual_seed(seed)
    draws = torch.rand(
        2, num_pairs, generator=generator, dtype=torch.float64, device=weights.device
    )
    rows, cols = _invert(weights.cumsum(0), draws)
    density = weights[rows] * weights[cols]
    values = exact.pairs(rows, cols).double()
    errors = (sampled.pairs(rows, cols).double() - values).square() / density
    norms = values.square() / density
    ratio = errors.mean() / norms.mean()
    spread = (errors - ratio * norms).std() / (norms.mean() * math.sqrt(num_pairs))
    value = float(ratio.sqrt())
    return SamplingError(value, float(spread) / (2 * value) if value > 0 else 0.0)
