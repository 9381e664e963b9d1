"""The reader of pickles follows those of CIFAR-10 and executes nothing of any other."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from hcurv.experiments.pickled_arrays import read_pickled_dict
from image_files import python2_pickle

PIXELS = np.arange(250, 256, dtype=np.uint8).reshape(2, 3)
LABELS = np.array([3, 200])


def test_python_2_pickles_are_read() -> None:
    content = python2_pickle(PIXELS, LABELS)
    batch = read_pickled_dict(content)
    assert batch.keys() == {"batch_label", "labels", "data", "filenames"}
    assert batch["data"].dtype == np.uint8
    assert np.array_equal(batch["data"], PIXELS)
    assert batch["labels"] == [3, 200]
    assert batch["batch_label"] == "training batch 1 of 5"
    assert batch["filenames"] == ["frog_0.png", "frog_1.png"]
    official = pickle.loads(content, encoding="latin1")
    assert np.array_equal(official["data"], PIXELS)
    assert official["filenames"] == batch["filenames"]


def test_python_3_pickles_are_read() -> None:
    written = {"data": PIXELS, "labels": [3, 200, 70_000, -1], "none": [None, True, (), (1, 2)]}
    batch = read_pickled_dict(pickle.dumps(written, 2))
    assert np.array_equal(batch["data"], PIXELS)
    assert batch["labels"] == written["labels"]
    assert batch["none"] == written["none"]


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps({"data": Malicious(tmp_path / "proof")}, protocol)
    with pytest.raises(ValueError, match=r"asks for '\w+\.mkdir'|unknown instruction"):
        read_pickled_dict(content)
    assert not (tmp_path / "proof").exists()
    pickle.loads(content)
    assert (tmp_path / "proof").exists()  # it would have


def test_no_module_is_imported() -> None:
    sys.modules.pop("this", None)
    with pytest.raises(ValueError, match=r"asks for 'this\.s'"):
        read_pickled_dict(b"\x80\x02cthis\ns\n.")
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([1, 2], 2), "a pickled list instead of a dictionary"),
        (pickle.dumps({"data": PIXELS.astype(np.float32)}, 2), "unknown arguments"),
        (pickle.dumps({"data": np.array([print], object)}, 2), "unknown arguments"),
        (pickle.dumps({"data": np.asfortranarray(PIXELS)}, 2), "not uint8 by rows"),
        (pickle.dumps({"data": 1.5}, 2), "unknown instruction BINFLOAT"),
        (pickle.dumps({"data": PIXELS}, 4), "unknown instruction PROTO"),
        (
            b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00bX\x05\x00\x00\x00rot13\x86R.",
            "unknown arg",
        ),
        (b"\x80\x02}}b.", "sets the state of something else"),
        (b"\x80\x02}K\x01u.", "too few marks"),
        (b"\x80\x02\x86.", "too few values"),
        (b"\x80\x02h\x01.", "no well-formed pickle"),
        (b"\x80\x02K\x01K\x02a.", "no well-formed pickle"),
        (b"\x80\x02}]K\x01s.", "no well-formed pickle"),
        (b"hello", "no well-formed pickle"),
        (b"", "pickle exhausted"),
    ],
)
def test_what_is_foreign_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pickled_dict(content)


def test_damage_is_a_value_error_or_goes_unnoticed() -> None:
    content = python2_pickle(PIXELS, LABELS)
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"."):
            read_pickled_dict(content[:length])
    generator = np.random.default_rng(0)
    num_refused = 0
    for _ in range(1000):
        damaged = bytearray(content)
        for place in generator.integers(0, len(content), 3):
            damaged[place] = generator.integers(0, 256)
        try:
            assert isinstance(read_pickled_dict(bytes(damaged)), dict)
        except ValueError:
            num_refused += 1
    assert num_refused > 500
