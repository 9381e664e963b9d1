"""Made-up image files of every official form, and descriptions with their checksums."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hcurv.experiments import datasets

NOWHERE = "file:///nowhere"


def idx_content(values: np.ndarray) -> bytes:
    """Return the content of an IDX file of bytes."""
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def idx_files(images: np.ndarray, labels: np.ndarray, part: str = "train") -> dict[str, bytes]:
    """Return the two IDX files of a data set by name; ``part`` is "train" or "t10k"."""
    return {
        f"{part}-images-idx3-ubyte": idx_content(images),
        f"{part}-labels-idx1-ubyte": idx_content(labels),
    }


def write_files(folder: Path, files: dict[str, bytes], compress: bool = True) -> None:
    """Write files into a folder, gzipped or not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
        else:
            (folder / name).write_bytes(content)


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    """Write files into a tar archive, which is compressed as the ending of its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def python2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """Return a batch as Python 2 wrote the official ones, with two-byte sizes and memo numbers."""

    def string(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    def memo(number: int) -> bytes:
        return b"r" + number.to_bytes(4, "little")

    sizes = b"".join(b"M" + size.to_bytes(2, "little") for size in pixels.shape)
    names = b"".join(string(f"frog_{i}.png") + memo(300 + i) for i in range(len(labels)))
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
        + b"U\x06labelsq\x04]q\x05("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07"
        + b"cnumpy\nndarray\nq\x08K\x00\x85q\tU\x01b\x87q\nRq\x0b(K\x01"
        + sizes
        + b"\x86q\x0ccnumpy\ndtype\nq\rU\x02u1K\x00K\x01\x87q\x0eRq\x0f("
        + b"K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x10b\x89T"
        + pixels.size.to_bytes(4, "little")
        + pixels.tobytes()
        + b"q\x11tq\x12bU\tfilenamesq\x13]q\x14("
        + names
        + b"eu."
    )


def cifar_files(batches: dict[str, np.ndarray], version: str) -> dict[str, bytes]:
    """Return the members of an archive; ``version`` is "binary", "python2" or "python3"."""
    files = {}
    for name, records in batches.items():
        labels, pixels = records[:, 0], records[:, 1:]
        if version == "binary":
            files[f"cifar-10-batches-bin/{name}.bin"] = records.tobytes()
        elif version == "python2":
            files[f"cifar-10-batches-py/{name}"] = python2_pickle(pixels, labels)
        else:
            batch = {"data": np.ascontiguousarray(pixels), "labels": labels.tolist()}
            files[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, 2)
    return files


def describe(original: datasets.ImageFiles, files: dict[str, bytes]) -> datasets.ImageFiles:
    """Describe a made-up data set, which nobody can download."""
    checksums = {
        name.partition("-idx")[0]: hashlib.sha256(content).hexdigest()
        for name, content in files.items()
    }
    return dataclasses.replace(original, address=NOWHERE, checksums=checksums)


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide the data and the cache of this machine, its proxy and the internet from a test."""
    monkeypatch.delenv(datasets.DATA_VARIABLE, raising=False)
    monkeypatch.setenv("HCURV_CACHE", str(folder / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(datasets, "SYSTEM_FOLDERS", (folder / "system",))
    for name in ("MNIST", "FASHION_MNIST", "CIFAR10"):
        described = dataclasses.replace(getattr(datasets, name), address=NOWHERE)
        monkeypatch.setattr(datasets, name, described)
