"""The options of `hcurv.compress`: checks, presets and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch
from torch import Tensor

from hcurv.arguments import check_number
from hcurv.hierarchical.tree.cluster_tree import Distance
from hcurv.indexing import check_count, check_seed
from hcurv.operators import EntrySource
from hcurv.ranks import OneRank
from hcurv.sources import MatrixProduct, has_product, name_of

__all__ = ["FINEST", "Options", "check_options"]


@dataclass(frozen=True)
class _Preset:
    leaf_size: int
    max_rank: int
    tolerance: float


_PRESETS = {  # the paper's settings
    "low": _Preset(leaf_size=128, max_rank=128, tolerance=5e-2),
    "high": _Preset(leaf_size=1024, max_rank=1024, tolerance=5e-4),
}
_DEFAULT_TOLERANCE = 5e-2
_DEFAULT_DAMPED_TOLERANCE = 1e-2
# Where storage alone is asked for, the tolerance is this multiple of the machine epsilon, which no
# build can go below.
FINEST = 10


@dataclass(frozen=True)
class Options:
    """What a compression is asked for.

    Attributes:
        tolerance: relative error to aim at, of A, or of (A + damping·I)⁻¹ if there is a damping.
        leaf_size: largest leaf; None to choose.
        max_rank: rank cap, or None.
        global_rank: columns of the global part; None to choose.
        near_budget: share of the leaves that may be near to a leaf.
        max_storage: largest number of floats over N², or None.
        ordering: name or permutation; "auto" to choose.
        method: "sketch" or "neighbors"; "auto" to choose.
        distance: distance of nearest neighbours.
        damping: what the matrix is solved with; None if it is for products.
        damped_tolerance: relative error of (A + damping·I)⁻¹, once ``tolerance`` is one of A; None
            if there is none.
        seed: seed of everything random.
        progress: whether to show what is being done.
        workspace: bytes that random products and a global part may take while they are made.
    """

    tolerance: float | None
    leaf_size: int | None
    max_rank: int | None
    global_rank: int | None
    near_budget: float
    max_storage: float | None
    ordering: str | Tensor
    method: str
    distance: Distance
    damping: float | None
    seed: int
    progress: bool
    workspace: int
    damped_tolerance: float | None = None

    def require_no_tree(self, name: str) -> None:
        """Raise if anything asks for entries, which a matrix does not have.

        Args:
            name: what the matrix is.
        """
        asked = {
            "leaf_size": self.leaf_size is not None,
            "max_rank": self.max_rank is not None,
            "near_budget": bool(self.near_budget),
            "ordering": not (isinstance(self.ordering, str) and self.ordering == "auto"),
            'method="neighbors"': self.method == "neighbors",
            "global_rank=0": self.global_rank == 0,
            "damping": self.damping is not None,
        }
        if any(asked.values()):
            found = ", ".join(option for option, is_asked in asked.items() if is_asked)
            raise ValueError(
                f"{name} has products and no entries, so that it is compressed to a global part"
                f" alone, without a tree and a diagonal. These options need entries: {found}. Leave"
                " them out (a preset counts as leaf_size and max_rank), or give the matrix"
                " diagonal() and block(rows, cols)"
            )

    def for_source(self, source: EntrySource | MatrixProduct, ranks: OneRank) -> Options:
        """These options with the defaults that depend on the source.

        Args:
            source: the matrix.
            ranks: the ranks that share it.

        Raises:
            ValueError: the source cannot be compressed in this way.
        """
        product, method, tolerance = has_product(source), self.method, self.tolerance
        if ranks.size > 1:
            self._check_for_ranks(source, product, method)
        if method == "auto":
            method = "sketch" if product else "neighbors"
        if method == "sketch" and not product:
            raise ValueError(
                f'method="sketch" needs products, but {name_of(source)} has no "@"; use'
                ' method="neighbors"'
            )
        if method == "neighbors" and self.max_storage is not None:
            raise ValueError('max_storage needs products: use method="sketch", or a tolerance')
        if method == "neighbors" and self.global_rank:
            raise ValueError('global_rank needs products: use method="sketch", or global_rank=0')
        if tolerance is None:
            tolerance = _DEFAULT_TOLERANCE
            if self.damping is not None:
                tolerance = _DEFAULT_DAMPED_TOLERANCE
            if self.max_storage is not None:
                # With a damping, 0 asks for all that the storage allows.
                finest = FINEST * torch.finfo(source.dtype).eps
                tolerance = finest if self.damping is None else 0.0
            elif self.max_rank is not None:
                tolerance = 0.0  # a rank cap is an accuracy by itself
        rank = self.global_rank
        if rank is not None:
            rank = check_count(rank, "global_rank", least=0, most=source.shape[0])
        elif method == "neighbors" or (tolerance == 0 and self.max_rank is not None):
            rank = 0
        return replace(self, tolerance=tolerance, global_rank=rank, method=method)

    def _check_for_ranks(
        self, source: EntrySource | MatrixProduct, product: bool, method: str
    ) -> None:
        if method == "neighbors" or not product:
            raise ValueError(
                "a matrix is shared between ranks by its products"
                f' (method="sketch"); {type(source).__name__} has'
                f" {'products' if product else 'none'}, and method={method!r} was asked for"
            )
        if self.near_budget:
            raise ValueError(
                f"near_budget={self.near_budget:g} is for one process: a near field is not shared"
                " between ranks. Use near_budget=0"
            )


def check_options(
    *,
    accuracy: str | None,
    tolerance: float | None,
    leaf_size: int | None,
    max_rank: int | None,
    global_rank: int | str,
    near_budget: float,
    max_storage: float | None,
    ordering: str | Tensor,
    method: str,
    distance: Distance,
    damping: float | None,
    seed: SupportsIndex,
    progress: bool,
    workspace: int,
) -> Options:
    """Check the options of `hcurv.compress` as far as that is possible without the matrix.

    Raises:
        TypeError, ValueError: an option is not what it should be; the message says which one.
    """
    if accuracy is not None and accuracy not in _PRESETS:
        known = " or ".join(f'"{name}"' for name in _PRESETS)
        raise ValueError(f"accuracy must be {known}; got {accuracy!r}")
    if tolerance is not None:
        tolerance = _check_tolerance(tolerance)
    if leaf_size is not None:
        leaf_size = check_count(leaf_size, "leaf_size")
    if max_rank is not None:
        max_rank = check_count(max_rank, "max_rank", least=0)
    if accuracy is not None:
        preset = _PRESETS[accuracy]
        leaf_size = preset.leaf_size if leaf_size is None else leaf_size
        max_rank = preset.max_rank if max_rank is None else max_rank
        tolerance = preset.tolerance if tolerance is None else tolerance
    if isinstance(global_rank, str) and global_rank != "auto":
        raise ValueError(f'global_rank must be a number or "auto"; got {global_rank!r}')
    if method not in ("auto", "sketch", "neighbors"):
        raise ValueError(f'method must be "auto", "sketch" or "neighbors"; got {method!r}')
    if distance not in ("angle", "gram"):
        raise ValueError(f'distance must be "angle" or "gram"; got {distance!r}')
    if damping is not None:
        damping = _check_damping(damping)
    if not (isinstance(near_budget, int | float) and 0 <= near_budget < 1):
        raise ValueError(f"near_budget is a share of the leaves, 0 ≤ share < 1; got {near_budget}")
    if near_budget and damping is not None:
        raise ValueError(
            f"damping={damping:g} is for matrices to factorize, without a near field: use"
            " near_budget=0, or leave the damping out"
        )
    if max_storage is not None:
        max_storage = check_number(max_storage, "max_storage, a share of N²,", above=0)
    return Options(
        tolerance,
        leaf_size,
        max_rank,
        None if isinstance(global_rank, str) else global_rank,
        near_budget,
        max_storage,
        ordering,
        method,
        distance,
        damping,
        check_seed(seed),
        progress,
        check_count(workspace, "workspace"),
    )


def _check_tolerance(tolerance: float) -> float:
    try:
        is_valid = math.isfinite(tolerance) and tolerance >= 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"tolerance must be a number of at least 0; got {tolerance!r}")
    return float(tolerance)


def _check_damping(damping: float) -> float:
    """The damping as a positive number."""
    message = (
        f"damping must be a positive number, as in damping=1e-3; got {damping!r}. For a damping of"
        " each row, compress for the smallest of them; for products, leave it out"
    )
    if isinstance(damping, str | bool):
        raise TypeError(message)
    try:
        value = float(damping)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(message) from None
    if not 0 < value < math.inf:
        raise ValueError(message)
    return value
