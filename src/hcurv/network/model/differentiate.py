"""Backward passes through what the user's model recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hcurv.network.tracing import UnsupportedModelError

__all__ = ["differentiate"]


def differentiate(
    outputs: Tensor, sources: Sequence[Any], weights: Tensor
) -> tuple[Tensor | None, ...]:
    """Derivatives of weighted outputs; the graph is kept.

    Args:
        outputs: what the model computed.
        sources: parameters, or edges of the graph.
        weights: what the outputs are multiplied by, in their shape.

    Returns:
        One derivative for each source; None if the outputs do not depend on it.

    Raises:
        UnsupportedModelError: autograd cannot differentiate the outputs.
    """
    if not sources or not outputs.requires_grad:
        return (None,) * len(sources)
    try:
        return torch.autograd.grad(
            outputs, list(sources), weights, retain_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        advice = "Does loss.backward() work on this model?"
        if "use_reentrant" in str(error):
            advice = "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
        raise UnsupportedModelError(
            f"the outputs cannot be differentiated by autograd: {error}", advice
        ) from error
