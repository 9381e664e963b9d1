"""Read and write arrays in .npy, .npz and .safetensors files. Pickles are never read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hcurv.files import write_atomically

__all__ = ["pick_data", "read_array", "read_arrays", "read_tensors", "write_array", "write_arrays"]

_INPUTS = ("inputs", "x", "X")
_TARGETS = ("targets", "y", "Y", "labels")
_DAMAGES = (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)
# These NumPy types do not exist in every version of torch, and are read as wider ones.
_WIDER = {"u2": np.int64, "u4": np.int64, "u8": np.int64, "f16": np.float64}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or is not a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _require(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error})") from error
    return tensors


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Read all arrays of a file, by name. The array of an .npy file has the name "".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, has another format, or holds something other than numbers.
    """
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return read_tensors(path)
    if suffix not in (".npy", ".npz"):
        raise ValueError(f"{path} must be an .npz, .npy or .safetensors file")
    _require(path)
    try:
        with path.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            if isinstance(content, np.ndarray):
                arrays = {"": content}
            else:
                arrays = {name: content[name] for name in content.files}
    except _DAMAGES as error:
        raise ValueError(
            f"{path} cannot be read: it is damaged, or holds Python objects ({error})"
        ) from error
    return {name: _to_tensor(values, name, path) for name, values in arrays.items()}


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")


def _to_tensor(values: np.ndarray, name: str, path: Path) -> Tensor:
    if values.dtype.kind not in "biuf":
        which = f"the array '{name}' of {path}" if name else str(path)
        raise ValueError(f"{which} must hold real numbers; got {values.dtype}")
    dtype = _WIDER.get(values.dtype.str[1:], values.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype).reshape(values.shape))


def read_array(path: Path) -> Tensor:
    """Read the only array of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no array that can be read, or several.
    """
    arrays = read_arrays(path)
    if len(arrays) != 1:
        raise ValueError(f"{path} must hold one array; it has {_listed(arrays)}")
    return next(iter(arrays.values()))


def pick_data(arrays: Mapping[str, Tensor], path: Path) -> tuple[Tensor, Tensor | None]:
    """Find the inputs and the targets by their usual names. A single array is the inputs.

    Raises:
        ValueError: no array can be recognised as the inputs.
    """
    targets = next((arrays[name] for name in _TARGETS if name in arrays), None)
    inputs = next((arrays[name] for name in _INPUTS if name in arrays), None)
    if inputs is None:
        others = [values for name, values in arrays.items() if name not in _TARGETS]
        if len(others) != 1:
            raise ValueError(
                f"{path} must have an array named {' or '.join(map(repr, _INPUTS))};"
                f" it has {_listed(arrays)}"
            )
        inputs = others[0]
    return inputs, targets


def _listed(arrays: Mapping[str, Tensor]) -> str:
    return ", ".join(map(repr, arrays)) or "none"


def write_array(path: Path, values: Tensor) -> None:
    """Write an .npy file, completely or not at all."""

    def write(name: str) -> None:
        with open(name, "wb") as stream:  # given a name, NumPy would change its ending
            np.save(stream, values.cpu().numpy(), allow_pickle=False)

    write_atomically(path, write)


def write_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write an .npz file, completely or not at all."""
    content: dict[str, Any] = {name: values.cpu().numpy() for name, values in arrays.items()}

    def write(name: str) -> None:
        with open(name, "wb") as stream:
            np.savez(stream, **content)

    write_atomically(path, write)
