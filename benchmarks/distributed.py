"""Any amount of data, and several processes: factors recomputed, and points spread over ranks.

make bench BENCH=distributed DATA=…  [PARTS="recompute ranks --points 2000"]

recompute: classifier (c) on all training images of MNIST. Products, the diagonal and a compressed
  matrix, with layer Jacobians in memory and recomputed at each call, alternating in one process;
  then each of the two in a process of its own, for its peak of memory.
resnet: ResNet-8 on all training images of CIFAR-10, whose Jacobians no ordinary memory holds. The
  first pass adds up the diagonal as well; a single column takes a linearised pass.
ranks: classifier (c) again, on 1, 2 and 4 processes with one thread each, which share the points:
  times of products and of a compressed matrix, the peak of each process, and messages and bytes
  beside the cost model of docs/scale.md. Each rank, also a single one, has 64 MB of workspace.
limit: classifier (c) once more, with layer Jacobians in memory and a limit on the memory of each
  process (as by `ulimit -v`) that is too small for all of them: one rank refuses, four ranks make
  products and a compressed matrix.

A ratio is the time of what is new over that of what it is compared with: recomputed over stored,
one rank over several.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

import hcurv
from hcurv.experiments import reference_models, reference_networks
from hcurv.experiments.measure import best_times, describe_machine, peak_extra_bytes
from hcurv.experiments.reference_models import REFERENCE_MODELS
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS
from hcurv.memory import format_bytes
from hcurv.ranks import OneRank

GB = 1e9
PARTS = ("recompute", "resnet", "ranks", "limit")
NETWORK, MODEL = "classifier (c)", "ResNet-8"
COLUMNS = (1, 16, 128)
TOLERANCE, ROUGH = 5e-2, 1e-1
RANKS = (1, 2, 4)
# A process of the part "limit" may use this share of the bytes that the factors of all points take,
# beyond what it has before the matrix is made; with fewer points than this, other things decide.
LIMIT_SHARE, LIMIT_POINTS = 0.7, 20_000
# Temporary memory of one call on a rank, in bytes. Several ranks share the memory of a machine.
WORKSPACE = 2**26


def classifier(num_points: int, data: str | None) -> tuple[nn.Module, Tensor]:
    """Classifier (c), trained, and the first training images."""
    found = reference_networks.train(REFERENCE_NETWORKS[NETWORK], data)
    return found.model, found.inputs[:num_points].clone()


def peak() -> float:
    """The largest memory of this process so far, in GB, everything included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB


def seconds(run: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def child(arguments: argparse.Namespace, *own: str) -> dict[str, float]:
    """Run this file in a process of its own, and read what it prints in its last line."""
    command = [sys.executable, __file__, *own, "--points", str(arguments.points or 0)]
    if arguments.data:
        command += ["--data", arguments.data]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def side_by_side(model: nn.Module, inputs: Tensor) -> None:
    """Times of stored and recomputed Jacobians."""
    matrices = {
        factors: hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs, factors=factors)
        for factors in ("memory", "recompute")
    }
    stored, again = matrices.values()
    print(
        f"\n{NETWORK}: N = {stored.shape[0]}, n = {stored.num_points};"
        f" stored {stored.nbytes / GB:.2f} GB"
    )
    for count in COLUMNS:
        columns = torch.randn(
            stored.shape[0], count, generator=torch.Generator().manual_seed(count)
        )
        times = best_times([lambda: stored @ columns, lambda: again @ columns], 3)  # noqa: B023
        error = float((again @ columns - stored @ columns).norm() / (stored @ columns).norm())
        line(f"product, {count} columns", times, f"difference {error:.0e}")
    line("diagonal", [seconds(stored.diagonal), seconds(again.diagonal)])
    passes = again.num_passes
    times = [
        seconds(lambda: hcurv.compress(matrix, tolerance=TOLERANCE))  # noqa: B023
        for matrix in matrices.values()
    ]
    line(f"compress to {TOLERANCE:g}", times, f"{again.num_passes - passes} passes over the data")


def recompute(arguments: argparse.Namespace) -> None:
    """Stored and recomputed Jacobians: times side by side, then the memory of each."""
    side_by_side(*classifier(arguments.points or 60_000, arguments.data))
    gc.collect()
    for factors in ("memory", "recompute"):
        found = child(arguments, "one", "--factors", factors)
        print(
            f"  {factors}: peak {found['peak']:.2f} GB in all, of which {found['before']:.2f} GB"
            " were in use before the matrix was made",
            flush=True,
        )


def line(name: str, times: list[float], note: str = "") -> None:
    """Print stored, recomputed and their ratio."""
    print(
        f"  {name:<24} stored {times[0]:8.3f} s   recomputed {times[1]:8.3f} s"
        f"   ratio {times[1] / times[0]:.2f}   {note}",
        flush=True,
    )


def one(arguments: argparse.Namespace) -> None:
    """One matrix in a process of its own: everything once, and the peak of memory."""
    model, inputs = classifier(arguments.points or 60_000, arguments.data)
    gc.collect()

    def run() -> None:
        H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs, factors=arguments.factors)
        H @ torch.ones(H.shape[0], 16)
        H.diagonal()
        hcurv.compress(H, tolerance=TOLERANCE)

    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    extra = peak_extra_bytes(run)
    print(json.dumps({"before": before / GB, "peak": (before + extra) / GB}))


def resnet(arguments: argparse.Namespace) -> None:
    """A matrix whose Jacobians do not fit."""
    count = arguments.points or 50_000
    found = reference_models.train(REFERENCE_MODELS[MODEL], arguments.data)
    data = (found.inputs[:count], found.targets[:count])
    before = peak()
    H = hcurv.GaussNewton(found.model, nn.CrossEntropyLoss(), data, factors="recompute")
    again = hcurv.GaussNewton(found.model, nn.CrossEntropyLoss(), (data[0][:8], data[1][:8]))
    whole = again.memory_plan().stored_bytes / 8 * count
    print(
        f"\n{MODEL}: N = {H.shape[0]}, n = {H.num_points}; stored, its factors would take"
        f" {format_bytes(whole)}"
    )
    columns = torch.randn(H.shape[0], 16, generator=torch.Generator().manual_seed(0))
    requests: dict[str, Callable[[], object]] = {
        "product, 16 columns": lambda: H @ columns,
        "diagonal": H.diagonal,
        "product, 1 column": lambda: H @ columns[:, :1],
    }
    for name, request in requests.items():
        passes, took = H.num_passes, seconds(request)
        print(f"  {name:<24} {took:8.1f} s   {H.num_passes - passes} passes", flush=True)
    passes, start = H.num_passes, time.perf_counter()
    A = hcurv.compress(H, tolerance=ROUGH)
    took = time.perf_counter() - start
    print(
        f"  compress to {ROUGH:g}          {took:8.1f} s   {H.num_passes - passes} passes, {A!r}\n"
        f"  peak {peak():.2f} GB in all, {before:.2f} GB before the matrix was made",
        flush=True,
    )


def ranks(arguments: argparse.Namespace) -> None:
    """The same points on 1, 2 and 4 processes with one thread each."""
    count = arguments.points or 60_000
    classifier(count, arguments.data)  # trained once, for all ranks
    print(f"\n{NETWORK} on several ranks, one thread each, n = {count}")
    alone: dict[str, Any] = {}
    for size in RANKS:
        found = torchrun(size, "rank", count, arguments)
        alone = alone or found
        print(
            f"  {size} ranks: {found['own']:.3f} GB at the most on a rank, for its points and the"
            f" matrix; {found['own'] / alone['own']:.2f} of that of one rank"
        )
        for name in [key for key in found if key.startswith(("product", "diagonal", "compress"))]:
            print(f"    {name:<24}{found[name]:8.3f} s   speed-up {alone[name] / found[name]:.2f}")
        for name, (counted, predicted) in found["traffic"].items():
            print(f"    {name:<24}{counted:12.0f} bytes sent, cost model {predicted:12.0f}")
        sys.stdout.flush()


def torchrun(size: int, part: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part of this file in several processes, and read what the first prints last."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [sys.executable, *command, __file__, part, "--points", str(count)]
    if arguments.data:
        command += ["--data", arguments.data]
    # Each thread of an allocator would reserve address space, which a limit counts.
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **one}
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def limit(arguments: argparse.Namespace) -> None:
    """What one rank has no memory for, four ranks do."""
    count = max(LIMIT_POINTS, arguments.points or 60_000)
    classifier(count, arguments.data)  # trained once, for all ranks
    for size in (1, RANKS[-1]):
        found = torchrun(size, "limited", count, arguments)
        if size == 1:
            print(f"\n{NETWORK}, n = {count}, {found['limit'] / GB:.2f} GB for each rank")
        if "refused" in found:
            print(f"  {size} rank: refused: {found['refused']}", flush=True)
            continue
        print(f"  {size} ranks, {found['stored'] / GB:.2f} GB of factors on each:", flush=True)
        for name in ("product", "compress"):
            print(f"    {name:<24}{found[name]:8.3f} s", flush=True)


def limited(arguments: argparse.Namespace) -> None:
    """One of several processes with little memory, started by torchrun."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    model, inputs = classifier(arguments.points, arguments.data)
    number, size, count = distributed.get_rank(), distributed.get_world_size(), len(inputs)
    own = inputs[count * number // size : count * (number + 1) // size].clone()
    del inputs
    group, loss = distributed.group.WORLD, nn.CrossEntropyLoss()
    # Libraries are loaded, and threads and connections made, before the limit is set.
    few = hcurv.GaussNewton(model, loss, own[:64], process_group=group, factors="memory")
    few @ torch.ones(few.shape[0], 16)
    hcurv.compress(few, tolerance=0.5)
    room = int(LIMIT_SHARE * few.memory_plan().stored_bytes / 64 * count)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    found: dict[str, object] = {"limit": room}
    try:
        H = hcurv.GaussNewton(
            model,
            loss,
            own,
            process_group=group,
            factors="memory",
            workspace=WORKSPACE,
        )
        vectors = torch.randn(H.shape[0], 16, generator=torch.Generator().manual_seed(0))
        found |= {"stored": H.nbytes, "product": _together(lambda: H @ vectors)}
        found["compress"] = _together(lambda: hcurv.compress(H, tolerance=TOLERANCE), 1)
    except hcurv.InsufficientMemoryError as error:
        found["refused"] = str(error)
    if number == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


def rank(arguments: argparse.Namespace) -> None:
    """One of several processes, started by torchrun."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    model, inputs = classifier(arguments.points, arguments.data)
    found: dict[str, object] = {}
    extra = peak_extra_bytes(lambda: found.update(measure_rank(model, inputs)))
    largest = torch.tensor([extra / GB], dtype=torch.float64)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    if distributed.get_rank() == 0:
        print(json.dumps({**found, "own": float(largest)}))
    distributed.destroy_process_group()


def measure_rank(model: nn.Module, inputs: Tensor) -> dict[str, object]:
    """Times and bytes of a rank that has its share of the points."""
    number, size = distributed.get_rank(), distributed.get_world_size()
    count = len(inputs)
    own = inputs[count * number // size : count * (number + 1) // size].clone()
    H = hcurv.GaussNewton(
        model,
        nn.CrossEntropyLoss(),
        own,
        process_group=distributed.group.WORLD,
        factors="memory",
        workspace=WORKSPACE,
    )
    found: dict[str, object] = {}
    traffic = {}
    for columns in COLUMNS:
        vectors = torch.randn(H.shape[0], columns, generator=torch.Generator().manual_seed(columns))
        before = _sent(H.ranks)
        H @ vectors
        predicted = 0 if size == 1 else 16 * size + vectors.numel() * vectors.element_size()
        traffic[f"product, {columns} columns"] = (_sent(H.ranks) - before, predicted)
        repeats = 1 if columns == max(COLUMNS) else 3
        found[f"product, {columns} columns"] = _together(partial(H.__matmul__, vectors), repeats)
        del vectors  # the peak of what follows is its own
    found["diagonal"] = _together(H.diagonal, 1)
    name = f"compress to {TOLERANCE:g}"
    found[name] = _together(lambda: hcurv.compress(H, tolerance=TOLERANCE), 1)
    return {**found, "traffic": traffic}


def _sent(known: OneRank) -> int:
    return sum(traffic.num_bytes for traffic in known.traffic.values())


def _together(run: Callable[[], object], repeats: int = 3) -> float:
    """The best time of a call that all ranks make together."""
    best = float("inf")
    for _ in range(repeats):
        distributed.barrier()
        start = time.perf_counter()
        run()
        distributed.barrier()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--data", help="folder with mnist/ and cifar10/")
    parser.add_argument("--points", type=int, help="fewer points, for a trial")
    parser.add_argument("--factors", default="recompute", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    inner = {"one": one, "rank": rank, "limited": limited}
    known = {"recompute": recompute, "resnet": resnet, "ranks": ranks, "limit": limit}
    if arguments.parts and arguments.parts[0] in inner:
        inner[arguments.parts[0]](arguments)
        return
    print(describe_machine())
    for part in arguments.parts or PARTS:
        took = seconds(lambda: known[part](arguments))  # noqa: B023
        print(f"  {part} took {took:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
