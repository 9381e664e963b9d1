"""Files of compressed matrices: exact round trips, clear refusals."""

from __future__ import annotations

import builtins
import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hcurv
from cases import both_dtypes
from matrices import compress_tree, kernel_matrix


@pytest.fixture
def matrix() -> hcurv.HMatrix:
    dense = kernel_matrix("gaussian", 90, 2)
    dense[13] = dense[:, 13] = 0
    return compress_tree(dense, tolerance=1e-3, leaf_size=16)


@pytest.fixture
def path(matrix: hcurv.HMatrix, tmp_path: Path) -> Path:
    matrix.save(tmp_path / "matrix.safetensors")
    return tmp_path / "matrix.safetensors"


@both_dtypes
@pytest.mark.parametrize("options", [{}, {"max_rank": 0}, {"leaf_size": 200}, {"max_rank": 2}])
def test_round_trip_is_exact(dtype: torch.dtype, options: dict[str, int], tmp_path: Path) -> None:
    dense = kernel_matrix("inverse multiquadric", 90, 2).to(dtype)
    saved = hcurv.compress(dense, **{"leaf_size": 16, **options})
    saved.save(tmp_path / "a.safetensors")
    loaded = hcurv.load(tmp_path / "a.safetensors")
    assert torch.equal(loaded.to_dense(), saved.to_dense())
    assert torch.equal(loaded.diagonal(), saved.diagonal())
    assert loaded.dtype == dtype
    assert loaded.record == saved.record
    assert loaded.num_stored == saved.num_stored
    assert loaded.tree.ordering == saved.tree.ordering
    assert loaded.tree.scores == saved.tree.scores
    assert all(torch.equal(a, b) for a, b in zip(loaded.ranks, saved.ranks, strict=True))
    assert loaded.record.seconds == saved.record.seconds


def test_zero_matrix(tmp_path: Path) -> None:
    hcurv.compress(torch.zeros(5, 5)).save(tmp_path / "zero.safetensors")
    assert not hcurv.load(tmp_path / "zero.safetensors").to_dense().any()


def test_file_describes_itself(path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert metadata["format"] == "hcurv.HMatrix"
    assert metadata["version"] == "3"
    description = json.loads(metadata["description"])
    assert description["size"] == 90
    assert description["record"]["tolerance"] == 1e-3
    assert {"permutation", "leaves.values", "levels.0.bases.0.weights"} <= names


def test_truncated(path: Path) -> None:
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(hcurv.FileFormatError, match=r"matrix\.safetensors is truncated or"):
            hcurv.load(path)


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for position in range(0, len(content), 211):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(hcurv.FileFormatError):
            hcurv.load(path)


def test_foreign(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(hcurv.FileFormatError, match="holds nothing of hcurv"):
        hcurv.load(tmp_path / "other.safetensors")
    torch.save({"a": torch.ones(3)}, tmp_path / "pickle.pt")
    with pytest.raises(hcurv.FileFormatError, match="no safetensors file"):
        hcurv.load(tmp_path / "pickle.pt")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing"):
        hcurv.load(tmp_path / "nothing")


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_newer_version(path: Path) -> None:
    metadata = _metadata(path)
    save_file(load_file(path), path, {**metadata, "version": "4"})
    with pytest.raises(hcurv.FileFormatError, match="version 4, this hcurv reads up to 3: upgrade"):
        hcurv.load(path)
    save_file(load_file(path), path, {**metadata, "version": "2"})
    with pytest.raises(hcurv.FileFormatError, match="version 2, which is no longer read"):
        hcurv.load(path)
    save_file(load_file(path), path, {**metadata, "version": "first"})
    with pytest.raises(hcurv.FileFormatError, match="its version is 'first'"):
        hcurv.load(path)


def test_description_without_some_part(path: Path) -> None:
    metadata = _metadata(path)
    description = json.loads(metadata["description"])
    del description["depth"]
    text = json.dumps(description)
    checksum = str(zlib.crc32(text.encode()))
    save_file(load_file(path), path, {**metadata, "description": text, "checksum": checksum})
    with pytest.raises(hcurv.FileFormatError, match="damaged"):
        hcurv.load(path)


def test_missing_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["permutation"]
    save_file(tensors, path, _metadata(path))
    with pytest.raises(hcurv.FileFormatError, match="checksums"):
        hcurv.load(path)


def test_failed_write_leaves_the_old_file(
    matrix: hcurv.HMatrix, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def fail(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        matrix.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_folder_that_is_not_there(matrix: hcurv.HMatrix, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        matrix.save(tmp_path / "none" / "a.safetensors")


def test_files_need_no_further_package(
    matrix: hcurv.HMatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def blocked(name: str, *arguments: object, **options: object) -> object:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", blocked)
    matrix.save(tmp_path / "a.safetensors")
    assert torch.equal(hcurv.load(tmp_path / "a.safetensors").to_dense(), matrix.to_dense())


def test_permissions_are_those_of_any_new_file(path: Path) -> None:
    plain = path.parent / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
