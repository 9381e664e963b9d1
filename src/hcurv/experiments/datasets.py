"""MNIST and CIFAR-10 from local files, scikit-learn's digits from its package.

Images come flattened, scaled to [0, 1] and not normalised any further, in the original order.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["DATA_VARIABLE", "cifar10", "data_directory", "digits", "mnist"]

DATA_VARIABLE = "HCURV_DATA"


def data_directory(directory: str | Path | None = None) -> Path:
    """The folder with the data sets: the argument, or what the environment says.

    Raises:
        FileNotFoundError: neither names an existing folder.
    """
    named = directory if directory is not None else os.environ.get(DATA_VARIABLE)
    if named is None or not Path(named).is_dir():
        where = "" if named is None else f" at {named}"
        raise FileNotFoundError(
            f"no data folder{where}: name one that holds mnist/ and cifar10/ with --data or the"
            f" environment variable {DATA_VARIABLE}"
        )
    return Path(named)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images of 8 x 8 pixels: (1797, 64) and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16.0).float(), torch.from_numpy(labels).long()


def _read_idx(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    num_axes = content[3]
    shape = np.frombuffer(content, ">u4", num_axes, 4).astype(int)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    if values.size != shape.prod():
        raise ValueError(f"{path} is damaged: {values.size} values instead of {shape.prod()}")
    return values.reshape(shape)


def _first_existing(folder: Path, names: tuple[str, ...], what: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{what} not found: put {names[0]} into {folder}")


def mnist(directory: str | Path | None = None, train: bool = True) -> tuple[Tensor, Tensor]:
    """MNIST: (60000 or 10000, 784) and labels, from IDX files, gzipped or not.

    Reads ``directory/mnist/*.gz`` and torchvision's ``directory/MNIST/raw/*``.
    """
    root = data_directory(directory)
    folder = root / "mnist" if (root / "mnist").is_dir() else root / "MNIST" / "raw"
    part = "train" if train else "t10k"
    images, labels = (
        _read_idx(_first_existing(folder, (f"{part}-{name}.gz", f"{part}-{name}"), "MNIST"))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    flat = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)) / 255
    return flat, torch.from_numpy(labels.astype(np.int64))


def cifar10(directory: str | Path | None = None, train: bool = True) -> tuple[Tensor, Tensor]:
    """CIFAR-10: (50000 or 10000, 3072) and labels, from the official binary version.

    Reads ``directory/cifar10/cifar-10-binary.tar.{gz,xz}`` or the unpacked folder
    ``directory/cifar10/cifar-10-batches-bin``.
    """
    folder = data_directory(directory) / "cifar10"
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    unpacked = "cifar-10-batches-bin"
    path = _first_existing(
        folder, ("cifar-10-binary.tar.gz", "cifar-10-binary.tar.xz", unpacked), "CIFAR-10"
    )
    if path.is_dir():
        contents = [(path / name).read_bytes() for name in names]
    else:
        try:
            contents = _read_members(path, [f"{unpacked}/{name}" for name in names])
        except (EOFError, tarfile.TarError, OSError, KeyError) as error:
            raise ValueError(f"{path} is damaged or not the official archive: {error}") from error
    for name, content in zip(names, contents, strict=True):
        if len(content) != 10_000 * 3073:
            raise ValueError(f"{name} in {path} is damaged: {len(content)} bytes")
    records = np.concatenate([np.frombuffer(c, np.uint8).reshape(-1, 3073) for c in contents])
    flat = torch.from_numpy(records[:, 1:].astype(np.float32)) / 255
    return flat, torch.from_numpy(records[:, 0].astype(np.int64))


def _read_members(path: Path, names: list[str]) -> list[bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:  # one pass: seeking in a compressed archive reads it again
            if member.name in names:
                file = archive.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
                if len(found) == len(names):
                    break
    return [found[name] for name in names]
