"""Files: one safetensors file per object, self-describing, written atomically, never pickled.

Tensors are named after the parts that they belong to, e.g. ``levels.0.bases.1.weights``; indices
are stored as int32 where that suffices. The metadata hold the format, its version, a JSON
description of everything else, and a checksum of every tensor.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree
from hcurv.files import check_target, write_atomically
from hcurv.hierarchical.elimination import Elimination, LevelFactor, Split
from hcurv.hierarchical.factorization import Factorization
from hcurv.hierarchical.global_part import GlobalPart, GlobalUpdate
from hcurv.hierarchical.levels import Basis, Coupling, LeafBlocks, Level
from hcurv.hierarchical.matrix import BuildRecord, HMatrix
from hcurv.hierarchical.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["FileFormatError", "load", "save"]

_MATRIX, _FACTORIZATION = "hcurv.HMatrix", "hcurv.Factorization"
_VERSION = 2  # 2: global parts, near fields
_COUPLINGS = ("couplings", "far")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_INT32 = torch.iinfo(torch.int32).max


class FileFormatError(ValueError):
    """A file is no readable hcurv file; the message says why."""


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files need the package safetensors: pip install 'hcurv[files]'"
        ) from error
    return safetensors.torch


def save(stored: HMatrix | Factorization, path: str | PathLike[str]) -> None:
    """Write a file; an existing one is replaced only once the new one is complete."""
    library = _safetensors()
    target = check_target(path)
    if isinstance(stored, HMatrix):
        kind, named, special = _MATRIX, _matrix_tensors(stored), _describe_matrix(stored)
    else:
        kind, named, special = _FACTORIZATION, _factor_tensors(stored), _describe_factors(stored)
    tree = stored.tree
    short = tree.size < _INT32
    tensors = {
        name: (tensor.int() if short and not tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in {"permutation": tree.permutation, **named}.items()
    }
    description = {
        "size": tree.size,
        "depth": tree.depth,
        "ordering": tree.ordering,
        "scores": tree.scores,
        "dtype": str(stored.dtype).removeprefix("torch."),
        **special,
        "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(description)
    metadata = {
        "format": kind,
        "version": str(_VERSION),
        "description": text,
        "checksum": str(zlib.crc32(text.encode())),
    }
    write_atomically(target, lambda name: library.save_file(tensors, name, metadata))


def _checksum(tensor: Tensor) -> int:
    values = zlib.crc32(tensor.numpy().tobytes()) if tensor.numel() else 0
    return zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), values)


def _matrix_tensors(matrix: HMatrix) -> dict[str, Tensor]:
    """What cannot be made of other parts."""
    tensors = {"leaves.values": matrix.leaves.values}
    if matrix.global_part is not None:
        tensors["global.rows"] = matrix.global_part.rows
        tensors["global.factor"] = matrix.global_part.factor
    for number, level in enumerate(matrix.levels):
        tensors[f"levels.{number}.ranks"] = level.ranks
        for place, basis in enumerate(level.bases):
            for part in ("nodes", "skeleton", "rest", "weights"):
                tensors[f"levels.{number}.bases.{place}.{part}"] = getattr(basis, part)
        for kind in _COUPLINGS:
            _add_couplings(tensors, f"levels.{number}.{kind}", getattr(level, kind))
    _add_couplings(tensors, "near", matrix.near)
    return tensors


def _add_couplings(tensors: dict[str, Tensor], name: str, parts: tuple[Coupling, ...]) -> None:
    for place, coupling in enumerate(parts):
        tensors[f"{name}.{place}.pairs"] = coupling.pairs
        tensors[f"{name}.{place}.values"] = coupling.values


def _read_couplings(
    tensors: Mapping[str, Tensor], name: str, count: int, sizes: Tensor
) -> tuple[Coupling, ...]:
    return tuple(
        Coupling.of(tensors[f"{name}.{place}.pairs"], sizes, tensors[f"{name}.{place}.values"])
        for place in range(count)
    )


def _describe_matrix(matrix: HMatrix) -> dict[str, Any]:
    return {
        "levels": [
            [len(level.bases), *(len(getattr(level, kind)) for kind in _COUPLINGS)]
            for level in matrix.levels
        ],
        "near": len(matrix.near),
        "record": asdict(matrix.record),
    }


def _factor_tensors(stored: Factorization) -> dict[str, Tensor]:
    tensors = {}
    for number, level in enumerate(stored.levels):
        for part in ("starts", "counts", "left"):
            tensors[f"levels.{number}.{part}"] = getattr(level.split, part)
        for place, step in enumerate(level.eliminations):
            for field in fields(Elimination):
                values = getattr(step, field.name)
                if values is not None:
                    tensors[f"levels.{number}.eliminations.{place}.{field.name}"] = values
    if stored.update is not None:
        for part in ("rows", "basis", "values"):
            tensors[f"update.{part}"] = getattr(stored.update, part)
    return tensors


def _describe_factors(stored: Factorization) -> dict[str, Any]:
    return {
        "levels": [[len(level.eliminations), level.size] for level in stored.levels],
        "damping": stored.damping,
        "log_determinant": stored.log_determinant,
        "num_negative": stored.num_negative,
        "update_between": stored.update is not None and stored.update.between,
    }


def load(path: str | PathLike[str], device: torch.device | str = "cpu") -> HMatrix | Factorization:
    """Read what `HMatrix.save` or `Factorization.save` wrote.

    Args:
        path: the file.
        device: where it shall live.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: it is foreign, damaged, or of a newer format.
    """
    library = _safetensors()
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        description = _read_description(path, metadata)
        tensors = library.load_file(path)
    except SafetensorError as error:
        raise FileFormatError(
            f"{path} is truncated or no safetensors file ({error}); write it again"
        ) from error
    checksums = description.get("checksums", {})
    if checksums.keys() != tensors.keys() or any(
        _checksum(tensor) != checksums[name] for name, tensor in tensors.items()
    ):
        raise FileFormatError(f"{path} is damaged: checksums do not match; write it again")
    # Copies are aligned as new tensors are: what is computed from them is the same bit for bit.
    moved = {
        name: tensor.to(device, None if tensor.is_floating_point() else torch.long, copy=True)
        for name, tensor in tensors.items()
    }
    try:
        make = _make_matrix if metadata["format"] == _MATRIX else _make_factorization
        return make(description, moved)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileFormatError(f"{path} is damaged: {error!r}; write it again") from error


def _read_description(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("format") not in (_MATRIX, _FACTORIZATION):
        found = metadata.get("format", "another program")
        raise FileFormatError(f"{path} holds nothing of hcurv (it is by {found})")
    version = metadata.get("version", "")
    if not version.isdigit():
        raise FileFormatError(f"{path} is damaged: its version is {version!r}")
    if int(version) > _VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this hcurv reads up to {_VERSION}: upgrade hcurv"
        )
    if int(version) < _VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, which is no longer read: compress again"
        )
    text = metadata.get("description", "")
    if str(zlib.crc32(text.encode())) != metadata.get("checksum"):
        raise FileFormatError(f"{path} is damaged: checksums do not match; write it again")
    description: dict[str, Any] = json.loads(text)
    return description


def _make_tree(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClusterTree:
    return ClusterTree(
        size=description["size"],
        permutation=tensors["permutation"],
        depth=description["depth"],
        ordering=description["ordering"],
        scores=description["scores"],
    )


def _make_matrix(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HMatrix:
    tree = _make_tree(description, tensors)
    levels: list[Level] = []
    size_below = tree.num_kept
    for number, (num_bases, *counts) in enumerate(description["levels"]):
        ranks = tensors[f"levels.{number}.ranks"]
        bases = []
        for place in range(num_bases):
            name = f"levels.{number}.bases.{place}"
            parts = [tensors[f"{name}.{part}"] for part in ("skeleton", "rest", "weights")]
            bases.append(Basis.of(tensors[f"{name}.nodes"], ranks, *parts))
        couplings = [
            _read_couplings(tensors, f"levels.{number}.{kind}", count, ranks)
            for kind, count in zip(_COUPLINGS, counts, strict=True)
        ]
        levels.append(Level(ranks, size_below, tuple(bases), *couplings))
        size_below = levels[-1].size
    bounds = tree.bounds(tree.depth)
    leaves = LeafBlocks.of(bounds, tensors["leaves.values"])
    near = _read_couplings(tensors, "near", description["near"], bounds.diff())
    record = _make_record(description["record"])
    global_part = None
    if "global.rows" in tensors:
        global_part = GlobalPart(tensors["global.rows"], tensors["global.factor"])
    dtype = _DTYPES[description["dtype"]]
    return HMatrix(tree, leaves, tuple(levels), record, dtype, global_part, near)


def _make_record(values: Mapping[str, Any]) -> BuildRecord:
    plan = values.get("plan")
    return BuildRecord(**{**values, "plan": None if plan is None else Plan.from_dict(plan)})


def _make_factorization(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Factorization:
    tree = _make_tree(description, tensors)
    levels: list[LevelFactor] = []
    size_below = tree.num_kept
    for number, (num_eliminations, size) in enumerate(description["levels"]):
        split = Split(
            *(tensors[f"levels.{number}.{part}"] for part in ("starts", "counts", "left"))
        )
        eliminations = []
        for place in range(num_eliminations):
            name = f"levels.{number}.eliminations.{place}"
            parts = {f.name: tensors.get(f"{name}.{f.name}") for f in fields(Elimination)}
            if any(value is None for part, value in parts.items() if part != "signs"):
                raise KeyError(name)
            eliminations.append(Elimination(**parts))  # type: ignore[arg-type]
        levels.append(LevelFactor(split, size, size_below, tuple(eliminations)))
        size_below = size
    update = None
    if "update.rows" in tensors:
        update = GlobalUpdate(
            tensors["update.rows"],
            tensors["update.basis"],
            tensors["update.values"],
            bool(description["update_between"]),
        )
    return Factorization(
        tree,
        tuple(levels),
        torch.tensor(description["damping"], dtype=torch.float64),
        description["log_determinant"],
        description["num_negative"],
        _DTYPES[description["dtype"]],
        update,
    )
