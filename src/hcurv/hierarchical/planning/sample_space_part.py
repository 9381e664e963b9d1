"""A global part alone, for a matrix so large that the workspace has no room for trees.

With H = SᵀS and fewer rows of S than of H, the leading eigenvectors U of K = SSᵀ are found first,
from products with K: a basis in sample space takes n·q floats a column, where one in parameter
space takes N. Then V = SᵀU: V Vᵀ = Sᵀ(UUᵀ)S is at most H, and leaves no more than U leaves of K,
because Sᵀ(I − UUᵀ)S and (I − UUᵀ)K(I − UUᵀ) have the same non-zero eigenvalues. Nothing of N rows
is stored but V and a panel of columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hcurv.hierarchical.building.construct import BuildStart
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.plan import Candidate, Plan
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.planning.sampled_matrix import SampledMatrix, pool_of
from hcurv.hierarchical.planning.tree_estimates import LEAST_COLUMNS, SAFETY
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, depth_for
from hcurv.linalg.nystrom import double_gram
from hcurv.memory import InsufficientMemoryError
from hcurv.operators import EntrySource
from hcurv.sources import RootedSource

__all__ = ["AMPLE", "part_alone", "sufficient_rank", "suits"]

# Vectors of N floats are multiplied in panels of so many floats, and this share of the workspace,
# but of at least so many columns.
_PANEL_FLOATS, _PANEL_SHARE, _LEAST_PANEL = 2**26, 1 / 16, 16
# Panels that exist at the same time, beside V.
_NUM_PANELS = 3
# The basis has so many directions at first, grows at most by this factor, and is so many times as
# wide as the rank that it is for.
_FIRST_WIDTH, _MAX_STEP, AMPLE = 16, 3.0, 1.25
# V is turned so many rows at a time.
_TURNED_FLOATS = 2**24


def suits(source: EntrySource, num_rows: int, max_working: int) -> bool:
    """Whether the matrix has a root of few rows, and the workspace has no room for trees."""
    if not isinstance(source, RootedSource) or source.num_root_rows >= num_rows:
        return False
    return pool_of(max_working // max(1, num_rows)) < LEAST_COLUMNS


def part_alone(
    source: RootedSource,
    rows: Tensor,
    tolerance: float,
    *,
    keep_diagonal: bool,
    max_working: int,
    seed: int,
    phases: Phases,
) -> BuildStart:
    """Make a global part that is as accurate as was asked for, and nothing else.

    Args:
        source: the matrix.
        rows: the rows that are not zero, ascending.
        tolerance: relative error.
        keep_diagonal: whether the diagonal of what the global part leaves is stored as well.
        max_working: number of floats that may be taken.
        seed: seed of the random vectors.
        phases: where to count the time and show progress.

    Raises:
        InsufficientMemoryError: the part would not fit into the workspace.
    """
    panel = min(_PANEL_FLOATS, int(_PANEL_SHARE * max_working)) // source.shape[0]
    kernel = _Kernel(source, rows, max(_LEAST_PANEL, panel))
    every = torch.arange(kernel.shape[0], device=source.device)
    known = SampledMatrix(kernel, RowShare(every), seed, phases, max_working, wide=_FIRST_WIDTH)
    known.keep_no_pool()
    room = max_working // rows.numel() - _NUM_PANELS * kernel.panel
    rank = sufficient_rank(known, tolerance, room, source.shape[0])
    with phases.timed("global part"):
        phases.describe(f"planning: {rank} columns of the global part")
        factor = _columns(kernel, known.factor(rank))
    norm, share = known.norm, known.residual(rank)
    candidate = Candidate(rank, 0, "none", rank * rows.numel())
    leaves = rows[:0]
    if keep_diagonal:
        floats = candidate.floats + 2 ** depth_for(rows.numel(), 1)
        candidate, leaves = Candidate(rank, 1, "none", floats), rows
    plan = Plan(tolerance, source.shape[0], candidate, ())
    tree = ClusterTree(source.shape[0], leaves, depth_for(leaves.numel(), 1), "none")
    part = GlobalPart(rows, factor) if rank else None
    return BuildStart(plan, tree, candidate.leaf_size, part, None, None, share, norm)


def sufficient_rank(known: SampledMatrix, tolerance: float, room: int, size: int) -> int:
    """Let the basis grow until some of it suffices, and return how many columns that is.

    Args:
        known: products with the matrix whose leading eigenvectors are looked for.
        tolerance: relative error.
        room: most columns that the workspace allows.
        size: number N of rows, for messages.

    Raises:
        InsufficientMemoryError: more columns are needed.
    """
    most = min(known.rows.numel(), math.ceil(AMPLE * max(0, room)))
    width = min(_FIRST_WIDTH, most)
    while True:
        known.extend(width)
        is_whole = known.is_exhausted or width == known.rows.numel()
        is_last = is_whole or width == most
        limit = known.rank if is_whole else min(int(width / AMPLE), known.rank)
        needed = known.rank_for(SAFETY * tolerance, limit)
        if needed <= min(limit, room):
            return int(needed)
        if is_whole and limit <= room:
            return limit  # nothing is left but rounding
        if is_last:
            hint = "" if needed == math.inf else f" about {math.ceil(needed)} may suffice;"
            raise InsufficientMemoryError(
                f"the workspace has room for a global part of {max(0, room)} columns, which leaves"
                f" a relative error above the tolerance {tolerance:.1e}, and for no tree of"
                f" N = {size};{hint} pass a larger workspace= or tolerance="
            )
        step = min(max(1.3, AMPLE * needed / width), _MAX_STEP)
        width = min(math.ceil(step * width), most)


class _Kernel:
    """K = SSᵀ, multiplied by some columns at a time."""

    def __init__(self, source: RootedSource, rows: Tensor, panel: int) -> None:
        self._source, self.rows, self.panel = source, rows, panel
        self.shape = (source.num_root_rows, source.num_root_rows)
        self.dtype, self.device = source.dtype, source.device

    def transposed(self, columns: Tensor) -> Tensor:
        """Sᵀ times some columns."""
        return self._source.root_transposed(columns)

    def __matmul__(self, columns: Tensor) -> Tensor:
        parts = [
            self._source.root_product(self.transposed(some.contiguous()))
            for some in columns.split(self.panel, 1)
        ]
        return torch.cat(parts, 1)


def _columns(kernel: _Kernel, directions: Tensor) -> Tensor:
    """V = SᵀU with orthogonal columns, stored by columns, for U spanned by ``directions``."""
    rank, rows = directions.shape[1], kernel.rows
    result = directions.new_empty(rank, rows.numel()).T
    if rank == 0:
        return result
    # The columns of V_K = U√Λ are orthogonal, up to rounding.
    basis = torch.linalg.qr(directions.double()).Q.to(directions.dtype)
    for first in range(0, rank, kernel.panel):
        some = slice(first, first + kernel.panel)
        found = kernel.transposed(basis[:, some].contiguous())
        result[:, some] = found if found.shape[0] == rows.numel() else found[rows]
    turn = torch.linalg.eigh(double_gram(result, result)).eigenvectors.flip(1).to(result.dtype)
    for some in result.split(max(1, _TURNED_FLOATS // rank)):
        some.copy_(some @ turn)
    return result
