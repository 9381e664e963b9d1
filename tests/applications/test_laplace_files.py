"""Posteriors in files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded

LOSS = nn.CrossEntropyLoss()


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    return model, (normal(30, 4), labels(30, 3))


@pytest.mark.parametrize("grouping", ["model", "layer", "parameter"])
def test_a_posterior_that_is_saved_and_loaded_predicts_the_same(
    grouping: str, tmp_path: Path
) -> None:
    model, data = problem()
    post = hcurv.laplace(model, LOSS, data).tune(grouping)
    post.save(tmp_path / "posterior.safetensors")
    again = hcurv.LaplacePosterior.load(tmp_path / "posterior.safetensors", model, LOSS, data)
    expected = post.predict(data[0]).probabilities
    # Equal to rounding: how memory is aligned can change the last bit.
    torch.testing.assert_close(again.predict(data[0]).probabilities, expected)
    torch.testing.assert_close(again.log_marginal_likelihood(), post.log_marginal_likelihood())
    torch.testing.assert_close(again.sample(2), post.sample(2))


def test_regressions_keep_their_noise_and_subsets_their_parameters(tmp_path: Path) -> None:
    model, (inputs, _) = problem()
    data = (inputs, normal(30, 3, seed=7))
    path = tmp_path / "posterior.safetensors"
    post = hcurv.laplace(model, nn.MSELoss(), data, parameters="last", structure="ekfac").tune()
    post.save(path)
    again = hcurv.LaplacePosterior.load(path, model, nn.MSELoss(), data)
    assert (again.noise, again.structure, again.layout) == (post.noise, "ekfac", post.layout)


def test_other_weights_models_data_and_losses_are_refused(tmp_path: Path) -> None:
    model, data = problem()
    path = tmp_path / "posterior.safetensors"
    hcurv.laplace(model, LOSS, data).save(path)
    load = hcurv.LaplacePosterior.load
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].bias[0] += 1e-3
    with pytest.raises(ValueError, match="other weights"):
        load(path, changed, LOSS, data)
    with pytest.raises(ValueError, match="another model"):
        load(path, nn.Linear(4, 3).double(), LOSS, data)
    with pytest.raises(ValueError, match="other data"):
        load(path, model, LOSS, (data[0] + 0.1, data[1]))
    with pytest.raises(ValueError, match="likelihood of classes"):
        load(path, model, nn.MSELoss(), (data[0], normal(30, 3)))


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    model, data = problem()
    path = tmp_path / "posterior.safetensors"
    hcurv.laplace(model, LOSS, data).save(path)
    whole = path.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1, 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(hcurv.FileFormatError):
            hcurv.LaplacePosterior.load(path, model, LOSS, data)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(hcurv.FileFormatError, match="damaged"):
        hcurv.LaplacePosterior.load(path, model, LOSS, data)
    save_file({"weights": torch.zeros(3)}, path)
    with pytest.raises(hcurv.FileFormatError, match="nothing of hcurv"):
        hcurv.LaplacePosterior.load(path, model, LOSS, data)
    with pytest.raises(FileNotFoundError):
        hcurv.LaplacePosterior.load(tmp_path / "nothing", model, LOSS, data)
    with pytest.raises(FileNotFoundError):
        hcurv.laplace(model, LOSS, data).save(tmp_path / "no folder" / "file")
