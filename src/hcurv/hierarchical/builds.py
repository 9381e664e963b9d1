"""A plan, and builds of it with any tolerance: what `compress` does between checks and results."""

from __future__ import annotations

from torch import Tensor

from hcurv.hierarchical.building.checkpoint import Checkpoint
from hcurv.hierarchical.building.construct import (
    BuildSettings,
    BuildStart,
    Construction,
    HSSStructure,
    MatrixStructure,
    SharedStructure,
    construct,
)
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.shared_rest import OwnEntries, SharedRest
from hcurv.hierarchical.building.size_forecast import WantedFloats
from hcurv.hierarchical.building.sketch import RandomProducts
from hcurv.hierarchical.building.storage_fit import fit_storage
from hcurv.hierarchical.matrix.distributed import padded
from hcurv.hierarchical.near_field.matrix import NearFieldStructure
from hcurv.hierarchical.options import Options
from hcurv.hierarchical.parts.global_part import GlobalPart, Remainder
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.plan import StorageCurve
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.planning.ordering import choose_tree, default_leaf_size
from hcurv.hierarchical.planning.planner import prepare
from hcurv.hierarchical.tree.cluster_tree import cluster
from hcurv.operators import EntrySource
from hcurv.ranks import OneRank
from hcurv.sources import structural_orders

__all__ = ["Builds"]

# If several builds may be needed, so many floats of random products are kept for the next one:
# 1 GB in single precision.
_KEPT_FLOATS = 2**28


class Builds:
    """A plan, and builds of it with any tolerance.

    Args:
        source: the matrix.
        diagonal: its diagonal.
        options: what is asked for, with a tolerance in the Frobenius norm.
        allowed: number of floats that are allowed, or None.
        phases: where to count the time.
        ranks: the ranks that share the matrix.
        saved: where plan and builds are saved.

    Attributes:
        start: what was planned.
    """

    def __init__(
        self,
        source: EntrySource,
        diagonal: Tensor,
        options: Options,
        allowed: int | None,
        phases: Phases,
        ranks: OneRank,
        saved: Checkpoint,
    ) -> None:
        assert options.tolerance is not None
        self._least, self._allowed, self._phases = options.tolerance, allowed, phases
        self._saved, plan = saved, saved.next_plan()
        start = None if plan is None else plan.load()
        if start is None:
            with phases.timed("planning"):
                start = _plan(source, diagonal, options, allowed, phases, ranks)
            if plan is not None:
                plan.save(start)
        self.start = start
        self._rest = _rest_of(source, self.start, diagonal)
        nodes = None
        structure: MatrixStructure = HSSStructure()
        if isinstance(self._rest, SharedRest):
            nodes = NodeShare.of_tree(self._rest.share, self.start.tree)
            structure = SharedStructure(nodes)
        elif options.near_budget:
            structure = NearFieldStructure(options.near_budget, options.distance, options.seed)
        self._products = None
        if options.method == "sketch":
            is_only = allowed is None and options.damping is None
            with phases.timed("samples"):
                self._products = _products_for(
                    self._rest, self.start, nodes, options.seed + 2, 0 if is_only else _KEPT_FLOATS
                )
        self._settings = BuildSettings(
            structure,
            options.max_rank,
            options.distance,
            options.damping,
            options.damped_tolerance,
            options.seed,
            options.workspace,
            nodes,
        )

    def build(self, tolerance: float, wanted: WantedFloats | None = None) -> Construction:
        """Build once.

        Raises:
            MisfitError: the matrix is likely to take other numbers of floats than are wanted.
        """
        part = self.start.global_part
        if wanted is not None and part is not None:
            wanted = wanted.without(part.num_stored)
        return construct(
            self._rest,
            self.start,
            self._products,
            tolerance,
            self._settings,
            self._phases,
            self._saved.next_build(),
            wanted,
        )

    def first(self) -> Construction:
        """Build with the tolerance that was planned for, until the result fits."""
        plan = self.start.plan
        tolerance = self._least if plan is None else plan.tolerance
        if self._allowed is None or not self.start.tree.has_clusters:
            return self.build(tolerance)
        curve = StorageCurve() if plan is None else StorageCurve(plan.decay)
        size = self.start.tree.size
        return fit_storage(self.build, tolerance, self._allowed, self._least, size, curve)


def _rest_of(source: EntrySource, start: BuildStart, diagonal: Tensor) -> EntrySource:
    """What the global part leaves of the matrix, as a source."""
    part, rows = start.global_part, start.rows
    if rows is not None and rows.is_split:
        assert not isinstance(part, GlobalPart)
        return SharedRest(source, rows, part, diagonal)
    assert not isinstance(part, SharedPart)
    return source if part is None else Remainder(source, part, diagonal)


def _products_for(
    rest: EntrySource, start: BuildStart, nodes: NodeShare | None, seed: int, max_kept: int
) -> RandomProducts:
    """The random products that a tree is built from: own rows, if ranks share the tree."""
    sketch, held_out, share = start.sketch, start.held_out, RowShare(start.tree.permutation)
    if isinstance(rest, SharedRest) and nodes is not None:
        if nodes.is_shared:
            own = OwnEntries(rest)
            return RandomProducts(own, rest.share, seed, sketch, held_out, max_kept)
        # The tree is small, and every rank builds all of it.
        sketch, held_out = (_whole(rest.share, columns) for columns in (sketch, held_out))
    return RandomProducts(rest, share, seed, sketch, held_out, max_kept)


def _whole(share: RowShare, columns: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Random vectors and their products with all rows, from the own ones."""
    if columns is None:
        return None
    return padded(share.whole(columns[0][:-1])), padded(share.whole(columns[1][:-1]))


def _plan(
    source: EntrySource,
    diagonal: Tensor,
    options: Options,
    allowed: int | None,
    phases: Phases,
    ranks: OneRank,
) -> BuildStart:
    """Choose global rank, leaf size and ordering, whichever are left open."""
    ordering, tolerance = options.ordering, options.tolerance
    assert tolerance is not None
    orders = structural_orders(source)
    if options.method == "sketch":
        return prepare(
            source,
            diagonal,
            tolerance,
            leaf_size=options.leaf_size,
            ordering=ordering,
            global_rank=options.global_rank,
            max_floats=allowed,
            keep_diagonal=options.damping is not None,
            workspace=options.workspace,
            seed=options.seed,
            orders=orders,
            phases=phases,
            ranks=ranks,
        )
    leaf_size = options.leaf_size or default_leaf_size(tolerance)
    phases.describe("planning: ordering the rows")
    if isinstance(ordering, str) and ordering == "auto":
        tree = choose_tree(source, leaf_size, tolerance, diagonal, options.seed, orders)
    else:
        tree = cluster(
            source,
            leaf_size=leaf_size,
            ordering=ordering,
            seed=options.seed,
            diagonal=diagonal,
            orders=orders,
        )
    return BuildStart(None, tree, leaf_size)
