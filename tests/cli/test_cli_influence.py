"""``hcurv influence``: what it prints and writes is what the library says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hcurv
from cases import labels, normal, seeded
from command_line import CROSS_ENTROPY, Network, fail, succeed, succeed_json, write_network


@pytest.fixture
def network(tmp_path: Path) -> Network:
    found = write_network(tmp_path)
    queries = normal(6, 9, seed=8).float()
    np.savez(tmp_path / "Q.npz", inputs=queries.numpy(), targets=labels(6, 4, seed=9).numpy())
    return found


def expected(network: Network, damping: float | None = None) -> hcurv.Influence:
    data = (network.inputs, network.targets)
    return hcurv.influence(network.model, nn.CrossEntropyLoss(), data, damping)


def queries_of(network: Network) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(6, 9, seed=8).float(), labels(6, 4, seed=9)


def test_scores_are_written_and_the_most_important_printed(network: Network) -> None:
    out = network.folder / "scores.safetensors"
    arguments = ["influence", *network.options, "--queries", network.folder / "Q.npz"]
    arguments += ["--damping", 0.1, "--top", 3, "--out", out]
    found = succeed_json(*arguments)
    infl = expected(network, 0.1)
    scores = infl.scores(queries_of(network))
    assert torch.allclose(load_file(out)["scores"], scores, rtol=1e-4, atol=1e-6)
    assert found["helpful"] == infl.top(queries_of(network), 3).points.tolist()
    assert found["harmful"] == infl.top(queries_of(network), 3, harmful=True).points.tolist()
    assert (found["num_queries"], found["damping"]) == (6, 0.1)
    text = succeed(*arguments)
    assert f"{found['helpful'][0][0]} (+" in text
    fewer = succeed_json(*arguments[:-2], "--num-queries", 2)
    assert fewer["helpful"] == found["helpful"][:2]


def test_self_scores(network: Network) -> None:
    out = network.folder / "self.npy"
    arguments = ["influence", *network.options, "--self-scores", "--damping", 0.1, "--out", out]
    found = succeed_json(*arguments, "--top", 4)
    values = expected(network, 0.1).self_scores()
    assert np.allclose(np.load(out), values.numpy(), rtol=1e-4)
    assert found["points"] == values.topk(4).indices.tolist()
    assert "self score" in succeed(*arguments)


def test_default_damping_is_that_of_the_library(network: Network) -> None:
    found = succeed_json("influence", *network.options, "--self-scores")
    assert found["damping"] == pytest.approx(expected(network).damping, rel=1e-5)


def test_a_picture_of_the_images_that_matter(tmp_path: Path) -> None:
    picture, weights, data = (tmp_path / name for name in ("p.png", "W.safetensors", "X.npz"))
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)))
    save_file(model.state_dict(), weights)
    np.savez(data, inputs=normal(20, 16).float().numpy(), targets=labels(20, 3).numpy())
    arguments = ["influence", weights, "--data", data, "--activation", "relu", *CROSS_ENTROPY]
    arguments += ["--queries", data, "--num-queries", 3, "--damping", 0.1, "--picture", picture]
    succeed(*arguments)
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "p.html"
    succeed_json(*arguments[:-1], page)
    assert "most harmful (red)" in page.read_text(encoding="utf-8")


def test_wrong_usage_is_explained(network: Network) -> None:
    start = ["influence", *network.options]
    queries = ["--queries", network.folder / "Q.npz"]
    assert "one of --queries and --self-scores" in fail(*start, code=2)
    assert "one of --queries and --self-scores" in fail(*start, *queries, "--self-scores", code=2)
    picture = ["--picture", network.folder / "p.png"]
    assert "--picture is for --queries" in fail(*start, "--self-scores", *picture, code=2)
    out = ["--out", network.folder / "scores.npy"]
    assert "must end with .safetensors" in fail(*start, *queries, *out)
    assert "--top 50 is more than there are points, 40" in fail(*start, *queries, "--top", 50)
    assert "no such file" in fail(*start, "--queries", network.folder / "none.npz")
    np.savez(network.folder / "bare.npz", inputs=network.inputs.numpy())
    bare = ["--queries", network.folder / "bare.npz"]
    assert "bare.npz has no targets" in fail(*start, *bare)


def test_points_that_are_no_images_have_no_picture() -> None:
    from hcurv.report.influential_images import draw_influential_images

    points, found = (
        (torch.zeros(2, 7), torch.zeros(2)),
        (torch.zeros(2, 1).long(), torch.ones(2, 1)),
    )
    with pytest.raises(ValueError, match="7 numbers are no square images"):
        draw_influential_images(points, points, found, found)
    with pytest.raises(ValueError, match=r"no images of shape \(2, 3\)"):
        draw_influential_images(points, points, found, found, (2, 3))
    assert len(draw_influential_images(points, points, found, found, (1, 7)).axes) == 6
    colours = (torch.rand(2, 12), torch.zeros(2))
    assert draw_influential_images(colours, colours, found, found).axes[0].images
