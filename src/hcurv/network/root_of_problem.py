"""The root S of a problem: that of a chain if the model is one, else that of any model.

A chain is read by tracing, so that it may do something else than the model itself: hooks, functions
with derivatives of their own, blocks without gradients. So its rows are compared with automatic
differentiation on the first points, and where they differ the model is read as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hcurv.network import products
from hcurv.network.chain_root import ChainRoot
from hcurv.network.linearisation import Linearisation
from hcurv.network.memory_plan import MemoryPlan, StoredPart
from hcurv.network.model.compute import compute_layered_root, model_gradient
from hcurv.network.model_inputs import num_points
from hcurv.network.precompute import read_chain
from hcurv.network.problem import NUM_TRIED, Problem
from hcurv.network.root import Root

__all__ = ["compute_gradient", "compute_root"]

# Bytes of temporary memory for reading the first points of a chain.
_FEW_BYTES = 2**24


def compute_root(
    problem: Problem,
    workspace: int,
    progress: Callable[[int], object] | None = None,
    *,
    verify: bool = True,
) -> tuple[Root, Problem, MemoryPlan]:
    """Read all of the data, and keep the rows of S.

    Args:
        problem: the model, the loss and the data.
        workspace: bytes of temporary memory to stay within.
        progress: called with the number of points done since the last call.
        verify: compare a chain with automatic differentiation; False if that was done before.

    Returns:
        S; the problem, whose ``network`` is None if the model turned out to be no chain; and what
        was planned to be stored.
    """
    if problem.network is not None and verify and not _chain_agrees(problem):
        problem = replace(problem, network=None)
    if problem.network is None:
        root, plan = compute_layered_root(problem, workspace, progress)
        return root, problem, plan
    stored = read_chain(problem, workspace, progress)
    chain = ChainRoot(stored, workspace)
    return chain, problem, _plan_of_chain(chain, workspace)


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


def _chain_agrees(problem: Problem) -> bool:
    """Whether the rows of the first points are those of automatic differentiation."""
    few = problem.first_points(NUM_TRIED)
    root = ChainRoot(read_chain(few, _FEW_BYTES), _FEW_BYTES)
    inputs, parameters = few.survey.first_inputs, few.snapshot.trainable
    count = num_points(inputs)
    with torch.enable_grad():
        outputs = few.loss.split_outputs(few.snapshot.outputs(inputs))
    if outputs.grad_fn is None:
        return False
    rows = few.loss_rows(outputs.detach(), slice(0, count))
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(count, rows.num_rows, generator=generator, dtype=torch.float64).to(outputs)
    tolerance = torch.finfo(outputs.dtype).eps ** 0.5
    for point in range(count):
        chosen = torch.zeros_like(mix)
        chosen[point] = mix[point]
        found = torch.autograd.grad(
            outputs,
            list(parameters.values()),
            rows.combine(chosen),
            retain_graph=True,
            allow_unused=True,
        )
        expected = torch.cat(
            [
                (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
                for parameter, gradient in zip(parameters.values(), found, strict=True)
            ]
        )
        read = root.apply_transposed(chosen.reshape(-1, 1), _FEW_BYTES).squeeze(1)
        if not float((read - expected).norm()) <= tolerance * float(expected.norm()):
            return False
    return True


def compute_gradient(
    problem: Problem,
    root: Root,
    points: Tensor,
    targets: Tensor,
    weights: Tensor,
    workspace: int,
) -> Tensor:
    """The flat gradient of Σ_i weights[i] f_i over some points, (N,).

    Args:
        problem: the model, the loss and the data.
        root: S over these points.
        points: the positions of the points in the data, (m,).
        targets: their targets.
        weights: their weights, (m,).
        workspace: bytes of temporary memory to stay within.
    """
    if isinstance(root, ChainRoot):
        assert problem.network is not None
        return products.gradient(
            problem.network, root.stored, problem.loss, targets, weights, workspace
        )
    # Points that do not belong to the matrix have no weight.
    everything = weights.new_zeros(problem.num_points)
    everything[points] = weights
    spread = targets.new_zeros(problem.num_points, *targets.shape[1:])
    spread[points] = targets
    return model_gradient(problem, spread, everything)
