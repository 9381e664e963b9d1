"""Files of matrices that are spread over ranks: a folder with one safetensors file for each rank.

Every file holds the leaf blocks, bases, couplings and rows of the global part of one rank, in the
numbering of the whole tree. The first one also holds what all ranks have. ``index.json`` names the
files and describes the matrix. All of them carry the same random mark, so that files of different
matrices are never mixed. The folder appears under its name once everything in it is written.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.files import check_target, write_atomically
from hcurv.hierarchical.matrix import storage
from hcurv.hierarchical.matrix.file_format import FileFormatError, read_tensors, write_tensors
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.matrix.sharding import whole_tensors
from hcurv.hierarchical.matrix.split import own_part
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix

__all__ = ["INDEX", "load_shards", "save_shards"]

INDEX = "index.json"
# The names of the formats of the index and of one file.
_FORMAT, _SHARD = "hcurv.ShardedHMatrix", "hcurv.HMatrixShard"
_VERSION = 1


def save_shards(matrix: DistributedHMatrix, path: str | PathLike[str]) -> None:
    """Write a folder; one that was written before is replaced once the new one is complete."""
    ranks, target = matrix.share.ranks, Path(path)
    with ranks.agreed():
        if ranks.first:
            _check_folder(target)
    number = secrets.randbits(62) if ranks.first else 0
    mark = format(int(ranks.broadcast(torch.tensor([number]))), "x")
    part = target.absolute().parent / f".part-{mark}"
    try:
        with ranks.agreed():
            if ranks.first:
                part.mkdir()
        with ranks.agreed():
            _write_shard(matrix, part, mark)
        with ranks.agreed():
            if ranks.first:
                _write_index(matrix, part, mark)
                _replace(part, target, mark)
    finally:
        if ranks.first:
            shutil.rmtree(part, ignore_errors=True)


def _check_folder(target: Path) -> None:
    """Raise unless a folder can be written there."""
    if target.is_dir():
        if any(target.iterdir()) and not (target / INDEX).is_file():
            raise FileExistsError(
                f"{target} is a folder with other files: name a new folder to save the matrix in"
            )
        check_target(target / INDEX)
    elif target.exists():
        raise FileExistsError(
            f"{target} is a file: a matrix that is spread over ranks is saved in a folder"
        )
    check_target(target.absolute().parent / f".part-{os.getpid()}")


def _replace(part: Path, target: Path, mark: str) -> None:
    """Give a folder its name, and remove the one that had it."""
    old = target.absolute().parent / f".old-{mark}"
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _file_name(rank: int, size: int) -> str:
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def _write_shard(matrix: DistributedHMatrix, folder: Path, mark: str) -> None:
    """Write what this rank has, and on the first one what all have."""
    ranks, nodes = matrix.share.ranks, matrix.nodes
    tensors: dict[str, Tensor] = {}
    first_leaf = 0
    if nodes.is_shared:
        first_leaf = nodes.first(matrix.tree.depth)
        tensors |= whole_tensors(matrix)
    if matrix.global_part is not None:
        tensors["global.rows"] = matrix.own_rows
        tensors["global.factor"] = matrix.global_part.factor
    if ranks.first:
        tensors |= _common_tensors(matrix)
    short = matrix.tree.size < torch.iinfo(torch.int32).max
    stored = {
        name: tensor.int() if short and not tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    description = {"mark": mark, "rank": ranks.rank, "first_leaf": first_leaf}
    write_tensors(folder / _file_name(ranks.rank, ranks.size), _SHARD, stored, description)


def _common_tensors(matrix: DistributedHMatrix) -> dict[str, Tensor]:
    """What all ranks have, under the names of the whole matrix."""
    tensors = {"permutation": matrix.tree.permutation}
    if not matrix.tree.num_kept:
        tensors["rows"] = matrix.share.rows
    top = storage.matrix_tensors(matrix.top)
    if not matrix.nodes.is_shared:
        return tensors | top
    lower = len(matrix.levels) - 1  # number of the cut level, from the leaves
    for number, ranks in enumerate(matrix.node_ranks):
        tensors[f"levels.{number}.ranks"] = ranks
    for name, tensor in top.items():
        kind, place, rest = [*name.split(".", 2), ""][:3]
        # The ranks and bases of the cut level are those of the whole tree, which are not here.
        if kind == "levels" and (place != "0" or rest.startswith("couplings")):
            tensors[f"levels.{int(place) + lower}.{rest}"] = tensor
    return tensors


def _write_index(matrix: DistributedHMatrix, folder: Path, mark: str) -> None:
    tree, size = matrix.tree, matrix.share.ranks.size
    batches = [[len(level.bases), len(level.couplings)] for level in matrix.levels]
    top = [[len(level.bases), len(level.couplings)] for level in matrix.top.levels]
    if batches:
        batches[-1][1] = top[0][1]
        top = top[1:]
    content = {
        "files": [_file_name(rank, size) for rank in range(size)],
        "mark": mark,
        "size": tree.size,
        "depth": tree.depth,
        "ordering": tree.ordering,
        "scores": tree.scores,
        "dtype": str(matrix.dtype).removeprefix("torch."),
        **storage.describe_matrix(matrix),
        "levels": batches + top,
    }
    text = json.dumps(content)
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": zlib.crc32(text.encode()),
        "content": text,
    }
    write_atomically(folder / INDEX, lambda name: Path(name).write_text(json.dumps(index)))


def load_shards(path: str | PathLike[str], device: torch.device | str, ranks: OneRank) -> HMatrix:
    """Read a folder that `save_shards` wrote, with any number of ranks.

    Args:
        path: the folder.
        device: where the tensors shall live.
        ranks: the ranks that share the matrix; one process has all of it.

    Raises:
        FileFormatError: a file is foreign, damaged, missing, or of another matrix.
    """
    folder = Path(path)
    with ranks.agreed():
        description = _read_index(folder)
        if ranks.size == 1:
            return _load_whole(folder, description, device)
        with _explained(folder):
            part = own_part(description, _shards(folder, description, device), ranks)
    matrix = part.matrix()
    matrix.layout = storage.read_layout(description)
    return matrix


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say of any error in what was read that the folder is damaged."""
    try:
        yield
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise FileFormatError(f"{folder} is damaged: {error!r}; write it again") from error


def _load_whole(
    folder: Path, description: Mapping[str, Any], device: torch.device | str
) -> HMatrix:
    """All of a matrix in one process."""
    parts: dict[str, list[Tensor]] = {}
    with _explained(folder):
        for _, tensors in _shards(folder, description, device):
            for name, tensor in tensors.items():
                parts.setdefault(name, []).append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in parts.items()}
        if "global.rows" in whole:
            rows, order = whole["global.rows"].sort()
            whole |= {"global.rows": rows, "global.factor": whole["global.factor"][order]}
        return storage.make_matrix(description, whole)


def _shards(
    folder: Path, description: Mapping[str, Any], device: torch.device | str
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The first leaf and the tensors of each file, one after the other."""
    for name in description["files"]:
        try:
            _, own, tensors = read_tensors(folder / name, (_SHARD,))
        except FileNotFoundError as error:
            raise FileFormatError(f"{folder} is damaged: {name} is missing") from error
        if own.get("mark") != description["mark"]:
            raise FileFormatError(f"{folder} is damaged: {name} belongs to another matrix")
        yield (
            own["first_leaf"],
            {
                name: t.to(device, None if t.is_floating_point() else torch.long, copy=True)
                for name, t in tensors.items()
            },
        )


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise FileFormatError(f"{folder} holds no matrix of hcurv: it has no {INDEX}")
    try:
        index = json.loads(path.read_text())
        text, version = index["content"], index["version"]
        is_sound = index["format"] == _FORMAT and zlib.crc32(text.encode()) == index["checksum"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path} is damaged or by another program: {error!r}") from error
    if version != _VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this hcurv reads {_VERSION}: upgrade hcurv"
        )
    if not is_sound:
        raise FileFormatError(f"{path} is damaged or by another program: write it again")
    content: dict[str, Any] = json.loads(text)
    return content
