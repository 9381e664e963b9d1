"""Rivals: low rank, K-FAC, diagonal and block-diagonal, matrix-free, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
import oracles
from cases import CASES, assert_close, both_dtypes, labels, normal, seeded
from conformance import check_operator
from hcurv.baselines import KFAC, BlockDiagonal, Diagonal, LowRank, MatrixFree
from matrices import kernel_matrix


def check_solves(factors: object, dense: Tensor) -> None:
    """solve and logdet of a factorization against the dense damped matrix."""
    rhs = normal(dense.shape[0], 3)
    expected = torch.linalg.solve(dense, rhs)
    assert_close(factors.solve(rhs), expected, 1e8)
    assert_close(factors.solve(rhs[:, 0].contiguous()), expected[:, 0], 1e8)
    assert float(factors.logdet()) == pytest.approx(
        float(torch.linalg.slogdet(dense).logabsdet), rel=1e-6, abs=1e-6
    )


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_root_products(name: str, dtype: torch.dtype) -> None:
    operator = CASES[name].operator(dtype)
    dense = operator.to_dense().double()
    identity = torch.eye(dense.shape[0], dtype=dtype)
    root = operator.root_product(identity).double()
    assert_close((root.T @ root).to(dtype), dense, 1e3)
    values = normal(root.shape[0], 5).to(dtype)
    assert_close(operator.root_transposed(values), root.T @ values.double(), 1e3)
    assert_close(operator.root_transposed(values[:, 0]), root.T @ values[:, 0].double(), 1e3)
    vector = normal(dense.shape[0]).to(dtype)
    assert_close(operator.root_product(vector), root @ vector.double(), 1e3)
    with pytest.raises(ValueError, match="values must have shape"):
        operator.root_transposed(values[1:])


@both_dtypes
@pytest.mark.parametrize("method", ["symmetric", "jacobian"])
@pytest.mark.parametrize("name", CASES)
def test_low_rank_is_exact_at_full_rank(name: str, method: str, dtype: torch.dtype) -> None:
    operator = CASES[name].operator(dtype)
    dense = operator.to_dense().double()
    matrix = LowRank(operator, dense.shape[0], method=method)
    assert float((matrix.to_dense() - dense).norm()) <= 2e3 * torch.finfo(dtype).eps * float(
        dense.norm()
    )
    expected = torch.linalg.eigvalsh(dense).flip(0)
    assert_close(matrix.values.to(dtype), expected[: matrix.values.numel()], 1e3)


@pytest.mark.parametrize("method", ["symmetric", "jacobian"])
def test_low_rank_is_as_good_as_a_truncated_svd(method: str) -> None:
    operator = CASES["deep autoencoder"].operator()
    dense = operator.to_dense()
    values = torch.linalg.eigvalsh(dense).flip(0)
    for rank in (1, 5, 20):
        best = float(values[rank:].norm() / values.norm())
        matrix = LowRank(operator, rank, method=method, power_iterations=2)
        assert matrix.values.shape == (rank,)
        assert_close(matrix.vectors.T @ matrix.vectors, torch.eye(rank, dtype=torch.float64), 1e6)
        error = float((matrix.to_dense() - dense).norm() / dense.norm())
        assert best * (1 - 1e-9) <= error <= 1.02 * best
        left, middle, right = torch.svd_lowrank(dense, rank + 10, niter=2)
        reference = left[:, :rank] @ torch.diag(middle[:rank]) @ right[:, :rank].T
        assert error <= 1.02 * float((reference - dense).norm() / dense.norm())


@both_dtypes
def test_low_rank_conformance_and_solves(dtype: torch.dtype) -> None:
    dense = kernel_matrix("gaussian", 90, 2).to(dtype)
    matrix = LowRank(dense, 12)
    known = matrix.vectors.double() @ torch.diag(matrix.values.double()) @ matrix.vectors.double().T
    check_operator(matrix, known)
    damped = known + 0.3 * torch.eye(90, dtype=torch.float64)
    rhs = normal(90, 2).to(dtype)
    assert_close(matrix.solve(rhs, 0.3), torch.linalg.solve(damped, rhs.double()), 1e4)
    assert float(matrix.logdet(0.3)) == pytest.approx(float(torch.logdet(damped)), rel=1e-4)
    samples = matrix.sample(100_000, 0.3, torch.Generator().manual_seed(0)).double()
    inverse = torch.linalg.inv(damped)
    spread = (inverse.square() + torch.outer(inverse.diagonal(), inverse.diagonal())).sqrt()
    difference = samples.T @ samples / 100_000 - inverse
    assert float((difference / spread).abs().max()) < 5.5 / 100_000**0.5


@both_dtypes
@pytest.mark.parametrize("method", ["symmetric", "jacobian"])
@pytest.mark.parametrize("power_iterations", [0, 1])
def test_vectors_of_small_eigenvalues_are_orthonormal(
    power_iterations: int, method: str, dtype: torch.dtype
) -> None:
    """Those of eigenvalues that rounding of the largest outweighs."""
    model = seeded(lambda: nn.Sequential(nn.Linear(40, 8, bias=False))).to(dtype)
    basis = torch.linalg.qr(normal(60, 40)).Q * 2.0 ** -torch.arange(40, dtype=torch.float64)
    operator = hcurv.GaussNewton(model, nn.MSELoss(), basis.to(dtype))
    matrix = LowRank(operator, 200, method=method, power_iterations=power_iterations)
    assert float(matrix.values[-1]) < 1e-5 * float(matrix.values[0])
    assert bool((matrix.values > 0).all())
    vectors = matrix.vectors.double()
    assert_close((vectors.T @ vectors).to(dtype), torch.eye(vectors.shape[1]).double(), 1e2)


@given(size=st.integers(1, 40), rank=st.integers(0, 40), true_rank=st.integers(0, 10))
def test_low_rank_of_any_gram_matrix(size: int, rank: int, true_rank: int) -> None:
    factor = normal(size, true_rank)
    dense = factor @ factor.T
    matrix = LowRank(dense, min(rank, size))
    assert matrix.num_stored <= (size + 1) * min(rank, size)
    assert bool((matrix.values >= 0).all())
    if rank >= true_rank:
        assert_close(matrix.to_dense(), dense, 1e6)


def test_low_rank_input() -> None:
    dense = torch.eye(5)
    with pytest.raises(ValueError, match="rank must be an integer from 0 to 5; got 6"):
        LowRank(dense, 6)
    with pytest.raises(ValueError, match="needs a GaussNewton"):
        LowRank(dense, 2, method="jacobian")
    with pytest.raises(ValueError, match="method must be"):
        LowRank(dense, 2, method="svd")
    with pytest.raises(ValueError, match="damping must be positive"):
        LowRank(dense, 2).solve(torch.ones(5), 0.0)


NETWORKS = {
    "classifier": (
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
        ),
        nn.CrossEntropyLoss(),
        3,
    ),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        nn.CrossEntropyLoss(reduction="sum"),
        3,
    ),
    "autoencoder": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.Softplus(), nn.Linear(2, 6), nn.Sigmoid()),
        hcurv.losses.HalfSquaredError(),
        6,
    ),
    "one layer": (lambda: nn.Sequential(nn.Linear(6, 3)), nn.BCEWithLogitsLoss(), 3),
    "squared": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)),
        nn.MSELoss(),
        2,
    ),
}


LABELS = labels(40, 3)


def network(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, Tensor]:
    factory, loss, _ = NETWORKS[name]
    return seeded(factory).to(dtype), loss, normal(40, 6).to(dtype)


def moments(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs (n, columns) and output Jacobians (n, q, units) of each layer, by autograd."""
    model, loss, inputs = network(name)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    loss = hcurv.losses.as_loss(loss)
    num_outputs = NETWORKS[name][2]
    scale = 1.0 if loss.reduction == "sum" else 1 / loss.divisor(40, num_outputs, None)
    features: list[list[Tensor]] = [[] for _ in layers]
    gradients: list[list[Tensor]] = [[] for _ in layers]
    for point in inputs:
        values: list[Tensor] = []
        current = point
        for module in model:
            if isinstance(module, nn.Linear):
                number = len(values)
                ones = current.new_ones(1) if module.bias is not None else current.new_ones(0)
                features[number].append(torch.cat([current, ones]).detach())
                current = module(current)
                values.append(current)
            else:
                current = module(current)
        root = loss.hessian_sqrt(current[None].detach(), None)[0]
        root = torch.diag(root) if root.ndim == 1 else root
        rows = [
            torch.autograd.grad(row @ current, values, retain_graph=True)
            for row in scale**0.5 * root
        ]
        for number in range(len(layers)):
            gradients[number].append(torch.stack([row[number] for row in rows]))
    return [torch.stack(f) for f in features], [torch.stack(g) for g in gradients]


def kronecker(name: str) -> tuple[dict[tuple[int, int], Tensor], dict[tuple[int, int], Tensor]]:
    features, gradients = moments(name)
    count = range(len(features))
    inputs = {(i, j): features[i].T @ features[j] / 40 for i in count for j in count}
    outputs = {
        (i, j): torch.einsum("nqa,nqb->ab", gradients[i], gradients[j])
        for i in count
        for j in count
    }
    return inputs, outputs


def flat_order(name: str) -> Tensor:
    """Flat index of each (unit, column), layer by layer."""
    model, _, _ = network(name)
    parts, offset = [], 0
    for layer in (m for m in model if isinstance(m, nn.Linear)):
        index = torch.arange(offset, offset + layer.weight.numel()).view_as(layer.weight)
        offset += layer.weight.numel()
        if layer.bias is not None:
            bias = torch.arange(offset, offset + layer.out_features)
            index = torch.cat([index, bias[:, None]], 1)
            offset += layer.out_features
        parts.append(index.flatten())
    return torch.cat(parts)


def assemble(name: str, blocks: dict[tuple[int, int], Tensor]) -> Tensor:
    """A matrix in flat order from blocks of layers."""
    count = max(i for i, _ in blocks) + 1
    sizes = [blocks[i, i].shape[0] for i in range(count)]
    rows = [
        torch.cat(
            [blocks.get((i, j), torch.zeros(sizes[i], sizes[j]).double()) for j in range(count)], 1
        )
        for i in range(count)
    ]
    order = flat_order(name)
    result = torch.empty(len(order), len(order), dtype=torch.float64)
    result[order[:, None], order] = torch.cat(rows)
    return result


@both_dtypes
@pytest.mark.parametrize("structure", ["block-diagonal", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_kfac_blocks(name: str, structure: str, dtype: torch.dtype) -> None:
    inputs, outputs = kronecker(name)
    blocks = {
        pair: torch.kron(outputs[pair], inputs[pair])
        for pair in inputs
        if structure == "full" or pair[0] == pair[1]
    }
    model, loss, data = network(name, dtype)
    matrix = KFAC(model, loss, data, structure=structure, num_samples=None)
    check_operator(matrix, assemble(name, blocks))


def test_kfac_is_exact_for_one_point_and_layer() -> None:
    model, loss, data = network("one layer")
    matrix = KFAC(model, loss, data[:1], num_samples=None)
    assert_close(matrix.to_dense(), hcurv.GaussNewton(model, loss, data[:1]).to_dense())


def damped_pair(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    ratio = ((inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs))).sqrt()
    identities = (torch.eye(len(m), dtype=torch.float64) for m in (inputs, outputs))
    first, second = identities
    return inputs + ratio * damping**0.5 * first, outputs + damping**0.5 / ratio * second


@pytest.mark.parametrize("name", NETWORKS)
def test_kfac_factored_damping(name: str) -> None:
    inputs, outputs = kronecker(name)
    blocks = {}
    for pair in inputs:
        if pair[0] == pair[1]:
            first, second = damped_pair(inputs[pair], outputs[pair], 1e-2)
            blocks[pair] = torch.kron(second, first)
    model, loss, data = network(name)
    matrix = KFAC(model, loss, data, num_samples=None)
    check_solves(matrix.factorize(1e-2), assemble(name, blocks))
    rhs = normal(matrix.shape[0])
    assert_close(matrix.solve(rhs, 1e-2), matrix.factorize(1e-2).solve(rhs))
    assert float(matrix.logdet(1e-2)) == float(matrix.factorize(1e-2).logdet())


@pytest.mark.parametrize("name", ["classifier", "no bias", "autoencoder", "squared", "one layer"])
def test_kfac_block_tridiagonal_inverse(name: str) -> None:
    """The inverse is block-tridiagonal; the matrix has the Kronecker blocks beside the diagonal."""
    inputs, outputs = kronecker(name)
    count = max(i for i, _ in inputs) + 1
    damping = 1e-2
    damped = [damped_pair(inputs[i, i], outputs[i, i], damping) for i in range(count)]
    diagonal = [torch.kron(second, first) for first, second in damped]
    beside = [torch.kron(outputs[i, i + 1], inputs[i, i + 1]) for i in range(count - 1)]
    # The maximum-entropy completion: block (i, j) goes through the layers in between.
    blocks = {(i, i): diagonal[i] for i in range(count)}
    for i in range(count):
        for j in range(i + 1, count):
            block = beside[i]
            for k in range(i + 1, j):
                block = block @ torch.linalg.solve(diagonal[k], beside[k])
            blocks[i, j], blocks[j, i] = block, block.T
    expected = assemble(name, blocks)
    model, loss, data = network(name)
    matrix = KFAC(model, loss, data, structure="block-tridiagonal", num_samples=None)
    check_solves(matrix.factorize(damping), expected)


@both_dtypes
def test_kfac_block_tridiagonal_conformance(dtype: torch.dtype) -> None:
    model, loss, data = network("squared", dtype)
    matrix = KFAC(model, loss, data, structure="block-tridiagonal", num_samples=None)
    inputs, outputs = kronecker("squared")
    blocks = {pair: torch.kron(outputs[pair], inputs[pair]) for pair in inputs}
    check_operator(matrix, assemble("squared", blocks))


@pytest.mark.parametrize("name", NETWORKS)
def test_ekfac(name: str) -> None:
    features, gradients = moments(name)
    inputs, outputs = kronecker(name)
    blocks = {}
    for i in range(len(features)):
        first = torch.linalg.eigh(inputs[i, i]).eigenvectors
        second = torch.linalg.eigh(outputs[i, i]).eigenvectors
        turned = (gradients[i] @ second).square().sum(1)
        scale = turned.T @ (features[i] @ first).square()
        basis = torch.kron(second, first)
        blocks[i, i] = basis @ torch.diag(scale.flatten()) @ basis.T
    dense = assemble(name, blocks)
    model, loss, data = network(name)
    matrix = KFAC(model, loss, data, num_samples=None, ekfac=True)
    exact = oracles.gauss_newton(model, lambda out: _oracle_loss(name, out), data)
    plain = KFAC(model, loss, data, num_samples=None)
    if name != "autoencoder":  # a diagonal G leaves its eigenvectors open
        check_operator(matrix, dense)
    size = dense.shape[0]
    damped = matrix.to_dense() + 1e-2 * torch.eye(size, dtype=torch.float64)
    check_solves(matrix.factorize(1e-2), damped)
    order, layers = (
        flat_order(name),
        [f.shape[1] * g.shape[2] for f, g in zip(features, gradients, strict=True)],
    )
    block_errors = []
    for operator in (matrix, plain):
        difference = (operator.to_dense() - exact)[order[:, None], order]
        parts = torch.split(torch.arange(size), layers)
        block_errors.append(sum(float(difference[p[:, None], p].norm() ** 2) for p in parts))
    assert block_errors[0] <= block_errors[1] * (1 + 1e-9)


def _oracle_loss(name: str, outputs: Tensor) -> Tensor:
    targets = LABELS if name in ("classifier", "no bias") else torch.zeros_like(outputs)
    loss = NETWORKS[name][1]
    if isinstance(loss, hcurv.losses.HalfSquaredError):
        return (outputs - targets).square().sum() / (2 * outputs.shape[0])
    return loss(outputs, targets)


@pytest.mark.parametrize("name", NETWORKS)
def test_sampled_kfac_tends_to_the_exact_one(name: str) -> None:
    model, loss, data = network(name)
    exact = KFAC(model, loss, data, num_samples=None)
    errors = [
        KFAC(model, loss, data, num_samples=count, seed=1).relative_error(exact)
        for count in (2, 200)
    ]
    assert errors[1] < 0.25
    assert errors[1] < errors[0] / 3
    once = KFAC(model, loss, data, seed=4)
    again = KFAC(model, loss, [data[:13], data[13:]], seed=4)
    assert torch.equal(once.diagonal(), KFAC(model, loss, data, seed=4).diagonal())
    assert once.num_stored == again.num_stored


def test_kfac_with_frozen_parameters() -> None:
    model, loss, data = network("classifier")
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    exact = hcurv.GaussNewton(model, loss, data[:1]).to_dense()
    matrix = KFAC(model, loss, data[:1], num_samples=None, structure="full")
    check_operator(matrix, exact)  # one point: the expectation of a product is a product
    sampled = KFAC(model, loss, data[:1], num_samples=2000)
    diagonal = KFAC(model, loss, data[:1], num_samples=None)
    assert sampled.relative_error(diagonal) < 0.2


def test_kfac_input() -> None:
    model, loss, data = network("classifier")
    with pytest.raises(ValueError, match="structure must be"):
        KFAC(model, loss, data, structure="diagonal")
    with pytest.raises(ValueError, match="num_samples must be"):
        KFAC(model, loss, data, num_samples=0)
    with pytest.raises(ValueError, match="ekfac works with"):
        KFAC(model, loss, data, structure="full", ekfac=True)
    with pytest.raises(ValueError, match="has no cheap inverse"):
        KFAC(model, loss, data, structure="full").factorize(1.0)
    with pytest.raises(ValueError, match="damping must be positive"):
        KFAC(model, loss, data).factorize(0.0)


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_diagonal_and_blocks(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    operator = case.operator(dtype)
    exact = oracles.gauss_newton(case.build(), case.loss_of_outputs, case.inputs)
    check_operator(Diagonal(operator), torch.diag(exact.diagonal()))
    units, _ = operator.factors.locate(torch.arange(operator.shape[0]))
    same = units[:, None] == units
    check_operator(BlockDiagonal(operator, "unit"), exact * same)
    ends = torch.tensor([slot.units.stop for slot in operator.factors.slots])
    layers = torch.searchsorted(ends, units, right=True)
    check_operator(BlockDiagonal(operator, "layer"), exact * (layers[:, None] == layers))


def test_block_solves() -> None:
    operator = CASES["classifier"].operator()
    damping = 1e-2
    size = operator.shape[0]
    identity = damping * torch.eye(size, dtype=torch.float64)
    for kind in ("unit", "layer"):
        matrix = BlockDiagonal(operator, kind)
        check_solves(matrix.factorize(damping), matrix.to_dense() + identity)
    diagonal = Diagonal(operator)
    rhs = normal(size, 2)
    expected = torch.linalg.solve(diagonal.to_dense() + identity, rhs)
    assert_close(diagonal.solve(rhs, damping), expected)
    some = BlockDiagonal(operator, [torch.arange(3, 9), torch.arange(20, 22)])
    check_solves(some.factorize(damping), some.to_dense() + identity)
    with pytest.raises(ValueError, match="must not overlap"):
        BlockDiagonal(operator, [torch.arange(3), torch.arange(2, 5)])
    with pytest.raises(TypeError, match="needs a GaussNewton"):
        BlockDiagonal(hcurv.compress(torch.eye(3)), "layer")
    with pytest.raises(ValueError, match="blocks must be"):
        BlockDiagonal(operator, "row")


def test_matrix_free() -> None:
    operator = CASES["classifier"].operator()
    matrix = MatrixFree(operator, tolerance=1e-10)
    dense = operator.to_dense()
    check_operator(matrix, dense)
    rhs = normal(dense.shape[0], 2)
    damped = dense + 1e-2 * torch.eye(dense.shape[0], dtype=torch.float64)
    assert_close(matrix.solve(rhs, 1e-2), torch.linalg.solve(damped, rhs), 1e9)
    assert int(matrix.iterate(rhs, 1e-2).num_iterations.max()) > 1
    with pytest.raises(RuntimeError, match="conjugate gradients: 2 of 2"):
        MatrixFree(operator, max_iterations=1).solve(rhs, 1e-6)


@pytest.mark.parametrize("build", ["low rank", "compressed"])
def test_errors_are_measured_with_vectors_of_their_own(build: str) -> None:
    """A sketch as wide as the probes, from the same seed, must not be the probes."""
    factor = normal(600, 600, seed=5) * torch.arange(1, 601) ** -0.5
    dense = factor @ factor.T
    if build == "low rank":
        approximation = LowRank(dense, 118, oversampling=10)
    else:
        approximation = hcurv.compress(dense, max_rank=16, leaf_size=32, global_rank=0)
    true = float(torch.linalg.norm(approximation.to_dense() - dense) / torch.linalg.norm(dense))
    assert approximation.relative_error(dense) == pytest.approx(true, rel=0.1)
