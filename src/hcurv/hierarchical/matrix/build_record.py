"""How a matrix was compressed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hcurv.hierarchical.parts.plan import Plan

__all__ = ["BuildRecord", "DampedError"]


@dataclass(frozen=True)
class DampedError:
    """What a compression does to the inverse of A + λI = (G Gᵀ)⁻¹: E = Gᵀ (H − A) G.

    All numbers are estimates from probes that the build did not use.

    Attributes:
        rms: the root mean square of ‖E z‖/‖z‖ over Gaussian z, which is ‖E‖_F/√N. The two normal
            distributions with precisions H + λI and A + λI have a divergence of about ¼‖E‖_F².
        trace: tr E, by how much log det(H + λI) is larger than log det(A + λI), to first order.
        norm: ‖E‖. The estimate comes from below.
        variance: the root mean square of the relative error of jᵀ (A + λI)⁻¹ j, where j is a
            normal random vector with the covariance H, like the rows of a root of H.
    """

    rms: float
    trace: float
    norm: float
    variance: float


@dataclass(frozen=True)
class BuildRecord:
    """How a matrix was compressed.

    Attributes:
        method: "sketch" or "neighbors".
        tolerance: relative error ‖H − A‖_F/‖H‖_F that the build aimed at.
        leaf_size: largest leaf asked for.
        max_rank: rank cap, or None.
        seed: of all that was random.
        num_columns: columns of the sketch, or sampled columns per node.
        num_capped: nodes that the cap kept from the tolerance.
        estimated_error: relative error estimated on what the build did not use.
        norm: estimate of ‖H‖_F.
        damping: λ that the matrix was compressed for, or None.
        damped_tolerance: relative error of (A + λI)⁻¹ that was asked for, or None.
        damped_error: what the compression does to (A + λI)⁻¹; None without a damping.
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
    norm: float = 0.0
    damping: float | None = None
    damped_tolerance: float | None = None
    damped_error: DampedError | None = None
    plan: Plan | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
