"""The command ``hcurv laplace``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from torch import nn

import hcurv
from cases import normal, seeded
from command_line import Network, fail, succeed, succeed_json, write_network


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return write_network(tmp_path)


def test_laplace_tunes_predicts_scores_draws_and_saves(network: Network, tmp_path: Path) -> None:
    out, plot, saved = (tmp_path / name for name in ("p.npz", "c.png", "post.safetensors"))
    document = succeed_json(
        "laplace", *network.options, "--test", network.data, "--out", out, "--plot", plot,
        "--save", saved,
    )  # fmt: skip
    data = (network.inputs, network.targets)
    post = hcurv.laplace(network.model, nn.CrossEntropyLoss(), data).tune()
    assert document["prior_precision"] == pytest.approx(post.prior_precision)
    assert document["log_marginal_likelihood"] == pytest.approx(
        float(post.log_marginal_likelihood())
    )
    assert document["test"]["log_likelihood"] == pytest.approx(post.score(data).log_likelihood)
    arrays = np.load(out)
    expected = post.predict(network.inputs)
    np.testing.assert_allclose(arrays["mean"], expected.mean, rtol=1e-4)
    np.testing.assert_allclose(arrays["variances"], expected.variances, rtol=1e-4)
    assert plot.read_bytes()[1:4] == b"PNG"
    loss = nn.CrossEntropyLoss()
    loaded = hcurv.LaplacePosterior.load(saved, network.model, loss, data)
    assert loaded.prior_precision == pytest.approx(post.prior_precision)
    printed = succeed("laplace", *network.options, "--tune", "layer", "--parameters", "last")
    assert "log_marginal_likelihood" in printed.replace(" ", "_")


def test_laplace_of_a_regression_has_noise_and_error_bars(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    save_file(model.state_dict(), tmp_path / "W.safetensors")
    inputs, targets = normal(30, 3).float(), normal(30, seed=4).float()
    np.savez(tmp_path / "X.npz", inputs=inputs.numpy(), targets=targets.numpy())
    options = (
        tmp_path / "W.safetensors", "--data", tmp_path / "X.npz", "--activation", "tanh",
        "--loss", "mse", "--test", tmp_path / "X.npz", "--plot", tmp_path / "e.png",
    )  # fmt: skip
    document = succeed_json("laplace", *options)
    assert document["noise"] > 0
    assert 0.8 < document["test"]["coverage"] <= 1
    assert succeed_json("laplace", *options, "--noise", "0.5", "--tune", "none")["noise"] == 0.5


def test_a_picture_may_be_a_page_with_all_results(network: Network, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    document = succeed_json(
        "laplace", *network.options, "--test", network.data, "--plot", path, "--tune", "none"
    )
    text = path.read_text(encoding="utf-8")
    assert f"{document['test']['log_likelihood']:.4g}" in text
    assert f"{document['log_marginal_likelihood']:.6g}" in text
    assert 'role="img"' in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_laplace_refuses_what_it_cannot_do(network: Network, tmp_path: Path) -> None:
    message = fail("laplace", *network.options, "--out", tmp_path / "p.npz", code=2)
    assert "--test" in message
    np.savez(network.data, inputs=network.inputs.numpy())
    assert "has no targets" in fail("laplace", *network.options)
