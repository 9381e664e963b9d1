"""A copy of the user's network in which only some parameters are trainable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hcurv.layout import ParameterLayout, layer_of
from hcurv.network.batches import Batches, Data
from hcurv.network.model.snapshot import ForwardFunction, ModelSnapshot, check_parameters
from hcurv.network.model_inputs import Inputs, map_inputs
from hcurv.ranks import OneRank

__all__ = ["select_parameters"]


def select_parameters(
    model: nn.Module,
    parameters: str | Sequence[str],
    data: Data,
    forward_fn: ForwardFunction | None,
    ranks: OneRank,
) -> nn.Module:
    """Copy a network, and freeze all parameters of the copy that were not asked for.

    Args:
        model: the network.
        parameters: "all" trainable ones, those of the "last" layer, or names of parameters or
            layers, or patterns of them.
        data: to find out which layer is the last one.
        forward_fn: as for `GaussNewton`.
        ranks: the processes, each of which has some of the data.

    Raises:
        KeyError: a name is that of no trainable parameter.
        TypeError: it is neither a string nor a sequence of strings.
    """
    check_parameters(model)
    snapshot = ModelSnapshot(model, forward_fn)
    if parameters == "all":
        return snapshot.module
    layout = snapshot.layout
    wanted: set[str] = set()
    if parameters == "last":
        wanted.update(layout.layers[_last_layer(snapshot, data, ranks)])
    elif not isinstance(parameters, Sequence) or not parameters:
        raise TypeError(
            'parameters must be "all", "last", or names of parameters or layers (or patterns of'
            f" them); got {parameters!r}"
        )
    else:
        for pattern in [parameters] if isinstance(parameters, str) else parameters:
            try:
                wanted.update(layout.matching(pattern))
            except KeyError as error:
                raise KeyError(f"parameters: {error.args[0]}") from error
    for name, parameter in snapshot.trainable.items():
        parameter.requires_grad_(name in wanted)
    return snapshot.module


def _last_layer(snapshot: ModelSnapshot, data: Data, ranks: OneRank) -> str:
    """The name of the layer with trainable parameters that a forward pass calls last.

    Ranks without points learn it from the first one that has some.
    """
    found = ""
    with ranks.agreed():
        dtype, device = check_parameters(snapshot.module)
        first = next(iter(Batches(data, dtype, device)), None)
        if first is not None:
            found = _last_called(snapshot, map_inputs(lambda tensor: tensor[:2], first[0]))
    known = [name for name in ranks.gather_texts(found) if name]
    if not known:
        raise ValueError("data is empty: at least one point is needed")
    return known[0]


def _last_called(snapshot: ModelSnapshot, few: Inputs) -> str:
    """The name of the layer with trainable parameters that is called last for some inputs."""
    layout: ParameterLayout = snapshot.layout
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, module in snapshot.module.named_modules()
        if name in layout.layers
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            snapshot.outputs(few)
    finally:
        for handle in handles:
            handle.remove()
    return called[-1] if called else layer_of(layout.names[-1])
