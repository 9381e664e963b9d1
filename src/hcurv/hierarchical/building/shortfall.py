"""Say that a compressed matrix is less accurate than asked for, why, and what to do."""

from __future__ import annotations

from hcurv.hierarchical.building.construct import Construction
from hcurv.hierarchical.building.damped_error import is_met
from hcurv.user_warnings import warn_user

__all__ = ["CompressionWarning", "warn_of_shortfall"]

# The estimated error is warned of beyond these multiples of the tolerance. It is known to about
# 20 %, because it is measured on 16 random vectors. Without a rank cap the multiple is larger,
# since the user could do nothing but accept the error or use another precision.
_WARN_CAPPED = 1.5
_WARN_UNCAPPED = 4.0


class CompressionWarning(UserWarning):
    """The compressed matrix is less accurate than asked for.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", hcurv.CompressionWarning)
        ...     rough = hcurv.compress(H, tolerance=1e-4, max_rank=1, leaf_size=8, global_rank=0)
        >>> rough.estimated_error > 1e-4
        True
    """


def warn_of_shortfall(built: Construction, is_limited: bool) -> None:
    """Warn of an error that is larger than asked for.

    Args:
        built: the result of `compress`, which calls this.
        is_limited: whether its storage was limited.
    """
    record = built.matrix.record
    if record.damping is None:
        wanted = record.tolerance
        factor = _WARN_CAPPED if record.num_capped else _WARN_UNCAPPED
        if wanted and record.estimated_error > factor * wanted:
            what = f"the estimated relative error is {record.estimated_error:.1e}"
            warn_user(
                f"{what}, asked for was {wanted:.1e}: {_reason(built, is_limited)}.",
                CompressionWarning,
            )
        return
    error, asked = record.damped_error, record.damped_tolerance
    assert error is not None
    if asked is None or is_met(error, asked, _WARN_CAPPED):
        return
    repaired = ""
    if built.error_before_repair is not None:
        repaired = (
            " Making it positive definite raised the relative error in the Frobenius norm from"
            f" {built.error_before_repair:.1e} to {record.estimated_error:.1e}."
        )
    warn_user(
        f"with damping {record.damping:.1e}, variances are wrong by about"
        f" {error.variance:.1e} and solves by up to {error.norm:.1e} (estimated), asked for was"
        f" {asked:.1e}: {_reason(built, is_limited)}.{repaired}",
        CompressionWarning,
    )


def _reason(built: Construction, is_limited: bool) -> str:
    """Why an error is larger than asked for, and what to do."""
    matrix, record = built.matrix, built.matrix.record
    if record.num_capped:
        return (
            f"the rank cap {record.max_rank} held back {record.num_capped} of"
            f" {2 ** (matrix.tree.depth + 1) - 2} nodes. Raise max_rank or leaf_size, try another"
            " ordering, or accept a larger tolerance"
        )
    if is_limited:
        return "max_storage allows no more. Raise it, use a larger damping, or accept the error"
    if matrix.tree.num_kept == 0 and record.plan is None:
        return f"a global part of rank {matrix.global_rank} leaves it. Raise global_rank"
    larger = "a larger tolerance" if record.damping is None else "a larger tolerance or damping"
    return (
        f"{matrix.dtype} rounding or noise in the entries is in the way. Use float64 or accept"
        f" {larger}"
    )
