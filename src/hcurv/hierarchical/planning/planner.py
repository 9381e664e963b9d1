"""Choose what to store, from few products and entries, before anything is built.

A global part of rank g takes g floats a row, and makes the ranks of the tree smaller. What trees
would take is estimated (`tree_estimates`) only where that can change the answer. The products that
are drawn for this serve the build, as samples or for the global part; only those that sharpened a
global part which is not used are lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hcurv.hierarchical.building.construct import DEFAULT_WORKSPACE, BuildStart
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import num_columns_for
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.plan import Candidate, Plan
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.planning.sample_space_part import part_alone, suits
from hcurv.hierarchical.planning.sampled_matrix import (
    AMPLE,
    FIRST_WIDTH,
    MAX_STEP,
    USABLE,
    SampledMatrix,
)
from hcurv.hierarchical.planning.tree_estimates import CLEAR, FIRST_COLUMNS, SAFETY, TreeEstimates
from hcurv.hierarchical.planning.within_storage import FIRST_TOLERANCE, StorageChoice
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, cluster, depth_for
from hcurv.memory import InsufficientMemoryError
from hcurv.operators import EntrySource
from hcurv.ranks import OneRank
from hcurv.sources import RootedSource, structural_orders

__all__ = ["prepare"]

# Leaf sizes to choose from.
_LEAF_SIZES = (16, 32, 64, 128, 256, 512, 1024)
# Trees are not estimated as long as few directions suggest a rank below so many times as many.
_NEAR = 10.0
# A global part alone that takes no more than so many times the floats of the smallest leaves is not
# compared with trees, which would take longer than making it.
_SMALL = 2.5
# Estimates of both together that are better by less than this factor are not better.
_SURE = 1.03
# For a tolerance of 0, trees are estimated at this multiple of the machine epsilon.
_FINEST = 10
# Columns of the global part that change the error by less than this factor are rounding.
_ROUNDING = 1.05


def prepare(
    source: EntrySource,
    diagonal: Tensor,
    tolerance: float,
    *,
    leaf_size: int | None,
    ordering: str | Tensor,
    global_rank: int | None,
    max_floats: int | None = None,
    keep_diagonal: bool = False,
    workspace: int = DEFAULT_WORKSPACE,
    seed: int = 0,
    orders: Mapping[str, Tensor] | None = None,
    phases: Phases | None = None,
    ranks: OneRank | None = None,
) -> BuildStart:
    """Choose global rank, leaf size and ordering, whichever are left open.

    Args:
        source: the matrix, with a product.
        diagonal: its diagonal.
        tolerance: relative error to plan for; 0 for as small as rounding allows.
        leaf_size: largest leaf, or None to choose.
        ordering: a name, a permutation, or "auto" to choose among the orders that the source
            offers, or else the orders by distance.
        global_rank: number of columns of the global part, or None to choose.
        max_floats: largest number of floats to store. The tolerance is then the smallest that this
            allows, and not below the one given.
        keep_diagonal: whether a global part never stands alone, but together with at least the
            diagonal of what it leaves.
        workspace: bytes that random products and the global part may take.
        seed: seed of everything random.
        orders: orders of the rows by name; None to ask the source for them.
        phases: where to count the time and show progress.
        ranks: the ranks that share random products and the global part; None for one process.
    """
    phases = Phases() if phases is None else phases
    ranks = OneRank() if ranks is None else ranks
    leaf_sizes = _LEAF_SIZES if leaf_size is None else (leaf_size,)
    if orders is None:
        orders = structural_orders(source)
    names: Sequence[str | Tensor] = [ordering]
    if isinstance(ordering, str) and ordering == "auto":
        names = list(orders) or ["natural", "angle", "gram"]
    trees = {}
    for name in names:
        phases.describe("planning: ordering the rows")
        tree = cluster(
            source,
            leaf_size=leaf_sizes[0],
            ordering=name,
            seed=seed,
            diagonal=diagonal,
            orders=orders,
        )
        trees[tree.ordering] = tree
    max_working = workspace // source.dtype.itemsize
    is_free = global_rank is None and max_floats is None and leaf_size is None and tolerance > 0
    is_free = is_free and ranks.size == 1
    rows = next(iter(trees.values())).permutation
    if is_free and isinstance(source, RootedSource) and suits(source, rows.numel(), max_working):
        return part_alone(
            source,
            rows.sort().values,
            tolerance,
            keep_diagonal=keep_diagonal,
            max_working=max_working,
            seed=seed,
            phases=phases,
        )
    planner = _Planner(source, trees, leaf_sizes, keep_diagonal, max_working, seed, phases, ranks)
    return planner.run(tolerance, global_rank, max_floats)


class _Planner:
    """Candidates and their estimates.

    Args:
        source: the matrix.
        trees: one for each ordering, as deep as the smallest leaves ask for.
        leaf_sizes: sizes to choose from, ascending.
        keep_diagonal: whether a global part never stands alone.
        max_working: number of floats that random products and the global part may take.
        seed: seed of everything random.
        phases: where to count the time and show progress.
        ranks: the ranks that share the work.
    """

    def __init__(
        self,
        source: EntrySource,
        trees: Mapping[str, ClusterTree],
        leaf_sizes: Sequence[int],
        keep_diagonal: bool,
        max_working: int,
        seed: int,
        phases: Phases,
        ranks: OneRank,
    ) -> None:
        self._source, self._trees, self._leaf_sizes = source, dict(trees), leaf_sizes
        rows = next(iter(trees.values())).permutation
        if len(trees) > 1:
            # With a given order, the result does not depend on the numbering of the rows.
            rows = rows.sort().values
        self._num_rows, self._phases = rows.numel(), phases
        share = RowShare(rows, ranks)
        self._known = SampledMatrix(source, share, seed, phases, max_working)
        self._estimates = TreeEstimates(
            source, trees, leaf_sizes, keep_diagonal, self._known, phases
        )
        self._within = StorageChoice(self._known, self._estimates, self._choose)

    def run(self, tolerance: float, global_rank: int | None, max_floats: int | None) -> BuildStart:
        """Choose what is left open, and prepare the build of it."""
        if global_rank:
            self._known.extend(min(self._num_rows, num_columns_for(global_rank)))
        if self._num_rows < 2:
            global_rank = 0
        rank = None if global_rank is None else min(global_rank, self._known.rank)
        if rank is not None and len(self._trees) == len(self._leaf_sizes) == 1:
            if max_floats is None:
                self._known.draw(self._estimates.first_columns, rank)
                only = Candidate(rank, self._leaf_sizes[0], next(iter(self._trees)), 0)
                return self._finish(None, only)
        if max_floats is not None:
            candidates, tolerance = self._within.best(max_floats, tolerance, rank)
        elif tolerance == 0 and rank is None:
            candidates = self._choose_exact()
        else:
            candidates = self._choose(tolerance or FIRST_TOLERANCE, rank)
            if tolerance == 0 and candidates[0].ordering == "none":
                # The given rank suffices for the tolerance of the comparison, not for 0.
                candidates = self._choose(_FINEST * torch.finfo(self._source.dtype).eps, rank)
        size, others = self._source.shape[0], tuple(candidates[1:])
        plan = Plan(tolerance, size, candidates[0], others, self._within.curve.decay)
        return self._finish(plan, candidates[0])

    def _choose_exact(self) -> list[Candidate]:
        """A tree alone, or a global part alone of the numerical rank of the matrix, best first.

        A global part and a tree together are no choice here: what the global part leaves is
        rounding, which no tree compresses.
        """
        tree = self._estimates.best(0, _FINEST * torch.finfo(self._source.dtype).eps)
        width = FIRST_WIDTH
        while True:
            # A global part must not take more than the tree.
            useful = math.ceil(AMPLE * tree.floats / self._num_rows) + 1
            width = min(width, useful, self._known.max_width)
            self._known.extend(width)
            if self._known.is_exhausted:
                rank = self._known.rank
                rank = int(self._known.rank_for(_ROUNDING * self._known.residual(rank), rank))
                options = [tree, self._estimates.without_tree(rank)]
                return sorted(options, key=lambda candidate: candidate.floats)
            if width == min(useful, self._known.max_width):
                return [tree]
            width *= 2

    def _choose(self, tolerance: float, rank: int | None) -> list[Candidate]:
        """The best candidate for every global rank that was looked at, best first.

        The global part grows as long as it may be better alone than the best candidate. What trees
        take is estimated only where that can change the answer.
        """
        known, num_rows = self._known, self._num_rows
        if rank is not None:
            # If only orderings are compared, estimates may all be too small in the same way.
            return [self._estimates.best(rank, tolerance, patient=len(self._leaf_sizes) > 1)]
        width = max(min(FIRST_WIDTH, num_rows), known.width)
        tree: Candidate | None = None  # the best without a global part
        others: list[Candidate] = []
        while True:
            known.extend(width)
            limit = known.rank if known.is_exhausted else min(int(width / USABLE), known.rank)
            is_last = known.is_exhausted or width >= self._known.max_width
            alone = known.rank_for(SAFETY * tolerance, limit)
            found = self._estimates.without_tree(int(alone)) if alone <= limit else None
            if found is not None and found.floats <= _SMALL * self._estimates.least_floats:
                return [found, *others]
            has_no_room = self._estimates.first_columns > known.affordable_pool
            if has_no_room:  # for trees, unless nothing else remains
                known.keep_no_pool()
                if found is not None:
                    return [found]
                if is_last and not known.is_exhausted:
                    self._refuse(tolerance, limit, alone)
            is_small = alone * num_rows <= _SMALL * self._estimates.least_floats
            is_near = width < FIRST_COLUMNS and alone <= _NEAR * limit
            if not is_last and found is None and (has_no_room or is_small or is_near):
                width = self._wider(width, alone)
                continue
            rival = known.likely_rank(alone, limit) * num_rows
            if tree is None:
                tree = self._estimates.alone(tolerance, rival)
                others = [tree]
            elif others == [tree] and alone * num_rows > CLEAR * tree.floats:
                # There are more columns now, which may tell more.
                tree = self._estimates.alone(tolerance, 0.0)
                others = [tree]
            if found is not None and found.floats <= CLEAR * others[0].floats:
                return [found, *others]
            if limit < alone < others[0].floats / num_rows and not is_last:
                width = self._wider(width, alone)
            else:
                tree = self._estimates.alone(tolerance, rival)
                others = [tree] if found is None else [tree, found]
                others = self._with_both(others, tolerance, limit)
                best = others[0]
                if is_last or not (best.leaf_size and 2 * best.global_rank > limit):
                    return others
                width = self._wider(width, math.inf)
            if width > known.affordable_pool:
                known.keep_no_pool()

    def _refuse(self, tolerance: float, limit: int, rank: float) -> None:
        """Say what the workspace allows, and what would be needed."""
        hint = ""
        if rank < math.inf:
            wanted = self._known.bytes_for(AMPLE * rank)
            hint = f"; workspace={wanted:.1g} or more may suffice"
        raise InsufficientMemoryError(
            f"the workspace has room for a global part of rank {limit}, which leaves a relative"
            f" error of {self._known.residual(limit):.1e}, above the tolerance {tolerance:.1e}, and"
            f" for no tree of N = {self._source.shape[0]}{hint}. Or use a larger tolerance"
        )

    def _wider(self, width: int, rank: float) -> int:
        """The number of directions to go on to, if a global part seems to need some rank."""
        step = min(max(1.5, AMPLE * rank / width), MAX_STEP)
        return min(math.ceil(step * width), self._known.max_width)

    def _with_both(self, others: list[Candidate], tolerance: float, limit: int) -> list[Candidate]:
        """Other candidates, and those of a tree beside a global part, best first.

        More global ranks are tried only if the first of them is better than all others.
        """
        best = min(candidate.floats for candidate in others)
        most = min(limit, int((best - self._estimates.least_floats) / self._num_rows))
        for share in (4, 2, 1):
            rank = most // share
            if rank == 0:
                continue
            candidate = self._estimates.best(rank, tolerance, patient=False)
            others.append(candidate)
            if candidate.floats > best:
                break
            best = candidate.floats
        return sorted(
            others,
            key=lambda one: one.floats * (_SURE if one.global_rank and one.leaf_size else 1.0),
        )

    def _finish(self, plan: Plan | None, chosen: Candidate) -> BuildStart:
        """Everything that the build of a candidate starts from.

        Rows of the global part and of random products go to the ranks of their subtrees.
        """
        known, rank = self._known, chosen.global_rank
        share, norm = known.residual(rank), known.norm
        is_alone = chosen.ordering == "none"
        if is_alone:
            known.release()
        with self._phases.timed("global part"):
            factor = known.factor(rank)
        tree = self._chosen_tree(plan, chosen)
        rows = tree.permutation if tree.num_kept else known.rows.sort().values
        target = RowShare(rows, known.share.ranks, None, tree.depth if tree.num_kept else None)
        part: GlobalPart | SharedPart | None = None
        if rank and target.is_split:
            part = SharedPart(target, known.share.moved(factor, target), self._source.shape[0])
        elif rank:
            rows, order = known.rows.sort()
            part = GlobalPart(rows, factor if known.is_sorted else factor[order])

        def ordered(columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            inputs, outputs = (values[:-1] for values in columns)
            if part is not None:
                mixed = known.share.total(factor.T @ inputs)
                outputs = torch.addmm(outputs, factor, mixed, alpha=-1)
            zeros = inputs.new_zeros(1, inputs.shape[1])
            moved = [known.share.moved(values, target) for values in (inputs, outputs)]
            return torch.cat([moved[0], zeros]), torch.cat([moved[1], zeros])

        sketch = None if is_alone else ordered(known.samples(rank))
        held_out = None if is_alone else ordered(known.held_out)
        return BuildStart(plan, tree, chosen.leaf_size, part, sketch, held_out, share, norm, target)

    def _chosen_tree(self, plan: Plan | None, chosen: Candidate) -> ClusterTree:
        """The tree of a candidate."""
        rows = self._known.rows
        if chosen.ordering == "none":
            # Leaves of one row and levels of rank 0 are a diagonal.
            rows = rows.sort().values if chosen.leaf_size else rows[:0]
            return ClusterTree(self._source.shape[0], rows, depth_for(rows.numel(), 1), "none")
        tree, scores = self._trees[chosen.ordering], {}
        if plan is not None and len(self._trees) > 1:
            scores = self._estimates.scores(chosen.global_rank)
        depth = self._estimates.depth(chosen.leaf_size, tree)
        return replace(tree, depth=depth, scores=scores)
