"""The reference models: their sizes, their training, and that their matrices are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments import datasets, reference_models
from hcurv.experiments.reference_models import (
    CHARACTERS,
    REFERENCE_MODELS,
    LanguageModel,
    ReferenceModel,
    build,
    fit,
    text,
    train,
)
from image_files import describe, idx_files, isolate, write_files

SIZES = {"LeNet": 61_706, "ResNet-8": 78_042, "ViT-tiny": 207_946, "GPT-tiny": 110_336}
NAMES = pytest.mark.parametrize("name", SIZES)


def made_up_data(recipe: ReferenceModel, count: int, context: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if recipe.data == "text":
        characters = torch.randint(0, len(CHARACTERS), (count, context + 1), generator=generator)
        return characters[:, :-1], characters[:, 1:]
    shape = (1, 28, 28) if recipe.data == "mnist" else (3, 32, 32)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return torch.rand(count, *shape, generator=generator), labels


def logits(recipe: ReferenceModel, model: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = model(inputs)
    return outputs.transpose(1, 2) if recipe.data == "text" else outputs


@torch.no_grad()
def mean_loss(recipe: ReferenceModel, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    return float(nn.functional.cross_entropy(logits(recipe, model, inputs), targets))


def autograd_product(
    recipe: ReferenceModel, model: nn.Module, data: tuple[Tensor, Tensor], vector: Tensor
) -> Tensor:
    """Jᵀ Q J v of the mean cross-entropy, by reverse passes alone."""
    parameters = list(model.parameters())
    parts = torch.split(vector, [p.numel() for p in parameters])
    outputs = logits(recipe, model, data[0])
    # The derivative of uᵀJ v with respect to u is J v.
    dummy = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, parameters, dummy, create_graph=True)
    along = sum((g * part.view_as(g)).sum() for g, part in zip(pulled, parts, strict=True))
    assert isinstance(along, Tensor)
    (pushed,) = torch.autograd.grad(along, dummy, retain_graph=True)
    leaf = outputs.detach().requires_grad_()
    slope = torch.autograd.grad(
        nn.functional.cross_entropy(leaf, data[1]), leaf, create_graph=True
    )[0]
    (curved,) = torch.autograd.grad(slope, leaf, pushed)
    found = torch.autograd.grad(outputs, parameters, curved)
    return torch.cat([g.reshape(-1) for g in found])


@NAMES
def test_models_have_their_sizes_and_outputs(name: str) -> None:
    recipe = REFERENCE_MODELS[name]
    model = build(recipe)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    assert not model.training
    inputs, _ = made_up_data(recipe, 3)
    expected = (3, 64, len(CHARACTERS)) if recipe.data == "text" else (3, 10)
    assert tuple(model(inputs).shape) == expected


def test_all_models_are_tested() -> None:
    assert REFERENCE_MODELS.keys() == SIZES.keys()


@NAMES
def test_models_depend_on_the_seed_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, again = build(REFERENCE_MODELS[name]), build(REFERENCE_MODELS[name])
    other = build(REFERENCE_MODELS[name], seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@NAMES
def test_training_reduces_the_loss(name: str) -> None:
    recipe = REFERENCE_MODELS[name]
    model, (inputs, targets) = build(recipe), made_up_data(recipe, 8)
    # In training mode, in which batch normalisation does not need running means.
    before = mean_loss(recipe, model.train(), inputs, targets)
    fit(model, inputs, targets, recipe.forward_fn, num_steps=6)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert mean_loss(recipe, model.train(), inputs, targets) < 0.98 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@NAMES
def test_products_are_those_of_autograd(name: str, dtype: torch.dtype) -> None:
    recipe = REFERENCE_MODELS[name]
    inputs, targets = made_up_data(recipe, 3, context=5)
    if recipe.data == "text":  # A small vocabulary, because there is a row for each character.
        recipe = replace(recipe, make=lambda: LanguageModel(num_characters=8))
        inputs, targets = inputs % 8, targets % 8
    else:
        inputs = inputs.to(dtype)
    model = build(recipe).to(dtype)
    matrix = hcurv.GaussNewton(
        model, nn.CrossEntropyLoss(), (inputs, targets), forward_fn=recipe.forward_fn
    )
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(matrix.shape[0], generator=generator, dtype=torch.float64).to(dtype)
    expected = autograd_product(recipe, model, (inputs, targets), vector)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    assert (matrix @ vector - expected).norm() <= tolerance * expected.norm()


def test_the_language_model_takes_sampled_rows() -> None:
    recipe = REFERENCE_MODELS["GPT-tiny"]
    inputs, targets = made_up_data(recipe, 3)
    matrix = hcurv.GaussNewton(
        build(recipe),
        nn.CrossEntropyLoss(),
        (inputs, targets),
        forward_fn=recipe.forward_fn,
        num_samples=2,
    )
    assert matrix.num_root_rows == 6
    assert matrix.memory_plan().stored_bytes == matrix.nbytes


def test_samples_of_a_point_differ() -> None:
    recipe = REFERENCE_MODELS["GPT-tiny"]
    matrix = hcurv.GaussNewton(
        build(recipe),
        nn.CrossEntropyLoss(),
        made_up_data(recipe, 3),
        forward_fn=recipe.forward_fn,
        num_samples=2,
    )
    rows = matrix.root_columns(torch.arange(200)).view(3, 2, 200)
    assert not torch.allclose(rows[:, 0], rows[:, 1])


def test_a_character_does_not_see_later_ones() -> None:
    recipe = REFERENCE_MODELS["GPT-tiny"]
    model, (inputs, _) = build(recipe), made_up_data(recipe, 1)
    changed = inputs.clone()
    changed[0, 40] = (changed[0, 40] + 1) % len(CHARACTERS)
    with torch.no_grad():
        difference = (model(changed) - model(inputs))[0].abs().sum(1)
    assert float(difference[:40].max()) == 0.0
    assert bool((difference[40:] > 0).all())


def test_a_text_is_cut_into_pieces_and_shifted_by_one() -> None:
    inputs, targets = text("abc é" * 40)
    assert inputs.shape == targets.shape == (3, 64)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert "".join(CHARACTERS[number] for number in inputs[0, :6].tolist()) == "abc  a"
    inputs, _ = text()
    assert len(inputs) > 600


@pytest.fixture
def _few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (128, 28, 28), dtype=np.uint8)
    files = idx_files(images, images[:, 0, 0] % 10)
    monkeypatch.setattr(datasets, "MNIST", describe(datasets.MNIST, files))
    write_files(tmp_path / "mnist", files, compress=False)
    monkeypatch.setattr(reference_models, "_NUM_STEPS", 2)


@pytest.mark.usefixtures("_few_images")
def test_what_was_trained_once_is_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(REFERENCE_MODELS["LeNet"], tmp_path)
    assert trained.inputs.shape == (128, 1, 28, 28)

    def fail(*arguments: object) -> None:
        pytest.fail("it was trained")

    monkeypatch.setattr(reference_models, "fit", fail)
    again = train(REFERENCE_MODELS["LeNet"], tmp_path)
    assert len(list((tmp_path / "cache" / "networks").iterdir())) == 1
    for one, two in zip(trained.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not again.model.training


@pytest.mark.usefixtures("_few_images")
def test_without_the_cache_nothing_is_written(tmp_path: Path) -> None:
    train(REFERENCE_MODELS["LeNet"], tmp_path, cache=False)
    assert not (tmp_path / "cache").exists()
