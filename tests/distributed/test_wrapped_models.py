"""Models that torch.distributed wraps or shards are read as the models that they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import hcurv
from cases import labels, normal, seeded
from several_ranks import run_ranks, values_of

_INPUTS, _TARGETS = normal(8, 6), labels(8, 3)


def _model() -> nn.Module:
    inner = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    inner.register_forward_hook(_doubled)
    frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), inner, frozen, nn.Linear(4, 3)).double()


def _doubled(module: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
    """A hook of the user's, which belongs to the model."""
    return 2 * outputs


def _wrapped(model: Any, kind: str) -> nn.Module:
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": kind == "FSDP", "device_id": torch.device("cpu")}
    model[2] = FullyShardedDataParallel(model[2], **options)
    model[3] = FullyShardedDataParallel(model[3], **options)
    return FullyShardedDataParallel(model, **options)


def _matrices(kinds: list[str]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    rank = distributed.get_rank()
    own = slice(5 * rank, 5 + 5 * rank)
    found = {}
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch speaks of its own deprecations
            wrapped = _wrapped(seeded(_model), kind)
            before = wrapped(_INPUTS)
            H = hcurv.GaussNewton(
                wrapped,
                nn.CrossEntropyLoss(),
                (_INPUTS[own], _TARGETS[own]),
                process_group=distributed.group.WORLD,
            )
            after = wrapped(_INPUTS)  # the user's model still works
        found[kind] = (H.to_dense(), before.detach(), after.detach())
    return found


def test_wrapped_and_sharded_models_are_accepted():
    kinds = ["DDP", "fully_shard", "FSDP", "FSDP with flat parameters"]
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        kinds.remove("fully_shard")
    expected = hcurv.GaussNewton(seeded(_model), nn.CrossEntropyLoss(), (_INPUTS, _TARGETS))
    dense = expected.to_dense()
    for value in values_of(run_ranks(2, _matrices, kinds)):
        for kind, (found, before, after) in value.items():
            assert torch.equal(before, after), kind
            assert float((found - dense).abs().max()) <= 1e-12 * float(dense.abs().max()), kind


def test_an_ordinary_model_is_not_copied_for_it():
    from hcurv.network.model.snapshot import plain_model

    model = seeded(_model)
    assert plain_model(model) is model
    with pytest.raises(TypeError, match="model must be a torch"):
        hcurv.GaussNewton("model", nn.MSELoss(), _INPUTS)  # type: ignore[arg-type]
