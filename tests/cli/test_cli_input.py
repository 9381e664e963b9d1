"""What models and data the command line reads, and that it reads them right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hcurv
from cases import normal, seeded
from command_line import CROSS_ENTROPY, Network, fail, succeed, succeed_json, write_network
from hcurv.cli.models import ACTIVATIONS, LOSSES
from hcurv.experiments import datasets
from image_files import describe, idx_files, isolate, write_files


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return write_network(tmp_path_factory.mktemp("network"))


def diagonal(folder: Path, *arguments: object) -> np.ndarray:
    """The diagonal of whatever the arguments say."""
    succeed("diagonal", *arguments, "--out", folder / "d.npy")
    result: np.ndarray = np.load(folder / "d.npy")
    return result


def expected(model: nn.Module, loss: object, inputs: Tensor) -> np.ndarray:
    return hcurv.GaussNewton(model, loss, inputs).diagonal().numpy()  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("output_activation", [None, "sigmoid"])
def test_activations(
    network: Network, tmp_path: Path, activation: str, output_activation: str | None
) -> None:
    parts = list(network.model)
    parts[1] = ACTIVATIONS[activation]()
    arguments = [network.weights, "--data", network.data, "--activation", activation]
    if output_activation is not None:
        parts.append(nn.Sigmoid())
        arguments += ["--output-activation", output_activation]
    found = diagonal(tmp_path, *arguments, *CROSS_ENTROPY)
    wanted = expected(nn.Sequential(*parts), nn.CrossEntropyLoss(), network.inputs)
    assert np.allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(network: Network, tmp_path: Path, loss: str) -> None:
    np.savez(tmp_path / "X.npz", x=network.inputs.numpy())
    arguments = [network.weights, "--data", tmp_path / "X.npz", "--activation", "relu"]
    found = diagonal(tmp_path, *arguments, "--loss", loss)
    assert np.allclose(found, expected(network.model, LOSSES[loss](), network.inputs), rtol=1e-5)


def test_dtype_and_number_of_points(network: Network, tmp_path: Path) -> None:
    found = diagonal(tmp_path, *network.options, "--dtype", "float64", "--num-points", "11")
    assert found.dtype == np.float64
    model = seeded(lambda: nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4))).double()
    wanted = expected(model, nn.CrossEntropyLoss(), network.inputs[:11].double())
    assert np.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("pattern", ["{}", "layers.{}", "net.fc{}.linear", "module.block{}"])
def test_layers_are_ordered_by_numbers(tmp_path: Path, pattern: str) -> None:
    layers = [seeded(lambda: nn.Linear(4, 4), seed).double() for seed in range(12)]
    state = {
        f"{pattern.format(2 * number)}.{part}": tensor
        for number, layer in enumerate(layers)
        for part, tensor in layer.state_dict().items()
    }
    save_file(state, tmp_path / "W.safetensors")
    inputs = normal(10, 4)
    np.save(tmp_path / "X.npy", inputs.numpy())
    parts = [part for layer in layers for part in (layer, nn.Tanh())][:-1]
    arguments = [tmp_path / "W.safetensors", "--data", tmp_path / "X.npy", "--activation", "tanh"]
    found = diagonal(tmp_path, *arguments, "--loss", "mse")
    assert np.allclose(found, expected(nn.Sequential(*parts), nn.MSELoss(), inputs), rtol=1e-10)


def test_one_layer_without_bias_needs_no_activation(tmp_path: Path) -> None:
    layer = seeded(lambda: nn.Linear(3, 2, bias=False))
    save_file(layer.state_dict(), tmp_path / "W.safetensors")
    inputs = normal(10, 3).float()
    save_file(
        {"x": inputs, "labels": torch.ones(10, dtype=torch.uint8)}, tmp_path / "X.safetensors"
    )
    found = diagonal(
        tmp_path, tmp_path / "W.safetensors", "--data", tmp_path / "X.safetensors", *CROSS_ENTROPY
    )
    assert np.allclose(found, expected(layer, nn.CrossEntropyLoss(), inputs), rtol=1e-5)


def test_half_precision_asks_for_a_type(network: Network, tmp_path: Path) -> None:
    path = tmp_path / "W.safetensors"
    save_file({name: t.half() for name, t in network.model.state_dict().items()}, path)
    arguments = [path, *network.options[1:]]
    assert "the weights are float16: choose --dtype" in fail("diagonal", *arguments)
    found = diagonal(tmp_path, *arguments, "--dtype", "float32")
    assert np.allclose(found, network.exact().diagonal().numpy(), rtol=0.05, atol=1e-4)


FACTORY = '''
import torch
from torch import nn

class Skewed(nn.Module):
    """Registered in another order than called, with a buffer and dropout."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 4)
        self.first = nn.Linear(9, 7)
        self.register_buffer("count", torch.tensor(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))

def build():
    torch.manual_seed(5)
    return Skewed()

def build_loudly():
    print("building")
    return build()

def convolution():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)
    )

class Loud(nn.Linear):
    def forward(self, x):
        print("forward pass of", type(x))
        return super().forward(x)

def loud():
    return nn.Sequential(Loud(9, 5), nn.Tanh(), nn.Linear(5, 4))

class LoudWhole(Skewed):
    def forward(self, x):
        print("forward pass of", type(x))
        return super().forward(x)

def loud_chain():
    return LoudWhole()

def leaves():
    raise SystemExit(0)

def fails():
    raise KeyError("no such size")

def other():
    return 3
'''


@pytest.fixture
def factory(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, a new one for each test."""
    name = f"factory_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("nowhere")  # restores the path
    return name


def test_factory_with_and_without_weights(network: Network, factory: str, tmp_path: Path) -> None:
    arguments = ["--data", network.data, *CROSS_ENTROPY, "--model", f"{factory}:build_loudly"]
    document = succeed_json("diagonal", *arguments)  # in spite of what the function prints
    assert [layer["name"] for layer in document["layers"]] == ["last", "first"]
    own = diagonal(tmp_path, *arguments)
    state = {
        "first.weight": network.model[0].weight.detach(),
        "first.bias": network.model[0].bias.detach(),
        "last.weight": network.model[2].weight.detach(),
        "last.bias": network.model[2].bias.detach(),
        "count": torch.tensor(3),
    }
    save_file(state, "W.safetensors")
    found = diagonal(tmp_path, "W.safetensors", *arguments)
    chain = nn.Sequential(network.model[0], nn.Tanh(), network.model[2])
    wanted = expected(chain, nn.CrossEntropyLoss(), network.inputs)
    last_first = np.concatenate([wanted[70:], wanted[:70]])  # as the parameters are registered
    assert np.allclose(found, last_first, rtol=1e-5)
    assert not np.allclose(own, last_first, rtol=1e-2)


@pytest.mark.parametrize("name", ["loud", "loud_chain"])
def test_what_a_forward_pass_prints_is_no_result(network: Network, factory: str, name: str) -> None:
    arguments = ["--data", network.data, *CROSS_ENTROPY, "--model", f"{factory}:{name}"]
    for command in (["diagonal"], ["eigs", "-k", "2"], ["solve", "--damping", "0.1", "--logdet"]):
        assert succeed_json(command[0], *arguments, *command[1:])


def test_a_convolution_by_its_factory(network: Network, factory: str, tmp_path: Path) -> None:
    """Every command that reads a model reads any model."""
    arguments = ["--data", network.data, *CROSS_ENTROPY, "--model", f"{factory}:convolution"]
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)
    ).double()
    parameters = dict(model.named_parameters())
    wanted = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64)
    for point in network.inputs.double()[:, None]:
        jacobians = torch.func.jacrev(torch.func.functional_call, argnums=1)(
            model, parameters, (point,)
        )
        rows = torch.cat([part.reshape(4, -1) for part in jacobians.values()], 1).detach()
        shares = model(point)[0].softmax(0).detach()
        inner = shares.diag() - shares[:, None] * shares
        wanted += torch.einsum("ak,ab,bk->k", rows, inner, rows) / len(network.inputs)
    assert np.allclose(diagonal(tmp_path, *arguments), wanted.numpy(), rtol=1e-4)
    document = succeed_json("compress", *arguments, "--tolerance", "1e-3", "--out", "A.safetensors")
    assert document["estimated_error"] < 2e-3
    assert hcurv.load("A.safetensors").shape == (wanted.numel(), wanted.numel())
    succeed("solve", *arguments, "--damping", "1e-2", "--logdet")
    succeed("compare", *arguments, "--storage", "0.3")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{}:fails", "failed: KeyError: 'no such size'"),
        ("{}:leaves", "failed: SystemExit: 0"),
        ("{}:other", "must return a torch.nn.Module; got int"),
        ("{}:nothing", "has no function 'nothing'"),
        ("{}", "must look like package.module:function"),
        ("no_such_module:build", "no_such_module cannot be imported"),
    ],
)
def test_unfit_factories(network: Network, factory: str, model: str, message: str) -> None:
    arguments = ["--data", network.data, *CROSS_ENTROPY, "--model", model.format(factory)]
    assert message in fail("diagonal", *arguments)


def test_weights_that_do_not_fit_the_factory(network: Network, factory: str) -> None:
    arguments = ["--data", network.data, *CROSS_ENTROPY, "--model", f"{factory}:build"]
    message = fail("diagonal", network.weights, *arguments)
    assert "does not fit the model of" in message
    assert "Missing key(s)" in message
    message = fail("diagonal", network.weights, *arguments, "--activation", "relu")
    assert "--activation and --output-activation do not go with --model" in message


def _images(folder: Path, network: Network) -> Path:
    np.save(folder / "X.npy", network.inputs.numpy().reshape(40, 3, 3))
    return folder / "X.npy"


def _big_endian(folder: Path, network: Network) -> Path:
    np.savez(
        folder / "X.npz",
        X=network.inputs.numpy().astype(">f8"),
        labels=network.targets.numpy().astype(">u2"),
    )
    return folder / "X.npz"


def _lone_array(folder: Path, network: Network) -> Path:
    np.savez_compressed(folder / "X.npz", arr_0=network.inputs.numpy())
    return folder / "X.npz"


def _safetensors(folder: Path, network: Network) -> Path:
    save_file({"x": network.inputs, "y": network.targets}, folder / "X.safetensors")
    return folder / "X.safetensors"


@pytest.mark.parametrize("write", [_images, _big_endian, _lone_array, _safetensors])
def test_data_files(
    network: Network, tmp_path: Path, write: Callable[[Path, Network], Path]
) -> None:
    path = write(tmp_path, network)
    arguments = [network.weights, "--data", path, "--activation", "relu", *CROSS_ENTROPY]
    assert np.array_equal(diagonal(tmp_path, *arguments), network.exact().diagonal().numpy())


def test_integer_data_are_converted(network: Network, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9), dtype=np.uint8)
    np.savez(tmp_path / "X.npz", x=pixels, y=pixels[:, :4] > 9)
    arguments = [network.weights, "--data", tmp_path / "X.npz", "--activation", "relu"]
    found = diagonal(tmp_path, *arguments, "--loss", "bce-with-logits")
    inputs = torch.from_numpy(pixels.astype(np.float32))
    assert np.allclose(found, expected(network.model, nn.BCEWithLogitsLoss(), inputs), rtol=1e-5)


def test_ignored_labels_are_ignored(network: Network, tmp_path: Path) -> None:
    targets = network.targets.clone()
    targets[10:] = -100
    np.savez(tmp_path / "X.npz", x=network.inputs.numpy(), y=targets.numpy())
    arguments = [network.weights, "--data", tmp_path / "X.npz", "--activation", "relu"]
    found = diagonal(tmp_path, *arguments, *CROSS_ENTROPY)
    wanted = expected(network.model, nn.CrossEntropyLoss(), network.inputs[:10])
    assert np.allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_digits(tmp_path: Path, loss: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10)))
    save_file(model.state_dict(), tmp_path / "W.safetensors")
    arguments = [tmp_path / "W.safetensors", "--data", "digits", "--activation", "relu"]
    found = diagonal(tmp_path, *arguments, "--loss", loss, "--num-points", "100")
    wanted = expected(model, LOSSES[loss](), datasets.digits()[0][:100])
    assert np.allclose(found, wanted, rtol=1e-5)


def test_named_data_sets_are_searched_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    generator = np.random.default_rng(0)
    files = idx_files(
        generator.integers(0, 256, (12, 2, 2), dtype=np.uint8),
        generator.integers(0, 3, 12, dtype=np.uint8),
    )
    monkeypatch.setattr(datasets, "MNIST", describe(datasets.MNIST, files))
    model = seeded(lambda: nn.Linear(4, 3))
    save_file(model.state_dict(), tmp_path / "W.safetensors")
    arguments = [tmp_path / "W.safetensors", "--data", "mnist", *CROSS_ENTROPY, "--data-dir"]
    (tmp_path / "empty").mkdir()
    message = fail("diagonal", *arguments, tmp_path / "empty")
    assert "the folder that --data-dir or" in message
    write_files(tmp_path / "full" / "mnist", files)
    found = diagonal(tmp_path, *arguments, tmp_path / "full")
    inputs, _ = datasets.mnist(tmp_path / "full")
    assert np.allclose(found, expected(model, nn.CrossEntropyLoss(), inputs), rtol=1e-5)
