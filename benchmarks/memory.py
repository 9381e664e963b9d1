"""Predicted and measured peaks of memory, over a grid of calls and sizes.

Each call runs in a process of its own, forked from one that has loaded everything. What is measured
is the largest resident set during the call, less what was resident before. What is predicted is
what the call asked for with `require_bytes` before it allocated, added to what it held by then: the
memory below which it would have refused.

The allocator of the C library keeps some freed memory to use it again. Here its settings make it
give back every block of 64 kB or more at once (``MALLOC_MMAP_THRESHOLD_``), so that what is in use
is what is resident.

    python benchmarks/memory.py [NAME ...] [--why] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hcurv
import hcurv.applications.laplace
import hcurv.baselines
import hcurv.inversion.factorize  # loaded before anything is measured
import hcurv.memory

MB = 2**20
# Smaller peaks than this drown in what the allocator and the libraries keep.
LEAST = 16 * MB
WITHIN = 0.15


# Blocks of so many bytes are given back to the system when they are freed.
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def resident() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def highest() -> int:
    """The most that it had since `reset`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not tell the largest resident set")


def reset() -> None:
    """Forget the largest resident set so far."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def recorded(before: int) -> Iterator[list[tuple[int, str]]]:
    """Collect what is asked for with `require_bytes`, with what is held by then, and for what."""
    found: list[tuple[int, str]] = []
    original = hcurv.memory.require_bytes

    def record(needed: int, device: Any, what: str, ways_out: Any, **others: Any) -> None:
        found.append((resident() - before + int(needed), what))
        original(needed, device, what, ways_out, **others)

    modules = [m for m in list(sys.modules.values()) if m.__name__.startswith("hcurv")]
    users = [m for m in modules if getattr(m, "require_bytes", None) is original]
    for module in users:
        module.require_bytes = record  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        for module in users:
            module.require_bytes = original  # type: ignore[attr-defined]


def measure(prepare: Callable[[], Callable[[], object]]) -> dict[str, Any]:
    """Run a call in a process of its own; predicted and measured bytes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            warm_up()
            call = prepare()
            before = resident()
            reset()
            with recorded(before) as asked, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = call()
            predicted, why = max(asked, default=(0, "nothing was asked for"))
            found: dict[str, Any] = {
                "measured": highest() - before,
                "predicted": predicted,
                "why": why,
            }
            del result
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)  # type: ignore[no-any-return]


def _chain(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _convolutions(channels: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * (size // 2) ** 2, 10),
    )


def warm_up() -> None:
    """Do everything once on a small scale, so that code is loaded that a process needs anyway."""
    for model, shape in ((_chain(4, 3, 2), (4,)), (_convolutions(1, 4), (1, 4, 4))):
        inputs = torch.randn(12, *shape)
        targets = torch.randint(0, 2, (12,))
        loss, data = nn.CrossEntropyLoss(), (inputs, targets)
        H = hcurv.GaussNewton(model, loss, data)
        for method in ("parameters", "samples", "iterations", "subset"):
            H.factorize(0.1, method=method).solve(H.diagonal())
        H.kernel().to_dense()
        hcurv.laplace(model, loss, data).predict(inputs)
        hcurv.influence(model, loss, data, 0.1, check_damping=False).scores(data)
    hcurv.compress(_dense(100, torch.float32), leaf_size=10, global_rank=0).factorize(0.1)


Maker = Callable[[], tuple[nn.Module, nn.Module, Any]]


def _problem(model: Callable[[], nn.Module], n: int, shape: tuple[int, ...], q: int) -> Maker:
    def make() -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(0)
        inputs = torch.randn(n, *shape)
        if q:
            return model(), nn.CrossEntropyLoss(), (inputs, torch.randint(0, q, (n,)))
        return model(), nn.MSELoss(), (inputs, inputs)

    return make


PROBLEMS: dict[str, Maker] = {
    "classifier 300-60-10, n 20000": _problem(lambda: _chain(300, 60, 10), 20_000, (300,), 10),
    "classifier 784-20-10, n 20000": _problem(lambda: _chain(784, 20, 10), 20_000, (784,), 10),
    "deep 200-100-80-60-10, n 10000": _problem(
        lambda: _chain(200, 100, 80, 60, 10), 10_000, (200,), 10
    ),
    "autoencoder 300-20-300, n 15000": _problem(lambda: _chain(300, 20, 300), 15_000, (300,), 0),
    "autoencoder 196-64-16-64-196, n 20000": _problem(
        lambda: _chain(196, 64, 16, 64, 196), 20_000, (196,), 0
    ),
    "convolutions 6 of 16 x 16, n 1200": _problem(
        lambda: _convolutions(6, 16), 1200, (1, 16, 16), 10
    ),
    "convolutions 4 of 12 x 12, n 4000": _problem(
        lambda: _convolutions(4, 12), 4000, (1, 12, 12), 10
    ),
}


# What is factorized: dense ways would take minutes for larger ones.
SMALLER: dict[str, Maker] = {
    "classifier 100-30-10, n 500": _problem(lambda: _chain(100, 30, 10), 500, (100,), 10),
    "deep 60-40-30-10, n 500": _problem(lambda: _chain(60, 40, 30, 10), 500, (60,), 10),
    "classifier 784-20-10, n 400": _problem(lambda: _chain(784, 20, 10), 400, (784,), 10),
    "convolutions 6 of 8 x 8, n 500": _problem(lambda: _convolutions(6, 8), 500, (1, 8, 8), 10),
}

# Iterations take memory for vectors alone: the networks are larger.
WIDER: dict[str, Maker] = {
    "classifier 784-80-10, n 250": _problem(lambda: _chain(784, 80, 10), 250, (784,), 10),
    "deep 300-150-100-10, n 300": _problem(lambda: _chain(300, 150, 100, 10), 300, (300,), 10),
    "convolutions 12 of 24 x 24, n 60": _problem(
        lambda: _convolutions(12, 24), 60, (1, 24, 24), 10
    ),
}


def _dense(size: int, dtype: torch.dtype) -> Tensor:
    x = torch.linspace(0, 1, size, dtype=dtype)
    return torch.exp(-20 * (x[:, None] - x).abs())


def grid() -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Names of calls, and what prepares them."""
    for name, maker in PROBLEMS.items():
        yield f"GaussNewton, {name}", lambda m=maker: _matrix_call(m)  # type: ignore[misc]
    for name in ("classifier 784-20-10, n 20000", "convolutions 4 of 12 x 12, n 4000"):
        yield (
            f"recomputed, {name}",
            lambda m=PROBLEMS[name]: _matrix_call(m, "recompute"),  # type: ignore[misc]
        )
    for name, wider in WIDER.items():
        yield (
            f"factorize by iterations, {name}",
            lambda m=wider: _factorize_call(m, "iterations"),  # type: ignore[misc]
        )
    for name, small in SMALLER.items():
        # A dense matrix of 15,910 rows is too slow to be part of this.
        dense = () if "784" in name else ("parameters",)
        for method in (*dense, "samples", "subset"):
            yield (
                f"factorize by {method}, {name}",
                lambda m=small, w=method: _factorize_call(m, w),  # type: ignore[misc]
            )
        yield f"kernel, {name}", lambda m=small: _kernel_call(m)  # type: ignore[misc]
        yield f"laplace, {name}", lambda m=small: _laplace_call(m)  # type: ignore[misc]
        yield f"influence, {name}", lambda m=small: _influence_call(m)  # type: ignore[misc]
        if dense:
            yield f"prune, {name}", lambda m=small: _prune_call(m)  # type: ignore[misc]
        yield f"optimizer step, {name}", lambda m=small: _step_call(m)  # type: ignore[misc]
    for size in (2000, 4000):
        for dtype in (torch.float32, torch.float64):
            kind = str(dtype).removeprefix("torch.")
            yield (
                f"compress, {size} rows of {kind}",
                lambda s=size, d=dtype: _compress_call(s, d),  # type: ignore[misc]
            )
            yield (
                f"compress with damping, {size} rows of {kind}",
                lambda s=size, d=dtype: _compress_call(s, d, damping=0.1),  # type: ignore[misc]
            )
            yield (
                f"factorize a tree, {size} rows of {kind}",
                lambda s=size, d=dtype: _tree_call(s, d),  # type: ignore[misc]
            )


def _matrix_call(maker: Maker, factors: Any = "memory") -> Callable[[], object]:
    parts = maker()
    if factors == "memory":
        return lambda: hcurv.GaussNewton(*parts)
    columns = torch.randn(sum(p.numel() for p in parts[0].parameters()), 64)
    # Without a request nothing is recomputed.
    return lambda: hcurv.GaussNewton(*parts, factors=factors) @ columns


def _with_entries(maker: Maker) -> hcurv.GaussNewton:
    H = hcurv.GaussNewton(*maker())
    H.diagonal()
    return H


def _factorize_call(maker: Maker, method: Any) -> Callable[[], object]:
    H = _with_entries(maker)
    damping = 1e-2 * H.trace() / H.shape[0]
    columns = torch.randn(H.shape[0], 16)  # plans are made for so many
    return lambda: H.factorize(damping, method=method).solve(columns)


def _kernel_call(maker: Maker) -> Callable[[], object]:
    H = _with_entries(maker)
    return lambda: H.kernel().to_dense()


def _laplace_call(maker: Maker) -> Callable[[], object]:
    parts = maker()
    inputs = parts[2][0]
    return lambda: hcurv.laplace(*parts).predict(inputs[:100])


def _influence_call(maker: Maker) -> Callable[[], object]:
    parts = maker()
    return lambda: hcurv.influence(*parts, damping=0.1, check_damping=False).scores(
        (parts[2][0][:50], parts[2][1][:50])
    )


def _prune_call(maker: Maker) -> Callable[[], object]:
    parts = maker()
    return lambda: hcurv.prune(*parts, sparsity=0.5, schedule=1)


def _step_call(maker: Maker) -> Callable[[], object]:
    model, loss, data = maker()
    optimizer = hcurv.optim.GaussNewton(model, loss)
    return lambda: optimizer.step(data)


def _compress_call(
    size: int, dtype: torch.dtype, damping: float | None = None
) -> Callable[[], object]:
    matrix = _dense(size, dtype)
    tolerance = 1e-3 if damping is None else 0.1
    return lambda: hcurv.compress(matrix, tolerance=tolerance, damping=damping, leaf_size=64)


def _tree_call(size: int, dtype: torch.dtype) -> Callable[[], object]:
    tree = hcurv.compress(_dense(size, dtype), tolerance=1e-5, leaf_size=512, global_rank=0)
    return lambda: tree.factorize(0.1)


def main() -> None:
    """Measure the grid, or the calls whose names contain one of the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--why", action="store_true", help="say what the most was asked for")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        # The allocator reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm_up()
    lines = [f"torch {torch.__version__}, {platform.machine()}, one thread", ""]
    lines.append(f"{'call':<58}{'predicted':>10}{'measured':>10}{'ratio':>7}")
    print(*lines, sep="\n")
    ratios = []
    for name, prepare in grid():
        if given.names and not any(part in name for part in given.names):
            continue
        found = measure(prepare)
        if "error" in found:
            lines.append(f"{name:<58} {found['error']}")
        else:
            ratio = found["predicted"] / max(1, found["measured"])
            counted = found["measured"] >= LEAST
            if counted:
                ratios.append(ratio)
            sizes = f"{found['predicted'] / MB:>7.0f} MB{found['measured'] / MB:>7.0f} MB"
            lines.append(f"{name:<58}{sizes}{ratio:>7.2f}{'' if counted else '  (too small)'}")
        print(lines[-1], flush=True)
        if given.why and "why" in found:
            print("   ", found["why"])
    good = sum(1 - WITHIN <= ratio <= 1 + WITHIN for ratio in ratios)
    low = sum(ratio < 1 - WITHIN for ratio in ratios)
    lines.append(
        f"{good} of {len(ratios)} within {WITHIN:.0%}; {low} predicted too little,"
        f" {len(ratios) - good - low} too much"
    )
    print(lines[-1])
    if given.output is not None:
        given.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
