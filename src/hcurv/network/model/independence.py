"""Whether outputs depend on their own point alone: not on the batch, and not on chance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.network.model.differentiate import differentiate
from hcurv.network.model_inputs import Inputs, map_inputs
from hcurv.network.tracing import UnsupportedModelError

__all__ = ["PARITIES", "agree", "require_independent", "require_own_derivatives"]

# Points are run apart in two groups, in which no point keeps its neighbours.
PARITIES = (slice(0, None, 2), slice(1, None, 2))

# A model with steps, such as signs, may round to another value where it is run on fewer points.
# That happens at a few points of many. Where more points than this share differ, the batch matters.
_MOST_ROUNDED = 0.01


def agree(first: Tensor, second: Tensor) -> Tensor:
    """At which points two outputs are the same up to rounding, (b,)."""
    first, second = first.detach(), second.detach()
    tolerance = torch.finfo(second.dtype).eps ** 0.5
    if second.numel() and float((first - second).abs().max()) <= tolerance * float(
        torch.linalg.vector_norm(second, torch.inf)
    ):
        return torch.ones(len(second), dtype=torch.bool, device=second.device)
    finite = second[torch.isfinite(second)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    close = torch.isclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return close.flatten(1).all(1) if close.ndim > 1 else close


def require_independent(
    run: Callable[[Inputs], Tensor], inputs: Inputs, outputs: Tensor, points: slice
) -> None:
    """Run even and odd points apart, and refuse a model for which that makes a difference.

    Args:
        run: the model.
        inputs: the inputs of some points.
        outputs: what the model made of them, all at once.
        points: their range in the data.

    Raises:
        UnsupportedModelError: points influence each other, or the forward pass is random.
    """
    apart = torch.empty_like(outputs)
    parities = PARITIES if len(outputs) > 1 else PARITIES[:1]
    # Some models take other ways where gradients are disabled.
    with torch.enable_grad():
        for own in parities:
            found = run(map_inputs(lambda tensor: tensor[own], inputs))  # noqa: B023
            if found.shape != apart[own].shape:
                raise _refusal(points, influence=True)
            apart[own] = found.detach()
    different = int((~agree(apart, outputs)).sum())
    if different == 0:
        return
    with torch.enable_grad():
        again = run(inputs).detach()
    steady = bool(agree(again, outputs).all())
    if not steady or different > _MOST_ROUNDED * len(outputs):
        raise _refusal(points, influence=steady)


def require_own_derivatives(run: Callable[[Inputs], Tensor], inputs: Inputs, points: slice) -> None:
    """Refuse a model whose outputs at even points have derivatives by the inputs of odd points.

    Outputs themselves do not show it where the inputs are so small that the outputs differ by
    rounding alone, although the derivatives by the weights are proportional to the inputs.

    Args:
        run: the model.
        inputs: the inputs of a few points.
        points: their range in the data.

    Raises:
        UnsupportedModelError: points influence each other.
    """
    leaves: list[Tensor] = []

    def follow(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # The model may change its inputs in place, but not a leaf.

    try:
        with torch.enable_grad():
            outputs = run(map_inputs(follow, inputs))
        if len(outputs) < 2 or not leaves:
            return
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
        weights = noise.to(outputs)
        weights[1::2] = 0.0
        derivatives = differentiate(outputs, leaves, weights)
    except Exception:
        # Some models do not run, or have no derivatives, where their inputs need gradients. They
        # are judged by their outputs alone.
        return
    for found in derivatives:
        if found is None or not bool(torch.isfinite(found).all()):
            continue
        largest = float(found.abs().max()) if found.numel() else 0.0
        others = float(found[1::2].abs().max()) if found.numel() else 0.0
        if others > torch.finfo(found.dtype).eps ** 0.5 * largest:
            raise _refusal(points, influence=True)


def _refusal(points: slice, *, influence: bool) -> UnsupportedModelError:
    where = f"points {points.start} to {points.stop - 1}"
    if influence:
        return UnsupportedModelError(
            f"the model's outputs at {where} change if every other point is left out: points of a"
            " batch influence each other.",
            "Call model.eval(), if it has batch normalisation.",
        )
    return UnsupportedModelError(
        f"the forward pass is random: two passes over {where} differ.",
        "Call model.eval(), or remove what is random.",
    )
