"""How a matrix was compressed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hcurv.hierarchical.parts.plan import Plan

__all__ = ["BuildRecord"]


@dataclass(frozen=True)
class BuildRecord:
    """How a matrix was compressed.

    Attributes:
        method: "sketch" or "neighbors".
        tolerance: relative error asked for.
        leaf_size: largest leaf asked for.
        max_rank: rank cap, or None.
        seed: of all that was random.
        num_columns: columns of the sketch, or sampled columns per node.
        num_capped: nodes that the cap kept from the tolerance.
        estimated_error: relative error estimated on what the build did not use.
        damping: with which it was made positive definite, or None.
        plan: how the parts were chosen, or None if nothing was left open.
        seconds: time of each phase.
    """

    method: str
    tolerance: float
    leaf_size: int
    max_rank: int | None
    seed: int
    num_columns: int
    num_capped: int
    estimated_error: float
    damping: float | None = None
    plan: Plan | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
