"""Choose what to store, from few products and entries, before anything is built.

A global part of rank g takes g floats a row, and makes the tree's ranks smaller. The ranks that a
tolerance asks for are found in a few subtrees, which are built for several g; from how they grow
with the length of a node follow the floats of a tree with leaves of any size. Products that were
drawn for it serve the build, as samples or for the global part; those that sharpened a global part
which is not used are lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, cluster, depth_for
from hcurv.hierarchical.build import num_columns_for
from hcurv.hierarchical.global_part import GlobalPart
from hcurv.hierarchical.plan import Candidate, Plan, RankProfile, tolerance_step, tree_floats
from hcurv.hierarchical.rank_trial import Subtrees, TrialLevel
from hcurv.hierarchical.sampled_matrix import SampledMatrix
from hcurv.operators import EntrySource
from hcurv.sources import structural_orders

__all__ = ["Prepared", "prepare"]

_SUBTREE, _SUBTREES = 512, 4  # rows and number of the subtrees that are tried
_TRIAL_LEAF = 16  # rows of their leaves
_LEAVES = (16, 32, 64, 128, 256, 512, 1024)  # sizes of leaves to choose from
_COLUMNS = 128  # of the first sample ...
_MOST_COLUMNS = 384  # ... and of the last
_MANY = 2**19  # rows for which products are dear: half as many columns at first
_FIRST_WIDTH = 64  # columns of the first sketch for a global part
_USABLE = 1.25  # columns of such a sketch per column of the global part
_FULL = 0.9  # share of the columns of a sketch that are independent; with fewer, H has no more
_BEYOND = 1.25  # times an extrapolated global rank, which is optimistic
_SAFETY = 0.97  # of a tolerance, for an error that was measured on a sample
_STEPS = 6  # to find the tolerance that a number of floats allows ...
_NEAR = 0.05  # ... to this share of them
_DEFAULT_TOLERANCE = 1e-2  # for which trees are compared if 0 was asked for


@dataclass(frozen=True)
class Prepared:
    """What a build starts from.

    Attributes:
        plan: what was chosen; None if nothing was left open.
        tree: clusters of the rows; without any rows if there shall be no tree.
        leaf_size: of its leaves.
        global_part: or None.
        sketch: random vectors and their products with what the global part leaves, in the order
            of the tree, as `random_products` gives them; None if there is no tree.
        share: norm of what the global part leaves, over that of the matrix.
        seconds: what samples and global part have taken, which are used by the build.
    """

    plan: Plan | None
    tree: ClusterTree
    leaf_size: int
    global_part: GlobalPart | None
    sketch: tuple[Tensor, Tensor] | None
    share: float
    seconds: Mapping[str, float] = field(default_factory=dict)


def prepare(
    source: EntrySource,
    diagonal: Tensor,
    tolerance: float,
    *,
    leaf_size: int | None,
    ordering: str | Tensor,
    global_rank: int | None,
    max_floats: int | None = None,
    seed: int = 0,
) -> Prepared:
    """Choose global rank, leaf size and ordering, whichever are left open.

    Args:
        source: the matrix, with a product.
        diagonal: its diagonal.
        tolerance: relative error to plan for.
        leaf_size: or None to choose.
        ordering: a name, a permutation, or "auto" to choose among the structural orders that the
            source offers, or else the orders by distance.
        global_rank: or None to choose.
        max_floats: store at most so many: the tolerance is then the smallest that this allows,
            and not below the one given.
        seed: of everything random.
    """
    leaf_sizes = _LEAVES if leaf_size is None else (leaf_size,)
    names: Sequence[str | Tensor] = [ordering]
    if isinstance(ordering, str) and ordering == "auto":
        names = list(structural_orders(source)) or ["natural", "angle", "gram"]
    trees = [
        cluster(source, leaf_size=leaf_sizes[0], ordering=name, seed=seed, diagonal=diagonal)
        for name in names
    ]
    planner = _Planner(source, {tree.ordering: tree for tree in trees}, leaf_sizes, seed)
    return planner.run(tolerance, global_rank, max_floats)


class _Planner:
    """Candidates and their estimates.

    Args:
        source: the matrix.
        trees: one for each ordering, as deep as the smallest leaves ask for.
        leaf_sizes: to choose from, ascending.
        seed: of everything random.
    """

    def __init__(
        self,
        source: EntrySource,
        trees: Mapping[str, ClusterTree],
        leaf_sizes: Sequence[int],
        seed: int,
    ) -> None:
        self._source, self._trees = source, dict(trees)
        self._leaf_sizes = leaf_sizes
        rows = next(iter(trees.values())).permutation
        self._known = SampledMatrix(source, rows, seed)
        self._num_rows = rows.numel()
        self._places = rows.new_full((source.shape[0],), -1)  # of rows in the sample
        self._places[rows] = torch.arange(rows.numel(), device=source.device)
        self._subtrees = {name: self._make_subtrees(tree) for name, tree in trees.items()}
        self._profiles: dict[tuple[str, int, float], RankProfile] = {}

    def _grow_sample(self, num_columns: int) -> None:
        self._known.grow_sample(num_columns)
        self._profiles.clear()

    def _make_factor(self, width: int) -> None:
        self._known.make_factor(width)
        self._profiles = {key: value for key, value in self._profiles.items() if key[1] == 0}

    @property
    def _widest(self) -> int:
        """Columns of a sketch for a global part."""
        return min(self._num_rows, max(_FIRST_WIDTH, self._known.affordable))

    @property
    def _most_columns(self) -> int:
        """Columns of a sample."""
        return max(_COLUMNS, min(_MOST_COLUMNS, self._known.affordable))

    def run(self, tolerance: float, global_rank: int | None, max_floats: int | None) -> Prepared:
        """Choose."""
        self._grow_sample(_COLUMNS if self._num_rows < _MANY else _COLUMNS // 2)
        if global_rank:
            self._make_factor(min(self._num_rows, num_columns_for(global_rank)))
        if self._num_rows < 2:
            global_rank = 0
        rank = None if global_rank is None else min(global_rank, self._known.factor.shape[1])
        if rank is not None and len(self._trees) == len(self._leaf_sizes) == 1:
            if max_floats is None:
                only = Candidate(rank, self._leaf_sizes[0], next(iter(self._trees)), 0)
                return self._finish(None, only)
        if max_floats is None:
            found = self._choose(tolerance or _DEFAULT_TOLERANCE, rank)
        else:
            found, tolerance = self._choose_within(max_floats, tolerance, rank)
        plan = Plan(tolerance, self._source.shape[0], found[0], tuple(found[1:]))
        return self._finish(plan, found[0])

    def _choose_within(
        self, max_floats: int, least: float, rank: int | None
    ) -> tuple[list[Candidate], float]:
        """The most accurate way that takes no more floats, and its tolerance."""
        tolerance = max(_DEFAULT_TOLERANCE, least)
        for number in range(_STEPS):
            # The tree alone shows about what is possible; its place is found at less expense.
            alone = rank is None and number < _STEPS // 2
            found = self._choose(tolerance, 0 if alone else rank)
            ratio = found[0].floats / max_floats
            if not alone and (abs(ratio - 1) < _NEAR or (ratio < 1 and tolerance <= least)):
                break
            step = tolerance_step(found[0].floats, max_floats)
            tolerance = min(max(tolerance * step, least), 1.0)
        best = found[0]
        if rank is None and best.leaf_size == 0 and tolerance > least:
            most = max_floats // self._num_rows
            if most > best.global_rank:  # what is left may as well be used
                self._make_factor(min(math.ceil(_USABLE * most), self._widest))
            most = min(most, self._known.factor.shape[1])
            found[0] = replace(best, global_rank=most, floats=most * self._num_rows)
            tolerance = self._known.left(most)
        return found, tolerance

    def _choose(self, tolerance: float, rank: int | None) -> list[Candidate]:
        """The best way for every global rank that was looked at, best first."""
        if rank is not None:
            # Estimates that are too small alike for all orderings tell them apart as well.
            return self._rank([rank], tolerance, patient=len(self._leaf_sizes) > 1)
        found = self._rank([0], tolerance)
        width = max(_FIRST_WIDTH, self._known.sketch[0].shape[1])
        while True:
            # A global part alone must not take more than what is known to do.
            useful = math.ceil(_USABLE * found[0].floats / self._num_rows) + 1
            drawn = self._known.sketch[0].shape[1]
            if width > drawn:
                width = min(width, max(useful, drawn), self._widest)
                self._make_factor(width)
            rank = self._known.factor.shape[1]
            limit = min(int(width / _USABLE), rank)
            is_last = width >= min(useful, self._widest) or rank < _FULL * width
            alone = self._known.rank_for(_SAFETY * tolerance, limit)
            if is_last or not limit < alone < found[0].floats / self._num_rows:
                grid = {0, limit // 4, limit // 2, limit}
                if alone <= limit:
                    grid = {rank for rank in grid if rank < alone} | {int(alone)}
                found = self._rank(sorted(grid), tolerance)
            best = found[0]
            hopeful = limit < alone < best.floats / self._num_rows
            if is_last or not (hopeful or (best.leaf_size and 2 * best.global_rank > limit)):
                return found
            factor = max(1.5, _USABLE * _BEYOND * alone / width) if hopeful else math.inf
            width = math.ceil(min(factor, 3.0) * width)

    def _rank(
        self, ranks: Sequence[int], tolerance: float, patient: bool = True
    ) -> list[Candidate]:
        """The best way for every global rank, best first; with more columns if that needs them."""
        while True:
            found = self._evaluate(ranks, tolerance)
            if found[0][1] or not patient or self._known.num_columns >= self._most_columns:
                return [candidate for candidate, _ in found]
            self._grow_sample(min(2 * self._known.num_columns, self._most_columns))

    def _evaluate(self, ranks: Sequence[int], tolerance: float) -> list[tuple[Candidate, bool]]:
        """The best way for every global rank, best first, and whether that is certain."""
        found = []
        for rank in ranks:
            options = [self._best_leaves(name, rank, tolerance) for name in self._names(tolerance)]
            found.append(min(options, key=lambda option: option[0].floats))
        return sorted(found, key=lambda option: option[0].floats)

    def _names(self, tolerance: float) -> list[str]:
        """Orderings to look at: once there is a global part, the best without it."""
        names = list(self._trees)
        if len(names) == 1 or self._known.factor.shape[1] == 0:
            return names
        return [min(names, key=lambda name: self._best_leaves(name, 0, tolerance)[0].floats)]

    def _depth(self, leaf_size: int, tree: ClusterTree) -> int:
        return min(depth_for(self._source.shape[0], leaf_size), tree.depth)

    def _best_leaves(self, name: str, rank: int, tolerance: float) -> tuple[Candidate, bool]:
        """The best size of leaves, and whether samples had columns enough to tell."""
        shared = rank * self._num_rows
        if self._known.left(rank) <= _SAFETY * tolerance:
            return Candidate(rank, 0, "none", shared), True
        profile = self._trial(name, rank, tolerance)
        best: Candidate | None = None
        for leaf_size in self._leaf_sizes:
            depth = self._depth(leaf_size, self._trees[name])
            floats = shared + round(tree_floats(self._num_rows, depth, profile))
            if best is None or floats < best.floats:
                best = Candidate(rank, leaf_size, name, floats)
        assert best is not None
        return best, profile.certain

    def _trial(self, name: str, rank: int, tolerance: float) -> RankProfile:
        """Ranks in a few subtrees."""
        if (name, rank, tolerance) not in self._profiles:
            subtrees, known = self._subtrees[name], self._known
            levels = []
            if subtrees is not None:
                factor = known.factor[:, :rank]
                levels = subtrees.ranks(*known.sample, factor, tolerance, known.norm)
            self._profiles[name, rank, tolerance] = self._profile(levels)
        return self._profiles[name, rank, tolerance]

    def _profile(self, levels: list[TrialLevel]) -> RankProfile:
        """Of levels whose ranks are well below the number of columns."""
        most = self._known.num_columns
        known = [level for level in levels if num_columns_for(int(level.ranks.max())) <= most]
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
        length = min(_SUBTREE, 2 ** int(math.log2(max(1, order.numel() // 2))))
        if order.numel() < 2:
            return None
        leaf_length = min(_TRIAL_LEAF, length)
        return Subtrees(self._source, order, self._places, length, leaf_length, _SUBTREES)

    def _finish(self, plan: Plan | None, chosen: Candidate) -> Prepared:
        """All that the build needs for a candidate."""
        known, part = self._known, None
        factor = known.factor[:, : chosen.global_rank]
        if chosen.global_rank:
            rows, order = known.rows.sort()
            part = GlobalPart(rows, factor[order])
        share = known.left(chosen.global_rank)
        if chosen.leaf_size == 0:
            empty = ClusterTree(self._source.shape[0], known.rows[:0], 0, "none")
            return Prepared(plan, empty, 0, part, None, share, known.seconds)
        tree = self._trees[chosen.ordering]
        scores = {}
        if plan is not None and len(self._trees) > 1:
            wanted = plan.tolerance or _DEFAULT_TOLERANCE
            for name in self._trees:
                option, _ = self._best_leaves(name, chosen.global_rank, wanted)
                scores[name] = float(option.floats)
        tree = replace(tree, depth=self._depth(chosen.leaf_size, tree), scores=scores)
        inputs, outputs = known.sample
        if part is None:
            inputs, outputs = (
                torch.cat(pair, 1) for pair in zip(known.sample, known.sketch, strict=True)
            )
        else:
            outputs[:-1].addmm_(factor, factor.T @ inputs[:-1], alpha=-1)
        places = self._places[tree.permutation]
        places = torch.cat([places, places.new_full((1,), self._num_rows)])
        sketch = (inputs.index_select(0, places), outputs.index_select(0, places))
        return Prepared(plan, tree, chosen.leaf_size, part, sketch, share, known.seconds)
