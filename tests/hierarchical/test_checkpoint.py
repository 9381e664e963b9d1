"""Checkpoints: a compression that was interrupted goes on, and gives the same matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hcurv
from hcurv.hierarchical.building import build, size_forecast, skeleton_choice
from hcurv.hierarchical.building.checkpoint import BuildCheckpoint

OPTIONS = {
    "tree": {"tolerance": 1e-3, "leaf_size": 16, "global_rank": 0},
    "both": {"tolerance": 1e-3, "leaf_size": 16, "global_rank": 6},
    "planned": {"tolerance": 1e-2},
    "damped": {"damping": 1e-2, "tolerance": 1e-3, "leaf_size": 32},
    "storage": {"max_storage": 0.15, "leaf_size": 32},
    "storage of a tree": {"max_storage": 0.45, "leaf_size": 8, "global_rank": 0},
}


class InterruptedBuildError(Exception):
    """What a test interrupts a build with."""


def matrix(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """exp(−3·distance) of random points in the plane."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 2, dtype=torch.float64, generator=generator)
    return torch.exp(-3 * torch.cdist(points, points)).to(dtype)


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int = 1) -> None:
    """Interrupt the next build after so many levels were saved."""
    save, saved = BuildCheckpoint.save, []

    def count(self: BuildCheckpoint, *args: object) -> None:
        save(self, *args)
        saved.append(1)
        if len(saved) == number:
            raise InterruptedBuildError

    monkeypatch.setattr(BuildCheckpoint, "save", count)


def start(folder: Path, number: int = 1, **options: object) -> None:
    """Begin a compression, and interrupt it."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, number)
        with pytest.raises(InterruptedBuildError):
            hcurv.compress(matrix(), checkpoint=folder, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_build_that_is_interrupted_after_each_level_gives_the_same_matrix(
    name, tmp_path, monkeypatch
):
    if "max_storage" in OPTIONS[name]:  # builds look ahead, and make larger errors at their end
        monkeypatch.setattr(build, "_LEAST_ROWS", 0)
        monkeypatch.setattr(skeleton_choice, "FIRST_RANK", 2)
        monkeypatch.setattr(size_forecast, "_NEARLY_ALL", 0.6)
    folder, expected = tmp_path / "checkpoint", hcurv.compress(matrix(), **OPTIONS[name])
    vectors = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    interruptions = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch)
            try:
                found = hcurv.compress(matrix(), checkpoint=folder, **OPTIONS[name])
            except InterruptedBuildError:
                assert folder.is_dir()
                interruptions += 1
                continue
        break
    assert interruptions >= expected.tree.depth
    assert torch.equal(found @ vectors, expected @ vectors)
    assert found.record == expected.record
    assert not folder.exists()


def test_a_resumed_build_asks_for_no_product_twice(tmp_path):
    values, products = matrix(), []

    class Source:
        shape, dtype, device = values.shape, values.dtype, values.device

        def diagonal(self) -> torch.Tensor:
            return values.diagonal().clone()

        def block(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
            return values[rows][:, cols]

        def __matmul__(self, rhs: torch.Tensor) -> torch.Tensor:
            if rhs.ndim == 2 and rhs.shape[1] > 1:  # A check of the source takes one column.
                products.append(rhs.shape[1])
            return values @ rhs

    options = OPTIONS["both"]
    hcurv.compress(Source(), **options)
    whole = sum(products)
    products.clear()
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(InterruptedBuildError):
            hcurv.compress(Source(), checkpoint=tmp_path / "c", **options)
    hcurv.compress(Source(), checkpoint=tmp_path / "c", **options)
    assert sum(products) == whole


def test_a_checkpoint_of_another_compression_is_refused(tmp_path):
    folder, options = tmp_path / "checkpoint", OPTIONS["tree"]
    start(folder, **options)
    with pytest.raises(hcurv.FileFormatError, match=r"tolerance was 0\.001 and is 0\.01"):
        hcurv.compress(matrix(), checkpoint=folder, **{**options, "tolerance": 1e-2})
    with pytest.raises(hcurv.FileFormatError, match="seed was 0 and is 1"):
        hcurv.compress(matrix(), checkpoint=folder, seed=1, **options)
    with pytest.raises(hcurv.FileFormatError, match="dtype"):
        hcurv.compress(matrix(torch.float32), checkpoint=folder, **options)
    with pytest.raises(hcurv.FileFormatError, match="belongs to another matrix"):
        hcurv.compress(2 * matrix(), checkpoint=folder, **options)
    hcurv.compress(matrix(), checkpoint=folder, **options)  # It is still good.


@pytest.mark.parametrize("kind", ["about", "plan-1", "build-1"])
def test_a_damaged_checkpoint_is_refused(kind, tmp_path):
    folder = tmp_path / "checkpoint"
    start(folder, **OPTIONS["both"])
    (path,) = folder.glob(f"{kind}*")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(hcurv.FileFormatError, match="damaged"):
        hcurv.compress(matrix(), checkpoint=folder, **OPTIONS["both"])
    path.write_bytes(content[:40])
    with pytest.raises(hcurv.FileFormatError, match="truncated"):
        hcurv.compress(matrix(), checkpoint=folder, **OPTIONS["both"])


def test_a_folder_with_other_files_is_no_checkpoint(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(hcurv.FileFormatError, match="holds other files"):
        hcurv.compress(matrix(), checkpoint=tmp_path, **OPTIONS["tree"])
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hcurv.compress(matrix(), checkpoint=tmp_path / "none" / "c", **OPTIONS["tree"])
    with pytest.raises(ValueError, match="checkpoint is for"):
        hcurv.compress(matrix(), checkpoint=tmp_path / "c", method="neighbors")
