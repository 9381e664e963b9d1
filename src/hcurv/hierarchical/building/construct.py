"""From a plan to a matrix: build the tree, estimate its errors, repair definiteness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hcurv.hierarchical.building.build import Builder, BuiltBlocks
from hcurv.hierarchical.building.checkpoint import BuildCheckpoint
from hcurv.hierarchical.building.damped_error import estimate_damped_error
from hcurv.hierarchical.building.error_budget import ErrorBudget
from hcurv.hierarchical.building.neighbor_columns import NeighborSampler
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import Sampler
from hcurv.hierarchical.building.size_forecast import WantedFloats
from hcurv.hierarchical.building.sketch import RandomProducts, SketchSampler
from hcurv.hierarchical.matrix.distributed import DistributedHMatrix, make_top
from hcurv.hierarchical.matrix.hmatrix import BuildRecord, HMatrix, completed
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.levels import LeafBlocks, Level
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.solving.definite import make_definite
from hcurv.hierarchical.tree.block_pattern import BlockPattern, SiblingPattern
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, Distance
from hcurv.operators import EntrySource

__all__ = [
    "DEFAULT_WORKSPACE",
    "BuildSettings",
    "BuildStart",
    "Construction",
    "HSSStructure",
    "MatrixStructure",
    "SharedStructure",
    "construct",
]

# Bytes that a build and its plan may take for random products, if nothing else is said.
DEFAULT_WORKSPACE = 2**32
# Entries that samples are taken from may take this share of the workspace.
_ENTRIES_SHARE = 0.5

# The probes of the damped error have a seed of their own, so that nothing was built from them.
_PROBE_SEED = 7919


@dataclass(frozen=True)
class BuildStart:
    """What a build starts from.

    Attributes:
        plan: what was chosen; None if nothing was left open.
        tree: clusters of the rows; without any rows if there shall be no tree, and without clusters
            if only a diagonal shall be stored.
        leaf_size: largest leaf that was asked for or chosen; 0 without a tree.
        global_part: VVᵀ, or None.
        sketch: random vectors and their products with what the global part leaves, in the order
            of the tree, as `random_products` gives them; None if there are none.
        held_out: the same, to estimate errors with.
        share: norm of what the global part leaves, over that of the matrix.
        norm: ‖H‖_F as far as it is known from products, or None.
        rows: the rows that are not zero, in tree order, and which of them are this rank's; None
            for one process.
    """

    plan: Plan | None
    tree: ClusterTree
    leaf_size: int
    global_part: GlobalPart | SharedPart | None = None
    sketch: tuple[Tensor, Tensor] | None = None
    held_out: tuple[Tensor, Tensor] | None = None
    share: float = 1.0
    norm: float | None = None
    rows: RowShare | None = None


class MatrixStructure(Protocol):
    """Which blocks a matrix stores, and the class of matrices that holds them."""

    def pattern(self, source: EntrySource, tree: ClusterTree) -> BlockPattern:
        """Which blocks of the source are dense, and which ones are coupled through bases."""

    def assemble(self, tree: ClusterTree, blocks: BuiltBlocks, dtype: torch.dtype) -> HMatrix:
        """The matrix of these blocks, without a build record and a global part."""


class HSSStructure:
    """Dense leaves, and couplings between siblings."""

    def pattern(self, source: EntrySource, tree: ClusterTree) -> BlockPattern:
        """Siblings are coupled on every level."""
        return SiblingPattern(source.device)

    def assemble(self, tree: ClusterTree, blocks: BuiltBlocks, dtype: torch.dtype) -> HMatrix:
        """An `HMatrix`."""
        return HMatrix(tree, blocks.leaves, blocks.levels, None, dtype)


@dataclass(frozen=True)
class SharedStructure(HSSStructure):
    """The same, with the subtrees on different ranks.

    Attributes:
        nodes: the nodes of this rank.
    """

    nodes: NodeShare

    def assemble(self, tree: ClusterTree, blocks: BuiltBlocks, dtype: torch.dtype) -> HMatrix:
        """A `DistributedHMatrix`."""
        nodes, device = self.nodes, tree.permutation.device
        levels = sum(level.num_stored for level in blocks.levels)
        own = torch.tensor([blocks.leaves.num_stored + levels])
        if nodes.is_shared:
            top = make_top(blocks.top, dtype, device)
            total = int(nodes.share.total(own)) + top.num_stored
            kept = blocks.levels
        else:
            top, kept = HMatrix(tree, blocks.leaves, blocks.levels, None, dtype), ()
            total = int(own)
        return DistributedHMatrix(
            tree,
            blocks.leaves,
            kept,
            None,
            dtype,
            nodes=nodes,
            node_ranks=blocks.ranks,
            top=top,
            num_tree_floats=total,
        )


@dataclass(frozen=True)
class BuildSettings:
    """What does not change from one build of a matrix to the next.

    Attributes:
        structure: which blocks to store.
        max_rank: rank cap, or None.
        distance: distance of nearest neighbours, for samples from entries alone.
        damping: λ that the matrix is compressed for, or None.
        damped_tolerance: relative error of (A + λI)⁻¹ that is asked for, or None.
        seed: seed of everything random.
        workspace: bytes that what a build is made from may take.
        nodes: the nodes that this rank builds; None for one process.
    """

    structure: MatrixStructure
    max_rank: int | None
    distance: Distance
    damping: float | None
    damped_tolerance: float | None
    seed: int
    workspace: int = DEFAULT_WORKSPACE
    nodes: NodeShare | None = None


class Construction(NamedTuple):
    """A matrix that was built.

    Attributes:
        matrix: the matrix.
        error_before_repair: its estimated error before it was made positive definite; None if it
            was not changed for that.
        measured: the same matrix with its damped error estimated, for the damping λ of the build.
        repaired: a matrix near it with A + λI positive definite, and its damped error estimated.
    """

    matrix: HMatrix
    error_before_repair: float | None
    measured: Callable[[], Construction]
    repaired: Callable[[], Construction]


def construct(
    rest: EntrySource,
    start: BuildStart,
    products: RandomProducts | None,
    tolerance: float,
    settings: BuildSettings,
    phases: Phases,
    checkpoint: BuildCheckpoint | None = None,
    wanted: WantedFloats | None = None,
) -> Construction:
    """Build the matrix of a plan.

    Args:
        rest: what the global part leaves of the matrix, as a source.
        start: tree and global part.
        products: random products with the rest to take samples from; None to sample its entries.
        tolerance: relative error of the whole matrix.
        settings: everything else.
        phases: where to count the time.
        checkpoint: where the build is saved after each level; None for nowhere.
        wanted: how many floats the tree shall take. A build that is likely to take others is given
            up; None for no limits.

    Raises:
        MisfitError: the build was given up.
    """
    tree, max_rank = start.tree, settings.max_rank
    pattern = settings.structure.pattern(rest, tree)
    relative = tolerance / max(start.share, torch.finfo(rest.dtype).eps)  # to the rest
    cap = tree.num_kept if max_rank is None else max_rank
    budget = ErrorBudget(relative, tree.depth)
    nodes = settings.nodes
    is_shared = nodes is not None and nodes.is_shared
    own_nodes = nodes if is_shared else None
    max_entries = int(_ENTRIES_SHARE * settings.workspace) // rest.dtype.itemsize
    builder = Builder(rest, tree, pattern, budget, cap, phases, own_nodes, wanted, max_entries)
    sampler: Sampler
    with phases.timed("samples"):
        if products is not None:
            sampler = SketchSampler(products)
        else:
            sampler = NeighborSampler(
                rest, tree, rest.diagonal(), settings.distance, pattern, settings.seed
            )
    is_diagonal = tree.num_kept > 0 and not tree.has_clusters
    if is_diagonal:
        blocks = _diagonal_blocks(rest, tree, nodes if is_shared else None)
    else:
        blocks = builder.build(sampler, checkpoint)
    matrix = settings.structure.assemble(tree, blocks, rest.dtype)
    has_tree = tree.num_kept > 0 or start.global_part is None

    def with_record(own: HMatrix, before: float | None) -> Construction:
        phases.describe("estimating the error")
        error = start.share
        if has_tree:
            with phases.timed("error estimate"):
                error = _estimate_error(own, sampler, start.global_part)
        record = BuildRecord(
            method="neighbors" if products is None else "sketch",
            tolerance=tolerance,
            leaf_size=start.leaf_size,
            max_rank=max_rank,
            seed=settings.seed,
            num_columns=sampler.num_columns,
            num_capped=builder.num_capped,
            estimated_error=error,
            norm=sampler.norm if start.norm is None else start.norm,
            damping=settings.damping,
            damped_tolerance=settings.damped_tolerance,
            plan=start.plan,
            seconds=dict(phases.seconds),
        )
        return finished(own, record, before)

    def finished(own: HMatrix, record: BuildRecord, before: float | None) -> Construction:
        whole = completed(own, record, start.global_part)

        def measured() -> Construction:
            assert settings.damping is not None
            phases.describe("estimating the damped error")
            with phases.timed("damped error"):
                damped = estimate_damped_error(
                    whole, rest, sampler, settings.damping, settings.seed + _PROBE_SEED
                )
            found = replace(record, damped_error=damped, seconds=dict(phases.seconds))
            return finished(own, found, before)

        def repaired() -> Construction:
            assert settings.damping is not None
            phases.describe("making the matrix positive definite")
            with phases.timed("definiteness"):
                definite = make_definite(own, settings.damping)
            if definite is own:
                return finished(own, record, before)
            return with_record(definite, record.estimated_error).measured()

        return Construction(whole, before, measured, repaired)

    return with_record(matrix, None)


def _diagonal_blocks(rest: EntrySource, tree: ClusterTree, nodes: NodeShare | None) -> BuiltBlocks:
    """The blocks of a diagonal matrix: leaves of one row, and levels of rank 0."""
    own = NodeShare(RowShare(tree.permutation)) if nodes is None else nodes
    rows, bounds = own.share.own_rows, own.leaf_bounds(tree)
    values = torch.zeros(bounds.numel() - 1, 1, 1, dtype=rest.dtype, device=rest.device)
    values[bounds.diff() > 0, 0, 0] = rest.diagonal()[rows]
    cut = 0 if own.cut is None else own.cut
    levels: list[Level] = []
    every: list[Tensor] = []
    top: list[Level] = []
    for depth in range(tree.depth, 0, -1):
        # Zeros that take no memory.
        whole = torch.zeros(1, dtype=torch.long, device=rest.device).expand(2**depth)
        if depth >= cut:
            ranks = whole[: own.num_nodes(depth)]
            levels.append(Level(ranks, 0 if levels else rows.numel(), (), ()))
            every.append(whole)
        if depth <= cut:
            top.append(Level(whole, 0, (), ()))
    shared = (tuple(every), tuple(top)) if own.is_shared else ((), ())
    return BuiltBlocks(LeafBlocks.of(bounds, values), (), tuple(levels), *shared)


def _estimate_error(
    matrix: HMatrix, sampler: Sampler, part: GlobalPart | SharedPart | None
) -> float:
    """Relative error of the matrix and a global part together, on held-out vectors."""
    inputs, products = sampler.held_out()  # products with what the global part leaves
    error = torch.linalg.vector_norm(products - matrix @ inputs, dtype=torch.float64)
    if part is not None:
        part.add_product(inputs, products)
    norm = torch.linalg.vector_norm(products, dtype=torch.float64)
    return float(error / norm) if float(norm) > 0 else float(error)
