"""Files with right checksums and wrong contents are refused, or what they hold works."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded
from matrices import compress_tree, kernel_matrix

MODEL = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double())
DATA = (normal(12, 2), labels(12, 2))


def _dense() -> Tensor:
    dense = kernel_matrix("gaussian", 24, 2)
    dense[13] = dense[:, 13] = 0
    return dense


def _tree() -> hcurv.HMatrix:
    return compress_tree(_dense(), tolerance=1e-2, leaf_size=8)


def _both() -> hcurv.HMatrix:
    named = hcurv.ParameterLayout({"a": (4, 5), "b": (4,)})
    return hcurv.compress(_dense(), leaf_size=8, global_rank=2).with_layout(named)


KINDS: dict[str, Callable[[], Any]] = {
    "tree and global part": _both,
    "near field": lambda: hcurv.compress(_dense(), leaf_size=4, global_rank=0, near_budget=0.4),
    "factorization of both": lambda: _both().factorize(
        torch.linspace(0.5, 1, 24, dtype=torch.float64), warn=False
    ),
    "indefinite": lambda: _both().factorize(-0.3, definite=False),
    "posterior": lambda: hcurv.laplace(MODEL, nn.CrossEntropyLoss(), DATA),
}


def _load(path: Path) -> Any:
    if path.name.startswith("posterior"):
        return hcurv.LaplacePosterior.load(path, MODEL, nn.CrossEntropyLoss(), DATA)
    return hcurv.load(path)


def _use(stored: Any) -> None:
    """Do everything that a stored object is for."""
    if isinstance(stored, hcurv.LaplacePosterior):
        stored.predict(DATA[0][:2])
        return
    ones = torch.ones(stored.shape[0], 2, dtype=stored.dtype)
    _ = stored @ ones, stored @ ones[:, 0].contiguous(), stored.to_dense(), stored.diagonal()
    repr(stored)
    if isinstance(stored, hcurv.HMatrix):
        _ = stored[3, 4:9], stored.pairs([1, 2], [3, 4])


CODES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32"}


class _Packed:
    """A tensor as a file holds it: its type, its shape, its bytes, and their checksum."""

    def __init__(self, tensor: Tensor) -> None:
        self.code, self.shape = CODES[tensor.dtype], list(tensor.shape)
        self.content = tensor.contiguous().numpy().tobytes()
        kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        self.checksum = zlib.crc32(kind, zlib.crc32(self.content))


def _write(path: Path, metadata: dict[str, str], text: Any, tensors: dict[str, _Packed]) -> None:
    """Write a safetensors file by hand, with checksums that fit its contents."""
    text = json.dumps({**text, "checksums": {n: t.checksum for n, t in tensors.items()}})
    own = {"description": text, "checksum": str(zlib.crc32(text.encode()))}
    header: dict[str, Any] = {"__metadata__": {**metadata, **own}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.content)
        header[name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [begin, end]}
    top = json.dumps(header).encode()
    path.write_bytes(
        b"".join((struct.pack("<Q", len(top)), top, *(t.content for t in tensors.values())))
    )


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Any], dict[str, Tensor]]:
    """The metadata of a file, what it says about itself, and its tensors."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    description = json.loads(metadata["description"])
    del description["checksums"]
    return metadata, description, load_file(path)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON."""
    if at:
        yield at
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value if isinstance(value, list) else ())
    ):
        yield from _places(item, (*at, key))


def _changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested JSON with another value at one place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return copy


VALUES = (..., None, -1, 0, 24, 2**40, 2**70, "text", [1, 2], True)


def _mutated_tensors(tensor: Tensor) -> Iterator[Tensor | None]:
    yield None
    yield tensor.double() if tensor.dtype != torch.float64 else tensor.float()
    yield tensor.long() if tensor.dtype != torch.int64 else tensor.int()
    yield tensor[..., None]
    yield tensor.reshape(-1)[:0]
    yield torch.zeros(0, 2**40, dtype=tensor.dtype)
    if tensor.ndim and tensor.shape[0]:
        yield tensor[:-1]
        yield torch.cat([tensor, tensor[:1]])
        yield tensor.flip(0)
    if tensor.ndim > 1:
        yield tensor.transpose(-1, -2)
        yield tensor[..., :-1]
    if not tensor.is_floating_point() and tensor.numel():
        for bad in (-1, 1, 10**6):
            changed = tensor.clone().reshape(-1)
            changed[-1] = bad
            yield changed.view_as(tensor)


def _accept(path: Path, use: Callable[[Any], object] = _use) -> bool:
    """Whether a file is loaded; what it holds then works. Only errors of files may be raised."""
    try:
        stored = _load(path)
    except (hcurv.FileFormatError, hcurv.InsufficientMemoryError):
        return False
    except (
        TypeError,
        ValueError,
        KeyError,
    ) as error:  # another posterior than the one that is asked for
        if not path.name.startswith("posterior"):
            pytest.fail(f"a raw error: {error!r}")
        return False
    use(stored)
    return True


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.safetensors"
    KINDS[request.param]().save(path)
    return path


def test_every_change_of_a_file_is_refused_or_harmless(saved: Path) -> None:
    """Fields of the description, and shapes, types and indices of tensors, one at a time."""
    metadata, description, tensors = _contents(saved)
    packed = {name: _Packed(tensor) for name, tensor in tensors.items()}
    _write(saved, metadata, description, packed)
    assert _accept(saved)
    num_refused = 0
    harmless = {
        "record",
        "layout",
        "scores",
        "ordering",
        "log_determinant",
        "num_negative",
        "damping",
        "seed",
    }
    for at in _places(description):
        for value in VALUES if at[0] != "record" else (..., None, "text"):
            _write(saved, metadata, _changed(description, at, value), packed)
            is_accepted = _accept(saved, repr if at[0] in ("record", "scores") else _use)
            num_refused += not is_accepted
            if is_accepted and not saved.name.startswith("posterior"):
                assert at[0] in harmless or _changed(description, at, value) == description, at
    # Of tensors of one kind, such as the weights of all bases, the first and the last are changed.
    kinds = {re.sub(r"\d+", "", name): name for name in reversed(tensors)}
    kinds.update({f"last {kind}": name for name in tensors for kind in [re.sub(r"\d+", "", name)]})
    for name in set(kinds.values()):
        tensor = tensors[name]
        for changed in _mutated_tensors(tensor):
            others = {other: values for other, values in packed.items() if other != name}
            if changed is not None:
                others[name] = _Packed(changed)
            _write(saved, metadata, description, others)
            num_refused += not _accept(saved)
    _write(saved, metadata, description, {**packed, "further": _Packed(torch.ones(2))})
    assert not _accept(saved)
    assert num_refused > 50


@pytest.mark.parametrize("size", [24, 2**26])
def test_a_small_file_of_a_deep_tree_takes_no_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    _tree().save(path)
    metadata, description, tensors = _contents(path)
    tensors["leaves.values"] = torch.zeros(2**24, 0, 0, dtype=torch.float64)
    packed = {name: _Packed(tensor) for name, tensor in tensors.items()}
    _write(path, metadata, {**description, "depth": 24, "size": size}, packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(hcurv.FileFormatError, match="damaged"):
        hcurv.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


def test_two_saves_of_one_object_are_equal_in_bytes(tmp_path: Path) -> None:
    for make in KINDS.values():
        stored, contents = make(), set()
        for number in range(6):
            stored.save(tmp_path / f"{number}")
            contents.add((tmp_path / f"{number}").read_bytes())
        assert len(contents) == 1


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    matrix = _tree()
    matrix.save(tmp_path / "a")
    found = load_file(tmp_path / "a")
    assert torch.equal(found["leaves.values"], matrix.leaves.values)
    assert torch.equal(found["permutation"].long(), matrix.tree.permutation)


def test_a_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced while it is read is the old one or the new one."""
    path, other = tmp_path / "a", tmp_path / "b"
    matrix = _tree()
    matrix.save(path)
    (matrix.with_parts(leaves=_tree().leaves)).to(dtype=torch.float32).save(other)
    original = os.fstat

    def replaced_now(descriptor: int) -> os.stat_result:
        if other.exists():
            os.replace(other, path)
        return original(descriptor)

    monkeypatch.setattr(os, "fstat", replaced_now)
    assert torch.equal(hcurv.load(path).to_dense(), matrix.to_dense())
    assert not other.exists()
    assert hcurv.load(path).dtype == torch.float32


def test_couplings_that_are_wider_than_all_nodes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tree"
    _tree().save(path)
    metadata, description, tensors = _contents(path)
    name = next(key for key in tensors if "couplings" in key and tensors[key].ndim == 3)
    tensors[name] = nn.functional.pad(tensors[name], (0, 1))
    _write(path, metadata, description, {key: _Packed(t) for key, t in tensors.items()})
    with pytest.raises(ValueError, match="larger than all nodes"):
        hcurv.load(path)
