"""Keep trained weights in safetensors files, and check them when they are read."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

from hcurv.files import replacing

__all__ = ["load_published", "load_weights", "save_weights"]


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "the cache of trained networks needs the package safetensors: pip install"
            " 'hcurv[files]', or train with cache=False"
        ) from error
    return safetensors.torch


def save_weights(model: nn.Module, path: Path, description: str) -> None:
    """Write weights and a description to a file. A warning says if it cannot be written."""
    library = _safetensors()
    weights = model.state_dict()
    metadata = {"description": description, "checksum": _checksum(weights)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(library.save(weights, metadata))
    except OSError as error:
        warnings.warn(f"trained weights are not stored: {error}", stacklevel=3)


def load_weights(model: nn.Module, path: Path) -> bool:
    """Load what `save_weights` wrote into a model of the same shape.

    Returns:
        Whether the weights were loaded. A damaged file gives a warning and leaves the model
        unchanged.
    """
    library = _safetensors()
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        weights = library.load_file(path)
        if metadata.get("checksum") != _checksum(weights):
            raise ValueError("checksums do not match")
        if _shapes(weights) != _shapes(model.state_dict()):
            raise ValueError("they are of another model")
    except (SafetensorError, ValueError, OSError) as error:
        warnings.warn(f"stored weights {path} are damaged: {error}", stacklevel=3)
        return False
    model.load_state_dict(weights)
    return True


def load_published(model: nn.Module, path: Path) -> None:
    """Load weights that others have published, a state dict in a safetensors file."""
    model.load_state_dict(_safetensors().load_file(path))


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _checksum(weights: Mapping[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.detach().contiguous().numpy().data)
    return checksum.hexdigest()
