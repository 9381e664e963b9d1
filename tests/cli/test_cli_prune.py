"""hcurv prune: what it writes and prints is what the library gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hcurv
from command_line import Network, fail, succeed, succeed_json, write_network


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return write_network(tmp_path_factory.mktemp("network"))


def test_prune_writes_what_the_library_gives(network: Network, tmp_path: Path) -> None:
    thin, masks, picture = (
        tmp_path / name for name in ("t.safetensors", "m.safetensors", "p.html")
    )
    arguments = ("prune", *network.options, "--sparsity", 0.6, "--steps", 3, "--corrections", 2)
    test = ("--test-data", network.data)
    files = ("--out", thin, "--masks", masks, "--picture", picture)
    document = succeed_json(*arguments, *test, *files)
    expected = hcurv.prune(
        network.model,
        torch.nn.CrossEntropyLoss(),
        (network.inputs, network.targets),
        0.6,
        schedule=3,
        corrections=2,
    )
    found, kept = load_file(thin), load_file(masks)
    for name, values in expected.model.state_dict().items():
        assert torch.equal(found[name], values)
    assert {name: mask.bool().tolist() for name, mask in kept.items()} == {
        name: mask.tolist() for name, mask in expected.masks.items()
    }
    page = picture.read_text(encoding="utf-8")
    assert "<svg" in page
    assert "In numbers" in page
    assert document["sparsity"] == expected.sparsity
    assert [row["loss"] for row in document["record"]] == [s.loss for s in expected.record]
    for row in document["record"]:
        assert row["evaluation"] == pytest.approx(row["accuracy"])  # The same data.
    again = succeed("prune", thin, *network.options[1:], "--structure", "2:4", "--steps", 1)
    assert "0.4396" in again.split("\n")[2]  # Four, four and one inputs keep two, two and one.


def test_prune_prints_a_table(network: Network) -> None:
    printed = succeed("prune", *network.options, "--structure", "units", "--sparsity", "0.5")
    header, first, *_ = printed.splitlines()
    assert header.split()[:2] == ["sparsity", "kept"]
    assert first.split()[:2] == ["0.0000", "70"]
    assert "zeros" in printed
    assert "0.weight" in printed


def test_prune_refuses_before_it_works(network: Network, tmp_path: Path) -> None:
    start = ("prune", *network.options)
    assert "less than 1; got 1.5" in fail(*start, "--sparsity", 1.5)
    assert "is an input" in fail(*start, "--out", network.weights)
    assert "must end with .png or .svg or .pdf or" in fail(*start, "--picture", tmp_path / "p.gif")
    assert "called 'seven'" in fail(*start, "--leave-out", "seven")
    same = tmp_path / "x.safetensors"
    assert "two files" in fail(*start, "--out", same, "--masks", same, code=2)
    bare = tmp_path / "bare.npz"
    np.savez(bare, inputs=network.inputs.numpy())
    assert "has no labels" in fail(*start, "--test-data", bare)
