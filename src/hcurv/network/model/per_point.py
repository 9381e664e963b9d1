"""Columns of S of parameters that no rule knows: derivatives of one point at a time.

`torch.func.vmap` runs all points at once where the model allows it; if not, the points are run one
after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from hcurv.losses import Loss
from hcurv.network.loss_rows import LossRows
from hcurv.network.model.differentiate import differentiate
from hcurv.network.model.snapshot import ModelSnapshot
from hcurv.network.model_inputs import Inputs, map_inputs, num_points

__all__ = ["PerPointColumns", "levels_restored"]

# Points that are run at once.
_CHUNK = 16


@contextmanager
def levels_restored() -> Iterator[None]:
    """Take back the levels of `torch.func` that an interruption has left.

    An interruption between entering a level and the ``finally`` that leaves it would keep the level
    for ever, and every later call of random numbers would fail.
    """
    functions = torch._C._functorch
    depth = getattr(functions, "get_dynamic_layer_stack_depth", lambda: None)()
    try:
        yield
    except BaseException:
        undo = getattr(functions, "pop_dynamic_layer_stack_and_undo_to_depth", None)
        if depth is not None and undo is not None:
            undo(depth)
        raise


class PerPointColumns:
    """Columns of S of some parameters, multiplied out.

    Args:
        snapshot: the model.
        loss: the loss, which says how outputs are arranged.
    """

    def __init__(self, snapshot: ModelSnapshot, loss: Loss) -> None:
        self._snapshot, self._loss = snapshot, loss
        self._vectorised = True

    def give_up_vectorising(self) -> bool:
        """From now on, run the points one after the other; whether that changes anything."""
        changed, self._vectorised = self._vectorised, False
        return changed

    def of(self, names: list[str], inputs: Inputs, rows: LossRows) -> dict[str, Tensor]:
        """Columns (p, q, b) of each of the parameters."""
        weights = torch.stack([rows.row(number) for number in range(rows.num_rows)])  # (q, b, t, d)
        if self._vectorised:
            try:
                with warnings.catch_warnings(), levels_restored():
                    # Functions that `vmap` runs in a loop are slow, which the user cannot change.
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    return self._vmapped(names, inputs, weights.transpose(0, 1))
            except Exception:  # What models raise that cannot be vectorised differs widely.
                self._vectorised = False
        return self._one_by_one(names, inputs, weights)

    def _vmapped(self, names: list[str], inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
        module = self._snapshot.module
        values = {name: p.detach() for name, p in module.named_parameters()}
        values.update({name: buffer.detach() for name, buffer in module.named_buffers()})
        chosen = {name: values.pop(name) for name in names}

        def outputs(own: dict[str, Tensor], point: Inputs) -> Tensor:
            single = map_inputs(lambda tensor: tensor[None], point)

            def run(*args: Any, **kwargs: Any) -> Any:
                return functional_call(module, {**values, **own}, args, kwargs)

            return self._loss.split_outputs(self._snapshot.outputs(single, run))[0]

        def rows_of(point: Inputs, weight: Tensor) -> dict[str, Tensor]:
            _, pull = vjp(lambda own: outputs(own, point), chosen)[:2]
            found: tuple[dict[str, Tensor]] = vmap(pull)(weight)
            return found[0]

        parts: list[dict[str, Tensor]] = []
        for start in range(0, num_points(inputs), _CHUNK):
            some = slice(start, start + _CHUNK)
            part = map_inputs(lambda tensor: tensor[some], inputs)  # noqa: B023
            found = vmap(rows_of)(part, weights[some])
            if any(found[n].shape != (*weights[some].shape[:2], *chosen[n].shape) for n in names):
                # The derivative of PReLU's slope comes without its sum over the units.
                raise ValueError("a derivative has another shape than its parameter")
            parts.append(found)
        return {
            name: torch.cat([part[name].detach().flatten(2) for part in parts]).permute(2, 1, 0)
            for name in names
        }

    def _one_by_one(self, names: list[str], inputs: Inputs, weights: Tensor) -> dict[str, Tensor]:
        parameters = self._snapshot.trainable
        chosen = [parameters[name] for name in names]
        count, q = num_points(inputs), weights.shape[0]
        result = {
            name: parameters[name].detach().new_zeros(parameters[name].numel(), q, count)
            for name in names
        }
        for point in range(count):
            some = slice(point, point + 1)
            single = map_inputs(lambda tensor: tensor[some], inputs)  # noqa: B023
            with torch.enable_grad():
                split = self._loss.split_outputs(self._snapshot.outputs(single))
            for row in range(q if split.requires_grad else 0):  # No parameter may be used.
                found = differentiate(split, chosen, weights[row, some])
                for name, gradient in zip(names, found, strict=True):
                    if gradient is not None:
                        result[name][:, row, point] = gradient.reshape(-1)
        return result
