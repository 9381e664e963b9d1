"""A file of scores that is filled some rows at a time, so that an interrupted run can continue.

It is a safetensors file with two tensors: ``scores`` (m, n), and ``checksums`` (m,), which hold the
CRC-32 of each row, and -1 where a row is not there yet. Its metadata say what the scores are made
of. While rows are missing, the file has ``.partial`` at the end of its name. Rows are written in
place, each before its checksum, so that a row that was cut off is noticed and computed again. The
complete file then takes the real name in one step.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hcurv.files import as_path, check_target, write_atomically
from hcurv.hierarchical import FileFormatError
from hcurv.ranks import OneRank

__all__ = ["ScoreFile", "SharedScoreFile"]

_FORMAT, _VERSION = "hcurv influence scores", "1"
_TYPES: dict[torch.dtype, tuple[str, np.dtype[Any]]] = {
    torch.float32: ("F32", np.dtype("<f4")),
    torch.float64: ("F64", np.dtype("<f8")),
}
# A longer header than this is not ours.
_MAX_HEADER = 2**20


class ScoreFile:
    """Scores (m, n) in a file. Made anew, or opened if the file exists.

    Args:
        path: the name of the complete file.
        settings: what the scores are made of, by name. A file with other settings is refused.
        shape: (m, n).
        dtype: the type of the scores.

    Raises:
        ValueError: the file was made for other settings.
        FileFormatError: the file is damaged, or not one of these.
        FileNotFoundError, IsADirectoryError, PermissionError: it cannot be written.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        settings: Mapping[str, str],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._path = check_target(path)
        self._partial = check_target(self._path.with_name(self._path.name + ".partial"))
        self._shape, (self._code, self._type) = shape, _TYPES[dtype]
        self._header = self._make_header(settings)
        current = self._path if self._path.exists() else self._partial
        if current.exists():
            self._check(current, settings)
        else:
            write_atomically(self._partial, self._write_empty)
        self.is_complete = current == self._path and self._path.exists()
        known = self._known_rows()
        if self.is_complete and not known.all():
            raise FileFormatError(f"{self._path} is damaged: checksums do not match; remove it")
        self._known = known

    @property
    def known(self) -> Tensor:
        """Which rows are there, a mask (m,)."""
        return torch.from_numpy(self._known.copy())

    def _make_header(self, settings: Mapping[str, str]) -> bytes:
        rows, columns = self._shape
        middle = rows * columns * self._type.itemsize
        content = {
            "__metadata__": {"format": _FORMAT, "version": _VERSION, **settings},
            "scores": {"dtype": self._code, "shape": [rows, columns], "data_offsets": [0, middle]},
            "checksums": {
                "dtype": "I64",
                "shape": [rows],
                "data_offsets": [middle, middle + 8 * rows],
            },
        }
        text = json.dumps(content).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _write_empty(self, name: str) -> None:
        rows, columns = self._shape
        with open(name, "wb") as stream:
            stream.write(self._header)
            stream.truncate(len(self._header) + rows * columns * self._type.itemsize)
            stream.seek(0, os.SEEK_END)
            stream.write(np.full(rows, -1, "<i8").tobytes())

    def _check(self, path: Path, settings: Mapping[str, str]) -> None:
        """Refuse a file that is damaged, foreign, or made for something else."""
        rows, columns = self._shape
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            header = prefix + stream.read(length) if length <= _MAX_HEADER else b""
        try:
            metadata = dict(json.loads(header[8:])["__metadata__"])
        except (ValueError, KeyError, TypeError):
            metadata = {}
        if metadata.get("format") != _FORMAT:
            raise FileFormatError(f"{path} holds no influence scores: remove it, or name another")
        if metadata.get("version") != _VERSION:
            raise FileFormatError(f"{path} is of another version of hcurv: remove it")
        wanted = {"format": _FORMAT, "version": _VERSION, **settings}
        names = {*wanted, *metadata}
        differing = sorted(name for name in names if wanted.get(name) != metadata.get(name))
        if differing:
            raise ValueError(
                f"{path} was made for other scores (other {', '.join(differing)}): remove it, or"
                " name another file"
            )
        size = len(self._header) + rows * columns * self._type.itemsize + 8 * rows
        if header != self._header or path.stat().st_size != size:
            raise FileFormatError(f"{path} is damaged: it is not as long as it says; remove it")

    @property
    def _current(self) -> Path:
        return self._path if self.is_complete else self._partial

    def _map(self, mode: Literal["r", "c"]) -> np.ndarray:
        return np.memmap(
            self._current, self._type, mode, offset=len(self._header), shape=self._shape
        )

    def _known_rows(self) -> np.ndarray:
        rows, columns = self._shape
        offset = len(self._header) + rows * columns * self._type.itemsize
        sums = np.memmap(self._current, "<i8", "r", offset=offset, shape=(rows,))
        scores = self._map("r")
        return np.array([s >= 0 and zlib.crc32(row) == s for row, s in zip(scores, sums)])  # noqa: B905

    def write(self, rows: slice, values: Tensor) -> None:
        """Write some rows, and then their checksums; both reach the disk before this returns."""
        content = np.ascontiguousarray(values.detach().cpu().numpy(), self._type)
        sums = np.array([zlib.crc32(row) for row in content], "<i8")
        start, width = len(self._header), self._shape[1] * self._type.itemsize
        with self._partial.open("rb+") as stream:
            for position, part in (
                (start + rows.start * width, content),
                (start + self._shape[0] * width + 8 * rows.start, sums),
            ):
                stream.seek(position)
                stream.write(part.tobytes())
                stream.flush()
                os.fsync(stream.fileno())
        self._known[rows] = True

    def finish(self) -> Tensor:
        """Give the file its name, and return the scores, which are read when they are used."""
        if not self.is_complete:
            if not self._known.all():
                missing = math.prod(self._known.shape) - int(self._known.sum())
                raise RuntimeError(f"{missing} rows of {self._partial} are missing")
            os.replace(self._partial, self._path)
            self.is_complete = True
        return torch.from_numpy(self._map("c"))


class SharedScoreFile:
    """A `ScoreFile` that the first of several ranks writes; an error of it is raised on all.

    Args:
        path, settings, shape, dtype: as for `ScoreFile`, the same on all ranks.
        ranks: the processes.

    Attributes:
        known: which rows are there, a mask (m,).
        is_complete: whether all of them are.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        settings: Mapping[str, str],
        shape: tuple[int, int],
        dtype: torch.dtype,
        ranks: OneRank,
    ) -> None:
        ranks.same(**settings, shape=shape)
        self._ranks, self._path = ranks, as_path(path)
        self._settings, self._shape, self._dtype = settings, shape, dtype
        self._file: ScoreFile | None = None
        with ranks.agreed():
            if ranks.first:
                self._file = self._open()
        known = torch.zeros(shape[0], dtype=torch.uint8)
        if self._file is not None:
            known = self._file.known.to(torch.uint8)
        self.known = ranks.broadcast(known).bool()
        self.is_complete = bool(self.known.all())

    def _open(self) -> ScoreFile:
        return ScoreFile(self._path, self._settings, self._shape, self._dtype)

    def write(self, rows: slice, values: Tensor) -> None:
        """See `ScoreFile.write`."""
        with self._ranks.agreed():
            if self._file is not None:
                self._file.write(rows, values)

    def finish(self) -> Tensor:
        """See `ScoreFile.finish`; all ranks read the scores from the file when they are used."""
        with self._ranks.agreed():
            if self._file is not None:
                found = self._file.finish()
        with self._ranks.agreed():
            if self._file is None:
                if not self._path.exists():
                    raise FileNotFoundError(
                        f"the scores are complete in {self._path}, which rank 0 wrote and rank"
                        f" {self._ranks.rank} does not see: pass a path in a folder of all ranks"
                    )
                found = self._open().finish()
        return found
