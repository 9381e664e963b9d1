"""Run a function in several processes that torch.distributed connects, with a time limit.

Processes are forked from a server that has imported torch once, which takes most of their time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

__all__ = ["Outcome", "die", "run_ranks", "values_of"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "safetensors.torch",
        "torch.distributed",
        "torch.func",
        "torch.fx",
        "hcurv.inversion.factorize",
        "hcurv.hierarchical.compress",
        "hcurv.applications.influence",
        "hcurv.applications.laplace",
        "every_request",
    ]
)


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        value: what the function returned.
        error: the exception that it raised, or None.
        trace: where it was raised.
        code: the exit code of the process; −9 if it was killed.
    """

    value: object = None
    error: Exception | None = None
    trace: str = ""
    code: int | None = None


def run_ranks(
    num_ranks: int,
    function: Callable[..., object],
    *args: object,
    time_limit: float = 240.0,
    group_timeout: float = 60.0,
) -> list[Outcome]:
    """Call ``function(*args)`` on every rank, where ``torch.distributed`` is initialised.

    Args:
        num_ranks: the number of processes.
        function: a function of a module, because other processes have to find it.
        args: its arguments, which go to other processes.
        time_limit: seconds after which all processes are killed and the test fails.
        group_timeout: seconds after which a rank gives up waiting for another.

    Returns:
        How each rank ended.

    Raises:
        TimeoutError: the ranks did not end in time.
    """
    deadline = time.monotonic() + time_limit
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            _CONTEXT.Process(
                target=_one_rank,
                args=(rank, num_ranks, meeting, group_timeout, sender, function, args),
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            outcomes = [_receive(receiver, deadline) for receiver, _ in pipes]
            for process, outcome in zip(processes, outcomes, strict=True):
                process.join(max(0.0, deadline - time.monotonic()))
                outcome.code = process.exitcode
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return outcomes


def values_of(outcomes: list[Outcome]) -> list[object]:
    """What all ranks returned; an error of any of them fails the test."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.trace}"
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}"
    return [outcome.value for outcome in outcomes]


def die() -> None:
    """End this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _receive(receiver: Connection, deadline: float) -> Outcome:
    if not wait([receiver], max(0.0, deadline - time.monotonic())):
        raise TimeoutError("the ranks did not end in time: somebody waits for ever")
    try:
        outcome = pickle.loads(receiver.recv_bytes())
    except EOFError:  # The process was killed.
        return Outcome()
    assert isinstance(outcome, Outcome)
    return outcome


def _one_rank(
    rank: int,
    num_ranks: int,
    meeting: str,
    group_timeout: float,
    sender: Connection,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    from torch import distributed

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            init_method=meeting,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(value=function(*args))
    except Exception as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    # Plain bytes: `send` would share the memory of tensors, which ends with this process.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    # Without this, a rank that ends early looks to the others like one that has crashed.
    if distributed.is_initialized() and outcome.error is None:
        distributed.destroy_process_group()
