"""What `compress` chooses: global rank, leaf size, ordering; and how well it fits into storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import CASES, NETWORKS, both_dtypes, normal, seeded
from hcurv.experiments import datasets
from hcurv.hierarchical.parts.plan import RankProfile, tree_floats
from matrices import kernel_matrix


def spiked(size: int = 600, rank: int = 12) -> Tensor:
    """A band of a kernel matrix, with few large eigenvalues on top."""
    points = torch.linspace(0, 1, size, dtype=torch.float64)
    band = torch.exp(-((points[:, None] - points) * size / 8).square())
    factor = normal(size, rank, seed=3)
    return band + factor @ factor.T


@both_dtypes
def test_low_rank_needs_no_tree(dtype: torch.dtype) -> None:
    factor = normal(500, 20).to(dtype)
    matrix = hcurv.compress(factor @ factor.T, tolerance=1e-4)
    assert matrix.global_rank == 20
    assert matrix.num_stored == 500 * 20
    assert matrix.plan is not None
    assert matrix.plan.chosen.leaf_size == 0


@both_dtypes
def test_a_band_needs_no_global_part(dtype: torch.dtype) -> None:
    points = torch.linspace(0, 1, 1000, dtype=dtype)
    band = torch.exp(-((points[:, None] - points) * 300).square())
    matrix = hcurv.compress(band, tolerance=1e-3)
    assert matrix.global_rank == 0
    assert matrix.relative_error(band) < 2e-3
    assert matrix.compression_rate < 0.12


def test_deflation_is_not_forced_on_what_a_tree_does_better() -> None:
    """Taking the spike off disturbs the band: the tree alone is smaller."""
    dense = spiked()
    matrix = hcurv.compress(dense, tolerance=1e-3)
    assert matrix.relative_error(dense) < 1e-3
    for global_rank in (0, 12, 20):
        other = hcurv.compress(dense, tolerance=1e-3, global_rank=global_rank, leaf_size=32)
        assert matrix.num_stored <= 1.1 * other.num_stored


def test_the_plan_is_printable_and_reproducible() -> None:
    dense = spiked()
    first, second = (hcurv.compress(dense, tolerance=1e-2, seed=4) for _ in range(2))
    assert first.plan is not None
    assert first.plan == second.plan
    assert torch.equal(first.to_dense(), second.to_dense())
    text = str(first.plan)
    assert text.startswith("Plan for a relative error of 1.0e-02, N = 600")
    assert f"→ {first.global_rank:>11}" in text
    floats = [candidate.floats for candidate in (first.plan.chosen, *first.plan.others)]
    assert floats == sorted(floats)
    assert 0 in {c.global_rank for c in (first.plan.chosen, *first.plan.others)}


def test_nothing_is_planned_where_nothing_is_open() -> None:
    dense = spiked(100)
    matrix = hcurv.compress(dense, leaf_size=16, ordering="natural", global_rank=2)
    assert matrix.plan is None
    assert matrix.global_rank == 2
    assert matrix.record.leaf_size == 16


def digits_networks() -> dict[str, hcurv.GaussNewton]:
    images = datasets.digits()[0][:200]
    classifier = seeded(lambda: nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)))
    autoencoder = seeded(
        lambda: nn.Sequential(nn.Linear(64, 4), nn.Softplus(), nn.Linear(4, 64), nn.Sigmoid())
    )
    return {
        "classifier": hcurv.GaussNewton(classifier, nn.CrossEntropyLoss(), images),
        "autoencoder": hcurv.GaussNewton(autoencoder, hcurv.losses.HalfSquaredError(), images),
    }


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2])
@pytest.mark.parametrize("name", ["classifier", "autoencoder"])
def test_the_choice_is_near_the_best_of_a_grid(name: str, tolerance: float) -> None:
    operator = digits_networks()[name]
    dense = operator.to_dense()
    chosen = hcurv.compress(operator, tolerance=tolerance)
    error = chosen.relative_error(dense)
    assert error < 1.1 * tolerance
    best = chosen.num_stored
    for global_rank in (0, 16, 64):
        for leaf_size in (16, 64):
            other = hcurv.compress(
                operator,
                tolerance=max(error, 0.8 * tolerance),
                leaf_size=leaf_size,
                global_rank=global_rank,
            )
            if other.relative_error(dense) <= error:
                best = min(best, other.num_stored)
    assert chosen.num_stored <= 1.3 * best


@pytest.mark.parametrize("name", ["classifier", "autoencoder"])
def test_storage_is_kept_to_and_made_use_of(name: str) -> None:
    operator = digits_networks()[name]
    errors = []
    for share in (0.03, 0.12):
        matrix = hcurv.compress(operator, max_storage=share)
        assert matrix.compression_rate <= share
        assert matrix.compression_rate > 0.5 * share
        errors.append(matrix.relative_error(operator))
    assert errors[0] > 3 * errors[1]


def test_storage_and_tolerance_together() -> None:
    factor = normal(300, 4)
    matrix = hcurv.compress(factor @ factor.T, max_storage=0.5, tolerance=1e-3)
    assert matrix.num_stored == 300 * 4


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network(name: str) -> None:
    operator = CASES[name].operator()
    matrix = hcurv.compress(operator, tolerance=1e-3)
    assert matrix.relative_error(operator) < 3e-3
    assert matrix.num_stored <= operator.shape[0] ** 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("seed", [0, 1])
def test_tiny_matrices(size: int, seed: int) -> None:
    factor = normal(size, 3, seed=seed)
    dense = factor @ factor.T
    matrix = hcurv.compress(dense, tolerance=1e-6, seed=seed)
    assert matrix.relative_error(dense) < 1e-5
    assert float(matrix.compression_rate) <= 1.0
    zero = hcurv.compress(torch.zeros(size, size), tolerance=1e-6)
    assert zero.num_stored == 0


@pytest.mark.parametrize("share", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_storage(share: float) -> None:
    with pytest.raises(
        ValueError, match="max_storage, a share of N², must be positive and finite; got"
    ):
        hcurv.compress(torch.eye(4), max_storage=share)
    with pytest.raises(ValueError, match="max_storage needs products"):
        hcurv.compress(kernel_matrix("gaussian", 20, 1), max_storage=0.5, method="neighbors")


def test_a_global_rank_beyond_max_storage_is_refused() -> None:
    """The global part alone would take ten times what is allowed."""
    dense = kernel_matrix("gaussian", 200, 2)
    with pytest.raises(ValueError, match=r"Use global_rank=2 or less, or max_storage=0\.1 or more"):
        hcurv.compress(dense, max_storage=0.01, global_rank=20)
    matrix = hcurv.compress(dense, max_storage=0.1, global_rank=20)
    assert matrix.global_rank == 20
    assert matrix.compression_rate <= 0.1


def test_leaves_beyond_max_storage_are_refused() -> None:
    """With a fixed leaf size and no global part, the blocks of the leaves alone are too large."""
    dense = kernel_matrix("gaussian", 200, 2)
    with pytest.raises(
        ValueError, match=r"max_storage=0\.05 is too small.*Use max_storage=0\."
    ) as e:
        hcurv.compress(dense, max_storage=0.05, leaf_size=100, global_rank=0)
    share = float(str(e.value).split("Use max_storage=")[1].split()[0])
    matrix = hcurv.compress(dense, max_storage=share, leaf_size=100, global_rank=0)
    assert matrix.compression_rate <= share


@pytest.mark.parametrize("share", [1e-9, 0.19])
def test_storage_for_less_than_one_float_a_row_is_refused(share: float) -> None:
    dense = kernel_matrix("gaussian", 5, 2)
    with pytest.raises(ValueError, match=r"one float for each of 5 nonzero rows.*=0\.2 or more"):
        hcurv.compress(dense, max_storage=share)
    assert hcurv.compress(dense, max_storage=0.2).num_stored == 5
    assert hcurv.compress(torch.zeros(5, 5), max_storage=share).num_stored == 0


def test_comparing_a_tiny_network_says_which_storage_it_needs() -> None:
    model = seeded(lambda: nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"Use max_storage=0\.445 or more"):
        hcurv.compare(model, nn.MSELoss(), (normal(9, 2).float(), normal(9, 1).float()))


@both_dtypes
def test_tolerance_zero_finds_the_numerical_rank(dtype: torch.dtype) -> None:
    """Softmax outputs add up to 1, so that 12 points with 3 outputs make a rank of 24."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)
        )
    ).to(dtype)
    operator = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(12, 16).to(dtype))
    matrix = hcurv.compress(operator, tolerance=0.0)
    assert matrix.tree.num_kept == 0
    assert matrix.global_rank == 24
    # Sums of N products have rounding errors of about √N units, and how large they come out depends
    # on where the operands lie in memory.
    rounding = torch.finfo(dtype).eps * operator.shape[0] ** 0.5
    assert matrix.relative_error(operator) < 2 * rounding
    tree = hcurv.compress(operator, tolerance=0.0, global_rank=0)
    assert matrix.num_stored < 0.7 * tree.num_stored
    assert matrix.plan is not None
    assert matrix.plan.others[0].global_rank == 0


def test_tolerance_zero_keeps_the_tree_of_a_matrix_of_full_rank() -> None:
    points = torch.linspace(0, 1, 300, dtype=torch.float64)
    band = torch.exp(-((points[:, None] - points) * 200).square())
    matrix = hcurv.compress(band, tolerance=0.0)
    assert matrix.global_rank == 0
    assert matrix.relative_error(band) < 1e-12


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0])
def test_ranks_that_do_not_grow_bound_the_floats_of_a_tree(slope: float) -> None:
    lengths = (16, 32, 64, 128, 256, 512)
    ranks = tuple(5 * (length / 16) ** slope for length in lengths)
    whole = RankProfile(8000, 9.0, lengths, ranks, ranks, True)
    for count in range(2, len(lengths)):
        some = RankProfile(8000, 9.0, lengths[:count], ranks[:count], ranks[:count], True)
        for depth in (5, 7, 9):
            floats = tree_floats(8000, depth, whole)
            assert tree_floats(8000, depth, some.without_growth()) <= (1 + 1e-9) * floats


def test_orders_are_asked_for_once() -> None:
    operator, calls = CASES["classifier"].operator(), []

    class Counting(type(operator)):
        def orders(self) -> dict[str, Tensor]:
            calls.append(1)
            return super().orders()

    operator.__class__ = Counting
    for options in ({}, {"method": "neighbors"}, {"ordering": "layer-output-input"}):
        calls.clear()
        hcurv.compress(operator, leaf_size=8, **options)
        assert len(calls) == 1


def test_a_workspace_bounds_the_global_part() -> None:
    """A small one is refused before trees are tried, with one that suffices."""
    vectors = torch.linalg.qr(normal(400, 400)).Q
    values = torch.arange(1, 401, dtype=torch.float64) ** -0.7
    dense = vectors * values @ vectors.T
    dense = (dense + dense.T) / 2
    with pytest.raises(hcurv.InsufficientMemoryError, match=r"room for a global part of rank \d+"):
        hcurv.compress(dense, tolerance=1e-2, workspace=400 * 8 * 150)
    rough = hcurv.compress(dense, tolerance=0.4, workspace=400 * 8 * 250)
    assert rough.global_rank > 0
    assert rough.relative_error(dense) < 0.42
    with pytest.raises(ValueError, match="workspace must be"):
        hcurv.compress(dense, workspace=0)


@both_dtypes
def test_few_points_are_sketched_in_sample_space(dtype: torch.dtype) -> None:
    """With fewer rows of the root than parameters; zero rows included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 4)).to(dtype)
    inputs = torch.randn(40, 30, dtype=dtype)
    inputs[:, :3] = 0
    operator = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    assert operator.num_root_rows < operator.shape[0]
    for tolerance in (1e-1, 1e-3):
        matrix = hcurv.compress(operator, tolerance=tolerance)
        assert matrix.relative_error(operator) < 1.3 * tolerance
    exact = hcurv.compress(operator, tolerance=0)
    assert exact.relative_error(operator) < 1e3 * torch.finfo(dtype).eps
