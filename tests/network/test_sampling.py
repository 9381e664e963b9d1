"""Monte Carlo entries: unbiased, bounded, convergent, deterministic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gauss_newton import random_cases
from torch import nn

import hcurv
import oracles
from cases import CASES, DTYPES, Case, assert_close, labels, normal, pairwise, seeded
from hcurv.network.sampling import SampledEntries, Scheme

SCHEMES: tuple[Scheme, ...] = ("importance", "stratified", "uniform")
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
SOME_CASES = ("classifier", "regression", "autoencoder", "deep autoencoder", "dead units")


def network(num_points: int, wide: bool = False) -> hcurv.GaussNewton:
    """A network with enough points for statistics."""
    sizes = (6, 3, 12) if wide else (6, 5, 4)
    model = seeded(lambda: nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:])))
    loss = hcurv.losses.HalfSquaredError() if wide else nn.CrossEntropyLoss()
    return hcurv.GaussNewton(model.double(), loss, normal(num_points, 6).exp())


def relative_error(sampled: hcurv.SampledEntries, exact: torch.Tensor) -> float:
    estimate = sampled.block(slice(None), slice(None))
    return float((estimate - exact).norm() / exact.norm())


@every_scheme
@pytest.mark.parametrize("name", SOME_CASES)
def test_unbiased_with_the_bounded_variance(name: str, scheme: Scheme) -> None:
    operator = CASES[name].operator()
    exact, size = CASES[name].dense, operator.shape[0]
    rows, cols = labels(60, size, seed=5), labels(60, size, seed=6)
    num_samples, num_seeds = 3, 200
    draws = torch.stack(
        [
            operator.sample_entries(num_samples, scheme, seed).pairs(rows, cols)
            for seed in range(num_seeds)
        ]
    )
    expected = exact[rows, cols]
    spread = draws.std(0)
    floor = 1e-12 * exact.abs().max()
    z = (draws.mean(0) - expected) / (spread / math.sqrt(num_seeds) + floor)
    # 60 correlated z-scores of one distribution: beyond 5 is a bias, not chance.
    assert z.abs().max() < 5
    if scheme != "uniform":
        # Eq. 3.8; the factor allows for the spread of an estimated variance.
        bound = exact.diagonal()[rows] * exact.diagonal()[cols] / num_samples
        assert (spread.square() <= 1.5 * bound + floor).all()


@given(random_cases(), st.integers(1, 9), st.integers(0, 2**20))
def test_errors_stay_below_the_proven_bound(case: Case, num_samples: int, seed: int) -> None:
    operator = case.operator()
    exact = case.dense
    for scheme in SCHEMES[:2]:
        sampled = operator.sample_entries(num_samples, scheme, seed)
        # With this delta a violation is not to be expected in the lifetime of the project.
        bound = sampled.error_bound(slice(None), slice(None), delta=1e-12)
        error = (sampled.block(slice(None), slice(None)) - exact).abs()
        assert (error <= bound + 1e-12 * exact.abs().max()).all()


def test_bounds_hold_with_the_stated_probability() -> None:
    operator = network(40)
    exact = operator.to_dense()
    delta, violations, total = 0.2, 0, 0
    for seed in range(40):
        sampled = operator.sample_entries(4, "importance", seed)
        bound = sampled.error_bound(slice(None), slice(None), delta)
        violations += int(((sampled.block(slice(None), slice(None)) - exact).abs() > bound).sum())
        total += exact.numel()
    assert violations <= delta * total
    norms = exact.diagonal().sqrt()
    eta = 1 + math.sqrt(8 * math.log(1 / delta))
    off_diagonal = ~torch.eye(len(exact), dtype=torch.bool)
    assert_close(bound[off_diagonal], (eta / 2 * norms[:, None] * norms)[off_diagonal])
    assert (bound.diagonal() == 0).all()


@pytest.mark.parametrize("wide", [False, True])
def test_error_falls_like_the_inverse_square_root_of_the_samples(wide: bool) -> None:
    operator = network(300, wide)
    exact = operator.to_dense()
    counts = (4, 16, 64, 256, 1024)
    errors = [
        sum(relative_error(operator.sample_entries(c, "importance", s), exact) for s in range(3))
        for c in counts
    ]
    x, y = torch.tensor(counts).log(), torch.tensor(errors).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert -0.6 < slope < -0.4


@pytest.mark.parametrize("wide", [False, True])
def test_stratified_is_better_and_importance_beats_uniform(wide: bool) -> None:
    operator = network(500, wide)
    exact = operator.to_dense()
    # Stratification gains more with more samples. At 300 the wide network is still at a ratio of
    # about 0.66 on average, and only some seeds stay below 0.6.
    for num_samples in (10, 300, 1000) if wide else (10, 300):
        errors = {
            scheme: sum(
                relative_error(operator.sample_entries(num_samples, scheme, seed), exact)
                for seed in range(5)
            )
            for scheme in SCHEMES
        }
        assert errors["stratified"] < errors["importance"] < errors["uniform"]
    assert errors["stratified"] < 0.6 * errors["importance"]


def test_error_does_not_grow_with_the_data() -> None:
    small, large = network(50), network(5000)
    rows, cols = labels(500, small.shape[0], seed=1), labels(500, small.shape[0], seed=2)

    def error(operator: hcurv.GaussNewton) -> float:
        sampled = operator.sample_entries(20, "importance")
        scale = (operator.diagonal()[rows] * operator.diagonal()[cols]).sqrt()
        difference = sampled.pairs(rows, cols) - operator.pairs(rows, cols)
        return float((difference / scale.clamp(min=1e-300)).norm())

    assert error(large) < 1.5 * error(small)


@pairwise(name=CASES, scheme=SCHEMES, dtype=DTYPES)
def test_diagonal_and_structural_zeros_are_exact(
    name: str, dtype: torch.dtype, scheme: Scheme
) -> None:
    exact = CASES[name].dense
    size = exact.shape[0]
    sampled = CASES[name].operator(dtype).sample_entries(2, scheme, seed=7)
    everything = torch.arange(size)
    assert_close(sampled.diagonal(), exact.diagonal())
    assert_close(sampled.pairs(everything, everything), exact.diagonal())
    zero = exact.diagonal() == 0
    assert (sampled.block(zero, slice(None)) == 0).all()
    assert sampled.shape == (size, size)
    assert sampled.dtype == dtype
    assert isinstance(sampled, hcurv.EntrySource)


@every_scheme
@pytest.mark.parametrize("name", SOME_CASES)
def test_values_depend_on_seed_and_indices_alone(name: str, scheme: Scheme) -> None:
    operator = CASES[name].operator(torch.float32)
    sampled = operator.sample_entries(5, scheme, seed=3)
    whole = sampled.block(slice(None), slice(None))
    assert torch.equal(whole, whole.T)
    size = len(whole)
    rows, cols = labels(30, size, 8), labels(17, size, 9)
    assert torch.equal(sampled.block(rows, cols), whole[rows][:, cols])
    assert torch.equal(sampled.pairs(rows[:17], cols), whole[rows[:17], cols])
    assert sampled.pairs([4], [9]) == whole[4, 9]
    again = CASES[name].operator(torch.float32).sample_entries(5, scheme, seed=3)
    assert torch.equal(again.block(rows, cols), whole[rows][:, cols])
    for workspace, cache_bytes in ((2**28, 1), (2**28, 3000), (2**28, 10_000), (5000, 10_000)):
        slow = SampledEntries(operator.root, 5, scheme, 3, workspace, cache_bytes)
        assert torch.equal(slow.block(rows, cols), whole[rows][:, cols])
    assert sampled.block(rows, []).shape == (30, 0)
    assert sampled.block([], cols).shape == (0, 17)
    other = operator.sample_entries(5, scheme, seed=4)
    assert not torch.equal(other.block(slice(None), slice(None)), whole)


def test_many_points_and_single_entries_agree_to_the_last_bit() -> None:
    operator = network(50_000)
    sampled = operator.sample_entries(40_000, "importance")
    rows, cols = [1, 5, 7], [30, 2, 7]
    together = sampled.pairs(rows, cols)
    alone = [sampled.pairs([row], [col]) for row, col in zip(rows, cols, strict=True)]
    assert torch.equal(torch.cat(alone), together)


@every_scheme
def test_extreme_counts(scheme: Scheme) -> None:
    one = CASES["one point"]
    exact = one.dense
    if scheme != "uniform":
        for num_samples in (1, 50):
            sampled = one.operator().sample_entries(num_samples, scheme)
            assert_close(sampled.block(slice(None), slice(None)), exact, 1e3)
    operator = network(7)
    many = operator.sample_entries(5_000, scheme)
    assert relative_error(many, operator.to_dense()) < 0.05
    single = operator.sample_entries(1, scheme).block(slice(None), slice(None))
    assert torch.isfinite(single).all()


def test_number_of_samples_for_an_accuracy() -> None:
    eta = 1 + math.sqrt(8 * math.log(100))
    assert hcurv.num_samples_for(0.1, 0.01) == math.ceil(eta**2 / 0.01)
    operator = network(30)
    sampled = operator.sample_entries(hcurv.num_samples_for(0.2, 0.1))
    norms = operator.diagonal().sqrt()
    bound = sampled.error_bound([0], [9], 0.1)
    assert float(bound) <= 0.2 * float(norms[0] * norms[9]) * (1 + 1e-12)


@pytest.mark.parametrize("name", SOME_CASES)
def test_subsets_are_unbiased_and_keep_the_trace(name: str) -> None:
    case = CASES[name]
    operator, exact = case.operator(), case.dense
    num_points, num_seeds = 4, 250
    subsets = [operator.subsample(num_points, seed) for seed in range(num_seeds)]
    draws = torch.stack([subset.to_dense() for subset in subsets])
    scale = exact.diagonal().sqrt()
    floor = 1e-12 * exact.abs().max()
    z = (draws.mean(0) - exact) / (draws.std(0) / math.sqrt(num_seeds) + floor)
    assert z.abs().max() < 6
    assert scale.max() > 0
    for subset, draw in zip(subsets[:20], draws, strict=False):
        assert float(draw.trace()) == pytest.approx(float(exact.trace()), rel=1e-10)
        assert torch.linalg.eigvalsh(draw).min() >= -1e-12 * draw.trace()
        assert subset.num_points == len(subset.points.unique()) <= num_points
    mean_square = (draws - exact).square().sum((1, 2)).mean()
    assert mean_square <= 1.2 * exact.trace() ** 2 / num_points


@pytest.mark.parametrize("name", ["classifier", "autoencoder", "class weights", "logistic"])
def test_subsets_estimate_the_gradient(name: str) -> None:
    case = CASES[name]
    operator = case.operator()
    expected = oracles.gradient(case.build(), case.loss_of_outputs, case.inputs)
    draws = []
    for seed in range(150):
        subset = operator.subsample(5, seed)
        draws.append(subset.gradient(case.targets[subset.points]))
    stack = torch.stack(draws)
    spread = stack.std(0) / math.sqrt(len(draws)) + 1e-12 * expected.abs().max()
    assert ((stack.mean(0) - expected) / spread).abs().max() < 6


def test_a_subset_of_a_subset_and_of_nothing() -> None:
    operator = network(60)
    twice = operator.subsample(30, seed=1).subsample(10, seed=2)
    assert float(twice.diagonal().sum()) == pytest.approx(float(operator.diagonal().sum()))
    assert twice.points.max() < 60
    weights = torch.bincount(operator.subsample(60, seed=3).points, minlength=60)
    assert weights.max() == 1
    zero = hcurv.GaussNewton(nn.Linear(3, 1, bias=False), nn.MSELoss(), torch.zeros(5, 3))
    assert (zero.subsample(2).to_dense() == 0).all()
    assert (zero.sample_entries(3).block([0, 1], [1, 2]) == 0).all()
    assert hcurv.sampling_error(zero.sample_entries(3), zero) == (0.0, 0.0)


@every_scheme
def test_error_estimate_agrees_with_the_dense_error(scheme: Scheme) -> None:
    operator = network(200)
    sampled = operator.sample_entries(30, scheme)
    expected = relative_error(sampled, operator.to_dense())
    estimate = hcurv.sampling_error(sampled, operator, num_pairs=20_000)
    assert abs(estimate.value - expected) < 5 * estimate.standard_error
    assert estimate.standard_error < 0.1 * expected
    assert hcurv.sampling_error(operator, operator, 100) == (0.0, 0.0)


@pytest.mark.parametrize("count", [0, -3, 2.5, "10"])
def test_bad_counts_are_refused(count: object) -> None:
    operator = network(5)
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1; got"):
        operator.sample_entries(count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_points must be an integer from 1 to 5"):
        operator.subsample(count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_pairs must be an integer of at least 2"):
        hcurv.sampling_error(operator, operator, count)  # type: ignore[arg-type]


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = network(5)
    with pytest.raises(ValueError, match="importance, stratified, uniform; got 'random'"):
        operator.sample_entries(5, "random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_points must be an integer from 1 to 5; got 6"):
        operator.subsample(6)
    sampled = operator.sample_entries(5)
    for delta in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(
            ValueError, match="delta must be a finite number larger than 0 and smaller than 1"
        ):
            sampled.error_bound([0], [1], delta)
    with pytest.raises(ValueError, match="epsilon must be positive and finite; got 0"):
        hcurv.num_samples_for(0, 0.1)
    for epsilon in (math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must be positive and finite"):
            hcurv.num_samples_for(epsilon, 0.1)
    with pytest.raises(ValueError, match="not 'uniform'"):
        operator.sample_entries(5, "uniform").error_bound([0], [1], 0.1)
    with pytest.raises(ValueError, match="same length; got 1 and 2"):
        sampled.pairs([0], [1, 2])
    with pytest.raises(IndexError, match="rows must lie in"):
        sampled.block([999], [0])
    with pytest.raises(ValueError, match="must have one shape"):
        hcurv.sampling_error(sampled, network(5, wide=True))
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    with pytest.raises(
        hcurv.InsufficientMemoryError, match=r"(?s)sampling from 5 points.*subsample"
    ):
        operator.sample_entries(5)


def test_it_describes_itself() -> None:
    assert repr(network(5).sample_entries(7, "stratified", 2)) == (
        "SampledEntries(N=59, num_samples=7, scheme='stratified', seed=2)"
    )
