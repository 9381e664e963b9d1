"""The file format: one safetensors file per object, self-describing, never pickled.

Indices are stored as int32 where that suffices. The metadata hold the name and version of the
format, a JSON description of everything that is not a tensor, and a checksum of every tensor.
Writing is atomic: an existing file is replaced only once the new one is complete.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Container, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hcurv.files import check_source, check_target, write_atomically
from hcurv.hierarchical.matrix.file_checks import ReadOnce, check_tree
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.tensor_files import MalformedFileError, bytes_of, read_tensor_file, write_tensor_file

T = TypeVar("T")

__all__ = [
    "FLOAT_TYPES",
    "FileFormatError",
    "make_tree",
    "read_file",
    "read_tensors",
    "write_file",
    "write_tensors",
]

# Version 2 added global parts; version 3 a damping for each row, and the layout of the parameters.
_VERSION = 3
FLOAT_TYPES = {"float32": torch.float32, "float64": torch.float64}
_INT32 = torch.iinfo(torch.int32).max


class _HasTree(Protocol):
    """What every stored object has."""

    tree: ClusterTree

    @property
    def dtype(self) -> torch.dtype: ...


class FileFormatError(ValueError):
    """A file is not a readable hcurv file; the message says why.

    Examples:
        >>> with open("notes.txt", "w") as file:
        ...     _ = file.write("not a matrix")
        >>> try:
        ...     hcurv.load("notes.txt")
        ... except hcurv.FileFormatError as error:
        ...     print("truncated or no safetensors file" in str(error))
        True
    """


def write_file(
    stored: _HasTree,
    path: str | PathLike[str],
    file_format: str,
    named: Mapping[str, Tensor],
    special: Mapping[str, Any],
) -> None:
    """Write the tree of an object together with its own tensors and description.

    Args:
        stored: the object.
        path: where to write; an existing file is replaced once the new one is complete.
        file_format: what `read_file` recognises the file by.
        named: its tensors by name, apart from those of the tree.
        special: what else describes it, to be stored as JSON.
    """
    tree = stored.tree
    short = tree.size < _INT32
    tensors = {
        name: tensor.int() if short and not tensor.is_floating_point() else tensor
        for name, tensor in {"permutation": tree.permutation, **named}.items()
    }
    description = {
        "size": tree.size,
        "depth": tree.depth,
        "ordering": tree.ordering,
        "scores": tree.scores,
        "dtype": str(stored.dtype).removeprefix("torch."),
        **special,
    }
    write_tensors(path, file_format, tensors, description)


def write_tensors(
    path: str | PathLike[str],
    file_format: str,
    named: Mapping[str, Tensor],
    description: Mapping[str, Any],
) -> None:
    """Write tensors with a description and checksums of everything.

    Args:
        path: where to write; an existing file is replaced once the new one is complete.
        file_format: what `read_tensors` recognises the file by.
        named: the tensors by name.
        description: what else is to be stored, as JSON.
    """
    target = check_target(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    text = json.dumps({**description, "checksums": checksums})
    metadata = {
        "format": file_format,
        "version": str(_VERSION),
        "description": text,
        "checksum": str(zlib.crc32(text.encode())),
    }
    write_atomically(target, lambda name: write_tensor_file(name, tensors, metadata))


def _checksum(tensor: Tensor) -> int:
    values = zlib.crc32(bytes_of(tensor)) if tensor.numel() else 0
    return zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), values)


def read_file(
    path: str | PathLike[str],
    device: torch.device | str,
    makers: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], T]],
) -> T:
    """Read a file that `write_file` wrote.

    Args:
        path: the file.
        device: where the tensors shall live.
        makers: for every known format, what makes an object from the description and the tensors.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: it is foreign, damaged, or of a newer format.
    """
    file_format, description, tensors = read_tensors(path, makers)
    moved = {
        name: tensor.to(device, None if tensor.is_floating_point() else torch.long)
        for name, tensor in tensors.items()
    }
    found = ReadOnce(moved)
    try:
        made = makers[file_format](description, found)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise FileFormatError(f"{path} is damaged: {what}; write it again") from error
    if found.unread:
        raise FileFormatError(
            f"{path} is damaged: nothing is said about its tensors {sorted(found.unread)}; write it"
            " again"
        )
    return made


def read_tensors(
    path: str | PathLike[str], formats: Container[str]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Read a file that `write_tensors` wrote: its format, its description and its tensors.

    Args:
        path: the file.
        formats: the formats that are wanted.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: it is foreign, damaged, or of a newer format.
    """
    path = check_source(path)
    try:
        metadata, tensors = read_tensor_file(
            path, lambda texts: _check_format(path, texts, formats)
        )
    except MalformedFileError as error:
        raise FileFormatError(
            f"{path} is truncated or no safetensors file ({error}); write it again"
        ) from error
    description = _read_description(path, metadata)
    checksums = description.get("checksums")
    if (
        not isinstance(checksums, dict)
        or checksums.keys() != tensors.keys()
        or any(_checksum(tensor) != checksums[name] for name, tensor in tensors.items())
    ):
        raise FileFormatError(f"{path} is damaged: checksums do not match; write it again")
    return metadata["format"], description, tensors


def _check_format(path: Path, metadata: Mapping[str, str], formats: Container[str]) -> None:
    """Refuse a file of another program, of another kind, or of another version."""
    if metadata.get("format", "") not in formats:
        found = metadata.get("format", "another program")
        raise FileFormatError(f"{path} holds nothing of hcurv (it is by {found})")
    version = metadata.get("version", "")
    if not (version.isdecimal() and len(version) < 10):
        raise FileFormatError(f"{path} is damaged: its version is {version!r}")
    if int(version) > _VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this hcurv reads up to {_VERSION}: upgrade hcurv"
        )
    if int(version) < _VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, which is no longer read: compress again"
        )


def _read_description(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("description", "")
    if str(zlib.crc32(text.encode(errors="replace"))) != metadata.get("checksum"):
        raise FileFormatError(f"{path} is damaged: checksums do not match; write it again")
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; write it again") from error
    if not isinstance(description, dict):
        raise FileFormatError(f"{path} is damaged: it describes nothing; write it again")
    return description


def make_tree(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClusterTree:
    """Return the tree that a file holds."""
    tree = ClusterTree(
        size=description["size"],
        permutation=tensors["permutation"],
        depth=description["depth"],
        ordering=description["ordering"],
        scores=description["scores"],
    )
    check_tree(tree)
    return tree
