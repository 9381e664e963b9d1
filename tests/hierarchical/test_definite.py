"""compress(damping=λ) always factorizes, also where it has to be repaired."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hcurv
from cases import CASES, DTYPES, NETWORKS, normal, pairwise
from matrices import KERNELS, compress_tree, kernel_matrix

OPTIONS = {"leaf_size": 20}


@pairwise(
    tolerance=(3e-1, 1e-2, 1e-4),
    relative=(1e-1, 1e-3, 1e-6),
    kernel=KERNELS,
    dimension=(1, 3),
    dtype=DTYPES,
)
def test_kernel_matrices(
    kernel: str, dimension: int, tolerance: float, relative: float, dtype: torch.dtype
) -> None:
    dense = kernel_matrix(kernel, 233, dimension).to(dtype)
    damping = relative * float(torch.linalg.eigvalsh(dense.double())[-1])
    plain = compress_tree(dense, tolerance=tolerance, leaf_size=20).relative_error(dense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hcurv.CompressionWarning)
        matrix = compress_tree(dense, tolerance=tolerance, damping=damping, **OPTIONS)
    assert float(torch.linalg.eigvalsh(matrix.to_dense().double())[0]) > -0.6 * damping
    assert matrix.relative_error(dense) <= max(1.6 * plain, tolerance)
    for factor in (1.0, 3.0, 1e4):
        with warnings.catch_warnings():
            if dtype == torch.float32 and factor * relative < 1e-4:  # residuals may be large
                warnings.simplefilter("ignore", hcurv.AccuracyWarning)
            matrix.factorize(factor * damping)


@pairwise(name=NETWORKS, dtype=DTYPES, relative=(1e-2, 1e-5))
def test_gauss_newton(name: str, dtype: torch.dtype, relative: float) -> None:
    operator = CASES[name].operator(dtype)
    largest = max(1.0, float(torch.linalg.eigvalsh(operator.to_dense().double())[-1]))
    matrix = compress_tree(operator, max_rank=3, leaf_size=8, damping=relative * largest)
    assert matrix.record.damping == relative * largest
    matrix.factorize(relative * largest)


@given(
    size=st.integers(1, 90),
    leaf_size=st.integers(1, 40),
    max_rank=st.integers(0, 6),
    seed=st.integers(0, 100),
    power=st.integers(-6, 2),
)
def test_any_shape(size: int, leaf_size: int, max_rank: int, seed: int, power: int) -> None:
    factor = normal(size, 9, seed=seed)
    matrix = compress_tree(
        factor @ factor.T,
        max_rank=max_rank,
        leaf_size=leaf_size,
        seed=seed,
        damping=10.0**power,
    )
    matrix.factorize(10.0**power)


def test_nothing_changes_where_nothing_is_wrong() -> None:
    dense = kernel_matrix("gaussian", 120, 2)
    plain = compress_tree(dense, tolerance=1e-3, leaf_size=20)
    definite = compress_tree(dense, tolerance=1e-3, damping=100.0, **OPTIONS)
    assert torch.equal(plain.to_dense(), definite.to_dense())


def test_the_change_is_semi_definite_estimated_and_saved(tmp_path: Path) -> None:
    dense = kernel_matrix("gaussian", 200, 2)
    plain = compress_tree(dense, tolerance=0.0, max_rank=5, leaf_size=20)
    with pytest.warns(hcurv.CompressionWarning, match="positive definite raised the relative"):
        definite = compress_tree(dense, tolerance=1e-2, max_rank=5, damping=1e-8, **OPTIONS)
    rough = compress_tree(dense, max_rank=5, damping=1e-8, **OPTIONS)
    values = torch.linalg.eigvalsh(rough.to_dense() - plain.to_dense())
    assert float(values[-1]) > 1e-3
    assert float(values[0]) > -1e-12
    assert rough.num_stored == plain.num_stored
    assert definite.estimated_error == pytest.approx(definite.relative_error(dense), rel=0.5)
    definite.save(tmp_path / "a.safetensors")
    assert hcurv.load(tmp_path / "a.safetensors").record == definite.record


def test_zero_rows_stay_zero() -> None:
    dense = kernel_matrix("gaussian", 200, 2)
    dense[50:60] = 0
    dense[:, 50:60] = 0
    definite = compress_tree(dense, tolerance=1e-1, damping=1e-6, **OPTIONS)
    assert not definite.diagonal()[50:60].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping must be a positive number.*got 0.0"),
        ({"damping": -1.0}, "damping must be a positive number"),
        ({"damping": float("nan")}, "damping must be a positive number"),
        ({"damping": float("inf")}, "damping must be a positive number"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress_tree(torch.eye(3), **options)


@pytest.mark.parametrize("damping", ["1e-3", True, torch.ones(3), {"0": 1.0}])
def test_dampings_that_are_no_numbers_are_refused(damping: object) -> None:
    with pytest.raises(TypeError, match=r"damping must be a positive number.*each row"):
        compress_tree(torch.eye(3), damping=damping)
