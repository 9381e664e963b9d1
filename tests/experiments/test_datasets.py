"""Image sets from made-up files: layouts, search order, damages, downloads."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from hcurv.experiments import datasets
from hcurv.experiments.cache import cache_directory
from hcurv.experiments.download import DownloadError, download
from image_files import (
    cifar_files,
    describe,
    idx_content,
    idx_files,
    isolate,
    write_archive,
    write_files,
)

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5])
TRAIN, TEST = idx_files(IMAGES, LABELS), idx_files(IMAGES[:2], LABELS[:2], "t10k")
BATCHES = {
    name: GENERATOR.integers(0, 10, (4, 3073), dtype=np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
}


@pytest.fixture(autouse=True)
def _made_up_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    for name in ("MNIST", "FASHION_MNIST"):
        described = describe(getattr(datasets, name), {**TRAIN, **TEST})
        monkeypatch.setattr(datasets, name, described)
    contents = {name: records.tobytes() for name, records in BATCHES.items()}
    monkeypatch.setattr(datasets, "CIFAR10", describe(datasets.CIFAR10, contents))


def write_cifar(folder: Path, version: str, packing: str, files: dict[str, bytes]) -> Path:
    """Unpacked, or as an archive; returns what was written."""
    if packing == "folder":
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return (folder / name).parent
    path = folder / f"cifar-10-{version.rstrip('23')}.tar.{packing}"
    write_archive(path, files)
    return path


def one_line(message: BaseException) -> str:
    assert "\n" not in str(message)
    return str(message)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    ("reader", "folder"),
    [
        (datasets.mnist, "mnist"),
        (datasets.mnist, "MNIST/raw"),
        (datasets.fashion_mnist, "fashion-mnist"),
        (datasets.fashion_mnist, "FashionMNIST/raw"),
        (datasets.fashion_mnist, "dataset-fashion-mnist"),
    ],
)
def test_idx_files_are_read(
    tmp_path: Path, reader: Callable[..., tuple[torch.Tensor, ...]], folder: str, compress: bool
) -> None:
    write_files(tmp_path / folder, {**TRAIN, **TEST}, compress)
    for train, count in ((True, 5), (False, 2)):
        inputs, labels = reader(tmp_path, train=train)
        assert inputs.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert torch.equal(inputs, torch.from_numpy(IMAGES[:count].reshape(count, -1)) / 255)
        assert labels.tolist() == LABELS[:count].tolist()


@pytest.mark.parametrize("packing", ["gz", "xz", "folder"])
@pytest.mark.parametrize("version", ["binary", "python2", "python3"])
@pytest.mark.parametrize("folder", ["cifar10", "."])
def test_cifar10_is_read(tmp_path: Path, folder: str, version: str, packing: str) -> None:
    write_cifar(tmp_path / folder, version, packing, cifar_files(BATCHES, version))
    for train in (True, False):
        inputs, labels = datasets.cifar10(tmp_path, train=train)
        records = np.concatenate([BATCHES[n] for n in BATCHES if n.startswith("test") != train])
        assert inputs.dtype == torch.float32
        assert torch.equal(inputs, torch.from_numpy(records[:, 1:]) / 255)
        assert torch.equal(labels, torch.from_numpy(records[:, 0]).long())


def test_digits_are_images_in_the_unit_interval() -> None:
    inputs, labels = datasets.digits()
    assert inputs.shape == (1797, 64)
    assert inputs.dtype == torch.float32
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert labels[:10].tolist() == list(range(10))


@pytest.mark.parametrize("first", range(4))
def test_the_first_place_that_has_the_files_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    roots = [tmp_path / name for name in ("named", "variable", "system", "cache/data")]
    for number, root in enumerate(roots):
        root.mkdir(parents=True)
        if number == first:
            write_files(root / "mnist", TRAIN)
        elif number > first:
            write_files(root / "mnist", idx_files(IMAGES, LABELS + 1))
        else:  # half of it: does not count
            write_files(root / "mnist", dict(list(TRAIN.items())[:1]))
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(roots[1]))
    assert datasets.mnist(roots[0])[1].tolist() == LABELS.tolist()


def test_an_archive_is_taken_where_unpacking_was_interrupted(tmp_path: Path) -> None:
    files = cifar_files(BATCHES, "binary")
    write_cifar(tmp_path, "binary", "folder", dict(list(files.items())[:3]))
    write_cifar(tmp_path, "binary", "gz", files)
    assert len(datasets.cifar10(tmp_path)[0]) == 20


def test_debian_s_folder_is_searched(tmp_path: Path) -> None:
    write_files(tmp_path / "system" / "fashion-mnist", TRAIN)
    assert len(datasets.fashion_mnist()[0]) == 5


@pytest.mark.parametrize(
    ("reader", "files", "folder"),
    [
        (datasets.mnist, "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz", "mnist"),
        (datasets.fashion_mnist, "train-images-idx3-ubyte.gz and train-l", "fashion-mnist"),
        (datasets.cifar10, "cifar-10-binary.tar.gz", "cifar10"),
    ],
)
def test_a_missing_set_says_what_to_get_and_where_to_put_it(
    tmp_path: Path, reader: Callable[..., object], files: str, folder: str
) -> None:
    with pytest.raises(FileNotFoundError, match="not found: get ") as caught:
        reader(tmp_path)
    message = one_line(caught.value)
    assert files in message
    assert "from file:///nowhere" in message
    assert str(tmp_path / "cache" / "data" / folder) in message
    assert "--data" in message
    assert "HCURV_DATA" in message
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_folder_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data folder at .*nowhere: name"):
        datasets.mnist(tmp_path / "nowhere")
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"no data folder at .*elsewhere"):
        datasets.cifar10(tmp_path)


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: gzip.compress(content)[:-20], "ended before the end-of-stream"),
        (lambda content: flip(gzip.compress(content), -5), "CRC check failed"),
        (lambda content: flip(gzip.compress(content), 20), "damaged"),
        (lambda content: b"plain text", "Not a gzipped file"),
        (lambda content: b"", "is not an IDX file of bytes"),
        (lambda content: gzip.compress(b"hello, world"), "is not an IDX file of bytes"),
        (lambda content: gzip.compress(flip(content, 2)), "is not an IDX file of bytes"),
        (lambda content: gzip.compress(content[:-1]), "not the original.*get it again from file:"),
        (lambda content: gzip.compress(flip(content, 99)), "not the original .its SHA-256 differs"),
        (lambda content: gzip.compress(idx_content(IMAGES[:4])), "is damaged or not the original"),
    ],
)
def test_damaged_idx_files_are_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_files(tmp_path / "mnist", TRAIN)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(TRAIN["train-images-idx3-ubyte"]))
    with pytest.raises(ValueError, match=message) as caught:
        datasets.mnist(tmp_path)
    assert one_line(caught.value).startswith(f"{path} is ")


@pytest.mark.parametrize("version", ["binary", "python2"])
@pytest.mark.parametrize("packing", ["gz", "xz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: flip(content, len(content) // 2),
        lambda content: b"no archive",
        lambda content: b"",
    ],
)
def test_damaged_archives_are_named(
    tmp_path: Path, version: str, packing: str, damage: Callable[[bytes], bytes]
) -> None:
    path = write_cifar(tmp_path, version, packing, cifar_files(BATCHES, version))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"damaged or not the") as caught:
        datasets.cifar10(tmp_path, train=False)
    assert str(path) in one_line(caught.value)


def test_an_archive_without_a_batch_is_named(tmp_path: Path) -> None:
    files = cifar_files(BATCHES, "binary")
    del files["cifar-10-batches-bin/data_batch_4.bin"]
    path = write_cifar(tmp_path, "binary", "gz", files)
    with pytest.raises(ValueError, match=r"it has no cifar-10-batches-bin/data_batch_4\.bin") as e:
        datasets.cifar10(tmp_path)
    assert one_line(e.value).startswith(str(path))


@pytest.mark.parametrize("packing", ["gz", "folder"])
@pytest.mark.parametrize(
    ("version", "damage", "message"),
    [
        ("binary", lambda content: content[:-1], "12291 bytes are no whole number"),
        ("binary", lambda content: content[:-3073], "its SHA-256 differs"),
        ("binary", lambda content: flip(content, 5000), "its SHA-256 differs"),
        ("python2", lambda content: content[:-1], "pickle exhausted"),
        ("python2", lambda content: flip(content, 5000), "its SHA-256 differs"),
        ("python2", lambda content: b"plain text", "no newline found"),
        ("python2", lambda content: pickle.dumps({"data": 1}, 2), "without 'data' and 'labels'"),
        (
            "python3",
            lambda content: pickle.dumps({"data": BATCHES["test_batch"], "labels": [1]}, 2),
            r"1 labels for an array of shape \(4, 3073\)",
        ),
        (
            "python3",
            lambda content: pickle.dumps({**pickle.loads(content), "labels": [1, 2, 3, 10]}, 2),
            "labels that are not from 0 to 9",
        ),
    ],
)
def test_damaged_batches_are_named(
    tmp_path: Path, version: str, packing: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    files = cifar_files(BATCHES, version)
    (name,) = (name for name in files if "test_batch" in name)
    files[name] = damage(files[name])
    path = write_cifar(tmp_path, version, packing, files)
    with pytest.raises(ValueError, match=message) as caught:
        datasets.cifar10(tmp_path, train=False)
    assert str(path) in one_line(caught.value)
    assert Path(name).name in str(caught.value)


def test_a_malicious_batch_is_refused_and_not_executed(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'proof'}",)

    files = cifar_files(BATCHES, "python2")
    files["cifar-10-batches-py/test_batch"] = pickle.dumps(Malicious(), 2)
    write_cifar(tmp_path, "python", "folder", files)
    with pytest.raises(
        ValueError, match=r"test_batch is damaged .*asks for '\w+\.system'"
    ) as caught:
        datasets.cifar10(tmp_path, train=False)
    one_line(caught.value)
    assert not (tmp_path / "proof").exists()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it can be had."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_nowhere_is_downloaded_once(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    monkeypatch.setattr(datasets, "MNIST", dataclasses.replace(datasets.MNIST, address=address))
    write_files(folder, TRAIN)
    assert datasets.mnist()[1].tolist() == LABELS.tolist()
    kept = sorted(path.name for path in (tmp_path / "cache" / "data" / "mnist").iterdir())
    assert kept == [f"{name}.gz" for name in sorted(TRAIN)]
    for path in folder.iterdir():
        path.unlink()
    assert datasets.mnist()[1].tolist() == LABELS.tolist()
    with pytest.raises(FileNotFoundError, match="the download failed: HTTP Error 404"):
        datasets.mnist(train=False)


def test_the_archive_of_cifar10_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "served"
    path = write_cifar(folder, "binary", "gz", cifar_files(BATCHES, "binary"))
    described = dataclasses.replace(datasets.CIFAR10, address=folder.as_uri())
    monkeypatch.setattr(datasets, "CIFAR10", described)
    assert len(datasets.cifar10(train=False)[0]) == 4
    path.unlink()
    assert len(datasets.cifar10()[0]) == 20


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"<html>"])
def test_a_damaged_download_leaves_nothing_behind(
    served: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
) -> None:
    folder, address = served
    monkeypatch.setattr(datasets, "MNIST", dataclasses.replace(datasets.MNIST, address=address))
    write_files(folder, TRAIN)
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ValueError, match=f"^{address}/{path.name} sent a file that is damaged"
    ) as e:
        datasets.mnist()
    assert str(tmp_path / "cache" / "data" / "mnist") in one_line(e.value)
    assert not list((tmp_path / "cache" / "data" / "mnist").iterdir())


def test_a_download_replaces_a_file_only_by_a_good_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def check(path: Path) -> None:
        if hashlib.sha256(path.read_bytes()).digest() != hashlib.sha256(b"good").digest():
            raise ValueError("not good")

    with pytest.raises(ValueError, match="sent a file that is damaged"):
        download(source.as_uri(), target, check)
    with pytest.raises(DownloadError, match="No such file"):
        download((tmp_path / "missing").as_uri(), target, check)
    assert target.read_bytes() == b"old"
    source.write_bytes(b"good")
    download(source.as_uri(), target, check)
    assert target.read_bytes() == b"good"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_cache_that_cannot_be_written_is_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HCURV_CACHE", str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError, match=r"the download failed: .*Not a directory"):
        datasets.mnist()


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("HCURV_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "hcurv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "hcurv"
