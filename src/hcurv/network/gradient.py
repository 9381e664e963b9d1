"""The gradient of the loss over the points of a matrix, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hcurv.network import products
from hcurv.network.batches import convert_targets
from hcurv.network.chain_root import ChainRoot
from hcurv.network.model.compute import model_gradient
from hcurv.network.problem import Problem, check_targets, loss_divisor, require_positive
from hcurv.network.root import Root
from hcurv.network.shards import Shard
from hcurv.ranks import OneRank

__all__ = ["WeightedPoints", "loss_gradient"]


@dataclass(frozen=True)
class WeightedPoints:
    """The points of a matrix, among those that the data of all ranks has.

    Attributes:
        shard: which points this rank has.
        ranks: the processes.
        points: the numbers of the matrix's points among those of all ranks, (m,).
        weights: the weight of each of them, (m,), if they were drawn; None if they are all points.
    """

    shard: Shard
    ranks: OneRank
    points: Tensor
    weights: Tensor | None

    @property
    def num_targets(self) -> int:
        """The number of targets that this rank is to pass."""
        return self.shard.num_own if self.weights is None else len(self.points)


def loss_gradient(
    problem: Problem,
    root: Root,
    weighted: WeightedPoints,
    targets: Tensor | np.ndarray | None,
    workspace: int,
) -> Tensor:
    """The flat gradient of the loss, (N,); see `GaussNewton.gradient`.

    Args:
        problem: the model, the loss, and the data of this rank.
        root: S over the points of the matrix.
        weighted: these points.
        targets: the targets that the user passed; None for those of the data.
        workspace: bytes of temporary memory to stay within.
    """
    if targets is None and problem.targets is None:
        raise ValueError("the data has no targets: pass gradient(targets)")
    with weighted.ranks.agreed():
        given = None if targets is None else _checked(problem, targets, weighted.num_targets)
    weights = _weights(problem, weighted, given)
    if isinstance(root, ChainRoot) and weighted.ranks.size == 1:
        assert problem.network is not None
        if given is None:
            assert problem.targets is not None
            given = problem.targets[weighted.points]
        return products.gradient(
            problem.network, root.stored, problem.loss, given, weights, workspace
        )
    with weighted.ranks.agreed(points=weighted.points, weights=weights):
        result = model_gradient(
            problem,
            _own_targets(problem, weighted, given),
            # Points that do not belong to the matrix have no weight.
            _spread(weights, weighted),
        )
    return weighted.ranks.sum(result)


def _checked(problem: Problem, targets: Tensor | np.ndarray, count: int) -> Tensor:
    """Targets that the user passed, converted; refuse those that do not fit."""
    if isinstance(targets, np.ndarray):
        targets = convert_targets(targets, problem.dtype, problem.device)
    if not isinstance(targets, Tensor) or targets.shape[:1] != (count,):
        given = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets must be a tensor of {count} rows; got {given}")
    targets = convert_targets(targets, problem.dtype, problem.device)
    if count:
        check_targets(problem.loss, (count, *problem.point_shape), targets)
    return targets


def _weights(problem: Problem, weighted: WeightedPoints, given: Tensor | None) -> Tensor:
    """The factor of each point's loss in that of all points, (m,)."""
    if weighted.weights is not None:  # They were drawn, and stand for all points.
        return (problem.scale * weighted.weights).to(problem.dtype)
    scale = problem.scale
    if given is not None and problem.loss.reduction != "sum":
        divisor = loss_divisor(problem.loss, (len(given), *problem.point_shape), given)
        total = weighted.ranks.sum(torch.tensor(divisor, dtype=torch.float64))
        scale = 1.0 / require_positive(float(total))
    count = len(weighted.points)
    return torch.full((count,), scale, dtype=problem.dtype, device=problem.device)


def _spread(values: Tensor, weighted: WeightedPoints) -> Tensor:
    """Values of the matrix's points as values of all points of this rank, zero elsewhere."""
    whole = values.new_zeros(weighted.shard.num_points, *values.shape[1:])
    whole[weighted.points] = values
    return whole[weighted.shard.own]


def _own_targets(problem: Problem, weighted: WeightedPoints, given: Tensor | None) -> Tensor:
    """The targets of all points of this rank; any for points that do not count."""
    if given is None:
        assert problem.targets is not None
        return problem.targets
    return given if weighted.weights is None else _spread(given, weighted)
