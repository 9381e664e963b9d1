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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree, cluster, depth_for
from hcurv.hierarchical.build import num_columns_for
from hcurv.hierarchical.global_part import GlobalPart
from hcurv.hierarchical.plan import Candidate, Plan, RankProfile, tolerance_step, tree_floats
from hcurv.hierarchical.rank_trial import Subtrees, TrialLevel
from hcurv.hierarchical.sketch import random_products
from hcurv.memory import require_bytes
from hcurv.nystrom import nystrom_of_sketch, orthonormal
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
_SKETCH_FLOATS = 2**30  # of the largest
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
    """

    plan: Plan | None
    tree: ClusterTree
    leaf_size: int
    global_part: GlobalPart | None
    sketch: tuple[Tensor, Tensor] | None
    share: float


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
        self._generator = torch.Generator(source.device).manual_seed(seed)
        self._rows = next(iter(trees.values())).permutation  # random vectors are in this order
        none = torch.zeros(self._rows.numel() + 1, 0, dtype=source.dtype, device=source.device)
        self._sample = (none, none)  # vectors, products: to estimate with
        self._sketch = (none, none)  # to make the global part of
        self._factor = none[:-1]
        self._places = self._rows.new_full((source.shape[0],), -1)
        self._places[self._rows] = torch.arange(self._rows.numel(), device=source.device)
        self._subtrees = {name: self._make_subtrees(tree) for name, tree in trees.items()}
        self._known: dict[tuple[str, int, float], RankProfile] = {}
        self._lefts: list[float] | None = None

    @property
    def _num_columns(self) -> int:
        return self._sample[0].shape[1]

    def _draw(self, known: tuple[Tensor, Tensor], num_columns: int) -> tuple[Tensor, Tensor]:
        missing = num_columns - known[0].shape[1]
        if missing <= 0:
            return known
        self._require_memory(2 * (num_columns + missing), f"a sketch of {num_columns} columns")
        new = random_products(self._source, self._rows, missing, self._generator)
        return torch.cat([known[0], new[0]], 1), torch.cat([known[1], new[1]], 1)

    def _require_memory(self, num_columns: int, what: str) -> None:
        require_bytes(
            num_columns * self._rows.numel() * self._source.dtype.itemsize,
            self._source.device,
            what,
            ("choose global_rank, leaf_size and ordering yourself", "use float32"),
        )

    def _grow_sample(self, num_columns: int) -> None:
        self._sample = self._draw(self._sample, num_columns)
        self._forget()

    def _forget(self, everything: bool = True) -> None:
        """Estimates for another sample, or for another global part."""
        kept = {} if everything else {key: v for key, v in self._known.items() if key[1] == 0}
        self._known = kept
        self._lefts = None

    def _make_factor(self, width: int) -> None:
        """A global part, nearly the best of its rank, from a sketch of ``width`` columns.

        A basis of HΩ is multiplied by H once more: from the products follow eigenvalues and
        eigenvectors (Nyström), and a remainder that is positive semi-definite.
        """
        self._require_memory(4 * width, f"a global part from a sketch of {width} columns")
        self._sketch = self._draw(self._sketch, width)
        start = orthonormal(self._sketch[1][:-1, :width], rounds=1)
        whole = start.new_zeros(self._source.shape[0], start.shape[1])
        products = self._source @ whole.index_copy_(0, self._rows, start)  # type: ignore[operator]
        values, vectors = nystrom_of_sketch(start, products.index_select(0, self._rows))
        self._factor = vectors * values.sqrt()
        self._forget(everything=False)

    def run(self, tolerance: float, global_rank: int | None, max_floats: int | None) -> Prepared:
        """Choose."""
        self._grow_sample(_COLUMNS if self._rows.numel() < _MANY else _COLUMNS // 2)
        if global_rank:
            self._make_factor(min(self._rows.numel(), num_columns_for(global_rank)))
        if self._rows.numel() < 2:
            global_rank = 0
        rank = None if global_rank is None else min(global_rank, self._factor.shape[1])
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
            most = max_floats // self._rows.numel()
            if most > best.global_rank:  # what is left may as well be used
                self._make_factor(min(math.ceil(_USABLE * most), self._affordable))
            most = min(most, self._factor.shape[1])
            found[0] = replace(best, global_rank=most, floats=most * self._rows.numel())
            tolerance = math.sqrt(self._left(most) / self._left(0))
        return found, tolerance

    @property
    def _affordable(self) -> int:
        """Columns of a sketch for a global part."""
        num_rows = self._rows.numel()
        return min(num_rows, max(_FIRST_WIDTH, _SKETCH_FLOATS // (4 * num_rows)))

    def _choose(self, tolerance: float, rank: int | None) -> list[Candidate]:
        """The best way for every global rank that was looked at, best first."""
        if rank is not None:
            # Estimates that are too small alike for all orderings tell them apart as well.
            return self._rank([rank], tolerance, patient=len(self._leaf_sizes) > 1)
        num_rows = self._rows.numel()
        found = self._rank([0], tolerance)
        width = max(_FIRST_WIDTH, self._sketch[0].shape[1])
        while True:
            # A global part alone must not take more than what is known to do.
            useful = math.ceil(_USABLE * found[0].floats / num_rows) + 1
            if width > self._sketch[0].shape[1]:
                width = min(width, max(useful, self._sketch[0].shape[1]), self._affordable)
                self._make_factor(width)
            limit = min(int(width / _USABLE), self._factor.shape[1])
            is_last = width >= min(useful, self._affordable)
            is_last = is_last or self._factor.shape[1] < _FULL * width
            alone = self._global_rank_alone(tolerance, limit)
            if is_last or not limit < alone < found[0].floats / num_rows:
                found = self._rank(self._grid(limit, tolerance), tolerance)
            best = found[0]
            hopeful = limit < alone < best.floats / num_rows
            if is_last or not (hopeful or (best.leaf_size and 2 * best.global_rank > limit)):
                return found
            factor = max(1.5, _USABLE * _BEYOND * alone / width) if hopeful else math.inf
            width = math.ceil(min(factor, 3.0) * width)

    def _grid(self, limit: int, tolerance: float) -> list[int]:
        """Global ranks to look at; among them the smallest that needs no tree, if there is any."""
        grid = {0, limit // 4, limit // 2, limit}
        enough = (_SAFETY * tolerance) ** 2 * self._left(0)
        low, high = 0, limit
        if self._left(high) <= enough:
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._left(middle) <= enough else (middle + 1, high)
            grid = {rank for rank in grid if rank < low} | {low}
        return sorted(grid)

    def _rank(
        self, ranks: Sequence[int], tolerance: float, patient: bool = True
    ) -> list[Candidate]:
        """The best way for every global rank, best first; with more columns if that needs them."""
        while True:
            found = self._evaluate(ranks, tolerance)
            if found[0][1] or not patient or self._num_columns >= self._most_columns():
                return [candidate for candidate, _ in found]
            self._grow_sample(min(2 * self._num_columns, self._most_columns()))

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
        if len(names) == 1 or self._factor.shape[1] == 0:
            return names
        return [min(names, key=lambda name: self._best_leaves(name, 0, tolerance)[0].floats)]

    def _most_columns(self) -> int:
        """Columns that are affordable for an estimate."""
        by_memory = _SKETCH_FLOATS // (4 * max(1, self._rows.numel()))
        return max(_COLUMNS, min(_MOST_COLUMNS, by_memory))

    def _depth(self, leaf_size: int, tree: ClusterTree) -> int:
        return min(depth_for(self._source.shape[0], leaf_size), tree.depth)

    def _best_leaves(self, name: str, rank: int, tolerance: float) -> tuple[Candidate, bool]:
        """The best size of leaves, and whether samples had columns enough to tell."""
        num_rows = self._rows.numel()
        shared = rank * num_rows
        if self._left(rank) <= (_SAFETY * tolerance) ** 2 * self._left(0):
            return Candidate(rank, 0, "none", shared), True
        profile = self._trial(name, rank, tolerance)
        best: Candidate | None = None
        for leaf_size in self._leaf_sizes:
            depth = self._depth(leaf_size, self._trees[name])
            floats = shared + round(tree_floats(num_rows, depth, profile))
            if best is None or floats < best.floats:
                best = Candidate(rank, leaf_size, name, floats)
        assert best is not None
        return best, profile.certain

    def _trial(self, name: str, rank: int, tolerance: float) -> RankProfile:
        """Ranks in a few subtrees."""
        if (name, rank, tolerance) not in self._known:
            subtrees = self._subtrees[name]
            levels = []
            if subtrees is not None:
                norm = math.sqrt(self._left(0))
                levels = subtrees.ranks(*self._sample, self._factor[:, :rank], tolerance, norm)
            self._known[name, rank, tolerance] = self._profile(levels)
        return self._known[name, rank, tolerance]

    def _profile(self, levels: list[TrialLevel]) -> RankProfile:
        """Of levels whose ranks are well below the number of columns."""
        most = self._num_columns
        known = [level for level in levels if num_columns_for(int(level.ranks.max())) <= most]
        known = known if len(known) > 1 else levels[:2]
        ranks = [level.ranks.double() for level in known]
        num_rows = self._rows.numel()
        return RankProfile(
            num_rows,
            max(1.0, math.log2(num_rows / levels[0].length)) if levels else 1.0,
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

    def _left(self, rank: int) -> float:
        """‖H − VVᵀ‖_F², V with ``rank`` columns, times the number of columns of the sample.

        Of eigenvalues as far as they are known, else of the sample: a sample alone is uncertain
        where few eigenvalues make up most of the matrix.
        """
        if self._lefts is None:
            inputs, outputs = (part[:-1] for part in self._sample)
            rest = torch.addmm(outputs, self._factor, self._factor.T @ inputs, alpha=-1)
            last = float(torch.linalg.vector_norm(rest, dtype=torch.float64).square())
            values = torch.linalg.vector_norm(self._factor, dim=0, dtype=torch.float64).square()
            sums = values.square().flip(0).cumsum(0).flip(0) * self._num_columns + last
            self._lefts = [*sums.tolist(), last]
        return self._lefts[rank]

    def _global_rank_alone(self, tolerance: float, limit: int) -> float:
        """That needs no tree, if what is left goes on to fall exponentially."""
        if limit < 2:
            return math.inf
        left = [math.sqrt(self._left(rank) / self._left(0)) for rank in (limit // 2, limit)]
        tolerance *= _SAFETY
        if left[1] <= tolerance:
            return float(limit)
        rate = math.log(left[0] / left[1]) / (limit - limit // 2)
        if rate <= 0:
            return math.inf
        return limit + math.log(left[1] / tolerance) / rate

    def _finish(self, plan: Plan | None, chosen: Candidate) -> Prepared:
        """All that the build needs for a candidate."""
        source, part = self._source, None
        if chosen.global_rank:
            rows, order = self._rows.sort()
            part = GlobalPart(rows, self._factor[order, : chosen.global_rank])
        total = self._left(0)
        share = math.sqrt(self._left(chosen.global_rank) / total) if total > 0 else 1.0
        if chosen.leaf_size == 0:
            empty = ClusterTree(source.shape[0], self._rows[:0], 0, "none")
            return Prepared(plan, empty, 0, part, None, share)
        tree = self._trees[chosen.ordering]
        scores = {}
        if plan is not None and len(self._trees) > 1:
            wanted = plan.tolerance or _DEFAULT_TOLERANCE
            for name in self._trees:
                option, _ = self._best_leaves(name, chosen.global_rank, wanted)
                scores[name] = float(option.floats)
        tree = replace(tree, depth=self._depth(chosen.leaf_size, tree), scores=scores)
        inputs, outputs = self._sample
        if part is None:
            inputs, outputs = (
                torch.cat(pair, 1) for pair in zip(self._sample, self._sketch, strict=True)
            )
        else:
            factor = self._factor[:, : chosen.global_rank]
            outputs[:-1].addmm_(factor, factor.T @ inputs[:-1], alpha=-1)
        places = self._places[tree.permutation]
        places = torch.cat([places, places.new_full((1,), self._rows.numel())])
        sketch = (inputs.index_select(0, places), outputs.index_select(0, places))
        return Prepared(plan, tree, chosen.leaf_size, part, sketch, share)
