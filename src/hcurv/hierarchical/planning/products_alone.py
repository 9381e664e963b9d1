"""A matrix that can be multiplied and nothing else: a global part V Vᵀ, without a tree.

Trees and diagonals are made of entries, which such a matrix does not have. Its leading eigenpairs
are found from products (Nyström's approximation from a basis that grows), and the error is measured
on products that were not used for them.
"""

from __future__ import annotations

from typing import cast

import torch

from hcurv.hierarchical.building.construct import (
    BuildSettings,
    BuildStart,
    Construction,
    HSSStructure,
    construct,
)
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import num_columns_for
from hcurv.hierarchical.building.sketch import RandomProducts
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.plan import Candidate, Plan
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.planning.sample_space_part import AMPLE, sufficient_rank
from hcurv.hierarchical.planning.sampled_matrix import SampledMatrix
from hcurv.hierarchical.planning.tree_estimates import SAFETY
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.operators import EntrySource, SymmetricOperator

__all__ = ["construct_from_products"]


def construct_from_products(
    source: SymmetricOperator,
    tolerance: float,
    *,
    global_rank: int | None,
    max_rank: int | None,
    workspace: int,
    seed: int,
    phases: Phases,
) -> Construction:
    """Make a global part of a matrix that has no entries.

    Args:
        source: the matrix.
        tolerance: relative error, positive; with a ``global_rank`` it is only compared with.
        global_rank: number of columns; None for as many as the tolerance asks for.
        max_rank: most columns that storage allows, or None.
        workspace: bytes that products and the global part may take.
        seed: seed of the random vectors.
        phases: where to count the time and show progress.

    Raises:
        InsufficientMemoryError: the workspace has no room for the columns that are needed.
    """
    size = source.shape[0]
    rows = torch.arange(size, device=source.device)
    with phases.timed("planning"):
        known = SampledMatrix(
            source, RowShare(rows), seed, phases, workspace // source.dtype.itemsize
        )
        known.keep_no_pool()
        most = global_rank if global_rank is not None else max_rank
        if most is None:
            rank = sufficient_rank(known, tolerance, int(known.affordable / AMPLE), size)
        else:
            known.extend(min(size, num_columns_for(most)))
            rank = min(most, known.rank)
            if global_rank is None:
                rank = int(min(rank, known.rank_for(SAFETY * tolerance, rank)))
                tolerance = max(tolerance, known.residual(rank))  # what storage allows
    part = GlobalPart(rows, known.factor(rank)) if rank else None
    plan = None
    if global_rank is None:
        plan = Plan(tolerance, size, Candidate(rank, 0, "none", rank * size))
    tree = ClusterTree(size, rows[:0], 0, "none")
    start = BuildStart(plan, tree, 0, part, None, None, known.residual(rank), known.norm)
    settings = BuildSettings(HSSStructure(), None, "angle", None, None, seed)
    none = torch.zeros(1, 0, dtype=source.dtype, device=source.device)
    # A tree without rows asks for neither entries nor samples.
    whole = cast("EntrySource", source)
    products = RandomProducts(whole, RowShare(tree.permutation), seed, None, (none, none))
    return construct(whole, start, products, tolerance, settings, phases)
