"""Files that were damaged or crafted: they load as what they are, or are refused with a sentence.

A file is changed in one of two ways. *Damage* changes bytes: what is loaded must then be the same,
bit for bit, or be refused. *Craft* changes the description or the tensors and makes all checksums
fit again: what is loaded may be another matrix, but must work: no raw error, neither in loading nor
in use, and no more memory than a bound.
"""

from __future__ import annotations

import json
import math
import random
import resource
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hcurv
from fuzz.outcomes import Refused, WrongError, refusals, told

# What loading and using a file of a few kilobytes may take beyond what the process has.
BOUND = 2**29
_TYPES = {"F32": 4, "F64": 8, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "I16": 2}


@lru_cache
def samples() -> dict[str, bytes]:
    """One file of every kind."""
    found = {}
    n = 24
    with tempfile.TemporaryDirectory() as folder, told():
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        smooth = torch.exp(-3 * (x[:, None] - x).abs()) + 0.1 * torch.eye(n).double()
        weights = torch.linspace(-1, 1, 6).double()
        smooth[5] = smooth[:, 5] = 0.0  # a row of zeros
        tree = hcurv.compress(smooth, tolerance=1e-2, leaf_size=4, global_rank=0)
        both = hcurv.compress(smooth.float(), tolerance=1e-3, leaf_size=4, global_rank=3)
        near = hcurv.compress(smooth, tolerance=1e-1, leaf_size=4, near_budget=0.3, global_rank=0)
        model, inputs, targets = _posterior_parts()
        H = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, targets))
        stored: dict[str, Any] = {
            "tree": tree,
            "global part": both,
            "near field": near,
            "named": hcurv.compress(H, tolerance=1e-2),
            "damped": hcurv.compress(H, damping=0.1, leaf_size=3),
            "factorization": tree.factorize(0.1),
            "factorization by rows": both.factorize(torch.linspace(0.1, 1, n).double()),
            "posterior": hcurv.laplace(model, nn.MSELoss(), (inputs, targets)),
        }
        del weights
        for name, thing in stored.items():
            path = Path(folder) / "file"
            thing.save(path)
            found[name] = path.read_bytes()
    return found


def _posterior_parts() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        return model, torch.randn(7, 2).double(), torch.randn(7, 1).double()


class Content:
    """A safetensors file, taken apart by hand."""

    def __init__(self, raw: bytes) -> None:
        (length,) = struct.unpack("<Q", raw[:8])
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.metadata: dict[str, str] = self.header.pop("__metadata__")
        data = raw[8 + length :]
        self.tensors = {
            name: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]]
            for name, entry in self.header.items()
        }
        self.description: dict[str, Any] = json.loads(self.metadata["description"])

    def write(self) -> bytes:
        """The file, with lengths and checksums that fit."""
        names = {
            "F32": torch.float32,
            "F64": torch.float64,
            "I32": torch.int32,
            "I64": torch.int64,
            "F16": torch.float16,
        }
        self.description["checksums"] = {
            name: zlib.crc32(
                f"{names.get(dtype, dtype)}{tuple(shape)}".encode(), zlib.crc32(data) if data else 0
            )
            for name, (dtype, shape, data) in self.tensors.items()
        }
        text = json.dumps(self.description)
        self.metadata["description"] = text
        self.metadata["checksum"] = str(zlib.crc32(text.encode()))
        header: dict[str, Any] = {"__metadata__": self.metadata}
        start, parts = 0, []
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [start, start + len(data)],
            }
            parts.append(data)
            start += len(data)
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        return struct.pack("<Q", len(encoded)) + encoded + b"".join(parts)


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Change some bytes."""
    kind = rng.choice(["flip", "flip", "truncate", "splice", "zeros", "append", "length", "swap"])
    changed = bytearray(raw)
    place = rng.randrange(len(raw))
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del changed[place:]
    elif kind == "splice":
        other = samples()[rng.choice(sorted(samples()))]
        changed[place:] = other[place : place + len(raw)]
    elif kind == "zeros":
        changed[place : place + 16] = bytes(len(changed[place : place + 16]))
    elif kind == "append":
        changed += bytes(rng.randrange(1, 9))
    elif kind == "length":
        changed[:8] = struct.pack("<Q", rng.choice([0, 1, len(raw), 2**40, 2**63, 2**64 - 1]))
    else:
        other_place = rng.randrange(len(raw))
        changed[place], changed[other_place] = changed[other_place], changed[place]
    return bytes(changed)


_NUMBERS: list[Any] = [0, 1, -1, 2, 7, 24, 10**6, 2**31, 2**63, 2**70, 0.5, -0.5, 1e300]
_OTHERS: list[Any] = [None, "", "float16", [], {}, True, math.nan, math.inf, [1], [[0, 0]], "0"]


def craft(rng: random.Random, raw: bytes) -> bytes:
    """Change the description, a tensor or a header, and make everything else fit."""
    content = Content(raw)
    for _ in range(rng.choice([1, 1, 2])):
        kind = rng.choice(["number", "number", "number", "tensor", "values", "shape", "metadata"])
        if kind == "number":
            _change_description(rng, content.description)
        elif kind == "metadata":
            key = rng.choice(sorted(content.metadata))
            content.metadata[key] = rng.choice(["", "3", "4", "x", "hcurv.HMatrix", "³"])
            if key in ("description", "checksum"):
                return _with_metadata(content, key)
        else:
            _change_tensor(rng, content.tensors, kind)
    return content.write()


def _with_metadata(content: Content, key: str) -> bytes:
    value = content.metadata[key]
    content.write()
    content.metadata[key] = value
    if key == "description":
        content.metadata["checksum"] = str(zlib.crc32(value.encode()))
    header = {"__metadata__": content.metadata, **content.header}
    encoded = json.dumps(header).encode()
    data = b"".join(data for _, _, data in content.tensors.values())
    return struct.pack("<Q", len(encoded)) + encoded + data


def _change_description(rng: random.Random, description: dict[str, Any]) -> None:
    """Change one value somewhere in the description."""
    place: Any = description
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            place = inner
            continue
        if rng.random() < 0.15:
            del place[key]
        elif isinstance(inner, int | float) and rng.random() < 0.7:
            near = [inner + 1, inner - 1, -inner, 2 * inner]
            place[key] = rng.choice(_NUMBERS + near)
        else:
            place[key] = rng.choice(_NUMBERS + _OTHERS)
        return


def _change_tensor(rng: random.Random, tensors: dict[str, list[Any]], kind: str) -> None:
    """Change the values, the shape or the place of one tensor."""
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    dtype, shape, data = tensors[name]
    size = _TYPES.get(dtype, 1)
    if kind == "tensor":
        action = rng.choice(["remove", "rename", "copy", "other"])
        if action == "copy":
            tensors[rng.choice(sorted(tensors))] = [dtype, list(shape), data]
        elif action == "other":
            tensors["unexpected"] = [dtype, list(shape), data]
        else:
            del tensors[name]
            if action == "rename":
                tensors[name + "x"] = [dtype, shape, data]
    elif kind == "values" and data:
        changed, place = bytearray(data), rng.randrange(len(data) // size) * size
        if dtype.startswith("I"):
            value = rng.choice([0, -1, 1, 5, 10**6, 2**31 - 1])
            changed[place : place + size] = struct.pack("<q", value)[:size]
        else:
            number = rng.choice([math.nan, math.inf, 0.0, -1.0, 1e30])
            changed[place : place + size] = struct.pack("<d" if size == 8 else "<f", number)
        tensors[name] = [dtype, shape, bytes(changed)]
    else:
        count = math.prod(shape)
        options: list[list[int]] = [[count], [1, count], [count, 1], [0], []]
        options += [shape[::-1], [*shape, 1]]
        chosen = rng.choice(options)
        kept = data[: math.prod(chosen) * size]
        tensors[name] = [dtype, chosen, kept + bytes(math.prod(chosen) * size - len(kept))]


@contextmanager
def limited_memory(extra: int = BOUND) -> Iterator[None]:
    """Let the process take so much address space more, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        current = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (current + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def use(loaded: Any) -> list[Tensor]:
    """Ask for everything once; the results tell whether two objects are the same."""
    if isinstance(loaded, hcurv.LaplacePosterior):
        _, inputs, _ = _posterior_parts()
        return [loaded.predict(inputs).variances, loaded.sample(2, seed=1)]
    if loaded.shape[0] > 10_000:  # a matrix of zeros, but for a few rows: its vectors are large
        return []
    ones = torch.linspace(-1, 1, loaded.shape[0]).to(loaded.dtype)
    found = [loaded @ ones, loaded @ torch.stack([ones, ones**2], 1), loaded.diagonal()]
    if isinstance(loaded, hcurv.HMatrix):
        found += [loaded[:3, :], loaded.pairs([0, 1], [2, 0]), loaded.to_dense()]
    else:
        found += [loaded.logdet()]
    return found


def _load(kind: str, path: Path) -> Any:
    if kind == "posterior":
        model, inputs, targets = _posterior_parts()
        return hcurv.LaplacePosterior.load(path, model, nn.MSELoss(), (inputs, targets))
    return hcurv.load(path)


def file_case(rng: random.Random) -> tuple[str, Callable[[], None]]:
    """Draw a file and a change of it: the name of the class, and what to run."""
    kind = rng.choice(sorted(samples()))
    crafted = rng.random() < 0.6
    raw = samples()[kind]
    changed = craft(rng, raw) if crafted else damage(rng, raw)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_bytes(changed)
            with limited_memory(), told():
                with refusals():
                    loaded = _load(kind, path)
                try:
                    with refusals():
                        found = use(loaded)
                except Refused:
                    if not crafted:
                        raise WrongError("loads, but cannot be used") from None
                    raise
        if crafted:
            return
        expected = _expected(kind)
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if not same:
            raise WrongError("a damaged file loads as another matrix")

    return ("file, crafted" if crafted else "file, damaged"), run


@lru_cache
def _expected(kind: str) -> list[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(samples()[kind])
        with told():
            return use(_load(kind, path))
