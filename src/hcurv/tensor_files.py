"""Files of tensors in the format of safetensors, written and read here, each opened once.

A file begins with the length of its header, 8 bytes. The header is JSON: for every tensor its type,
its shape and where its bytes lie, and texts by name. The bytes of all tensors follow, without gaps.

Why not the package safetensors? It writes the texts in a random order, so that two files of one
object differ, it copies all tensors before it writes them, and it opens a file twice to read it, so
that a file that is replaced in between looks damaged.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hcurv.memory import require_bytes

__all__ = ["MalformedFileError", "bytes_of", "read_tensor_file", "write_tensor_file"]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}
# The format allows headers of this many bytes.
_MAX_HEADER = 100_000_000


class MalformedFileError(ValueError):
    """The file is not in the format of safetensors; the message says what is wrong."""


def write_tensor_file(path: str, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts. Equal contents give equal bytes.

    Args:
        path: the file to write.
        tensors: contiguous tensors on the CPU, of 32 or 64 bits a value, by name.
        texts: what else is stored, by name.
    """
    # The widest values come first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(texts.items()))}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for name in names:
            if tensors[name].numel():
                stream.write(bytes_of(tensors[name]))


def read_tensor_file(
    path: Path, check: Callable[[Mapping[str, str]], object]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the texts and the tensors of a file. Nothing large is allocated before it is checked.

    Args:
        path: the file.
        check: is given the texts before any tensor is read, and may raise.

    Raises:
        MalformedFileError: it is not such a file.
        InsufficientMemoryError: its tensors do not fit into memory.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise MalformedFileError("it has no header")
        header = _parse(stream.read(length))
        texts = header.pop("__metadata__", {})
        if not isinstance(texts, dict) or not all(isinstance(t, str) for t in texts.values()):
            raise MalformedFileError("its texts are no texts")
        check(texts)
        _check_layout(header, size - 8 - length)
        require_bytes(
            size,
            torch.device("cpu"),
            f"reading {path}",
            ("free memory, or read it on a larger machine",),
        )
        first = 8 + length
        return texts, {name: _read(stream, first, entry) for name, entry in header.items()}


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise MalformedFileError("its header is no JSON object")
    return header


def _check_layout(header: Mapping[str, Any], size: int) -> None:
    """Check that the tensors fill the rest of the file, ``size`` bytes, without gaps."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
        begin, end_before = _offsets(name, entry)[0], end
        end = _offsets(name, entry)[1]
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if not isinstance(dtype, str) or dtype not in _TYPES:
            raise MalformedFileError(f"tensor {name!r} has the type {dtype!r}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
            raise MalformedFileError(f"tensor {name!r} has the shape {shape!r}")
        if begin != end_before or end - begin != math.prod(shape) * _TYPES[dtype].itemsize:
            raise MalformedFileError(f"tensor {name!r} is not where the header says")
    if end != size:
        raise MalformedFileError(f"its tensors have {size} bytes, and the header says {end}")


def _offsets(name: str, entry: object) -> tuple[int, int]:
    found = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(found, list) or len(found) != 2 or not all(_is_count(o) for o in found):
        raise MalformedFileError(f"tensor {name!r} is not described")
    return found[0], found[1]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU that is not empty, without a copy."""
    values: Any = tensor.view(-1).numpy()
    return memoryview(values).cast("B")


def _read(stream: BufferedReader, first: int, entry: Mapping[str, Any]) -> Tensor:
    """Read one tensor; ``first`` is where the bytes of all tensors begin."""
    try:
        tensor = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]])
    except RuntimeError as error:  # an empty tensor of a shape beyond all bounds
        raise MalformedFileError(f"it has a tensor of shape {entry['shape']}") from error
    if tensor.numel() == 0:
        return tensor
    stream.seek(first + entry["data_offsets"][0])
    if stream.readinto(bytes_of(tensor)) != tensor.nbytes:
        raise MalformedFileError("it ends too early")
    return tensor
