"""compress(damping=λ, tolerance=ε): (A + λI)⁻¹ is right to ε, against dense linear algebra."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import CASES, assert_close, both_dtypes, normal, seeded
from matrices import Plain, WithProduct, kernel_matrix


@cache
def network(name: str, dtype: torch.dtype = torch.float64) -> hcurv.GaussNewton:
    """A small network with some structure in its inputs: their size decays like 1/k."""
    inputs = (normal(120, 14) / torch.arange(1, 15)).to(dtype)
    if name == "classifier":
        model = seeded(lambda: nn.Sequential(nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, 5)))
        return hcurv.GaussNewton(model.to(dtype), nn.CrossEntropyLoss(), inputs)
    if name == "autoencoder":
        model = seeded(lambda: nn.Sequential(nn.Linear(14, 5), nn.Softplus(), nn.Linear(5, 14)))
        return hcurv.GaussNewton(model.to(dtype), nn.MSELoss(), (inputs, inputs))
    model = seeded(lambda: nn.Sequential(nn.Linear(14, 16), nn.Tanh(), nn.Linear(16, 1)))
    return hcurv.GaussNewton(model.to(dtype), nn.MSELoss(), (inputs, inputs[:, :1]))


class Truth:
    """H in double precision, and rows of a root of it."""

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense.double()
        self.values, self.vectors = torch.linalg.eigh(self.dense)
        self.values = self.values.clamp(min=0.0)
        self.largest = float(self.values[-1])
        weights = normal(200, self.values.numel(), seed=11)
        self.rows = (weights * self.values.sqrt()) @ self.vectors.T

    def variances(self, damping: float) -> Tensor:
        return ((self.rows @ self.vectors).square() / (self.values + damping)).sum(1)

    def error(self, matrix: hcurv.HMatrix, damping: float) -> Tensor:
        """E = Gᵀ (H − A) G in double precision."""
        own = matrix.to_dense().double()
        root = torch.linalg.cholesky(own + damping * torch.eye(len(own), dtype=own.dtype))
        half = torch.linalg.solve_triangular(root, self.dense - own, upper=False)
        return torch.linalg.solve_triangular(root, half.T, upper=False)

    def check(self, matrix: hcurv.HMatrix, damping: float, tolerance: float) -> None:
        """Variances are right to the tolerance, and E is what the record says."""
        factors = matrix.factorize(damping)
        found = factors.quadratic(self.rows.to(matrix.dtype), diagonal=True).double()
        wrong = (found / self.variances(damping) - 1).abs()
        # Rounding moves H by some units, which a solve multiplies by λ₁/λ.
        floor = 10 * torch.finfo(matrix.dtype).eps * self.largest / damping
        assert float(wrong.median()) < 1.3 * tolerance + floor
        assert float(wrong.quantile(0.95)) < 3 * tolerance + floor
        error = self.error(matrix, damping)
        assert float(torch.linalg.matrix_norm(error, 2)) < 1 + floor
        assert torch.allclose(matrix.diagonal().double(), self.dense.diagonal(), rtol=1e-2)
        assert matrix.tree.num_kept == int((self.dense.diagonal() > 0).sum())
        rms = float(error.norm()) / len(error) ** 0.5
        assert rms / 2 - floor < matrix.damped_error < 2 * rms + floor


NETWORKS = ("classifier", "autoencoder", "regression")


@pytest.mark.parametrize("ratio", [1e-1, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("name", NETWORKS)
def test_variances_are_right_to_the_tolerance(name: str, ratio: float) -> None:
    operator = network(name)
    truth = Truth(operator.to_dense())
    damping = ratio * truth.largest
    matrix = hcurv.compress(operator, damping=damping, tolerance=1e-2)
    truth.check(matrix, damping, 1e-2)
    assert matrix.variance_error < 1.5e-2
    assert matrix.record.damping == damping
    assert matrix.record.damped_tolerance == 1e-2


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("name", NETWORKS)
def test_variances_are_right_in_single_precision(name: str, ratio: float) -> None:
    operator = network(name, torch.float32)
    truth = Truth(operator.to_dense())
    damping = ratio * truth.largest
    truth.check(hcurv.compress(operator, damping=damping, tolerance=3e-2), damping, 3e-2)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-5])
def test_errors_follow_the_tolerance(tolerance: float) -> None:
    operator = network("classifier")
    truth = Truth(operator.to_dense())
    damping = 1e-3 * truth.largest
    truth.check(hcurv.compress(operator, damping=damping, tolerance=tolerance), damping, tolerance)


@pytest.mark.parametrize("ratio", [1e-2, 1e-5])
@pytest.mark.parametrize("size", [97, 128])
@pytest.mark.parametrize("source", [lambda dense: dense, WithProduct, Plain])
def test_kernel_matrices_of_any_source(source: Any, size: int, ratio: float) -> None:
    """Dense tensors, sources with products, and sources that have entries alone."""
    dense = kernel_matrix("gaussian", size, 2)
    truth = Truth(dense)
    damping = ratio * truth.largest
    matrix = hcurv.compress(source(dense), damping=damping, leaf_size=16)
    factors = matrix.factorize(damping)
    wrong = (factors.quadratic(truth.rows, diagonal=True) / truth.variances(damping) - 1).abs()
    assert float(wrong.median()) < 1e-2
    assert matrix.damped_error is not None


def test_tangent_kernels_are_compressed_for_a_damping() -> None:
    kernel = network("regression").kernel()
    truth = Truth(kernel.to_dense())
    damping = 1e-3 * truth.largest
    truth.check(hcurv.compress(kernel, damping=damping), damping, 1e-2)


@pytest.mark.parametrize("name", ["one point", "dead units", "zero inputs", "width one"])
def test_odd_networks_factorize_at_any_damping(name: str) -> None:
    operator = CASES[name].operator()
    largest = max(float(torch.linalg.eigvalsh(operator.to_dense())[-1]), 1e-3)
    for ratio in (1.0, 1e-4, 1e-8):
        matrix = hcurv.compress(operator, damping=ratio * largest)
        for factor in (1.0, 7.0, 1e5):
            matrix.factorize(factor * ratio * largest)


def test_the_smallest_matrices_are_compressed_for_a_damping() -> None:
    single = hcurv.compress(torch.tensor([[3.0]]), damping=1.0)
    assert float(single.factorize(1.0).solve(torch.ones(1))) == pytest.approx(0.25)
    zero = hcurv.compress(torch.zeros(4, 4), damping=2.0)
    assert_close(zero.factorize(2.0).solve(torch.ones(4)), torch.full((4,), 0.5).double())
    assert zero.damped_error == 0.0


def low_rank(size: int = 90) -> Tensor:
    """A matrix of rank 5 with three zero rows."""
    factor = normal(size, 5)
    factor[:3] = 0
    return factor @ factor.T


@both_dtypes
def test_a_global_part_keeps_the_diagonal_of_the_rest(dtype: torch.dtype, tmp_path: Path) -> None:
    dense = low_rank().to(dtype)
    dense[3:, 3:].diagonal().add_(torch.linspace(0, 0.5, 87))
    matrix = hcurv.compress(dense, damping=10.0, tolerance=0.1)
    assert matrix.global_rank == 5
    assert not matrix.tree.has_clusters
    assert matrix.tree.num_kept == 87
    assert matrix.num_stored == 5 * 87 + 128
    assert_close(matrix.diagonal(), dense.diagonal().double(), 1e3)
    # The largest eigenvectors take a little of the diagonal with them, which comes back to it.
    assert matrix.relative_error(dense) < 0.01
    assert_close(matrix.block([0, 7], [7, 40]), matrix.to_dense()[[0, 7]][:, [7, 40]].double())
    Truth(dense).check(matrix, 10.0, 1e-2)
    matrix.save(tmp_path / "a.safetensors")
    loaded = hcurv.load(tmp_path / "a.safetensors")
    assert torch.equal(loaded.to_dense(), matrix.to_dense())
    assert loaded.record == matrix.record
    assert loaded.variance_error == matrix.variance_error
    assert "a diagonal" in loaded.plot().get_suptitle()


def test_without_a_damping_a_global_part_may_stand_alone() -> None:
    matrix = hcurv.compress(low_rank(), tolerance=1e-2)
    assert matrix.tree.num_kept == 0
    assert matrix.damped_error is None
    assert matrix.variance_error is None


@pytest.mark.parametrize("floats_per_row", [3, 10, 40])
def test_limited_storage_is_kept_to_and_positive_definite(floats_per_row: int) -> None:
    operator = network("classifier")
    size = operator.shape[0]
    truth = Truth(operator.to_dense())
    damping = 1e-3 * truth.largest
    matrix = hcurv.compress(operator, damping=damping, max_storage=floats_per_row / size)
    assert matrix.num_stored <= floats_per_row * size
    assert torch.allclose(matrix.diagonal(), operator.diagonal(), rtol=1e-2)
    factors = matrix.factorize(damping)
    wrong = (factors.quadratic(truth.rows, diagonal=True) / truth.variances(damping) - 1).abs()
    alone = hcurv.baselines.LowRank(operator, floats_per_row).factorize(damping)
    others = (alone.quadratic(truth.rows, diagonal=True) / truth.variances(damping) - 1).abs()
    assert float(wrong.median()) < float(others.median())


def test_a_target_that_ranks_or_rounding_do_not_allow_is_warned_of() -> None:
    operator = network("classifier", torch.float32)
    largest = Truth(operator.to_dense()).largest
    options = {"max_rank": 2, "leaf_size": 16, "global_rank": 0}
    with pytest.warns(hcurv.CompressionWarning, match=r"variances are wrong.*Raise max_rank"):
        hcurv.compress(operator, damping=1e-3 * largest, tolerance=1e-2, **options)
    with pytest.warns(hcurv.CompressionWarning, match=r"with damping .* Use float64") as caught:
        matrix = hcurv.compress(operator, damping=1e-8 * largest, tolerance=1e-2)
    assert caught[0].filename == __file__
    with pytest.warns(hcurv.AccuracyWarning, match="relative residual"):
        matrix.factorize(1e-8 * largest)


@pytest.mark.parametrize("name", NETWORKS)
def test_factorizing_warns_where_variances_are_wrong_by_tens_of_per_cent(name: str) -> None:
    """It warns wherever they are wrong by more than 20 %, and nowhere below 5 %."""
    operator = network(name)
    truth = Truth(operator.to_dense())
    num_warned = num_silent = 0
    for tolerance in (1e-1, 1e-2, 1e-3, 1e-4):
        matrix = hcurv.compress(operator, tolerance=tolerance)
        for ratio in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
            damping = ratio * truth.largest
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    factors = matrix.factorize(damping)
                except hcurv.NotPositiveDefiniteError:
                    continue
            found = factors.quadratic(truth.rows, diagonal=True)
            wrong = float((found / truth.variances(damping) - 1).abs().median())
            num_warned, num_silent = num_warned + bool(caught), num_silent + (not caught)
            assert caught or wrong < 0.2, (tolerance, ratio, wrong)
            assert not caught or wrong > 0.05, (tolerance, ratio, wrong)
    assert num_warned > 0
    assert num_silent > 5


def test_the_warning_says_what_to_do_and_can_be_turned_off() -> None:
    operator = network("classifier")
    damping = 1e-5 * Truth(operator.to_dense()).largest
    rough = hcurv.compress(operator, tolerance=0.1)
    with pytest.warns(hcurv.AccuracyWarning, match=f"damping={damping:.1e}") as caught:
        rough.factorize(damping)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preconditioner = rough.factorize(damping, warn=False)
        hcurv.cg(
            operator, normal(operator.shape[0]), damping=damping, preconditioner=preconditioner
        )
        hcurv.compress(operator, damping=damping).factorize(damping / 2)
    larger = hcurv.compress(operator, damping=1e4 * damping)
    with pytest.warns(hcurv.AccuracyWarning, match=f"for a damping of {1e4 * damping:.1e}"):
        larger.factorize(damping)


def test_results_are_reproducible() -> None:
    operator = network("regression")
    first, second = (hcurv.compress(operator, damping=1e-3, seed=3) for _ in range(2))
    assert torch.equal(first.to_dense(), second.to_dense())
    assert first.record.damped_error == second.record.damped_error
