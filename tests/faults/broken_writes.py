"""Processes that are killed while they save, disks that are full, and two writers of one file."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import hcurv

Matrices = tuple[hcurv.HMatrix, hcurv.HMatrix]


def two_matrices(size: int = 64) -> Matrices:
    """Two compressed matrices that cannot be mistaken for each other."""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    smooth = torch.exp(-3 * (x[:, None] - x).abs())
    return hcurv.compress(smooth, leaf_size=16), hcurv.compress(2 * smooth, leaf_size=16)


def in_child(function: Callable[[], None]) -> int:
    """Start a copy of this process that runs a function; its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which are idle here
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def check_file(path: Path, matrices: Matrices) -> str | None:
    """What is wrong with a file that should hold one of two matrices."""
    try:
        found = hcurv.load(path).to_dense()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not any(torch.equal(found, matrix.to_dense()) for matrix in matrices):
        return "it holds neither matrix"
    return None


def kill_while_saving(folder: Path, matrices: Matrices, rng: random.Random) -> str | None:
    """Kill a process that saves again and again; what is then wrong with the file."""
    path = folder / "A.safetensors"
    matrices[0].save(path)

    def save() -> None:
        while True:
            for matrix in matrices[::-1]:
                matrix.save(path)

    child = in_child(save)
    time.sleep(rng.uniform(0.001, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wrong = check_file(path, matrices)
    if wrong is None:  # what is left of the killed process does not disturb the next one
        matrices[1].save(path)
        wrong = check_file(path, matrices[1:])  # type: ignore[arg-type]
    return wrong


def save_on_a_full_disk(folder: Path, matrices: Matrices) -> tuple[str, list[str]]:
    """Save where only half of the file fits; the error, and the names of all files left."""
    path = folder / "A.safetensors"
    matrices[0].save(path)
    num_bytes = path.stat().st_size // 2
    read, write = os.pipe()

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        try:
            matrices[1].save(path)
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())

    child = in_child(save)
    os.waitpid(child, 0)
    os.close(write)
    message = os.read(read, 10_000).decode()
    os.close(read)
    wrong = check_file(path, matrices[:1])  # type: ignore[arg-type]
    if wrong is not None:
        message = f"the old file is gone: {wrong}"
    return message, sorted(p.name for p in folder.iterdir())


def two_writers(folder: Path, matrices: Matrices, seconds: float) -> tuple[int, list[str]]:
    """Let two processes save to one file while a third reads: how often, and what was wrong."""
    path = folder / "A.safetensors"
    matrices[0].save(path)

    def save(matrix: hcurv.HMatrix) -> None:
        while True:
            matrix.save(path)

    children = [in_child(lambda m=matrix: save(m)) for matrix in matrices]  # type: ignore[misc]
    problems, count, end = [], 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            count += 1
            if (wrong := check_file(path, matrices)) is not None:
                problems.append(wrong)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return count, problems
