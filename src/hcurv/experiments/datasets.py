"""Read MNIST, Fashion-MNIST and CIFAR-10 from files, and the digits from scikit-learn.

Images are flattened, scaled to [0, 1] and not normalised any further. They keep their original
order.

Files are searched in the folder that the caller names, in the folder that the environment variable
``HCURV_DATA`` names, where Debian puts data sets, and in the cache. If they are nowhere, they are
downloaded into the cache. However they are packed, their content must have the checksum of the
original.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hcurv.experiments.cache import cache_directory
from hcurv.experiments.download import DownloadError, download
from hcurv.experiments.pickled_arrays import read_pickled_dict

__all__ = [
    "CIFAR10",
    "DATA_VARIABLE",
    "FASHION_MNIST",
    "MNIST",
    "ImageFiles",
    "cifar10",
    "digits",
    "fashion_mnist",
    "find_file",
    "mnist",
]

DATA_VARIABLE = "HCURV_DATA"
# Debian's package dataset-fashion-mnist puts its files into /usr/share/datasets/fashion-mnist, or
# into /usr/share/dataset-fashion-mnist.
SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/share"))
_CIFAR_PIXELS = 3 * 32 * 32
_DAMAGES = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, tarfile.TarError)

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class ImageFiles:
    """The files of a data set.

    Attributes:
        title: the name of the data set.
        folders: where its files lie within a data folder. Messages recommend the first.
        address: the URL of the folder from which the files are downloaded.
        checksums: the SHA-256 of the content of every file, by the beginning of its name. For IDX
            files this is the unpacked file; for CIFAR-10 it is the unpacked binary batch, to which
            a Python batch is converted.
    """

    title: str
    folders: tuple[str, ...]
    address: str
    checksums: Mapping[str, str]


MNIST = ImageFiles(
    "MNIST",
    ("mnist", "MNIST/raw"),
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    {
        "train-images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION_MNIST = ImageFiles(
    "Fashion-MNIST",
    ("fashion-mnist", "FashionMNIST/raw", "dataset-fashion-mnist"),
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train-images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
CIFAR10 = ImageFiles(
    "CIFAR-10",
    ("cifar10", "."),
    "https://www.cs.toronto.edu/~kriz",
    {
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)


def digits() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's 1,797 images of 8 x 8 pixels, (1797, 64), and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16.0).float(), torch.from_numpy(labels).long()


def mnist(directory: str | Path | None = None, train: bool = True) -> tuple[Tensor, Tensor]:
    """Read MNIST, (60000 or 10000, 784), and its labels from IDX files, gzipped or not.

    Args:
        directory: the folder to search first, with ``mnist/`` or torchvision's ``MNIST/raw/``.
        train: whether to read the training set or the test set.

    Raises:
        FileNotFoundError: the files are nowhere; the message says what to get and where to put it.
        ValueError: a file is damaged; the message names it.
    """
    return _read_idx_set(MNIST, directory, train)


def fashion_mnist(directory: str | Path | None = None, train: bool = True) -> tuple[Tensor, Tensor]:
    """Read Fashion-MNIST, (60000 or 10000, 784), and its labels from IDX files, gzipped or not.

    Args:
        directory: the folder to search first, with ``fashion-mnist/``, torchvision's
            ``FashionMNIST/raw/`` or ``dataset-fashion-mnist/`` in it. Debian's package of this name
            is found where it is.
        train: whether to read the training set or the test set.

    Raises:
        FileNotFoundError: the files are nowhere; the message says what to get and where to put it.
        ValueError: a file is damaged; the message names it.
    """
    return _read_idx_set(FASHION_MNIST, directory, train)


def cifar10(directory: str | Path | None = None, train: bool = True) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10, (50000 or 10000, 3072), and its labels from the binary or the Python version.

    Args:
        directory: the folder to search first. It or ``cifar10/`` in it has one of the archives
            ``cifar-10-binary.tar.{gz,xz}`` and ``cifar-10-python.tar.{gz,xz}``, or what they unpack
            to, ``cifar-10-batches-bin/`` or ``cifar-10-batches-py/``.
        train: whether to read the training set or the test set.

    Raises:
        FileNotFoundError: the files are nowhere; the message says what to get and where to put it.
        ValueError: a file is damaged; the message names it.
    """
    names = [name for name in CIFAR10.checksums if name.startswith("test") != train]

    def find(folder: Path) -> list[Path]:
        for version, ending in (("bin", ".bin"), ("py", "")):
            unpacked = folder / f"cifar-10-batches-{version}"
            if all((unpacked / f"{name}{ending}").is_file() for name in names):
                return [unpacked]
        archives = (
            folder / f"cifar-10-{version}.tar.{packing}"
            for version in ("binary", "python")
            for packing in ("gz", "xz")
        )
        return [path for path in archives if path.is_file()][:1]

    def check(path: Path) -> None:
        _read_batches(path, list(CIFAR10.checksums))

    (path,) = _find(CIFAR10, directory, ["cifar-10-binary.tar.gz"], find, check)
    records = np.concatenate(_read_batches(path, names))
    return _to_tensors(records[:, 1:], records[:, 0])


def _to_tensors(images: Bytes, labels: Bytes) -> tuple[Tensor, Tensor]:
    flat = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)) / 255
    return flat, torch.from_numpy(labels.astype(np.int64))


def _search_folders(directory: str | Path | None) -> Iterator[Path]:
    for named in (directory, os.environ.get(DATA_VARIABLE)):
        if named:
            if not Path(named).is_dir():
                raise FileNotFoundError(
                    f"no data folder at {named}: name an existing one with --data or the"
                    f" environment variable {DATA_VARIABLE}"
                )
            yield Path(named)
    yield from SYSTEM_FOLDERS
    yield cache_directory() / "data"


def find_file(directory: str | Path | None, name: str) -> Path:
    """Find a file by its path within a data folder.

    Args:
        directory: the folder to search first.
        name: the path of the file within it.

    Raises:
        FileNotFoundError: no data folder has it.
    """
    for folder in _search_folders(directory):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"{name} not found: put it into the folder that --data or the environment variable"
        f" {DATA_VARIABLE} names"
    )


def _find(
    images: ImageFiles,
    directory: str | Path | None,
    originals: list[str],
    find: Callable[[Path], list[Path]],
    check: Callable[[Path], object],
) -> list[Path]:
    """Find the first folder that has all files; if there is none, download them.

    Args:
        images: the data set.
        directory: the folder to search first.
        originals: the names of the files to download.
        find: returns the paths of all files that are needed if a folder has them, else nothing.
        check: raises ValueError for a damaged download.
    """
    for root in _search_folders(directory):
        for folder in images.folders:
            if found := find(root / folder):
                return found
    target = cache_directory() / "data" / images.folders[0]
    try:
        for name in originals:
            download(f"{images.address}/{name}", target / name, check)
    except DownloadError as error:
        raise FileNotFoundError(
            f"{images.title} not found: get {' and '.join(originals)} from {images.address} and put"
            f" into {target}, or into {images.folders[0]}/ of the folder that --data or the"
            f" environment variable {DATA_VARIABLE} names (the download failed: {error})"
        ) from error
    return find(target)


def _verify(content: bytes | memoryview, images: ImageFiles, name: str, place: str) -> None:
    if hashlib.sha256(content).hexdigest() != images.checksums[name]:
        raise ValueError(
            f"{place} is damaged or not the original (its SHA-256 differs): remove it and get it"
            f" again from {images.address}"
        )


def _first_line(error: BaseException) -> str:
    return (
        str(error).partition("\n")[0].rstrip(":")
    )  # tarfile goes on with all formats that it tried


def _read_idx_set(
    images: ImageFiles, directory: str | Path | None, train: bool
) -> tuple[Tensor, Tensor]:
    prefix = "train" if train else "t10k"
    names = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]

    def find(folder: Path) -> list[Path]:
        found = []
        for name in names:
            either = (folder / name, folder / f"{name}.gz")
            found += [path for path in either if path.is_file()][:1]
        return found if len(found) == len(names) else []

    def read(path: Path) -> Bytes:
        return _read_idx(path, images)

    paths = _find(images, directory, [f"{name}.gz" for name in names], find, read)
    return _to_tensors(*map(read, paths))


def _read_idx(path: Path, images: ImageFiles) -> Bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except _DAMAGES as error:
        raise ValueError(f"{path} is damaged: {_first_line(error)}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    _verify(content, images, path.name.partition("-idx")[0], str(path))
    num_axes = content[3]
    shape = np.frombuffer(content, ">u4", num_axes, 4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def _read_batches(path: Path, names: list[str]) -> list[Bytes]:
    """Read labels and pixels, (n, 1 + 3072) for each batch, from a folder or an archive."""
    binary = path.name.startswith(("cifar-10-batches-bin", "cifar-10-binary"))
    folder, ending = ("cifar-10-batches-bin", ".bin") if binary else ("cifar-10-batches-py", "")
    if path.is_dir():
        contents = [(path / f"{name}{ending}").read_bytes() for name in names]
    else:
        try:
            contents = _read_members(path, [f"{folder}/{name}{ending}" for name in names])
        except _DAMAGES as error:
            raise ValueError(
                f"{path} is damaged or not the official archive: {_first_line(error)}"
            ) from error
    batches = []
    for name, content in zip(names, contents, strict=True):
        place = str(path / f"{name}{ending}") if path.is_dir() else f"{name}{ending} in {path}"
        try:
            batches.append(_binary_records(content) if binary else _pickled_records(content))
        except ValueError as error:
            raise ValueError(f"{place} is damaged or not the original: {error}") from error
        _verify(batches[-1].data, CIFAR10, name, place)
    return batches


def _read_members(path: Path, names: list[str]) -> list[bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:  # one pass: seeking in a compressed archive reads it again
            if member.name in names and member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
                if len(found) == len(names):
                    break
    for name in names:
        if name not in found:
            raise tarfile.ReadError(f"it has no {name}")
    return [found[name] for name in names]


def _binary_records(content: bytes) -> Bytes:
    if len(content) % (1 + _CIFAR_PIXELS):
        raise ValueError(f"{len(content)} bytes are no whole number of images")
    return np.frombuffer(content, np.uint8).reshape(-1, 1 + _CIFAR_PIXELS)


def _pickled_records(content: bytes) -> Bytes:
    batch = read_pickled_dict(content)
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise ValueError("a pickle without 'data' and 'labels'")
    if pixels.shape != (len(labels), _CIFAR_PIXELS):
        raise ValueError(f"{len(labels)} labels for an array of shape {pixels.shape}")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise ValueError("labels that are not from 0 to 9")
    return np.column_stack((np.array(labels, np.uint8), pixels))
