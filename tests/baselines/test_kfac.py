"""K-FAC and EKFAC against dense matrices that autograd and `torch.kron` give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
import oracles
from cases import assert_close, both_dtypes, labels, normal, seeded
from conformance import check_factorized, check_operator
from hcurv.baselines import KFAC

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


def check_solves(factors: object, dense: Tensor) -> None:
    """solve and logdet of a factorization against the dense damped matrix."""
    rhs = normal(dense.shape[0], 3)
    expected = torch.linalg.solve(dense, rhs)
    assert_close(factors.solve(rhs), expected, 1e8)
    assert_close(factors.solve(rhs[:, 0].contiguous()), expected[:, 0], 1e8)
    assert float(factors.logdet()) == pytest.approx(
        float(torch.linalg.slogdet(dense).logabsdet), rel=1e-6, abs=1e-6
    )


def network(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, Tensor]:
    factory, loss, _ = NETWORKS[name]
    return seeded(factory).to(dtype), loss, normal(40, 6).to(dtype)


def moments(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs (n, columns) and output Jacobians (n, q, units) of each layer, by autograd."""
    model, loss, inputs = network(name)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    loss = hcurv.losses.as_loss(loss)
    num_outputs = NETWORKS[name][2]
    scale = 1.0 if loss.reduction == "sum" else 1 / loss.divisor((40, num_outputs), None)
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


def factored(name: str, dampings: list[Any]) -> Tensor:
    """The dense block-diagonal matrix with factored damping, one number for each layer."""
    inputs, outputs = kronecker(name)
    blocks = {}
    for i, damping in enumerate(dampings):
        first, second = damped_pair(inputs[i, i], outputs[i, i], damping)
        blocks[i, i] = torch.kron(second, first)
    return assemble(name, blocks)


def layer_dampings(name: str) -> dict[str, float]:
    """A different damping for each layer, by its name."""
    model, _, _ = network(name)
    layers = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {layer: 10.0 ** (-1 - i) for i, layer in enumerate(layers)}


@both_dtypes
@pytest.mark.parametrize("name", NETWORKS)
def test_kfac_factored_damping(name: str, dtype: torch.dtype) -> None:
    model, loss, data = network(name, dtype)
    matrix = KFAC(model, loss, data, num_samples=None)
    names = layer_dampings(name)
    expected = factored(name, [1e-2] * len(names))
    if dtype == torch.float64:
        check_solves(matrix.factorize(1e-2), expected)
    shifted = expected - 1e-2 * torch.eye(len(expected), dtype=torch.float64)
    check_factorized(matrix.factorize, shifted, 1e-2, names={"*": 1e-2}, gradients=False)
    damping = matrix.layout.expand(names)
    check_factorized(
        lambda _: matrix.factorize(names),
        factored(name, list(names.values())) - damping.diag(),
        damping,
        gradients=False,
    )


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("by_layer", [False, True], ids=["one number", "numbers by layer"])
def test_kfac_gradients_are_those_of_the_factored_damping(name: str, by_layer: bool) -> None:
    model, loss, data = network(name)
    matrix = KFAC(model, loss, data, num_samples=None)
    layers = layer_dampings(name)
    start = torch.tensor(list(layers.values()) if by_layer else [1e-2], dtype=torch.float64)
    size = matrix.shape[0]
    columns, weights = normal(size, 2, seed=4), normal(size, 2, seed=5)

    def run(by_torch: bool) -> tuple[Tensor, ...]:
        given = start.clone().requires_grad_()
        rhs = columns.clone().requires_grad_()
        numbers = list(given) if by_layer else [given[0]] * len(layers)
        if by_torch:
            dense = factored(name, numbers)
            solved, logdet = torch.linalg.solve(dense, rhs), torch.logdet(dense)
        else:
            damping = dict(zip(layers, numbers, strict=True)) if by_layer else given[0]
            factorized = matrix.factorize(damping)
            solved, logdet = factorized.solve(rhs), factorized.logdet()
            one = factorized.solve(rhs[:, 0].contiguous())
            assert_close(one.detach(), solved[:, 0].detach(), 1e8)
        gradients = torch.autograd.grad(logdet, given, retain_graph=True)
        return *gradients, *torch.autograd.grad((weights * solved).sum(), (given, rhs))

    for actual, expected in zip(run(False), run(True), strict=True):
        assert_close(actual, expected, 1e8)


def test_a_factorization_can_be_differentiated_more_than_once() -> None:
    model, loss, data = network("classifier")
    for ekfac in (False, True):
        damping = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        factorized = KFAC(model, loss, data, ekfac=ekfac).factorize(damping)
        for _ in range(2):
            factorized.logdet().backward()
            factorized.solve(normal(factorized.shape[0])).sum().backward()
        assert bool(torch.isfinite(damping.grad))


def test_block_tridiagonal_gradients_are_refused_unless_of_the_right_hand_side() -> None:
    model, loss, data = network("classifier")
    matrix = KFAC(model, loss, data, structure="block-tridiagonal")
    factorized = matrix.factorize(torch.tensor(0.1, requires_grad=True))
    rhs = normal(matrix.shape[0])
    for use in (factorized.logdet, lambda: factorized.solve(rhs)):
        with pytest.raises(
            hcurv.NotFactorizableError, match="no gradients with respect to its damping"
        ):
            use()
    with torch.no_grad():
        expected = factorized.solve(rhs)
    fixed = matrix.factorize(0.1)
    variable = rhs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fixed.solve(variable) @ rhs, variable)
    assert_close(gradient, expected, 1e8)


def test_dampings_that_differ_within_a_layer_are_refused() -> None:
    model, loss, data = network("classifier")
    for options in ({}, {"structure": "block-tridiagonal"}, {"ekfac": True}):
        matrix = KFAC(model, loss, data, **options)
        with pytest.raises(TypeError, match=r"one damping for each layer.*names of the layers"):
            matrix.factorize(torch.ones(matrix.shape[0]))
        with pytest.raises(ValueError, match=r"from 0.5 to 2.0 for the layer of '2.weight'"):
            matrix.factorize({"*.weight": 2.0, "*.bias": 2.0, "2.bias": 0.5})
        assert matrix.factorize({"*.weight": 2.0, "*.bias": 2.0}).shape == matrix.shape


@both_dtypes
@pytest.mark.parametrize("name", ["classifier", "no bias", "autoencoder", "squared", "one layer"])
def test_kfac_block_tridiagonal_inverse(name: str, dtype: torch.dtype) -> None:
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
    model, loss, data = network(name, dtype)
    matrix = KFAC(model, loss, data, structure="block-tridiagonal", num_samples=None)
    if dtype == torch.float64:
        check_solves(matrix.factorize(damping), expected)
    shifted = expected - damping * torch.eye(len(expected), dtype=torch.float64)
    check_factorized(matrix.factorize, shifted, damping, names={"*": damping}, gradients=False)


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
    check_factorized(matrix.factorize, matrix.to_dense(), 1e-2, names={"*": 1e-2})
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


@both_dtypes
@pytest.mark.parametrize("name", NETWORKS)
def test_ekfac_with_a_damping_for_each_layer(name: str, dtype: torch.dtype) -> None:
    matrix = KFAC(*network(name, dtype), num_samples=None, ekfac=True)
    names = layer_dampings(name)
    damping = matrix.layout.expand(names)
    dense = matrix.to_dense()
    check_factorized(lambda _: matrix.factorize(names), dense, damping, gradients=False)
    if dtype == torch.float64:
        numbers = {layer: torch.tensor(n, requires_grad=True) for layer, n in names.items()}
        matrix.factorize(numbers).logdet().backward()
        inverse = torch.linalg.inv(dense + damping.diag()).diagonal()
        for layer, number in numbers.items():
            expected = float(inverse[matrix.layout.select(layer)].sum())
            assert float(number.grad) == pytest.approx(expected, rel=1e-6)


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


@pytest.mark.parametrize("num_samples", [None, 1])
def test_moments_that_overflow_are_refused(num_samples: int | None) -> None:
    model, loss, data = network("squared", torch.float32)
    with pytest.raises(ValueError, match="inputs or derivatives overflow"):
        KFAC(model, loss, 1e30 * data, num_samples=num_samples)


def test_factors_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    model, loss, data = network("classifier")
    with pytest.raises(hcurv.InsufficientMemoryError, match="the Kronecker factors of 3 layers"):
        KFAC(model, loss, data)
