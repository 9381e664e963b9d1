"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcurv.files import check_target, replacing, write_atomically


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_and_stop() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_complete_write_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, lambda name: Path(name).write_bytes(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_targets_are_checked_first(tmp_path: Path) -> None:
    assert check_target(tmp_path / "file") == tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="no such folder"):
        check_target(tmp_path / "missing" / "file")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        check_target(tmp_path)
