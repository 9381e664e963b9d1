"""Data readers on made-up files, the reference recipes, and the demonstration."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hcurv
from hcurv.experiments import datasets, demo
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, build_mlp, train


def write_idx(path: Path, values: np.ndarray, compress: bool = True) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if compress else content)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (300 * 128, 28, 28), dtype=np.uint8)


@pytest.mark.parametrize(("folder", "ending"), [("mnist", ".gz"), ("MNIST/raw", "")])
def test_mnist_is_read_from_idx_files(tmp_path: Path, folder: str, ending: str) -> None:
    pictures = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 256
    write_idx(tmp_path / folder / f"train-images-idx3-ubyte{ending}", pictures, bool(ending))
    write_idx(tmp_path / folder / f"train-labels-idx1-ubyte{ending}", np.arange(5), bool(ending))
    inputs, labels = datasets.mnist(tmp_path)
    assert inputs.shape == (5, 784)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs * 255, torch.from_numpy(pictures.reshape(5, -1)).float())
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("packing", ["gz", "xz", "folder"])
def test_cifar10_is_read_from_the_binary_version(tmp_path: Path, packing: str) -> None:
    records = np.zeros((10_000, 3073), dtype=np.uint8)  # mostly zeros: quick to compress
    records[::50] = np.random.default_rng(0).integers(0, 10, (200, 3073), dtype=np.uint8)
    folder = tmp_path / "cifar10"
    folder.mkdir()
    name = "cifar-10-batches-bin/test_batch.bin"
    if packing == "folder":
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(records.tobytes())
    else:
        with tarfile.open(folder / f"cifar-10-binary.tar.{packing}", f"w:{packing}") as archive:  # type: ignore[call-overload]
            member = tarfile.TarInfo(name)
            member.size = records.nbytes
            archive.addfile(member, io.BytesIO(records.tobytes()))
    inputs, labels = datasets.cifar10(tmp_path, train=False)
    assert torch.equal(inputs * 255, torch.from_numpy(records[:, 1:]).float())
    assert torch.equal(labels, torch.from_numpy(records[:, 0]).long())


def test_missing_and_damaged_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(datasets.DATA_VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match=r"no data folder: name one.*HCURV_DATA"):
        datasets.mnist()
    with pytest.raises(FileNotFoundError, match=r"no data folder at .*nowhere"):
        datasets.mnist(tmp_path / "nowhere")
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="MNIST not found: put train-images"):
        datasets.mnist()
    with pytest.raises(FileNotFoundError, match="CIFAR-10 not found: put cifar-10-binary"):
        datasets.cifar10()
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    write_idx(path, np.zeros((2, 28, 28)))
    content = path.read_bytes()
    for damaged, message in (
        (content[:-20], "is damaged"),
        (gzip.compress(b"hello, world"), "is not an IDX file"),
        (gzip.compress(gzip.decompress(content)[:-1]), "1567 values instead of 1568"),
        (b"plain text", "is damaged"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            datasets.mnist()
    archive = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is damaged or not the official archive"):
        datasets.cifar10()


def test_reference_networks_have_the_papers_sizes() -> None:
    expected = {
        "classifier (a)": 15_910,
        "classifier (b)": 61_670,
        "classifier (c)": 219_818,
        "classifier (d)": 1_643_498,
        "AE (a)": 16_474,
        "AE (b)": 64_522,
        "AE (c)": 125_972,
    }
    assert REFERENCE_NETWORKS.keys() == expected.keys()
    for name, size in expected.items():
        model = build_mlp(REFERENCE_NETWORKS[name].sizes, torch.nn.ReLU)
        assert sum(p.numel() for p in model.parameters()) == size


@pytest.mark.parametrize("name", ["classifier (a)", "AE (a)"])
def test_training_a_reference_network_is_reproducible(
    name: str, tmp_path: Path, images: np.ndarray
) -> None:
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte", images, compress=False)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", images[:, 0, 0] % 10, compress=False)
    state = torch.get_rng_state()
    first, second = (train(REFERENCE_NETWORKS[name], tmp_path) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert hcurv.GaussNewton(first.model, first.loss, first.inputs[:5]).num_points == 5


def test_the_demonstration_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(tmp_path)
    printed = capsys.readouterr().out
    assert "H is 6570 x 6570" in printed
    assert "agrees with automatic differentiation" in printed
    for name in ("diagonal", "pixels", "block"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
