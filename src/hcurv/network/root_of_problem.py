"""The root S of a problem: that of a chain if the model is one, else that of any model.

A chain is compared with the model and with automatic differentiation at all points, see
`forward_pass.verify`. Where they differ, the model is read as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hcurv.network.chain_root import ChainRoot
from hcurv.network.forward_pass import ChainMismatchError
from hcurv.network.linearisation import Linearisation
from hcurv.network.memory_plan import MemoryPlan, StoredPart
from hcurv.network.model.compute import ModelBatches, compute_layered_root
from hcurv.network.precompute import read_chain
from hcurv.network.problem import Problem
from hcurv.network.root import Root
from hcurv.precision import full_precision

__all__ = ["compute_root"]


@full_precision
def compute_root(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None = None,
    batches: ModelBatches | None = None,
) -> tuple[Root, Problem, MemoryPlan]:
    """Read all of the data, and keep the rows of S.

    Args:
        problem: the model, the loss and the data.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.
        batches: the data of a model that is no chain, if it was looked at before.

    Returns:
        S; the problem, whose ``network`` is None if the model turned out to be no chain; and what
        was planned to be stored.
    """
    # A model that turns out to be random must leave the user's random numbers as they were.
    with torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
        return _compute_root(problem, workspace, progress, batches)


def _compute_root(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None,
    batches: ModelBatches | None,
) -> tuple[Root, Problem, MemoryPlan]:
    if problem.network is not None:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(count)

        try:
            chain = ChainRoot(read_chain(problem, workspace, advance), workspace)
            return chain, problem, _plan_of_chain(chain, workspace)
        except ChainMismatchError:
            advance(-done)
            problem = replace(problem, network=None)
    batches = ModelBatches(problem, workspace) if batches is None else batches
    root, plan = compute_layered_root(problem, batches, progress)
    return root, problem, plan


def _plan_of_chain(root: ChainRoot, workspace: int) -> MemoryPlan:
    """What a chain has stored, and what it will store when it is asked for entries."""
    count, stored = root.num_points, root.stored
    inputs = stored.inputs.numel()
    linearised = isinstance(stored, Linearisation)
    name = "slopes and weighted outputs" if linearised else "derivatives"
    parts = (
        StoredPart("inputs of all layers", "plain", inputs / count),
        StoredPart(name, "plain", (stored.num_stored - inputs) / count),
    )
    more = root.num_stored_with_entries - stored.num_stored
    later = (StoredPart("derivatives", "plain", more / count),) if linearised else ()
    return MemoryPlan(parts, count, root.dtype.itemsize, workspace, later)
