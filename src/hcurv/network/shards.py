"""Points that lie on several ranks: who has how many, and how some of them come to all ranks.

The points of all ranks are numbered in the order of the ranks, and on each of them in the order of
its data.
"""

from __future__ import annotations

import json
from itertools import accumulate

import torch
from torch import Tensor

from hcurv.network.batches import Survey
from hcurv.network.model_inputs import Inputs, map_inputs, tensors_of
from hcurv.ranks import OneRank

__all__ = ["Shard", "gather_inputs", "share_survey"]

# Ranks without points receive this many, to try the model on.
_NUM_SHARED = 4


class Shard:
    """Which of all points this rank has.

    Args:
        ranks: the processes.
        num_points: the number of points of this one.

    Attributes:
        counts: the number of points of each rank.
        offset: the number of the first point of this rank among all points.
    """

    def __init__(self, ranks: OneRank, num_points: int) -> None:
        found = ranks.gather(torch.tensor([num_points]))
        self.counts = [int(count) for count in found]
        self.offset = [0, *accumulate(self.counts)][ranks.rank]
        self.num_own = num_points

    @property
    def num_points(self) -> int:
        """The number of points of all ranks."""
        return sum(self.counts)

    @property
    def own(self) -> slice:
        """The range of this rank's points among all points."""
        return slice(self.offset, self.offset + self.num_own)


def share_survey(ranks: OneRank, survey: Survey | None, device: torch.device) -> Survey:
    """Give ranks without points a few of another rank, so that all of them can try the model.

    Args:
        ranks: the processes.
        survey: what this rank found in its data; None if it is empty.
        device: where this rank computes.

    Returns:
        What was found. On a rank without points, its first inputs are those of another rank, and it
        has no points.

    Raises:
        ValueError: no rank has any points, or some have targets and some do not.
    """
    if ranks.size == 1:
        assert survey is not None
        return survey
    has_points = torch.tensor([survey is not None])
    full = torch.cat(ranks.gather(has_points))
    if not bool(full.any()):
        raise ValueError("data is empty on all ranks: at least one point is needed")
    has_targets = survey is not None and survey.targets is not None
    known = torch.cat(ranks.gather(torch.tensor([has_targets])))
    if len(set(known[full].tolist())) > 1:
        with_targets = known.nonzero()[:, 0].tolist()
        raise ValueError(f"the data of ranks {with_targets} has targets, that of the others not")
    if bool(full.all()):
        return survey  # type: ignore[return-value]
    giver = int(full.nonzero()[0])
    inputs, targets = None, None
    if ranks.rank == giver and survey is not None:
        inputs = map_inputs(lambda tensor: tensor[:_NUM_SHARED], survey.first_inputs)
        targets = None if survey.first_targets is None else survey.first_targets[:_NUM_SHARED]
    few = gather_inputs(ranks, inputs)
    few_targets = gather_inputs(ranks, targets) if bool(known.any()) else None
    if survey is not None:
        return survey
    few = map_inputs(lambda tensor: tensor.to(device), few)
    if few_targets is None:
        return Survey(0, few, None, None, (), 0.0)
    assert isinstance(few_targets, Tensor)
    few_targets = few_targets.to(device)
    return Survey(0, few, few_targets, few_targets[:0], (), 0.0)


def gather_inputs(ranks: OneRank, inputs: Inputs | None) -> Inputs:
    """The inputs of the points of all ranks, in their order, on all ranks.

    Args:
        ranks: the processes.
        inputs: those of this rank; None if it has none, and does not know what they look like.

    Raises:
        ValueError: inputs of different ranks do not go together.
    """
    if ranks.size == 1:
        assert inputs is not None
        return inputs
    own = "" if inputs is None else _form(inputs)
    forms = ranks.gather_texts(own)
    known = {form: rank for rank, form in reversed(list(enumerate(forms))) if form}
    if len(known) > 1:
        (first, one), (second, other) = list(known.items())[:2]
        raise ValueError(
            f"the inputs of rank {one} do not go with those of rank {other}: {first} and {second}"
        )
    if inputs is None:
        inputs = _empty(next(iter(known)))
    gathered = [torch.cat(ranks.gather(tensor)) for tensor in tensors_of(inputs)]
    parts = iter(gathered)
    return map_inputs(lambda _: next(parts), inputs)


def _form(inputs: Inputs) -> str:
    """How inputs are arranged, and the shapes and types of one point, as text."""
    tensors = [
        [list(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")]
        for tensor in tensors_of(inputs)
    ]
    names = list(inputs) if isinstance(inputs, dict) else None
    return json.dumps([isinstance(inputs, Tensor), names, tensors])


def _empty(form: str) -> Inputs:
    """Inputs of no points, of the given form."""
    single, names, described = json.loads(form)
    tensors = [torch.empty(0, *shape, dtype=getattr(torch, kind)) for shape, kind in described]
    if single:
        return tensors[0]
    return tuple(tensors) if names is None else dict(zip(names, tensors, strict=True))
