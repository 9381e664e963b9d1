"""How many floats trees would take, alone or beside a global part.

The ranks that a tolerance asks for are found by building a few subtrees. From how they grow with
the length of a node follows the number of floats of a tree with leaves of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import num_columns_for
from hcurv.hierarchical.parts.plan import Candidate, RankProfile, tree_floats
from hcurv.hierarchical.planning.rank_trial import Subtrees, TrialLevel
from hcurv.hierarchical.planning.sampled_matrix import SampledMatrix
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, depth_for
from hcurv.operators import EntrySource

__all__ = ["CLEAR", "FIRST_COLUMNS", "LEAST_COLUMNS", "SAFETY", "TreeEstimates"]

# Subtrees of 512 rows with leaves of 16 are tried: at least four, and eight where there are many
# rows. More or larger ones predict ranks better, and cost more entries and time.
_SUBTREE_ROWS, _TRIAL_LEAF = 512, 16
_LEAST_SUBTREES, _MOST_SUBTREES, _SUBTREE_SHARE = 4, 8, 8
# Ranks are first tried on this many columns, and on as many as 400 if they turn out to be large.
# Where memory is short, as few as 64 have to do.
FIRST_COLUMNS, _MAX_COLUMNS, LEAST_COLUMNS = 144, 400, 64
# No other ordering is tried after one that takes so many times the floats of a global part alone.
_HOPELESS = 2.5
# What takes no more than this share of the floats of something else is clearly smaller, although
# both are estimates.
CLEAR = 0.85
# Tolerances within this factor are nearly the same: what was clearly worse is not tried again.
_NEARBY = 2.0
# A global part alone that takes so many times the floats of a tree is out of the question.
_OPEN = 2.0
# An error that was measured on a sample has to be below this share of the tolerance.
SAFETY = 0.97


class TreeEstimates:
    """Estimates of trees in several orders.

    Args:
        source: the matrix.
        trees: one for each ordering, as deep as the smallest leaves ask for.
        leaf_sizes: sizes to choose from, ascending.
        keep_diagonal: whether a global part never stands alone.
        known: random products with the matrix, and its global part.
        phases: where to show progress.
    """

    def __init__(
        self,
        source: EntrySource,
        trees: Mapping[str, ClusterTree],
        leaf_sizes: Sequence[int],
        keep_diagonal: bool,
        known: SampledMatrix,
        phases: Phases,
    ) -> None:
        self._source, self._trees, self._keep_diagonal = source, dict(trees), keep_diagonal
        self._leaf_sizes, self._known, self._phases = leaf_sizes, known, phases
        self._num_rows = known.rows.numel()
        self._subtrees: dict[str, Subtrees | None] = {}
        # What a trial found, and how many floats were enough to end it before the last level.
        self._profiles: dict[tuple[str, int, float, int, int], tuple[RankProfile, float]] = {}
        # The best tree without a global part for a tolerance, where it is certain.
        self._certain: dict[float, Candidate] = {}
        # The last tolerance at which an ordering without a global part was clearly worse.
        self._lost: dict[str, float] = {}
        # Floats of the last estimate for an ordering and a global rank.
        self._floats: dict[tuple[str, int], int] = {}

    @property
    def first_columns(self) -> int:
        """Number of columns that ranks are first tried on."""
        return min(FIRST_COLUMNS, max(LEAST_COLUMNS, self._known.affordable_pool))

    @property
    def _max_columns(self) -> int:
        return max(self.first_columns, min(_MAX_COLUMNS, self._known.affordable_pool))

    @property
    def least_floats(self) -> float:
        """Floats that the leaves of any tree take, whatever its ranks are."""
        trees = self._trees.values()
        depths = [self.depth(leaf_size, tree) for leaf_size in self._leaf_sizes for tree in trees]
        return self._num_rows**2 / float(2 ** max(depths))

    def depth(self, leaf_size: int, tree: ClusterTree) -> int:
        """Depth of a tree with leaves of some size."""
        return min(depth_for(self._source.shape[0], leaf_size), tree.depth)

    def scores(self, rank: int) -> dict[str, float]:
        """Floats of each ordering that was tried beside a global part of some rank."""
        return {name: float(n) for (name, beside), n in self._floats.items() if beside == rank}

    def without_tree(self, rank: int) -> Candidate:
        """A global part without a tree, or with the diagonal of what it leaves."""
        shared = rank * self._num_rows
        if not self._keep_diagonal:
            return Candidate(rank, 0, "none", shared)
        return Candidate(rank, 1, "none", shared + 2 ** depth_for(self._num_rows, 1))

    def alone(self, tolerance: float, rival: float) -> Candidate:
        """The best tree without a global part.

        Args:
            tolerance: relative error.
            rival: floats of a global part without a tree. If a tree takes clearly more, as few
                columns as there are tell so, and if it takes far less, a first sample does.
        """
        if tolerance in self._certain:
            return self._certain[tolerance]
        # A global part of that rank would need these columns anyway.
        self._known.draw(int(min(self.first_columns, rival / self._num_rows)), 0)
        found = self.best(0, tolerance, patient=False, rival=rival)
        if rival <= CLEAR * found.floats:
            return found
        self._known.draw(self.first_columns, 0)
        is_open = rival < _OPEN * found.floats or rival == math.inf
        return self.best(0, tolerance, patient=is_open)

    def best(
        self, rank: int, tolerance: float, patient: bool = True, rival: float = math.inf
    ) -> Candidate:
        """The best tree beside a global part of some rank, or that part alone if it suffices.

        Args:
            rank: number of columns of the global part.
            tolerance: relative error.
            patient: whether the sample grows until the estimate is certain.
            rival: floats to beat. If an ordering takes several times as many, no other is tried. 0
                for an estimate from the first ordering alone.
        """
        known = self._known
        if known.residual(rank) <= SAFETY * tolerance:
            return self.without_tree(rank)
        if rank:
            known.draw(self.first_columns, rank)
        names = self._open(tolerance) if rank == 0 else [self._best_ordering(tolerance)]
        while True:
            options = []
            enough = _HOPELESS * rival if rival else math.inf
            for name in names:
                options.append(self._best_leaves(name, rank, tolerance, enough))
                if options[-1][0].floats > _HOPELESS * rival:
                    break
                enough = min(enough, options[-1][0].floats / CLEAR)
            found, is_certain = min(options, key=lambda option: option[0].floats)
            if is_certain and rank == 0:
                self._certain[tolerance] = found
                self._remember(found, tolerance)
            num_columns = known.num_columns(rank)
            if is_certain or not patient or num_columns >= self._max_columns:
                return found
            # Orderings that are clearly worse are not tried again.
            tried = names[: len(options)]
            names = [name for name in tried if CLEAR * self._floats[name, rank] <= found.floats]
            known.draw(self._max_columns, rank)

    def _open(self, tolerance: float) -> list[str]:
        """The orderings that were not clearly worse at nearly the same tolerance."""
        lost = {n for n, t in self._lost.items() if max(t / tolerance, tolerance / t) <= _NEARBY}
        return [name for name in self._trees if name not in lost]

    def _remember(self, best: Candidate, tolerance: float) -> None:
        """Which orderings were clearly worse than the best one."""
        self._lost.pop(best.ordering, None)
        for name in self._trees:
            floats = self._floats.get((name, 0))
            if floats is not None and CLEAR * floats > best.floats:
                self._lost[name] = tolerance

    def _best_ordering(self, tolerance: float) -> str:
        """The ordering to look at beside a global part: the best without it."""
        names = list(self._trees)
        if len(names) > 1:
            for name in names:
                if (name, 0) not in self._floats:
                    self._best_leaves(name, 0, tolerance)
            names.sort(key=lambda name: self._floats[name, 0])
        return names[0]

    def _best_leaves(
        self, name: str, rank: int, tolerance: float, enough: float = math.inf
    ) -> tuple[Candidate, bool]:
        """The candidate with the best leaf size, and whether the sample had columns enough.

        If it takes more than ``enough`` floats, how many more does not matter.
        """
        profile = self._trial(name, rank, tolerance, enough)
        best, floats = self._smallest(name, rank, profile)
        self._floats[name, rank] = floats
        return Candidate(rank, best, name, floats), profile.certain

    def _smallest(self, name: str, rank: int, profile: RankProfile) -> tuple[int, int]:
        """The leaf size that takes least floats, and how many these are."""
        floats = {}
        for leaf_size in self._leaf_sizes:
            depth = self.depth(leaf_size, self._trees[name])
            floats[leaf_size] = round(tree_floats(self._num_rows, depth, profile))
        best = min(floats, key=lambda leaf_size: floats[leaf_size])
        return best, rank * self._num_rows + floats[best]

    def _trial(self, name: str, rank: int, tolerance: float, enough: float) -> RankProfile:
        """The ranks in a few subtrees of an ordering, beside a global part.

        The trial ends where higher levels could not change the answer: where the ranks are more
        than the columns can show, or where the tree takes more than ``enough`` floats even if
        ranks do not grow any more.
        """
        known = self._known
        key = (name, rank, tolerance, known.num_columns(rank), known.width if rank else 0)
        if key not in self._profiles or enough > self._profiles[key][1]:
            if name not in self._subtrees:
                self._subtrees[name] = self._make_subtrees(self._trees[name])
            subtrees = self._subtrees[name]
            num_columns = known.num_columns(rank)
            levels: list[TrialLevel] = []
            ended_at = math.inf
            if subtrees is not None:
                self._phases.describe(
                    f"planning: ranks for a relative error of {tolerance:.1e} beside a global part"
                    f" of rank {rank}"
                )
                for level in subtrees.ranks(known, rank, tolerance):
                    levels.append(level)
                    if len(levels) < 2:
                        continue
                    profile = self._profile(levels, num_columns)
                    if not profile.certain:
                        break
                    least = self._smallest(name, rank, profile.without_growth())[1]
                    if least > enough:
                        ended_at = least
                        break
            self._profiles[key] = self._profile(levels, num_columns), ended_at
        return self._profiles[key][0]

    def _profile(self, levels: list[TrialLevel], num_columns: int) -> RankProfile:
        """How ranks grow, from the levels whose ranks are well below the number of columns."""
        known = [x for x in levels if num_columns_for(int(x.ranks.max())) <= num_columns]
        known = known if len(known) > 1 else levels[:2]
        ranks = [level.ranks.double() for level in known]
        return RankProfile(
            self._num_rows,
            max(1.0, math.log2(self._num_rows / levels[0].length)) if levels else 1.0,
            tuple(level.length for level in known),
            tuple(float(r.mean()) for r in ranks),
            tuple(float(r.square().mean().sqrt()) for r in ranks),
            len(known) == len(levels),
        )

    def _make_subtrees(self, tree: ClusterTree) -> Subtrees | None:
        order = tree.permutation
        length = min(_SUBTREE_ROWS, 2 ** int(math.log2(max(1, order.numel() // 2))))
        if order.numel() < 2:
            return None
        leaf_length = min(_TRIAL_LEAF, length)
        number = order.numel() // (_SUBTREE_SHARE * _SUBTREE_ROWS)  # an eighth of all rows
        number = max(_LEAST_SUBTREES, min(number, _MOST_SUBTREES))
        return Subtrees(self._source, order, self._known.places, length, leaf_length, number)
