"""How accurate sampled entries are: the proven bound, and an estimate of the actual error."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hcurv.arguments import check_number
from hcurv.indexing import check_count, check_seed
from hcurv.network.random_draws import invert_cumulative
from hcurv.precision import full_precision

__all__ = ["SamplingError", "bound_factor", "num_samples_for", "sampling_error"]


def bound_factor(delta: float) -> float:
    """η = 1 + √(8 log(1/δ)), the factor of the paper's Theorem 3.2."""
    delta = check_number(delta, "delta", above=0, below=1)
    return 1 + math.sqrt(8 * math.log(1 / delta))


def num_samples_for(epsilon: float, delta: float) -> int:
    """The number of samples per entry that a given accuracy needs (paper, Theorem 3.2).

    With c ≥ η²/ε² samples, η = 1 + √(8 log(1/δ)), each entry satisfies
    |H_km − H̃_km| ≤ ε ‖v_k‖ ‖v_m‖ with probability 1 − δ.

    Args:
        epsilon: ε, the error allowed, relative to ‖v_k‖ ‖v_m‖ = √(H_kk H_mm).
        delta: δ, the probability of a larger error, in (0, 1).

    Examples:
        >>> hcurv.num_samples_for(epsilon=0.1, delta=0.05)
        3476
    """
    epsilon = check_number(epsilon, "epsilon", above=0)
    return math.ceil((bound_factor(delta) / epsilon) ** 2)


class SamplingError(NamedTuple):
    """An estimate of ‖H̃ − H‖_F / ‖H‖_F and its standard error. Made by `sampling_error`.

    Attributes:
        value: the estimate.
        standard_error: its standard error.

    Examples:
        >>> error = hcurv.SamplingError(value=0.05, standard_error=0.001)
        >>> error.value < 0.1
        True
    """

    value: float
    standard_error: float


class _PairSource(Protocol):
    """A matrix that can be asked for single entries."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def diagonal(self) -> Tensor: ...

    def pairs(self, rows: Tensor, cols: Tensor) -> Tensor: ...


@full_precision
def sampling_error(
    sampled: _PairSource, exact: _PairSource, num_pairs: int = 10_000, seed: int = 0
) -> SamplingError:
    """Estimate ‖H̃ − H‖_F / ‖H‖_F without forming either matrix.

    Both squared norms are estimated from the same entries (k, m), which are drawn with probability
    H_kk H_mm / trace(H)². Since H_km² ≤ H_kk H_mm, no single draw can dominate ‖H‖_F².

    Args:
        sampled: the approximation H̃, with ``pairs``.
        exact: the matrix H, with ``pairs`` and ``diagonal``.
        num_pairs: the number of entries to draw.
        seed: the seed of the draw.

    Returns:
        The estimate, and its standard error by the delta method for a ratio.

    Raises:
        ValueError: the shapes differ, or ``num_pairs`` is no integer of at least 2.

    Examples:
        >>> error = hcurv.sampling_error(H.sample_entries(1000), H)
        >>> error.value < 0.2
        True
    """
    check_count(num_pairs, "num_pairs", least=2)
    seed = check_seed(seed)
    for source, name in ((sampled, "sampled"), (exact, "exact")):
        if not (hasattr(source, "pairs") and hasattr(source, "diagonal")):
            raise TypeError(
                f"{name} must offer entries, diagonal() and pairs(rows, cols), as a GaussNewton and"
                f" its sample_entries do; got {type(source).__name__}"
            )
    if sampled.shape != exact.shape:
        raise ValueError(f"sampled and exact must have one shape: {sampled.shape}, {exact.shape}")
    weights = exact.diagonal().double()
    trace = weights.sum()
    if trace == 0:
        return SamplingError(0.0, 0.0)
    generator = torch.Generator(weights.device).manual_seed(seed)
    draws = torch.rand(
        2, num_pairs, generator=generator, dtype=torch.float64, device=weights.device
    )
    rows, cols = invert_cumulative(weights.cumsum(0), draws)
    density = weights[rows] * weights[cols]
    values = exact.pairs(rows, cols).double()
    errors = (sampled.pairs(rows, cols).double() - values).square() / density
    norms = values.square() / density
    ratio = errors.mean() / norms.mean()
    spread = (errors - ratio * norms).std() / (norms.mean() * math.sqrt(num_pairs))
    value = float(ratio.sqrt())
    return SamplingError(value, float(spread) / (2 * value) if value > 0 else 0.0)
