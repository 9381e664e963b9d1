"""What can be read, and what is refused with the name of the part at fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import hcurv
import oracles
from cases import assert_close, labels, normal, seeded
from hcurv.network.reading import read_network


class Forward(nn.Module):
    """A module whose forward is given as a function of (module, x)."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], object], **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._function = forward

    def forward(self, x: Tensor) -> object:
        return self._function(self, x)


def linear(num_in: int = 4, num_out: int = 3) -> nn.Linear:
    return nn.Linear(num_in, num_out)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "randomised leaky relu, inactive": nn.RReLU().eval(),
    "chain": nn.Sequential(nn.Tanh(), nn.Identity(), nn.Softplus(), nn.Dropout(0.3).eval()),
    "function": torch.sin,
    "method": lambda x: x.tanh(),
    "composed": lambda x: x * torch.sigmoid(x) + 0.1 * x.square(),
    "affine": lambda x: 2 * x - 1,
    "defined for positive numbers": lambda x: torch.where(x > 0, x.log(), 0 * x),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "functional dropout, inactive": lambda x: functional.dropout(x.exp(), 0.5, training=False),
    "flatten": nn.Flatten(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's, in the oracle
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize("at_the_end", [False, True])
def test_any_elementwise_activation_is_read(
    activation: Callable[[Tensor], Tensor], at_the_end: bool
) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        x = activation(module.a(x))
        return activation(module.b(x)) if at_the_end else module.b(x)

    model = seeded(lambda: Forward(forward, a=linear(), b=linear(3, 2)).double())
    if isinstance(activation, nn.Module):
        model.activation = activation
    inputs, targets = normal(6, 4), labels(6, 2)
    loss = nn.CrossEntropyLoss()
    expected = oracles.gauss_newton(model, lambda outputs: loss(outputs, targets), inputs)
    assert_close(hcurv.GaussNewton(model, loss, inputs).to_dense(), expected, 1e3)


@pytest.mark.parametrize(
    ("prepare", "shape"),
    [
        (nn.Flatten(), (5, 1, 2, 2)),
        (lambda x: x.view(x.size(0), -1), (5, 2, 2)),
        (lambda x: torch.flatten(x, 1), (5, 4, 1)),
        (lambda x: (x - 0.5) / 2, (5, 4)),
    ],
)
def test_inputs_may_be_flattened_and_scaled(
    prepare: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    model = seeded(lambda: Forward(lambda m, x: m.a(prepare(x)), a=linear()).double())
    if isinstance(prepare, nn.Module):
        model.prepare = prepare
    inputs = normal(*shape)
    expected = hcurv.GaussNewton(model.a, nn.MSELoss(), prepare(inputs)).to_dense()
    assert_close(hcurv.GaussNewton(model, nn.MSELoss(), inputs).to_dense(), expected)


def test_flat_index_is_that_of_parameters_to_vector() -> None:
    model = Forward(lambda m, x: m.b(torch.relu(m.a(x))), b=linear(3, 2), a=linear(4, 3))
    model.b.bias.requires_grad_(False)
    network = read_network(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    flat = nn.utils.parameters_to_vector(trainable)
    assert network.num_parameters == flat.numel()
    assert [layer.name for layer in network.layers] == ["a", "b"]
    for layer in network.layers:
        place = layer.parameters.weight
        assert place is not None
        assert torch.equal(flat[place].view_as(layer.weight), layer.weight)
    assert network.layers[1].parameters.bias is None
    assert network.layout.names == ("b.weight", "a.weight", "a.bias")


def test_a_linear_layer_by_itself_keeps_the_names_of_its_parameters() -> None:
    network = read_network(linear())
    assert network.layout.layers == {"": ("weight", "bias")}
    assert network.layers[0].parameters.bias == slice(12, 15)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    return model


class OddLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(), linear()),
        r"'0' \(Conv1d\) has parameters but is no Linear layer",
    ),
    "frozen convolution": (
        lambda: nn.Sequential(nn.Conv1d(1, 1, 1).requires_grad_(False), nn.Flatten(), linear()),
        r"'0' \(Conv1d\).*apply it to the data first",
    ),
    "batch norm": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(3).eval(), linear(3, 2)),
        r"'1' \(BatchNorm1d\) is a normalisation",
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        r"'1' \(BatchNorm1d\) is a normalisation",
    ),
    "layer norm": (
        lambda: nn.Sequential(linear(), nn.LayerNorm(3, elementwise_affine=False)),
        r"what follows '0' \('1' \(LayerNorm\)\) does not act elementwise",
    ),
    "softmax": (
        lambda: nn.Sequential(nn.Sequential(linear(), nn.Softmax(dim=1))),
        r"what follows '0.0' \('0.1' \(Softmax\)\) does not act elementwise",
    ),
    "softmax function": (
        lambda: Forward(lambda m, x: torch.softmax(m.a(x), -1), a=linear()),
        r"what follows 'a' \('softmax'\) does not act elementwise",
    ),
    "learned activation": (
        lambda: nn.Sequential(linear(), nn.PReLU()),
        r"'1' \(PReLU\) has parameters",
    ),
    "skip connection": (
        lambda: Forward(lambda m, x: x + m.a(x), a=linear(4, 4)),
        r"'add' combines the outputs of 'input' and 'a': branches",
    ),
    "two heads": (
        lambda: Forward(lambda m, x: m.b(x) + m.a(x), a=linear(), b=linear()),
        "branches",
    ),
    "returns the middle": (
        lambda: Forward(lambda m, x: (m.b(m.a(x)), m.a(x))[0], a=linear(4, 4), b=linear()),
        r"'a' shares weights with 'a'",
    ),
    "two outputs": (
        lambda: Forward(lambda m, x: (m.a(x), x), a=linear()),
        "the model must return one tensor",
    ),
    "shared module": (
        lambda: Forward(lambda m, x: m.a(m.a(x)), a=linear(4, 4)),
        r"'a' shares weights with 'a'",
    ),
    "shared weight": (tied, r"'2' shares weights with '0'"),
    "parameter in forward": (
        lambda: Forward(lambda m, x: functional.linear(x, m.a.weight), a=linear()),
        r"the parameter 'a.weight' is used outside a Linear layer",
    ),
    "control flow": (
        lambda: Forward(lambda m, x: m.a(x) if x.sum() > 0 else x, a=linear()),
        "torch.fx cannot trace Forward",
    ),
    "no linear layer": (lambda: nn.Sequential(nn.ReLU()), "the model has no Linear layer"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"'0' \(LazyLinear\) is not a plain Linear"),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(linear())),
        r"the parameter '0.weight' is computed from other tensors",
    ),
    "odd linear": (
        lambda: nn.Sequential(OddLinear(4, 3)),
        "is not a plain Linear|outside a Linear",
    ),
    "unused layer": (
        lambda: Forward(lambda m, x: m.a(x), a=linear(), spare=linear()),
        r"the parameter 'spare.weight' requires a gradient but no Linear",
    ),
    "dropout in training": (
        lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear(3, 2)),
        r"'1' \(Dropout, p=0.5\) is active: the model is in training mode. Call model.eval\(\)",
    ),
    "functional dropout": (
        lambda: Forward(lambda m, x: functional.dropout(m.a(x), 0.5), a=linear()),
        "is random",
    ),
    "attention to other points": (
        lambda: Forward(lambda m, x: (lambda y: y - y.mean(0))(m.a(x)), a=linear()),
        "does not act elementwise",
    ),
    "reshaped": (
        lambda: Forward(lambda m, x: m.a(x)[:, :2], a=linear()),
        "does not act elementwise",
    ),
    "softmax beside something unused": (
        lambda: Forward(
            lambda m, x: (lambda y: (m.b(y), torch.softmax(y, 1))[1])(m.a(x)),
            a=linear(),
            b=nn.ReLU(),
        ),
        r"what follows 'a' \('softmax'\) does not act",
    ),
    "undefined everywhere": (
        lambda: Forward(lambda m, x: (-m.a(x).square()).log(), a=linear()),
        "does not act elementwise",
    ),
    "two inputs": (
        lambda: nn.Bilinear(2, 2, 2),
        "the model takes a second input",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_no_chain(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(hcurv.UnsupportedModelError, match=message):
        read_network(model())


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def by_hand(layer: nn.Linear) -> None:
    bias = layer.bias
    del layer.bias
    layer.bias = 2 * bias
    layer.raw_bias = bias


# What makes the weight or the bias of a layer a computed tensor, and what the message advises.
COMPUTED: dict[str, tuple[Callable[[nn.Linear], object], str, str]] = {
    "pruned bias": (
        lambda layer: prune.l1_unstructured(layer, "bias", 1),
        "bias",
        "prune.remove",
    ),
    "pruned weight": (
        lambda layer: prune.l1_unstructured(layer, "weight", 2),
        "weight",
        "prune.remove",
    ),
    "parametrized bias": (
        lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
        "bias",
        "parametrize.remove_parametrizations",
    ),
    "spectral norm of a bias": (
        lambda layer: parametrizations.spectral_norm(layer, "bias").eval(),
        "bias",
        "parametrize.remove_parametrizations",
    ),
    "weight norm": (
        parametrizations.weight_norm,
        "weight",
        "parametrize.remove_parametrizations",
    ),
    "old spectral norm": (
        lambda layer: nn.utils.spectral_norm(layer).eval(),
        "weight",
        "remove_spectral_norm",
    ),
    "computed by hand": (by_hand, "bias", "torch.nn.Parameter"),
}


@pytest.mark.parametrize(("change", "parameter", "remedy"), COMPUTED.values(), ids=COMPUTED.keys())
def test_computed_parameters_belong_to_no_chain(
    change: Callable[[nn.Linear], object], parameter: str, remedy: str
) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(3, 2))
    change(model[2])
    message = rf"'2.{parameter}' is computed from other tensors .*{remedy}"
    with pytest.raises(hcurv.UnsupportedModelError, match=message):
        read_network(model)


def test_parameters_that_are_computed_once_and_for_all_are_refused() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(3, 2))
    by_hand(model[2])
    with pytest.raises(hcurv.UnsupportedModelError, match=r"'2.bias' was computed .*forward"):
        hcurv.GaussNewton(model, nn.MSELoss(), normal(5, 4).float())


def test_the_advice_for_pruned_parameters_works() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(3, 2))
    prune.l1_unstructured(model[2], "bias", 1)
    prune.remove(model.get_submodule("2"), "bias")
    assert hcurv.GaussNewton(model, nn.MSELoss(), normal(5, 4).float()).shape == (23, 23)


class Subclass(nn.Linear):
    """Not different from its base, but defined outside torch."""


def test_subclasses_that_keep_the_forward_method_are_read() -> None:
    model = seeded(lambda: nn.Sequential(Subclass(4, 3), nn.Tanh(), Subclass(3, 2))).double()
    inputs, targets, loss = normal(6, 4), labels(6, 2), nn.CrossEntropyLoss()
    expected = oracles.gauss_newton(model, lambda outputs: loss(outputs, targets), inputs)
    assert_close(hcurv.GaussNewton(model, loss, inputs).to_dense(), expected, 1e3)


def test_a_bias_that_is_a_buffer_is_frozen() -> None:
    model = seeded(lambda: nn.Sequential(linear(), nn.Tanh(), linear(3, 2)))
    expected = hcurv.GaussNewton(model, nn.MSELoss(), normal(5, 4).float()).to_dense()
    bias = model[2].bias.detach()
    del model[2].bias
    model[2].register_buffer("bias", bias)
    fixed = hcurv.GaussNewton(model, nn.MSELoss(), normal(5, 4).float()).to_dense()
    assert_close(fixed, expected[:21, :21])


def test_parameters_that_a_layer_holds_but_does_not_use_are_refused() -> None:
    model = nn.Sequential(linear())
    model[0].temperature = nn.Parameter(torch.ones(1))
    with pytest.raises(
        hcurv.UnsupportedModelError, match=r"the parameter '0.temperature' requires"
    ):
        read_network(model)


def test_reading_leaves_the_random_state_alone() -> None:
    model = Forward(lambda m, x: functional.dropout(m.a(x), 0.5), a=linear())
    state = torch.get_rng_state()
    with pytest.raises(hcurv.UnsupportedModelError, match="is random"):
        read_network(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_points_that_influence_each_other_are_refused() -> None:
    model = Forward(lambda m, x: m.a(x - x.mean(0)), a=linear())
    with pytest.raises(hcurv.UnsupportedModelError, match="outputs on 3 points differ"):
        hcurv.GaussNewton(model, nn.MSELoss(), normal(3, 4).float())


def test_hooks_belong_to_the_model() -> None:
    model = hooked()
    inputs = normal(3, 4).float()
    expected = oracles.gauss_newton(model, lambda outputs: outputs.square().mean(), inputs)
    assert_close(hcurv.GaussNewton(model, nn.MSELoss(), inputs).to_dense(), expected, 1e3)


def test_bad_parameters_are_refused() -> None:
    def refuse(model: object) -> None:
        hcurv.GaussNewton(model, nn.MSELoss(), normal(3, 4).float())

    with pytest.raises(TypeError, match=r"all float32 or all float64; got torch.float16"):
        refuse(nn.Sequential(linear()).half())
    mixed = nn.Sequential(linear(), linear(3, 2).double())
    with pytest.raises(TypeError, match=r"got torch.float32, torch.float64"):
        refuse(mixed)
    whole = nn.Sequential(linear().requires_grad_(False), linear(3, 2))
    whole[0].weight.data = torch.ones(3, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"got torch.float32, torch.int64"):
        refuse(whole)
    for value in (float("nan"), float("inf")):
        model = nn.Sequential(linear(), nn.ReLU(), linear(3, 2))
        model[2].bias.data[1] = value
        with pytest.raises(ValueError, match=r"the parameter '2.bias' has NaN or infinite values"):
            refuse(model)
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        refuse(linear().requires_grad_(False))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        refuse(lambda x: x)
