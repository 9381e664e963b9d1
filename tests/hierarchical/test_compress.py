"""hcurv.compress and HMatrix against dense matrices."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
from cases import CASES, DTYPES, assert_close, both_dtypes, normal, pairwise, seeded
from conformance import check_operator
from hcurv.hierarchical.parts.shape_groups import group_by_shape
from matrices import KERNELS, Plain, WithProduct, compress_tree, kernel_matrix


def error(actual: hcurv.HMatrix, dense: Tensor) -> float:
    return float((actual.to_dense().double() - dense).norm() / dense.norm())


def permutation(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def random_hss(depth: int, leaf: int, rank: int) -> Tensor:
    """A matrix that is exactly hierarchical with nested bases, positive definite."""
    size = leaf * 2**depth
    matrix = torch.zeros(size, size, dtype=torch.float64)
    bases = [normal(leaf, rank, seed=k) for k in range(2**depth)]
    step = leaf
    for level in range(depth, 0, -1):
        for node in range(0, 2**level, 2):
            left = slice(node * step, (node + 1) * step)
            right = slice((node + 1) * step, (node + 2) * step)
            block = bases[node] @ normal(rank, rank, seed=level * 1000 + node) @ bases[node + 1].T
            matrix[left, right] = block
            matrix[right, left] = block.T
        bases = [
            torch.cat([bases[k], bases[k + 1] @ normal(rank, rank, seed=7000 * level + k)])
            for k in range(0, 2**level, 2)
        ]
        step *= 2
    shift = 1.1 * torch.linalg.eigvalsh(matrix).abs().max()
    return matrix + shift * torch.eye(size, dtype=torch.float64)


def test_neighbors_find_the_few_large_columns_of_units_that_leaves_cut() -> None:
    """In an autoencoder the weights of one output unit depend on each other and little else."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(64, 4), nn.Softplus(), nn.Linear(4, 64), nn.Sigmoid())
    ).double()
    inputs = torch.rand(50, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = hcurv.GaussNewton(model, hcurv.losses.HalfSquaredError(), inputs**2).to_dense()
    options = {"leaf_size": 32, "ordering": "natural", "method": "neighbors"}
    for seed in range(4):
        matrix = compress_tree(dense, tolerance=1e-2, seed=seed, **options)
        assert error(matrix, dense) < 1.5e-2


@pairwise(dimension=(1, 2, 3, 6), method=("sketch", "neighbors"), kernel=KERNELS, dtype=DTYPES)
def test_kernel_matrices_reach_the_tolerance(
    kernel: str, dimension: int, method: str, dtype: torch.dtype
) -> None:
    dense = kernel_matrix(kernel, 389, dimension)
    errors = []
    for tolerance in (1e-1, 1e-2, 1e-3):
        matrix = compress_tree(dense.to(dtype), tolerance=tolerance, leaf_size=32, method=method)
        errors.append(error(matrix, dense))
        assert errors[-1] <= 4 * tolerance
        assert errors[-1] / 4 <= matrix.estimated_error <= 4 * errors[-1] + 1e-6
    assert errors[0] > errors[1] > errors[2]


def test_sketch_errors_are_close_to_the_tolerance() -> None:
    ratios = []
    for name in KERNELS:
        for dimension in (1, 2, 3, 6):
            dense = kernel_matrix(name, 300, dimension)
            for tolerance in (3e-2, 1e-3, 1e-5):
                matrix = compress_tree(dense, tolerance=tolerance, leaf_size=32)
                ratios.append(error(matrix, dense) / tolerance)
    assert max(ratios) <= 2.0
    assert torch.tensor(ratios).median() >= 0.1  # no more effort than asked for


def test_compression_saves_storage() -> None:
    dense = kernel_matrix("inverse multiquadric", 2000, 1)
    matrix = compress_tree(dense, tolerance=1e-6, leaf_size=64)
    assert error(matrix, dense) <= 2e-6
    assert matrix.compression_rate < 0.08
    assert matrix.num_stored == sum(
        t.numel()
        for t in (
            matrix.leaves.values,
            *(b.weights for level in matrix.levels for b in level.bases),
            *(c.values for level in matrix.levels for c in level.couplings),
        )
    )


@pytest.mark.parametrize("method", ["sketch", "neighbors"])
def test_exactly_hierarchical_matrices_are_exact(method: str) -> None:
    dense = random_hss(depth=3, leaf=16, rank=3)
    matrix = compress_tree(dense, tolerance=1e-11, leaf_size=16, ordering="natural", method=method)
    assert error(matrix, dense) <= 1e-11
    assert [int(ranks.max()) for ranks in matrix.ranks] == [3, 3, 3]


@pairwise(
    case=("classifier", "autoencoder", "dead units", "hand-written"),
    method=("sketch", "neighbors"),
    dtype=DTYPES,
)
def test_gauss_newton(case: str, method: str, dtype: torch.dtype) -> None:
    operator = CASES[case].operator(dtype)
    dense = operator.to_dense().double()
    matrix = compress_tree(operator, tolerance=0, leaf_size=8, method=method)
    assert error(matrix, dense) <= 1e4 * torch.finfo(dtype).eps
    loose = compress_tree(operator, tolerance=5e-2, leaf_size=8, method=method)
    assert error(loose, dense) <= 0.15
    assert loose.num_stored < matrix.num_stored


def test_sampled_entries() -> None:
    operator = CASES["autoencoder"].operator()
    dense = operator.to_dense()
    errors = []
    for count in (4, 200):
        sampled = operator.sample_entries(count, seed=1)
        matrix = compress_tree(sampled, tolerance=5e-2, leaf_size=16)
        assert matrix.record.method == "neighbors"
        errors.append(error(matrix, dense))
    assert errors[1] <= 0.15
    assert errors[1] < errors[0] / 2


@both_dtypes
def test_conformance(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 101, 2).to(dtype)
    matrix = compress_tree(dense, tolerance=1e-2, leaf_size=10)
    check_operator(matrix, matrix.block(slice(None), slice(None)).double())


@pairwise(
    size=(1, 2, 3, 5, 13, 31, 64, 97), leaf_size=(1, 2, 7, 200), method=("sketch", "neighbors")
)
def test_sizes(size: int, leaf_size: int, method: str) -> None:
    dense = kernel_matrix("gaussian", size, 2)
    matrix = compress_tree(dense, tolerance=0, leaf_size=leaf_size, method=method)
    assert error(matrix, dense) <= 1e-10
    check_entries(matrix)


def check_entries(matrix: hcurv.HMatrix) -> None:
    """block, pairs, diagonal and product describe the same symmetric matrix."""
    size = matrix.shape[0]
    dense = matrix.to_dense()
    assert_close(dense, dense.T)
    assert_close(matrix.block(slice(None), slice(None)), dense)
    index = torch.arange(size)
    assert_close(matrix.pairs(index, index.flip(0)), dense[index, index.flip(0)])
    assert_close(matrix.diagonal(), dense.diagonal())
    rows, cols = permutation(size)[: size // 2 + 1], permutation(size + 1)[: size // 3] % size
    assert_close(matrix.block(rows, cols), dense[rows][:, cols])


@given(
    size=st.integers(1, 90),
    leaf_size=st.integers(1, 40),
    max_rank=st.integers(0, 12),
    num_zero=st.integers(0, 30),
    seed=st.integers(0, 100),
    product=st.booleans(),
)
def test_any_shape(
    size: int, leaf_size: int, max_rank: int, num_zero: int, seed: int, product: bool
) -> None:
    factor = normal(size, 4, seed=seed)
    factor[permutation(size)[:num_zero]] = 0
    dense = factor @ factor.T
    matrix = compress_tree(
        dense,
        max_rank=max_rank,
        leaf_size=leaf_size,
        seed=seed,
        method="sketch" if product else "neighbors",
    )
    assert all(int(ranks.max()) <= max_rank for ranks in matrix.ranks)
    check_entries(matrix)
    if max_rank >= 4:
        assert_close(matrix.to_dense(), dense, 1e5)
    assert matrix.tree.zero_rows.numel() == int((dense.diagonal() == 0).sum())


def test_products_are_linear_and_symmetric() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 150, 3), tolerance=1e-2, leaf_size=16)
    left, right = normal(150, 4, seed=3), normal(150, 4, seed=4)
    assert_close(matrix @ (2 * left - right), 2 * (matrix @ left) - matrix @ right, 1e3)
    assert_close(left.T @ (matrix @ right), (matrix @ left).T @ right, 1e3)
    assert_close(torch.stack([matrix @ c for c in left.T], 1), matrix @ left)


def test_given_order_makes_it_independent_of_the_numbering() -> None:
    dense = kernel_matrix("inverse multiquadric", 120, 2)
    order = permutation(120)
    options = {"tolerance": 1e-2, "leaf_size": 16, "seed": 5}
    matrix = compress_tree(dense, ordering="natural", **options)
    shuffled = compress_tree(dense[order][:, order], ordering=order.argsort(), **options)
    assert_close(shuffled.to_dense(), matrix.to_dense()[order][:, order], 1e6)
    assert shuffled.num_stored == matrix.num_stored


def test_orderings() -> None:
    order = permutation(300)
    dense = kernel_matrix("gaussian", 300, 1, width=0.1)
    errors = {}
    for ordering in ("natural", "angle", "gram", "auto"):
        matrix = compress_tree(dense, max_rank=6, leaf_size=32, ordering=ordering)
        errors[ordering] = error(matrix, dense)
    assert max(errors["angle"], errors["gram"], errors["auto"]) < errors["natural"] / 3
    assert set(matrix.tree.scores) == {"natural", "angle", "gram"}
    assert matrix.tree.ordering == min(matrix.tree.scores, key=matrix.tree.scores.__getitem__)
    assert compress_tree(dense, ordering=order).tree.ordering == "given"


def test_structural_orders_of_networks() -> None:
    operator = CASES["classifier"].operator()
    matrix = compress_tree(operator, leaf_size=8)
    assert set(matrix.tree.scores) == {"layer-output-input", "layer-input-output"}
    named = compress_tree(operator, leaf_size=8, ordering="layer-output-input")
    assert named.tree.ordering == "layer-output-input"
    assert named.tree.scores == {}


def test_duplicated_and_zero_rows() -> None:
    base = kernel_matrix("gaussian", 40, 2)
    index = torch.arange(120) % 40
    dense = base[index][:, index]
    dense[7] = dense[:, 7] = 0
    dense[50] = dense[:, 50] = 0
    matrix = compress_tree(dense, tolerance=1e-8, leaf_size=16)
    assert error(matrix, dense) <= 1e-7
    assert matrix.tree.zero_rows.tolist() == [7, 50]
    assert not matrix.to_dense()[[7, 50]].any()


def test_zero_matrix() -> None:
    matrix = compress_tree(torch.zeros(20, 20), leaf_size=4)
    assert matrix.num_stored == 0
    assert matrix.estimated_error == 0
    check_operator(matrix, torch.zeros(20, 20, dtype=torch.float64))


def test_block_diagonal_matrix_has_rank_zero() -> None:
    dense = torch.block_diag(*(kernel_matrix("gaussian", 8, 2) for _ in range(8)))
    matrix = compress_tree(dense, tolerance=1e-3, leaf_size=8, ordering="natural")
    assert all(not ranks.any() for ranks in matrix.ranks)
    assert matrix.num_stored == 8 * 64
    assert torch.equal(matrix.to_dense(), dense)


@pytest.mark.parametrize("max_rank", [0, 1])
def test_tiny_rank_caps(max_rank: int) -> None:
    dense = kernel_matrix("gaussian", 70, 2)
    with pytest.warns(hcurv.CompressionWarning, match="rank cap"):
        matrix = compress_tree(dense, max_rank=max_rank, tolerance=1e-3, leaf_size=16)
    assert all(int(ranks.max()) == max_rank for ranks in matrix.ranks)
    check_entries(matrix)


def test_cap_warning_names_a_remedy_and_only_then() -> None:
    dense = kernel_matrix("gaussian", 200, 6)
    with pytest.warns(hcurv.CompressionWarning, match=r"Raise max_rank or leaf_size.*") as caught:
        matrix = hcurv.compress(dense, max_rank=3, tolerance=1e-4, leaf_size=32, global_rank=0)
    assert caught[0].filename == __file__
    assert matrix.record.num_capped > 0
    assert matrix.estimated_error > 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress_tree(dense, tolerance=1e-4, leaf_size=32)
        compress_tree(dense, max_rank=3, leaf_size=32)  # the cap is the request


def test_rounding_warning() -> None:
    dense = kernel_matrix("gaussian", 200, 3).float()
    with pytest.warns(hcurv.CompressionWarning, match="Use float64"):
        compress_tree(dense, tolerance=1e-9, leaf_size=32)


def test_a_repair_of_definiteness_beyond_the_tolerance_is_warned_of() -> None:
    """A rank cap on a matrix with many small eigenvalues, then a tiny damping."""
    dense = kernel_matrix("gaussian", 400, 3, width=0.4)
    options = {"tolerance": 1e-2, "leaf_size": 16, "global_rank": 0}
    plain = hcurv.compress(dense, **{**options, "tolerance": 0.0}, max_rank=30)
    with pytest.warns(
        hcurv.CompressionWarning, match=r"positive definite raised the relative error .* from .*"
    ) as caught:
        repaired = hcurv.compress(dense, damping=1e-6, max_rank=30, **options)
    assert caught[0].filename == __file__
    assert "Raise max_rank" in str(caught[0].message)
    assert repaired.estimated_error > 1.2 * plain.estimated_error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hcurv.compress(dense, damping=100.0, **options)


def test_build_records_do_not_change() -> None:
    """With max_storage several matrices are built; each keeps the record of its own build."""
    matrix = compress_tree(kernel_matrix("gaussian", 300, 2, width=0.1), max_storage=0.3)
    before = dict(matrix.record.seconds)
    assert {"planning", "samples", "interpolation", "error estimate"} <= set(before)
    matrix @ normal(300)
    assert matrix.record.seconds == before


@pytest.mark.parametrize("method", ["sketch", "neighbors"])
def test_seeds_reproduce_bit_for_bit(method: str) -> None:
    dense = kernel_matrix("gaussian", 200, 3)

    def build(seed: int) -> Tensor:
        options = {"tolerance": 1e-2, "leaf_size": 16, "method": method}
        return compress_tree(dense, seed=seed, **options).to_dense()

    state = torch.random.get_rng_state()
    assert torch.equal(build(3), build(3))
    assert not torch.equal(build(3), build(4))
    assert torch.equal(state, torch.random.get_rng_state())


def test_protocol_objects() -> None:
    dense = kernel_matrix("inverse multiquadric", 150, 2)
    options = {"tolerance": 1e-3, "leaf_size": 16}
    plain = compress_tree(Plain(dense), **options)
    assert plain.record.method == "neighbors"
    assert error(plain, dense) <= 4e-3
    product = compress_tree(WithProduct(dense), **options)
    assert product.record.method == "sketch"
    assert error(product, dense) <= 2e-3


def test_to() -> None:
    dense = kernel_matrix("gaussian", 90, 2)
    matrix = compress_tree(dense, tolerance=1e-3, leaf_size=16)
    single = matrix.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    assert_close(single.to_dense(), matrix.to_dense())
    assert torch.equal(single.to("cpu", torch.float32).to_dense(), single.to_dense())
    assert matrix.dtype == torch.float64
    with pytest.raises(TypeError, match="float32 or torch"):
        matrix.to(dtype=torch.float16)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    dense = kernel_matrix("gaussian", 90, 2)
    compress_tree(dense, leaf_size=16, progress=True)
    assert "level 1, 2 nodes" in capsys.readouterr().err
    compress_tree(dense, leaf_size=16)
    assert capsys.readouterr().err == ""


def test_progress_covers_planning_and_says_what_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A low-rank matrix has no tree: all of the work is planning."""
    factor = normal(200, 5)
    matrix = hcurv.compress(factor @ factor.T, tolerance=1e-3, progress=True)
    assert matrix.tree.num_kept == 0
    shown = capsys.readouterr().err
    steps = [
        "planning: ordering the rows",
        "planning: global part from 16 directions",
        "compressed to 2.50% of N², estimated error",
    ]
    places = [shown.index(step) for step in steps]
    assert places == sorted(places)
    assert "?" not in shown


def test_plot() -> None:
    matrix = compress_tree(kernel_matrix("gaussian", 90, 2), tolerance=1e-3, leaf_size=16)
    figure = matrix.plot()
    structure, ranks = figure.axes[:2]
    labels = [text.get_text() for text in structure.texts]
    assert [str(int(r)) for r in matrix.ranks[0]] == labels[:2]
    assert len(structure.patches) == 2 + 4 + 8 + 8
    assert ranks.get_xlabel().startswith("level")
    assert len(matrix.plot(max_levels=1).axes[0].patches) == 2 + 2
    compress_tree(torch.zeros(3, 3)).plot()


def test_python_work_grows_with_levels_not_nodes() -> None:
    calls = []

    class Counting(WithProduct):
        def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
            calls.append(rows.shape)
            return self.dense[rows[:, :, None], cols[:, None, :]]

    dense = kernel_matrix("inverse multiquadric", 1024, 1)
    compress_tree(Counting(dense), tolerance=1e-2, leaf_size=8, ordering="natural")
    assert len(calls) < 7 * 24 < 2**8  # 254 nodes on 7 levels


@given(shapes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60))
def test_groups_partition_with_little_padding(shapes: list[tuple[int, int]]) -> None:
    rows, cols = torch.tensor(shapes).T
    groups = group_by_shape(rows, cols)
    assert torch.cat(groups).sort().values.tolist() == list(range(len(shapes)))
    full = [g for g in groups if (rows * cols)[g].any()]
    padded = sum(g.numel() * int(rows[g].max() * cols[g].max()) for g in full)
    needed = int((rows * cols).sum())
    assert padded <= 1.04 * needed or len(full) == 24
    assert all((rows * cols)[g].all() for g in full)


def test_presets() -> None:
    dense = kernel_matrix("gaussian", 300, 2)
    record = compress_tree(dense).record
    assert (record.tolerance, record.max_rank) == (5e-2, None)
    record = compress_tree(dense, accuracy="low").record
    assert (record.tolerance, record.leaf_size, record.max_rank) == (5e-2, 128, 128)
    record = compress_tree(dense, accuracy="high", tolerance=1e-2).record
    assert (record.tolerance, record.leaf_size, record.max_rank) == (1e-2, 1024, 1024)
    assert compress_tree(dense, tolerance=1e-2).record.max_rank is None


def test_repr_names_size_and_error() -> None:
    model = seeded(lambda: nn.Linear(7, 3))
    operator = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(11, 7).float())
    text = repr(compress_tree(operator, leaf_size=8))
    assert text.startswith("HMatrix(N=24, global_rank=0, depth=2, ordering='layer-")
    assert "estimated_error=" in text
