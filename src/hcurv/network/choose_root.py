"""Where the rows of S are kept: in memory, or nowhere, and on one rank or several."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from hcurv.memory import available_bytes, format_bytes, require_bytes
from hcurv.network.chain_batches import ChainBatches
from hcurv.network.forward_pass import verified
from hcurv.network.memory_plan import MemoryPlan, StoredPart
from hcurv.network.model.compute import ModelBatches
from hcurv.network.point_sum import PointSum
from hcurv.network.problem import NUM_TRIED, Problem
from hcurv.network.root import Root
from hcurv.network.root_of_problem import compute_root
from hcurv.network.shards import Shard
from hcurv.ranks import OneRank

__all__ = ["Factors", "make_root"]

Factors: TypeAlias = Literal["auto", "memory", "recompute"]
# "auto" keeps factors in memory if they take less than this share of what is free. The rest is for
# what is built from them.
_MEMORY_SHARE = 0.6


def make_root(
    problem: Problem,
    shard: Shard,
    ranks: OneRank,
    factors: Factors,
    workspace: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[Root, Problem, MemoryPlan]:
    """Read the data, or prepare to read it again and again.

    Args:
        problem: the model, the loss, and the data of this rank.
        shard: which points these are.
        ranks: the processes.
        factors: whether layer Jacobians are kept in memory or recomputed at each call.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.

    Returns:
        S; the problem, whose ``network`` is None if the model turned out to be no chain; and what
        is stored on this rank.
    """
    problem = _common(problem, ranks)
    with ranks.agreed():
        batches = _batches(problem, workspace)
        full = _full_plan(batches, problem, workspace)
    points: Iterable[Root]
    why = ""
    if factors == "auto":
        factors, why = _choice(full, problem, ranks)
    if factors == "memory":
        if ranks.size == 1:
            return compute_root(problem, workspace, progress, batches=_of_models(batches))
        points, problem, plan = _stored(problem, batches, ranks, workspace, progress)
    else:
        with ranks.agreed():
            checked = verified(problem)
        problem = _common(checked, ranks)
        with ranks.agreed():
            if problem.network is None and isinstance(batches, ChainBatches):
                batches = _batches(problem, workspace)
                full = _full_plan(batches, problem, workspace)
            size, working = full.bytes_per_float, batches.working_bytes
            plan = MemoryPlan((), problem.num_points, size, working, note=why)
            require_bytes(
                working,
                problem.device,
                f"recomputing the factors of {batches.batch} points at a time",
                ("pass a smaller workspace=",),
            )
        points = batches
    with ranks.agreed():
        like, _, _ = compute_root(problem.first_points(NUM_TRIED), workspace)
    ranks.same(rows_per_point=like.num_rows)
    spread = PointSum(like, points, shard, ranks, problem, batches.batch, workspace)
    return spread, problem, plan


def _batches(problem: Problem, workspace: int) -> ChainBatches | ModelBatches:
    """The data, ready to be read."""
    return (ModelBatches if problem.network is None else ChainBatches)(problem, workspace)


def _of_models(batches: ChainBatches | ModelBatches) -> ModelBatches | None:
    return batches if isinstance(batches, ModelBatches) else None


def _common(problem: Problem, ranks: OneRank) -> Problem:
    """The same problem, as a chain only if it is one on all ranks."""
    if ranks.most([float(problem.network is None)])[0]:
        return replace(problem, network=None)
    return problem


def _stored(
    problem: Problem,
    batches: ChainBatches | ModelBatches,
    ranks: OneRank,
    workspace: int,
    progress: Callable[[int], object] | None,
) -> tuple[tuple[Root, ...], Problem, MemoryPlan]:
    """The points of this rank in memory; none if it has none."""
    while True:
        found: tuple[Root, ...] = ()
        read, plan = problem, _full_plan(batches, problem, workspace)
        with ranks.agreed():
            if problem.num_points:
                known = _of_models(batches) if problem.network is None else None
                root, read, plan = compute_root(problem, workspace, progress, batches=known)
                found = (root,)
        # If the model is no chain at the points of one rank, all of them read it as any other.
        common = _common(read, ranks)
        if (common.network is None) == (problem.network is None):
            return found, common, plan
        problem = common


def _full_plan(
    batches: ChainBatches | ModelBatches, problem: Problem, workspace: int
) -> MemoryPlan:
    """What is stored if factors are kept in memory."""
    if isinstance(batches, ModelBatches):
        return batches.plan
    plan, count = batches.plan, max(1, problem.num_points)
    floats = plan.num_floats + (plan.num_linear_floats if plan.linearised else 0)
    parts = (StoredPart("inputs and derivatives", "plain", floats / count),)
    return MemoryPlan(parts, problem.num_points, problem.dtype.itemsize, workspace)


def _choice(full: MemoryPlan, problem: Problem, ranks: OneRank) -> tuple[Factors, str]:
    """Whether factors are kept in memory, the same on all ranks, and why not."""
    free = available_bytes(problem.device)
    if ranks.size > 1:
        hosts = ranks.gather_texts(socket.gethostname())
        if free is not None and problem.device.type == "cpu":
            free //= hosts.count(hosts[ranks.rank])  # Ranks of one machine share its memory.
    fits = free is None or full.peak_bytes <= _MEMORY_SHARE * free
    if ranks.size > 1:
        fits = not bool(ranks.sum(torch.tensor([not fits], dtype=torch.int64)))
    if fits:
        return "memory", ""
    known = "" if free is None else f", and {format_bytes(free)} is free"
    return "recompute", f"stored, they would take {format_bytes(full.peak_bytes)}{known}"
