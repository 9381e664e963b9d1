"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hcurv.files import check_source, check_target, replacing, write_atomically


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


def _write(path: Path, content: bytes = b"new") -> None:
    write_atomically(path, lambda name: Path(name).write_bytes(content))


@pytest.mark.parametrize("exists", [True, False])
def test_writing_through_a_link_keeps_the_link(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "file", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(Path("data") / "file")
    _write(link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert list((tmp_path / "data").iterdir()) == [target]


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    for name, target in (("itself", "itself"), ("missing", "no-folder/file")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OSError, match=r"link to itself|no such folder"):
            _write(tmp_path / name)
        assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    _write(path)
    assert path.stat().st_mode & 0o7777 == mode


def test_a_new_file_has_the_mode_of_any_new_file_and_the_umask_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("umask was changed"))
        _write(tmp_path / "file")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_pipes_and_devices_are_neither_replaced_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="no regular file"):
            _write(path)
        with pytest.raises(OSError, match="path must be a regular file"):
            check_source(path)
        assert not path.is_file()


@pytest.mark.parametrize("path", [None, 3, b"file", "", "a\0b", ["file"]])
def test_what_is_no_name_of_a_file_is_refused(path: object) -> None:
    for check in (check_target, check_source):
        with pytest.raises((TypeError, ValueError), match="path must be the name of a file"):
            check(path)  # type: ignore[arg-type]
