"""The reference recipes, and the cache of what was trained by them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hcurv
from hcurv.experiments import datasets, reference_networks
from hcurv.experiments.reference_networks import (
    REFERENCE_NETWORKS,
    ReferenceNetwork,
    TrainedNetwork,
    build_mlp,
    seeded_mlp,
    train,
)
from image_files import describe, idx_files, isolate, write_files

DIGITS = REFERENCE_NETWORKS["AE (digits)"]


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)


def stored_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "networks").iterdir())


def assert_same_weights(left: TrainedNetwork, right: TrainedNetwork) -> None:
    expected = right.model.state_dict()
    assert left.model.state_dict().keys() == expected.keys()
    for name, weights in left.model.state_dict().items():
        assert torch.equal(weights, expected[name])


def forbid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        pytest.fail("it was trained")

    monkeypatch.setattr(reference_networks, "_fit", fail)


def test_reference_networks_have_the_papers_sizes() -> None:
    expected = {
        "classifier (a)": 15_910,
        "classifier (b)": 61_670,
        "classifier (c)": 219_818,
        "classifier (d)": 1_643_498,
        "AE (a)": 16_474,
        "AE (b)": 64_522,
        "AE (c)": 125_972,
        "classifier (digits)": 1_510,
        "AE (digits)": 1_354,
    }
    assert REFERENCE_NETWORKS.keys() == expected.keys()
    for name, size in expected.items():
        model = build_mlp(REFERENCE_NETWORKS[name].sizes, torch.nn.ReLU)
        assert sum(p.numel() for p in model.parameters()) == size


def test_no_steps_leave_the_initial_weights() -> None:
    initial = train(DIGITS, num_steps=0)
    expected = seeded_mlp(DIGITS.sizes, 0, torch.nn.Softplus, torch.nn.Sigmoid())
    for name, weights in expected.state_dict().items():
        assert torch.equal(initial.model.state_dict()[name], weights)
        assert not torch.equal(train(DIGITS).model.state_dict()[name], weights)
    assert_same_weights(train(DIGITS, num_steps=0), initial)


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("kind", ["classifier", "autoencoder"])
def test_training_follows_the_recipe(
    data: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, width = 300 * 128 if kind == "classifier" else 100 * 128, 2
    images = np.random.default_rng(0).integers(0, 256, (count, width, width), dtype=np.uint8)
    labels = images[:, 0, 0] % 10
    files = idx_files(images, labels)
    name = data.upper().replace("-", "_")
    monkeypatch.setattr(datasets, name, describe(getattr(datasets, name), files))
    write_files(tmp_path / data, files, compress=False)
    is_classifier = kind == "classifier"
    sizes = (4, 20, 10) if is_classifier else (4, 3, 4)

    state = torch.get_rng_state()
    trained = train(ReferenceNetwork("made up", sizes, kind, data), tmp_path)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)

    inputs = torch.from_numpy(images.reshape(count, -1).astype(np.float32)) / 255
    assert torch.equal(trained.inputs, inputs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = torch.nn.Linear(*sizes[:2]), torch.nn.Linear(*sizes[1:])
    weights = [first.weight, first.bias, last.weight, last.bias]
    rate = 0.1 if is_classifier else 0.02 * 784 / 4
    for begin in range(0, count, 128):
        x, y = inputs[begin : begin + 128], torch.from_numpy(labels[begin : begin + 128]).long()
        if is_classifier:
            loss = torch.nn.functional.cross_entropy(last(first(x).relu()), y)
        else:
            output = last(torch.nn.functional.softplus(first(x))).sigmoid()
            loss = (output - x).square().sum() / 256
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= rate * slope
    for weight, parameter in zip(weights, trained.model.parameters(), strict=True):
        assert torch.allclose(weight, parameter, rtol=1e-4, atol=1e-5)
        assert parameter.grad is None
    assert hcurv.GaussNewton(trained.model, trained.loss, trained.inputs[:5]).num_points == 5


@pytest.mark.parametrize("name", ["classifier (digits)", "AE (digits)"])
def test_training_is_reproducible_and_learns(name: str) -> None:
    recipe = REFERENCE_NETWORKS[name]
    trained = train(recipe, cache=False)
    assert_same_weights(train(recipe, cache=False), trained)
    with torch.no_grad():
        outputs = trained.model(trained.inputs)
    if recipe.kind == "classifier":
        assert (outputs.argmax(1) == trained.targets).float().mean() > 0.9
    else:
        error = (outputs - trained.targets).square().sum()
        spread = (trained.inputs - trained.inputs.mean(0)).square().sum()
        assert error < 0.8 * spread


@pytest.mark.parametrize("name", ["classifier (digits)", "AE (digits)"])
def test_what_was_trained_once_is_taken_from_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = REFERENCE_NETWORKS[name]
    trained = train(recipe)
    (path,) = stored_files(tmp_path)
    forbid_training(monkeypatch)
    again = train(recipe)
    assert_same_weights(again, trained)
    assert type(again.loss) is type(trained.loss)
    assert torch.equal(again.targets, trained.targets)
    assert all(p.requires_grad and p.is_leaf for p in again.model.parameters())
    assert stored_files(tmp_path) == [path]


def test_without_the_cache_nothing_is_read_or_written(tmp_path: Path) -> None:
    train(DIGITS, cache=False)
    assert not (tmp_path / "cache").exists()


def change_data(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = datasets.digits()
    monkeypatch.setattr(datasets, "digits", lambda: (inputs.flip(0), labels))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(reference_networks, "_PROCEDURE", 0),
        lambda patch: patch.setattr(ReferenceNetwork, "rate", 0.125),
        lambda patch: patch.setattr(torch, "__version__", "1.0"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 1000),
        change_data,
    ],
)
def test_weights_of_another_training_are_not_taken(
    change: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(DIGITS)
    change(monkeypatch)
    train(DIGITS)
    assert len(stored_files(tmp_path)) == 2


@pytest.mark.parametrize("change", [{"sizes": (64, 8, 64)}, {"batch_size": 64}, {"seed": 1}])
def test_other_recipes_are_stored_beside(tmp_path: Path, change: dict[str, Any]) -> None:
    for recipe in (DIGITS, dataclasses.replace(DIGITS, **change)):
        train(recipe)
    assert len(stored_files(tmp_path)) == 2


def test_other_numbers_of_steps_are_stored_beside(tmp_path: Path) -> None:
    train(DIGITS)
    train(DIGITS, num_steps=5)
    assert len(stored_files(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no weights"),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
        lambda path: save_file({"0.weight": torch.zeros(2)}, path),
    ],
)
def test_damaged_weights_are_trained_again(
    damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(DIGITS)
    (path,) = stored_files(tmp_path)
    damage(path)
    with pytest.warns(UserWarning, match=f"stored weights {path} are damaged"):
        assert_same_weights(train(DIGITS), trained)
    forbid_training(monkeypatch)
    assert_same_weights(train(DIGITS), trained)


def test_weights_of_another_model_are_not_taken(tmp_path: Path) -> None:
    train(dataclasses.replace(DIGITS, sizes=(64, 8, 64)))
    (other,) = stored_files(tmp_path)
    trained = train(DIGITS)
    (path,) = set(stored_files(tmp_path)) - {other}
    path.write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match="they are of another model"):
        assert_same_weights(train(DIGITS), trained)


def test_training_goes_on_without_a_place_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HCURV_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="weights are not stored: .*Not a directory"):
        trained = train(DIGITS)
    assert_same_weights(trained, train(DIGITS, cache=False))


def test_without_safetensors_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        ImportError, match=r"pip install 'hcurv\[files\]', or train with cache=False"
    ):
        train(DIGITS)
    train(DIGITS, cache=False)
