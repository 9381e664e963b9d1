"""K-FAC of models that are no chains, against Kronecker products that loops make from hooks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hcurv
import oracles
from cases import assert_close, both_dtypes, labels, normal, seeded
from conformance import check_factorized, check_operator
from hcurv.baselines import KFAC

POSITIONS = ("expand", "reduce")
both_positions = pytest.mark.parametrize("positions", POSITIONS)


class MeanOf(nn.Module):
    """The mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes)


class Attention(nn.Module):
    """Embeddings with learned positions, attention with a residual, and layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.places = nn.Parameter(0.3 * torch.randn(3, 4))
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 12)
        self.join = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places
        q, k, v = self.mix(self.norm(h)).chunk(3, -1)
        h = h + self.join(torch.softmax(q @ k.mT, -1) @ v)
        return self.last(torch.tanh(h).mean(1))


class Twice(nn.Module):
    """A module that is called twice, at different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x)).mean(1)
        return self.last(torch.tanh(self.inner(h)))


class Tied(nn.Module):
    """An embedding that is the output layer, and a weight that is used transposed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.out.weight = self.words.weight
        self.inner, self.plain = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.plain(self.words(x).sum(1))))
        return self.out(torch.tanh(h @ self.inner.weight))


@dataclass(frozen=True, eq=False)
class Model:
    """A model, a loss and data.

    Attributes:
        build: makes the model.
        loss: the loss.
        inputs: the inputs.
        targets: the targets.
        others: names of the parameters that shall have a diagonal block.
        unique: the treatments of positions for which A and G have one eigenbasis each.
        frozen: names of the parameters that are not trainable.
    """

    build: Callable[[], nn.Module]
    loss: nn.Module
    inputs: Tensor
    targets: Tensor
    others: tuple[str, ...] = ()
    unique: tuple[str, ...] = POSITIONS
    frozen: tuple[str, ...] = ()

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module, Any]:
        model = seeded(self.build).to(dtype).eval()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        inputs = self.inputs.to(dtype) if self.inputs.is_floating_point() else self.inputs
        return model, self.loss, (inputs, self.targets)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1),
        nn.Tanh(),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 2, dilation=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def _sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)
    )


WORDS = labels(12, 3).view(6, 2)
MODELS = {
    "cnn": Model(
        _cnn,
        nn.CrossEntropyLoss(),
        normal(24, 2, 5, 4),
        labels(24, 3),
        ("2.weight", "2.bias"),
        unique=("expand",),
    ),
    "groups": Model(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Tanh(), MeanOf(2), nn.Linear(6, 3)),
        nn.CrossEntropyLoss(reduction="sum"),
        normal(8, 4, 5),
        labels(8, 3),
    ),
    "three axes": Model(
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2, padding=1), nn.Tanh(), MeanOf(2, 3, 4)),
        nn.MSELoss(),
        normal(9, 1, 2, 3, 2),
        normal(9, 2),
        unique=("expand",),
    ),
    "sequence outputs": Model(_sequence, nn.MSELoss(), normal(6, 3, 4), normal(6, 3, 2), unique=()),
    "sequence classes": Model(
        lambda: nn.Sequential(_sequence(), nn.Flatten(1), nn.Unflatten(1, (2, 3))),
        nn.CrossEntropyLoss(),
        normal(6, 3, 4),
        labels(18, 2).view(6, 3),
        unique=("reduce",),
    ),
    "two leading dimensions": Model(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), MeanOf(1, 2), nn.Linear(3, 3)),
        nn.BCEWithLogitsLoss(),
        normal(7, 2, 3, 4),
        labels(21, 2).view(7, 3).double(),
        unique=POSITIONS,
    ),
    "attention": Model(
        Attention,
        nn.CrossEntropyLoss(),
        labels(24, 5).view(8, 3),
        labels(8, 3),
        ("words.weight", "places", "norm.weight", "norm.bias"),
        unique=("expand",),
    ),
    "called twice": Model(Twice, nn.CrossEntropyLoss(), normal(9, 3, 4), labels(9, 3)),
    "tied": Model(
        Tied,
        nn.CrossEntropyLoss(),
        WORDS,
        labels(6, 3),
        ("words.weight", "out.bias", "inner.weight"),
        unique=(),
    ),
    "frozen": Model(
        _cnn,
        nn.CrossEntropyLoss(),
        normal(24, 2, 5, 4),
        labels(24, 3),
        ("2.weight", "6.bias"),
        frozen=("0.bias", "2.bias", "6.weight"),
        unique=("expand",),
    ),
}
all_models = pytest.mark.parametrize("name", MODELS)


def patches(module: nn.Module, x: Tensor, group: int) -> Tensor:
    """What a module multiplies its weight with, for one point: (positions, columns), by loops."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    axes = range(x.ndim - 2)
    per_group = x.shape[1] // module.groups
    own = x[0, group * per_group : (group + 1) * per_group]
    own = functional.pad(own, [p for a in reversed(axes) for p in [module.padding[a]] * 2])
    reach = [module.dilation[a] * (module.kernel_size[a] - 1) for a in axes]
    starts = [range(0, own.shape[1 + a] - reach[a], module.stride[a]) for a in axes]
    rows = []
    for place in itertools.product(*starts):
        offsets = itertools.product(*(range(k) for k in module.kernel_size))
        entries = [
            own[(slice(None), *(place[a] + module.dilation[a] * offset[a] for a in axes))]
            for offset in offsets
        ]
        rows.append(torch.stack(entries, 1).reshape(-1))
    return torch.stack(rows)


@dataclass
class Block:
    """What one Kronecker block is made of.

    Attributes:
        index: flat indices, (units, columns).
        inputs: for each point, (T, columns).
        gradients: for each point, (rows, T, units).
    """

    index: Tensor
    inputs: list[Tensor]
    gradients: list[Tensor]


def flat_places(model: nn.Module) -> dict[str, Tensor]:
    """Flat indices of the trainable parameters, in their shapes."""
    places, start = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            places[name] = torch.arange(start, start + parameter.numel()).view(parameter.shape)
            start += parameter.numel()
    return places


def output_rows(model: Model, output: Tensor, number: int) -> Tensor:
    """Rows R with RᵀR the Hessian of the loss with respect to the outputs of a point."""
    share = 1.0 if model.loss.reduction == "sum" else 1 / len(model.inputs)
    target = model.targets[number : number + 1]
    values = output.detach()
    curvature = share * oracles.hessian(lambda flat: model.loss(flat.view_as(values), target))(
        values.reshape(-1)
    )
    found, vectors = torch.linalg.eigh(curvature)
    return (vectors * found.clamp(min=0).sqrt()).T.reshape(-1, *values.shape)


@cache
def kronecker_blocks(model: Model) -> list[Block]:
    """All blocks, from hooks of the modules, point by point."""
    network, _, (inputs, _) = model.make()
    places = flat_places(network)
    blocks: dict[tuple[str, int], Block] = {}
    called: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    names = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            name = names.get(id(module.weight))
            if name is not None and name not in model.others:
                module.register_forward_hook(
                    lambda m, x, z, n=name: called.append((n, m, x[0].detach(), z))
                )
    for number in range(len(inputs)):
        called.clear()
        output = network(inputs[number : number + 1])
        rows = output_rows(model, output, number)
        results = [z for _, _, _, z in called]
        found = [torch.autograd.grad(output, results, row, retain_graph=True) for row in rows]
        here: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
        for use, (name, module, x, z) in enumerate(called):
            derivative = torch.stack([row[use] for row in found])  # (rows, 1, …)
            if isinstance(module, nn.Linear):
                derivative = derivative.flatten(1, -2)
            else:
                derivative = derivative.flatten(3)[:, 0].mT
            groups = getattr(module, "groups", 1)
            bias = module.bias is not None and names.get(id(module.bias))
            width = z.shape[-1 if isinstance(module, nn.Linear) else 1] // groups
            for group in range(groups):
                units = slice(group * width, (group + 1) * width)
                seen = patches(module, x, group)
                index = places[name][units].reshape(width, -1)
                if bias:
                    seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
                    index = torch.cat([index, places[bias][units, None]], 1)
                blocks.setdefault((name, group), Block(index, [], []))
                parts = here.setdefault((name, group), ([], []))
                parts[0].append(seen)
                parts[1].append(derivative[:, :, units])
        for key, (seen, derivatives) in here.items():
            blocks[key].inputs.append(torch.cat(seen))
            blocks[key].gradients.append(torch.cat(derivatives, 1))
    return list(blocks.values())


def moments(block: Block, positions: str) -> tuple[Tensor, Tensor]:
    """A and G, from the definitions."""
    columns, units = block.index.shape[1], block.index.shape[0]
    inputs = torch.zeros(columns, columns, dtype=torch.float64)
    outputs = torch.zeros(units, units, dtype=torch.float64)
    for x, rows in zip(block.inputs, block.gradients, strict=True):
        if positions == "reduce":
            inputs += torch.outer(x.mean(0), x.mean(0))
        else:
            inputs += sum(torch.outer(at, at) for at in x) / len(x)
        for g in rows:
            if positions == "reduce":
                outputs += torch.outer(g.sum(0), g.sum(0))
            else:
                outputs += sum(torch.outer(at, at) for at in g)
    return inputs / len(block.inputs), outputs


@cache
def exact(model: Model) -> Tensor:
    network, loss, (inputs, targets) = model.make()
    return oracles.gauss_newton(network, lambda outputs: loss(outputs, targets), inputs)


def assemble(model: Model, blocks: list[Block], values: list[Tensor], shift: Any = 0.0) -> Tensor:
    """A matrix from the values of blocks and, for all other parameters, the diagonal of H."""
    places = flat_places(model.make()[0])
    diagonal = exact(model).diagonal()
    result = torch.zeros(len(diagonal), len(diagonal), dtype=torch.float64)
    for block, value in zip(blocks, values, strict=True):
        order = block.index.flatten()
        result[order[:, None], order] = value
    for name in model.others:
        order = places[name].flatten()
        result[order, order] = diagonal[order] + shift
    covered = torch.cat(
        [*(b.index.flatten() for b in blocks), *(places[n].flatten() for n in model.others)]
    )
    assert torch.equal(covered.sort().values, torch.arange(len(diagonal)))
    return result


def kfac_matrix(model: Model, positions: str) -> Tensor:
    blocks = kronecker_blocks(model)
    values = []
    for block in blocks:
        inputs, outputs = moments(block, positions)
        values.append(torch.kron(outputs, inputs))
    return assemble(model, blocks, values)


def damped_matrix(model: Model, positions: str, damping: Any) -> Tensor:
    """The matrix that K-FAC inverts, with a factored damping of its Kronecker blocks."""
    blocks = kronecker_blocks(model)
    values = []
    for block in blocks:
        inputs, outputs = moments(block, positions)
        ratio = (inputs.diagonal().mean() / outputs.diagonal().mean()).sqrt()
        eyes = [torch.eye(len(matrix), dtype=torch.float64) for matrix in (inputs, outputs)]
        first = inputs + ratio * damping**0.5 * eyes[0]
        values.append(torch.kron(outputs + damping**0.5 / ratio * eyes[1], first))
    return assemble(model, blocks, values, damping)


def ekfac_matrix(model: Model, positions: str) -> Tensor:
    """Eigenvectors of A and G, and the squares of the gradients of all points along them."""
    blocks = kronecker_blocks(model)
    values = []
    for block in blocks:
        first, second = (torch.linalg.eigh(m).eigenvectors for m in moments(block, positions))
        basis = torch.kron(second, first)
        scale = torch.zeros(block.index.numel(), dtype=torch.float64)
        for x, rows in zip(block.inputs, block.gradients, strict=True):
            for g in rows:
                gradient = sum(torch.outer(g[t], x[t]) for t in range(len(x)))
                scale += (basis.T @ gradient.flatten()).square()
        values.append(basis @ scale.diag() @ basis.T)
    return assemble(model, blocks, values)


@both_dtypes
@both_positions
@all_models
def test_kfac_is_its_definition(name: str, positions: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    matrix = KFAC(*model.make(dtype), positions=positions, num_samples=None)
    expected = kfac_matrix(model, positions)
    if dtype == torch.float64:
        check_operator(matrix, expected)
    else:
        assert_close(matrix.to_dense(), expected, 1000)
    assert matrix.num_stored < matrix.shape[0] ** 2


@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, positions) for name, model in MODELS.items() for positions in model.unique],
)
def test_ekfac_is_its_definition(name: str, positions: str) -> None:
    model = MODELS[name]
    matrix = KFAC(*model.make(), positions=positions, num_samples=None, ekfac=True)
    # Eigenvectors of close eigenvalues are less accurate than matrices are: 107 units were seen.
    check_operator(matrix, ekfac_matrix(model, positions), 300.0)


@both_positions
@all_models
def test_ekfac_keeps_the_trace_and_beats_kfac(name: str, positions: str) -> None:
    model = MODELS[name]
    dense = exact(model)
    ekfac, kfac = (
        KFAC(*model.make(), positions=positions, num_samples=None, ekfac=choice)
        for choice in (True, False)
    )
    assert float(ekfac.diagonal().sum()) == pytest.approx(float(dense.trace()))
    # In the same eigenbasis, no other eigenvalues are nearer to H.
    errors = [float((matrix.to_dense() - dense).norm()) for matrix in (ekfac, kfac)]
    assert errors[0] <= errors[1] * (1 + 1e-9)


@both_positions
@pytest.mark.parametrize("name", ["cnn", "attention", "tied"])
def test_kfac_inverts_its_factored_damping(name: str, positions: str) -> None:
    model = MODELS[name]
    matrix = KFAC(*model.make(), positions=positions, num_samples=None)
    expected = damped_matrix(model, positions, torch.tensor(0.1, dtype=torch.float64))
    shifted = expected - 0.1 * torch.eye(len(expected), dtype=torch.float64)
    check_factorized(matrix.factorize, shifted, 0.1, names={"*": 0.1}, gradients=False)


@both_dtypes
@pytest.mark.parametrize("name", ["cnn", "attention", "tied"])
def test_ekfac_inverts_its_product(name: str, dtype: torch.dtype) -> None:
    matrix = KFAC(*MODELS[name].make(dtype), ekfac=True, num_samples=None)
    check_factorized(matrix.factorize, matrix.to_dense().double(), 0.1, names={"*": 0.1})
    rhs = normal(matrix.shape[0]).to(dtype)
    solved = matrix.factorize(0.1).solve(rhs)
    assert_close(matrix @ solved + 0.1 * solved, rhs, 1e4)


def test_dampings_may_differ_between_layers_and_pass_gradients() -> None:
    model = MODELS["attention"]
    matrix = KFAC(*model.make(), num_samples=None)
    rhs, weights = normal(matrix.shape[0], 2), normal(matrix.shape[0], 2, seed=3)

    def run(by_torch: bool) -> tuple[Tensor, ...]:
        damping = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        if by_torch:
            dense = damped_matrix(model, "expand", damping)
            solved, logdet = torch.linalg.solve(dense, rhs), torch.logdet(dense)
        else:
            factorized = matrix.factorize(damping)
            solved, logdet = factorized.solve(rhs), factorized.logdet()
        (first,) = torch.autograd.grad(logdet, damping, retain_graph=True)
        return first, *torch.autograd.grad((weights * solved).sum(), damping)

    for actual, wanted in zip(run(False), run(True), strict=True):
        assert float(actual) == pytest.approx(float(wanted), rel=1e-9)
    names = {"*": 0.1, "norm": 3.0, "places": 2.0}
    inverse = matrix.factorize(names).inverse_diagonal()
    place = matrix.layout.select("norm", "places")
    assert_close(
        inverse[place], 1 / (exact(model).diagonal()[place] + matrix.layout.expand(names)[place])
    )
    with pytest.raises(ValueError, match=r"for the layer of 'mix.weight'"):
        matrix.factorize({"*": 0.1, "mix.bias": 0.2})


@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_ekfac_of_models_can_be_calibrated(name: str) -> None:
    network, loss, data = MODELS[name].make()
    reference = hcurv.GaussNewton(network, loss, data).factorize(1e-2)
    matrix = KFAC(network, loss, data, ekfac=True, num_samples=None)
    rows = normal(16, matrix.shape[0])
    plain = matrix.factorize(1e-2)
    calibrated = matrix.factorize(1e-2, reference=reference, rows=rows)
    truth = reference.quadratic(rows, diagonal=True)
    errors = [
        float((found.quadratic(rows, diagonal=True) / truth).log().norm())
        for found in (calibrated, plain)
    ]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("name", ["cnn", "sequence classes", "attention", "tied"])
def test_sampled_targets_tend_to_the_expectation(name: str) -> None:
    network, loss, data = MODELS[name].make()
    expected = KFAC(network, loss, data, num_samples=None)
    errors = [
        sum(
            KFAC(network, loss, data, num_samples=count, seed=seed).relative_error(expected) ** 2
            for seed in range(6)
        )
        for count in (1, 16)
    ]
    # Sixteen times as many samples make the error four times smaller.
    assert 2.5 < (errors[0] / errors[1]) ** 0.5 < 6
    once = KFAC(network, loss, data, seed=4, ekfac=True)
    assert torch.equal(once.diagonal(), KFAC(network, loss, data, seed=4, ekfac=True).diagonal())
    other = KFAC(network, loss, data, seed=5, ekfac=True)
    assert not torch.equal(once.diagonal(), other.diagonal())


def test_the_mean_of_sampled_matrices_is_unbiased() -> None:
    # With one point, A does not depend on the targets, so that the mean is over G alone.
    network, loss, (inputs, targets) = MODELS["called twice"].make()
    data = (inputs[:1], targets[:1])
    expected = KFAC(network, loss, data, num_samples=None).to_dense()
    draws = torch.stack([KFAC(network, loss, data, seed=s).to_dense() for s in range(40)])
    error = (draws.mean(0) - expected).norm()
    spread = (draws - expected).square().sum((1, 2)).mean().sqrt() / 40**0.5
    assert float(error) < 3 * float(spread)


@pytest.mark.parametrize("name", ["cnn", "attention", "called twice"])
def test_batches_do_not_matter(name: str) -> None:
    network, loss, (inputs, targets) = MODELS[name].make()
    batches = [(inputs[:5], targets[:5]), (inputs[5:6], targets[5:6]), (inputs[6:], targets[6:])]
    for options in ({}, {"ekfac": True}):
        whole = KFAC(network, loss, (inputs, targets), num_samples=None, **options)
        parts = KFAC(network, loss, batches, num_samples=None, **options)
        assert_close(parts.to_dense(), whole.to_dense(), 1e4)


@pytest.mark.parametrize(
    ("positions", "pooled"), [("expand", False), ("reduce", True)], ids=POSITIONS
)
def test_kfac_is_exact_for_linear_networks(positions: str, pooled: bool) -> None:
    """Expand if each position has a loss, reduce if positions are averaged (Eschenhagen 2023)."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)]
    if pooled:
        layers.insert(2, MeanOf(1))
    network = seeded(lambda: nn.Sequential(*layers)).double()
    inputs = normal(5, 3, 3)
    targets = normal(5, 2) if pooled else normal(5, 3, 2)
    model = Model(lambda: network, nn.MSELoss(), inputs, targets)
    dense = exact(model)
    matrix = KFAC(network, nn.MSELoss(), inputs, positions=positions, num_samples=None).to_dense()
    places = flat_places(network)
    for layer in {name.partition(".")[0] for name in places}:
        own = torch.cat([places[n].flatten() for n in places if n.startswith(f"{layer}.")])
        assert_close(matrix[own[:, None], own], dense[own[:, None], own])


def test_packed_attention_of_torch_is_a_linear_layer() -> None:
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 1, batch_first=True)
            nn.init.normal_(self.inner.in_proj_bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0].mean(1)

    class Written(nn.Module):
        def __init__(self, other: nn.MultiheadAttention) -> None:
            super().__init__()
            self.mix, self.join = nn.Linear(4, 12), nn.Linear(4, 4)
            self.mix.weight, self.mix.bias = other.in_proj_weight, other.in_proj_bias
            self.join.weight, self.join.bias = other.out_proj.weight, other.out_proj.bias

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x).chunk(3, -1)
            return self.join(torch.softmax(q @ k.mT / 2, -1) @ v).mean(1)

    network, inputs, loss = seeded(Torch).double(), normal(6, 3, 4), nn.CrossEntropyLoss()
    other = Written(network.inner)
    for options in ({}, {"positions": "reduce"}, {"ekfac": True}):
        first, second = (
            KFAC(m, loss, inputs, num_samples=None, **options) for m in (network, other)
        )
        assert_close(first.to_dense(), second.to_dense(), 1e4)


def test_parts_of_a_weight_have_blocks_of_their_own() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 1, batch_first=True)
            nn.init.normal_(self.inner.in_proj_bias)
            self.queries = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            q = self.queries(x[:, :, :3])
            return self.inner(q, x, x, need_weights=False)[0].mean(1)

    network, inputs = seeded(Cross).double(), normal(6, 3, 4)
    matrix = KFAC(network, nn.CrossEntropyLoss(), inputs, num_samples=None)
    # in_proj is divided into that of queries and that of keys and values; the bias goes with them.
    factors = [(5, 4), (5, 8), (5, 4), (4, 4)]
    assert matrix.num_stored == sum(a * a + b * b for a, b in factors)
    dense = matrix.to_dense()
    queries = torch.cat([torch.arange(16), torch.arange(48, 52)])
    assert float(dense[queries[:, None], torch.arange(16, 48)].abs().max()) == 0
    assert float(dense[:16, 48:52].abs().max()) > 0


def test_lstm_biases_join_their_weights() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0].mean(1)

    network = seeded(Last).double()
    matrix = KFAC(network, nn.CrossEntropyLoss(), normal(6, 4, 3), num_samples=None)
    assert matrix.num_stored == (4 * 4 + 8 * 8) + (3 * 3 + 8 * 8)


def test_parameters_that_no_rule_knows_and_unused_ones_have_a_diagonal() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)
            self.power, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sigmoid(self.first(x)).mean(1) ** self.power
            return functional.linear(h, self.last.weight / self.last.weight.norm(), self.last.bias)

    others = ("power", "unused", "last.weight", "last.bias")
    model = Model(Strange, nn.CrossEntropyLoss(), normal(8, 2, 4), labels(8, 3), others)
    network, loss, data = model.make()
    matrix = KFAC(network, loss, data, num_samples=None)
    diagonal = exact(model).diagonal()
    place = matrix.layout.select(*others)
    assert_close(matrix.diagonal()[place], diagonal[place])
    assert matrix.num_stored == place.numel() + 5 * 5 + 3 * 3
    solved = matrix.factorize(0.5).solve(torch.ones(matrix.shape[0], dtype=torch.float64))
    assert_close(solved[place], 1 / (diagonal[place] + 0.5))


def test_a_model_without_linear_maps_is_a_diagonal() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    model = Model(Scale, nn.MSELoss(), normal(7, 3), normal(7, 3), ("scale",))
    network, loss, data = model.make()
    for ekfac in (False, True):
        matrix = KFAC(network, loss, data, num_samples=None, ekfac=ekfac)
        check_operator(matrix, exact(model).diagonal().diag())
        check_factorized(matrix.factorize, matrix.to_dense(), 0.1, names={"scale": 0.1})


def test_inputs_and_forward_functions_are_those_of_gauss_newton() -> None:
    network, loss, (inputs, targets) = MODELS["called twice"].make()
    expected = KFAC(network, loss, inputs, num_samples=None)
    found = KFAC(
        network,
        loss,
        [({"x": inputs, "scale": torch.full((len(inputs),), 2.0, dtype=torch.float64)}, targets)],
        num_samples=None,
        forward_fn=lambda model, batch: model(batch["x"] * batch["scale"][0] / 2),
    )
    assert_close(found.to_dense(), expected.to_dense())


def test_chains_are_the_same_with_both_treatments_of_positions() -> None:
    network = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))).double()
    matrices = [
        KFAC(network, nn.CrossEntropyLoss(), normal(9, 4), positions=p, num_samples=None)
        for p in POSITIONS
    ]
    assert torch.equal(matrices[0].to_dense(), matrices[1].to_dense())


def test_bad_options_are_refused() -> None:
    network, loss, data = MODELS["cnn"].make()
    with pytest.raises(ValueError, match='positions must be "expand" or "reduce"; got \'mean\''):
        KFAC(network, loss, data, positions="mean")
    for structure in ("block-tridiagonal", "full"):
        with pytest.raises(
            hcurv.UnsupportedModelError, match=f'"{structure}".*needs a chain of Linear layers'
        ):
            KFAC(network, loss, data, structure=structure)
    with pytest.raises(ValueError, match="inputs or derivatives overflow"):
        KFAC(network.float(), loss, (1e25 * data[0].float(), data[1]), num_samples=None)


def test_weights_that_are_not_used_at_all_points_alike_are_refused() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x if bool((x > 5).any()) else torch.tanh(self.first(x)).mean(1, True))

    network, inputs = seeded(Moody).double(), normal(6, 1, 4)
    loss = nn.MSELoss()
    with pytest.raises(
        hcurv.UnsupportedModelError, match=r"same way at all points.*'first.weight'"
    ):
        KFAC(network, loss, [(inputs,), (inputs + 100.0,)])


def test_factors_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    with pytest.raises(hcurv.InsufficientMemoryError, match="the Kronecker factors of 3 layers"):
        KFAC(*MODELS["cnn"].make())


CURVLINOPS = {
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ),
    "sequence": lambda: nn.Sequential(
        nn.Flatten(2), nn.Linear(36, 5), nn.Tanh(), MeanOf(1), nn.Linear(5, 3)
    ),
    "chain": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
@both_positions
@pytest.mark.parametrize("name", CURVLINOPS)
def test_the_matrices_are_those_of_curvlinops(
    name: str, positions: str, loss: type[nn.Module], reduction: str
) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    network = seeded(CURVLINOPS[name]).double()
    inputs = normal(60, 2, 6, 6)
    targets = labels(60, 3) if loss is nn.CrossEntropyLoss else normal(60, 3)
    batches = [(inputs[:23], targets[:23]), (inputs[23:], targets[23:])]
    for kind, ekfac in (("KFACLinearOperator", False), ("EKFACLinearOperator", True)):
        theirs = getattr(curvlinops, kind)(
            network,
            loss(reduction=reduction),
            list(network.parameters()),
            batches,
            fisher_type="type-2",
            kfac_approx=positions,
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        ours = KFAC(
            network,
            loss(reduction=reduction),
            batches,
            positions=positions,
            num_samples=None,
            ekfac=ekfac,
        )
        expected = theirs @ torch.eye(ours.shape[0], dtype=torch.float64)
        assert float((ours.to_dense() - expected).norm() / expected.norm()) < 1e-10
