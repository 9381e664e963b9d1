"""Batches of points of a chain of Linear layers that are not stored, but linearised anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hcurv.network.chain_root import ChainRoot
from hcurv.network.precompute import (
    chain_inputs,
    forward_passes,
    linearise,
    plan_chain,
    plan_factors,
)
from hcurv.network.problem import Problem

__all__ = ["ChainBatches"]

# Floats for each point are counted for this many points.
_SAMPLE = 1024
# Factors of a batch are made for products with this many columns at least, where they multiply
# faster. Making them takes about as long as products with twelve columns (784-256-64-32-10).
_MANY = 32


class ChainBatches:
    """The points of a chain's data, linearised anew whenever they are asked for.

    The chain must have been compared with the model at all points before.

    A linearisation of b points takes a forward pass, which is cheap beside a product. Entries are
    made from it at the same cost as if it were stored.

    Args:
        problem: the network, the loss and the data.
        workspace: bytes of temporary memory; the factors of one batch take half of it.
        max_batch: most points propagated at a time.

    Attributes:
        num_points: the number of points.
        batch: the number of points of a batch, but for the last one.
        plan: what storing everything would take.
        working_bytes: what a batch takes, with temporaries of making it.
    """

    def __init__(self, problem: Problem, workspace: int, max_batch: int = 512) -> None:
        self._problem, self._workspace = problem, workspace
        self.num_points = problem.num_points
        self.plan = plan_chain(problem)
        chain = self.plan.jacobian.chain
        self._shape = (chain.network, chain.num_rows, chain.diagonal)
        network, num_rows, diagonal = self._shape
        few = plan_factors(network, _SAMPLE, num_rows, diagonal)
        # Factors and linearisation share the inputs.
        floats = (few.num_floats + few.num_linear_floats) / _SAMPLE - few.num_inputs
        point_bytes = floats * problem.dtype.itemsize
        self.batch = max(1, min(int(workspace / (2 * point_bytes)), max(1, self.num_points)))
        self._step = self.plan.batch_size(workspace, max_batch)
        self.working_bytes = int(self.batch * point_bytes)
        self.working_bytes += self.plan.working_bytes(workspace, max_batch)
        # Derivatives are checked for overflow in the first pass over the data.
        self._checked = False

    def __iter__(self) -> Iterator[ChainRoot]:
        """Read the data once, and linearise one batch after the other."""
        start, network, (_, num_rows, diagonal) = 0, self._problem.network, self._shape
        assert network is not None
        for inputs in _regrouped(chain_inputs(self._problem), self.batch):
            plan = plan_factors(network, inputs.shape[0], num_rows, diagonal)
            passes = forward_passes(self._problem, [inputs], self._step, start=start, verified=True)
            stored = linearise(plan, passes, checked=self._checked)
            yield ChainRoot(stored, self._workspace, None if plan.linearised else _MANY)
            start += inputs.shape[0]
        self._checked = True


def _regrouped(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same points in batches of ``size``, and what is left."""
    held: list[Tensor] = []
    missing = size
    for inputs in batches:
        while inputs.shape[0]:
            held.append(inputs[:missing])
            inputs = inputs[missing:]
            missing -= held[-1].shape[0]
            if missing == 0:
                yield held[0] if len(held) == 1 else torch.cat(held)
                held, missing = [], size
    if held:
        yield held[0] if len(held) == 1 else torch.cat(held)
