"""Checkpoints of a compression: what was planned, and what was built after each level.

A checkpoint is a folder. Files ``plan-…`` hold what builds start from, ``build-…`` their states
after a level. Each rank writes its own files, and the state before is removed only once all ranks
have written the next one. So an interruption at any time leaves a state that all ranks have.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.files import as_path, check_target
from hcurv.hierarchical.building.sampler import LevelRows
from hcurv.hierarchical.building.skeleton_columns import AdaptiveSampler
from hcurv.hierarchical.matrix import storage
from hcurv.hierarchical.matrix.file_format import (
    FileFormatError,
    make_tree,
    read_tensors,
    write_tensors,
)
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from hcurv.hierarchical.building.construct import BuildStart

__all__ = ["BuildCheckpoint", "BuildState", "Checkpoint"]

_FORMAT = "hcurv.Checkpoint"
# Two diagonals of the same matrix differ by no more than this many units of rounding.
_ROUNDING = 1e3


@dataclass
class BuildState:
    """A build under way.

    Attributes:
        depth: the level to build next.
        rows: its rows.
        leaves: diagonal blocks of the leaves.
        dense: dense blocks of pairs of different leaves.
        levels: levels that were built; of this rank, if ranks share them.
        ranks: then the ranks of all their nodes,
        top: and levels that are on every rank.
        samples: the state of the sampler, if it was read from a file.
        whole: how much error is allowed, and
        spent: how much of it was made.
        num_capped: number of nodes that a rank cap kept from their tolerance.
        is_foreseen: whether it was seen that the matrix will have the size that is wanted.
    """

    depth: int
    rows: LevelRows
    leaves: LeafBlocks
    dense: tuple[Coupling, ...] = ()
    levels: list[Level] = field(default_factory=list)
    ranks: list[Tensor] = field(default_factory=list)
    top: list[Level] = field(default_factory=list)
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    whole: float = 0.0
    spent: float = 0.0
    num_capped: int = 0
    is_foreseen: bool = False


class Checkpoint:
    """The checkpoint of one call of `compress`.

    Args:
        folder: where it is; None for no checkpoint, of which nothing is saved.
        ranks: the ranks that share the matrix.
        options: what was asked for, by name. A checkpoint is good for nothing else.
        diagonal: diagonal of the matrix.

    Raises:
        FileFormatError: the folder holds the checkpoint of something else, or other files.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None,
        ranks: OneRank,
        options: Mapping[str, object],
        diagonal: Tensor,
    ) -> None:
        self._folder = None if folder is None else as_path(folder, "checkpoint")
        self._ranks, self._device = ranks, diagonal.device
        self._num_plans = self._num_builds = 0
        if self._folder is None:
            return
        described = {name: _described(value) for name, value in options.items()}
        self._about = {**described, "ranks": ranks.size, "dtype": str(diagonal.dtype)}
        with ranks.agreed():
            if ranks.first:
                self._open(self._folder, diagonal)

    def _open(self, folder: Path, diagonal: Tensor) -> None:
        """Make the folder, or check that it belongs to this compression."""
        about = folder / "about.safetensors"
        if not folder.is_dir() or not any(folder.iterdir()):
            check_target(folder.absolute().parent / ".part")
            folder.mkdir(exist_ok=True)
            write_tensors(about, _FORMAT, {"diagonal": diagonal}, {"about": self._about})
            return
        if not about.is_file():
            raise FileFormatError(
                f"{folder} is no checkpoint: it holds other files. Name a new folder"
            )
        _, description, tensors = read_tensors(about, (_FORMAT,))
        known = description["about"]
        names = [
            name for name in {**known, **self._about} if known.get(name) != self._about.get(name)
        ]
        if names:
            listed = ", ".join(
                f"{name} was {known.get(name)} and is {self._about.get(name)}" for name in names
            )
            raise FileFormatError(
                f"the checkpoint {folder} belongs to another compression: {listed}. Pass the same"
                " arguments, or name another folder"
            )
        before = tensors["diagonal"].to(diagonal)
        rounding = _ROUNDING * torch.finfo(diagonal.dtype).eps
        is_same = before.shape == diagonal.shape and bool(
            ((before - diagonal).abs() <= rounding * diagonal.abs().max()).all()
        )
        if not is_same:
            raise FileFormatError(
                f"the checkpoint {folder} belongs to another matrix: the diagonals differ. Name"
                " another folder, or remove it"
            )

    def next_plan(self) -> PlanCheckpoint | None:
        """Where the next plan is kept."""
        self._num_plans += 1
        if self._folder is None:
            return None
        name = f"plan-{self._num_plans}.{self._ranks.rank}.safetensors"
        return PlanCheckpoint(self._folder / name, self._ranks, self._device)

    def next_build(self) -> BuildCheckpoint | None:
        """Where the next build is kept."""
        self._num_builds += 1
        if self._folder is None:
            return None
        return BuildCheckpoint(self._folder, f"build-{self._num_builds}", self._ranks, self._device)

    def remove(self) -> None:
        """Remove the folder, once the compression has ended."""
        if self._folder is not None:
            self._ranks.agree()  # Nobody reads or writes any more.
            if self._ranks.first:
                shutil.rmtree(self._folder)


class PlanCheckpoint:
    """What a build starts from.

    Args:
        path: the file of this rank.
        ranks: the ranks.
        device: where tensors shall live.
    """

    def __init__(self, path: Path, ranks: OneRank, device: torch.device) -> None:
        self._path, self._ranks, self._device = path, ranks, device

    def load(self) -> BuildStart | None:
        """What was saved, if all ranks have saved it."""
        exists = torch.tensor([int(self._path.is_file())])
        if int(self._ranks.sum(exists)) < self._ranks.size:
            return None
        with self._ranks.agreed():
            description, tensors = _read(self._path, self._device)
            return _make_start(description, tensors, self._ranks)

    def save(self, start: BuildStart) -> None:
        """Save it."""
        tree, tensors = start.tree, {"permutation": start.tree.permutation}
        part = start.global_part
        if part is not None:
            tensors["global.factor"] = part.factor
            tensors["global.rows"] = part.share.rows if isinstance(part, SharedPart) else part.rows
        for name in ("sketch", "held_out"):
            columns = getattr(start, name)
            if columns is not None:
                tensors[f"{name}.inputs"], tensors[f"{name}.outputs"] = columns
        if start.rows is not None:
            tensors["rows"] = start.rows.rows
        description = {
            "plan": None if start.plan is None else asdict(start.plan),
            "size": tree.size,
            "depth": tree.depth,
            "ordering": tree.ordering,
            "scores": tree.scores,
            "leaf_size": start.leaf_size,
            "share": start.share,
            "norm": start.norm,
            "bounds": None if start.rows is None else start.rows.bounds,
        }
        with self._ranks.agreed():
            _write(self._path, tensors, description)


def _make_start(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: OneRank
) -> BuildStart:
    from hcurv.hierarchical.building.construct import BuildStart

    rows = None
    part: GlobalPart | SharedPart | None = None
    if "rows" in tensors:
        rows = RowShare(tensors["rows"], ranks, description["bounds"])
    if "global.factor" in tensors and rows is not None and rows.is_split:
        part = SharedPart(rows, tensors["global.factor"], description["size"])
    elif "global.factor" in tensors:
        part = GlobalPart(tensors["global.rows"], tensors["global.factor"])
    columns = {
        name: (tensors[f"{name}.inputs"], tensors[f"{name}.outputs"])
        for name in ("sketch", "held_out")
        if f"{name}.inputs" in tensors
    }
    plan = description["plan"]
    return BuildStart(
        None if plan is None else Plan.from_dict(plan),
        make_tree(description, tensors),
        description["leaf_size"],
        part,
        columns.get("sketch"),
        columns.get("held_out"),
        description["share"],
        description["norm"],
        rows,
    )


class BuildCheckpoint:
    """The state of one build after its last level.

    Args:
        folder: where files are.
        name: how their names begin.
        ranks: the ranks.
        device: where tensors shall live.
    """

    def __init__(self, folder: Path, name: str, ranks: OneRank, device: torch.device) -> None:
        self._folder, self._name, self._ranks, self._device = folder, name, ranks, device

    def _path(self, depth: int) -> Path:
        return self._folder / f"{self._name}.level-{depth}.{self._ranks.rank}.safetensors"

    def load(self, leaf_bounds: Tensor) -> BuildState | None:
        """The last state that all ranks have saved, or None.

        Args:
            leaf_bounds: where the own leaves begin and end among the own rows.
        """
        flags = torch.zeros(64, dtype=torch.long)
        for depth in range(flags.numel()):
            flags[depth] = int(self._path(depth).is_file())
        found = (self._ranks.sum(flags) == self._ranks.size).nonzero()
        if found.numel() == 0:
            return None
        with self._ranks.agreed():
            description, tensors = _read(self._path(int(found[0])), self._device)
            return _make_state(description, tensors, leaf_bounds)

    def save(self, state: BuildState, sampler: AdaptiveSampler) -> None:
        """Save a state, and remove the one before, once all ranks have saved theirs."""
        tensors = {"leaves.values": state.leaves.values}
        for name, levels in (("levels", state.levels), ("top", state.top)):
            for number, level in enumerate(levels):
                tensors |= storage.level_tensors(f"{name}.{number}", level)
        for number, ranks in enumerate(state.ranks):
            tensors[f"ranks.{number}"] = ranks
        for name in ("positions", "starts", "counts", "scales"):
            tensors[f"rows.{name}"] = getattr(state.rows, name)
        samples = {f"samples.{name}": tensor for name, tensor in sampler.state().items()}
        description = {
            "depth": state.depth,
            "whole": state.whole,
            "spent": state.spent,
            "num_capped": state.num_capped,
            "is_foreseen": state.is_foreseen,
            "levels": [_counts(level) for level in state.levels],
            "top": [_counts(level) for level in state.top],
            "num_ranks": len(state.ranks),
        }
        with self._ranks.agreed():
            _write(self._path(state.depth), {**tensors, **samples}, description)
        self._path(state.depth + 1).unlink(missing_ok=True)


def _counts(level: Level) -> list[int]:
    return [len(level.bases), len(level.couplings), level.size_below]


def _make_state(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], leaf_bounds: Tensor
) -> BuildState:
    built = {
        name: [
            storage.read_level(tensors, f"{name}.{number}", counts, counts[2])
            for number, counts in enumerate(description[name])
        ]
        for name in ("levels", "top")
    }
    rows = LevelRows(
        *(tensors[f"rows.{name}"] for name in ("positions", "starts", "counts", "scales"))
    )
    samples = {
        name.removeprefix("samples."): tensor
        for name, tensor in tensors.items()
        if name.startswith("samples.")
    }
    return BuildState(
        description["depth"],
        rows,
        LeafBlocks.of(leaf_bounds, tensors["leaves.values"]),
        (),
        built["levels"],
        [tensors[f"ranks.{number}"] for number in range(description["num_ranks"])],
        built["top"],
        samples,
        description["whole"],
        description["spent"],
        description["num_capped"],
        description["is_foreseen"],
    )


def _write(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write a file. Tensors that share memory are copied, because a file cannot hold them."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    write_tensors(path, _FORMAT, own, description)


def _read(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a file."""
    try:
        _, description, tensors = read_tensors(path, (_FORMAT,))
    except FileFormatError as error:
        raise FileFormatError(
            f"the checkpoint is damaged: {error}. Remove the folder {path.parent} to start anew"
        ) from error
    # Copies are aligned as new tensors are: what is computed from them is the same bit for bit.
    return description, {name: t.to(device, copy=True) for name, t in tensors.items()}


def _described(value: object) -> str:
    """An option as text; tensors by a checksum."""
    if isinstance(value, Tensor):
        return f"tensor {zlib.crc32(value.cpu().numpy().tobytes())}"
    return json.dumps(value)
