"""hcurv.compress: any symmetric positive semi-definite matrix into an HMatrix."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hcurv.hierarchical.building.checkpoint import Checkpoint
from hcurv.hierarchical.building.construct import DEFAULT_WORKSPACE, Construction
from hcurv.hierarchical.building.damped_error import (
    badness,
    damped_step,
    frobenius_tolerance,
    is_met,
)
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import FIRST_RANK, num_columns_for
from hcurv.hierarchical.building.shortfall import CompressionWarning, warn_of_shortfall
from hcurv.hierarchical.building.storage_fit import max_floats
from hcurv.hierarchical.builds import Builds
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.options import FINEST, Options, check_options
from hcurv.hierarchical.planning.ordering import default_leaf_size
from hcurv.hierarchical.planning.products_alone import construct_from_products
from hcurv.hierarchical.scaling import scale_of, scaled, unscaled
from hcurv.hierarchical.tree.cluster_tree import Distance, depth_for
from hcurv.layout import layout_of
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.precision import full_precision
from hcurv.ranks import OneRank, ranks_of
from hcurv.sources import MatrixProduct, as_products, as_source, has_entries, ranks_behind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CompressionWarning", "compress"]

# With a damping, at most so many builds are made until the damped error is small enough.
_MAX_DAMPED_BUILDS = 4


@full_precision
def compress(
    source: EntrySource | MatrixProduct | Tensor,
    *,
    accuracy: Literal["low", "high"] | None = None,
    tolerance: float | None = None,
    leaf_size: int | None = None,
    max_rank: int | None = None,
    global_rank: int | Literal["auto"] = "auto",
    near_budget: float = 0.0,
    max_storage: float | None = None,
    ordering: str | Tensor = "auto",
    method: Literal["auto", "sketch", "neighbors"] = "auto",
    distance: Distance = "angle",
    damping: float | None = None,
    workspace: int = DEFAULT_WORKSPACE,
    seed: int = 0,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
    checkpoint: str | PathLike[str] | None = None,
) -> HMatrix:
    """Compress a symmetric positive semi-definite matrix into a hierarchical one.

    Args:
        source: a `GaussNewton`, sampled entries, a dense tensor, or any object with the
            `EntrySource` protocol. It may further offer ``@`` (products), ``blocks(rows, cols)``
            (many blocks at once) and ``orders()`` (orders of its rows by name). An object with
            products and no entries (``shape``, ``dtype``, ``device`` and ``@``), such as an
            operator of another library, becomes a global part alone.
        accuracy: a preset with the paper's settings: "low" (leaves of 128, ranks up to 128,
            tolerance 5e-2) or "high" (1024, 1024, 5e-4). The next three arguments override it.
        tolerance: relative error ‖H − A‖_F/‖H‖_F to aim at, which is right for products; 0 for as
            accurate as rounding allows. With ``damping`` it has another meaning, see there.
        leaf_size: largest number of rows of a leaf. If neither it nor a preset is given, it is
            chosen.
        max_rank: rank cap. Without it, and without a preset, the tolerance alone decides.
        global_rank: number of columns of a global part V Vᵀ, which is subtracted before the rest is
            compressed in a tree. 0 means none; "auto" takes as many as make the whole smallest
            (``A.plan`` shows the alternatives). It needs products; without them it is 0.
        near_budget: share of the leaves that may be near to a leaf. Blocks between near leaves,
            which hold many nearest neighbours of each other's rows, are stored exactly. This is for
            products: before such a matrix can be factorized, it is compressed once more.
        max_storage: largest number of floats to store, as a share of N² (like `compression_rate`).
            The error is then about the smallest that this allows, but not below ``tolerance`` if
            that is given. No more builds are made once one of them uses most of it.
        ordering: "angle" or "gram" (the paper's distances), "natural", a name that the source
            offers, a permutation of the rows, or "auto" to choose the one that needs least storage.
        method: "sketch" needs products with the source, "neighbors" needs entries only (the
            paper's way); "auto" takes the sketch if the source offers products.
        distance: distance of nearest neighbours, for ``method="neighbors"`` and the near field.
        damping: λ > 0, for a matrix to solve with, which `A.factorize` is then given. Now
            ``tolerance`` is the relative error of (A + λI)⁻¹, in the terms of its use: of the
            variances jᵀ (A + λI)⁻¹ j of rows j of a root of H, such as the Jacobian of a network's
            outputs. It is 1e-2 if it is not given. A + λI is positive definite for this λ and any
            larger one, and the diagonal of H is always kept.
        workspace: about how many bytes random products and a global part may take while they are
            made, besides what the source itself uses. It bounds the rank of a global part that can
            be considered for very large matrices. Entries that samples of a tree are taken from
            take at most half of it.
        seed: seed of everything random. The result is a function of source, arguments and seed.
        progress: show on stderr what is being done, in planning and building, and for how long.
        process_group: a group of `torch.distributed`, whose ranks share the matrix, the work and
            the memory: the result is a `DistributedHMatrix`. It is not needed for a source that is
            itself spread over ranks. Any other source is one that every rank has to itself. All
            ranks have to pass the same arguments. ``workspace`` is then that of each rank.
        checkpoint: a folder, in which the plan and what was built is saved after each level of the
            tree. If the compression is interrupted, the same call goes on from there, and gives
            the same matrix. The folder is made if there is none, and removed at the end.

    Returns:
        The compressed matrix; ``estimated_error`` is its relative error, estimated on random
        vectors that were not used to build it. With a damping, ``variance_error`` and
        ``damped_error`` are estimates of what the compression does to (A + λI)⁻¹.

    Raises:
        TypeError, ValueError: the source is not such a matrix, an option has no valid value, or
            nothing fits into ``max_storage`` (the message names the smallest value that works).
        InsufficientMemoryError: the result would not fit into free memory.
        FileFormatError: the checkpoint is damaged, or belongs to another compression.

    Warns:
        CompressionWarning: the estimated error is well above the tolerance. The message says why,
            and what to do.

    Examples:
        >>> A = hcurv.compress(H, tolerance=1e-2)
        >>> bool((A @ b - H @ b).norm() < 0.05 * (H @ b).norm())
        True

        For solves, variances and log-determinants, compress for the damping that they use:

        >>> A = hcurv.compress(H, damping=1e-2, tolerance=1e-2)
        >>> x, exact = A.factorize(1e-2).solve(H @ b), H.factorize(1e-2).solve(H @ b)
        >>> bool((x - exact).norm() < 0.05 * exact.norm())
        True

        A long compression that may be interrupted goes on when the same call is made again:

        >>> A = hcurv.compress(H, tolerance=1e-2, checkpoint="A-checkpoint")
    """
    options = check_options(
        accuracy=accuracy,
        tolerance=tolerance,
        leaf_size=leaf_size,
        max_rank=max_rank,
        global_rank=global_rank,
        near_budget=near_budget,
        max_storage=max_storage,
        ordering=ordering,
        method=method,
        distance=distance,
        damping=damping,
        seed=seed,
        progress=progress,
        workspace=workspace,
    )
    ranks = ranks_behind(source)
    is_private = ranks.size == 1
    if is_private:
        ranks = ranks_of(process_group)
    ranks.same(**vars(options))
    with torch.no_grad(), closing(Phases(progress and ranks.first)) as phases:
        scale = 1.0
        if not has_entries(source) and isinstance(source, MatrixProduct):
            _check_products_alone(ranks, checkpoint)
            built = _compress_products(source, options, phases)
        else:
            with ranks.agreed():
                matrix = as_source(source)
            diagonal = matrix.diagonal()
            if is_private:
                ranks.same(diagonal=diagonal)
            options = options.for_source(matrix, ranks)
            _check_checkpoint(options, checkpoint)
            # Terms that are spread over ranks are taken as they are.
            scale = scale_of(diagonal) if ranks.size == 1 else 1.0
            if options.damping is not None:
                options = replace(options, damping=options.damping / scale)
            matrix, diagonal = scaled(matrix, scale), diagonal / scale
            saved = Checkpoint(checkpoint, ranks, _asked(options), diagonal)
            built = _compress(matrix, diagonal, options, phases, ranks, saved)
            saved.remove()
    if ranks.first:
        warn_of_shortfall(built, options.max_storage is not None)
    return unscaled(built.matrix, scale).with_layout(layout_of(source))


def _check_products_alone(ranks: OneRank, checkpoint: str | PathLike[str] | None) -> None:
    if ranks.size > 1 or checkpoint is not None:
        raise ValueError(
            "a matrix with products and no entries is compressed in one process, without a"
            " checkpoint: leave process_group and checkpoint out, or give it diagonal() and"
            " block(rows, cols)"
        )


def _compress_products(source: MatrixProduct, options: Options, phases: Phases) -> Construction:
    """Make a global part of a matrix without entries."""
    options.require_no_tree(type(source).__name__)
    operator = as_products(source, options.seed)
    if options.tolerance is None and options.global_rank is not None:
        options = replace(options, tolerance=0.0)  # a number of columns is an accuracy by itself
    options, max_rank = options.for_source(operator, OneRank()), None
    if options.max_storage is not None:
        max_rank = min(operator.shape[0], int(options.max_storage * operator.shape[0]))
        if max_rank == 0:
            least = 1 / operator.shape[0]
            raise ValueError(
                f"max_storage={options.max_storage:g} allows not even one column; the smallest"
                f" value is {least:.3g}"
            )
    tolerance = options.tolerance
    assert tolerance is not None
    if options.global_rank is None:
        tolerance = max(tolerance, FINEST * torch.finfo(operator.dtype).eps)
    return construct_from_products(
        operator,
        tolerance,
        global_rank=options.global_rank,
        max_rank=max_rank,
        workspace=options.workspace,
        seed=options.seed,
        phases=phases,
    )


def _check_checkpoint(options: Options, checkpoint: str | PathLike[str] | None) -> None:
    if checkpoint is not None and (options.method != "sketch" or options.near_budget):
        raise ValueError(
            'checkpoint is for method="sketch" without a near field: use near_budget=0 and a source'
            " with products, or leave the checkpoint out"
        )


def _asked(options: Options) -> dict[str, object]:
    """What a checkpoint belongs to."""
    return {name: value for name, value in vars(options).items() if name != "progress"}


def _compress(
    source: EntrySource,
    diagonal: Tensor,
    options: Options,
    phases: Phases,
    ranks: OneRank,
    saved: Checkpoint,
) -> Construction:
    """Plan, and build until the result is as small or as accurate as is asked for."""
    num_rows = int((diagonal > 0).sum())
    with ranks.agreed():
        _require_memory(source, num_rows, options, ranks)
    allowed = None
    if options.max_storage is not None:
        # Beside a global part, a matrix for solving stores at least the diagonal of the rest.
        with_diagonal = options.damping is not None and num_rows > 0
        allowed = max_floats(
            source.shape[0],
            num_rows,
            options.max_storage,
            options.global_rank,
            2 ** depth_for(num_rows, 1) if with_diagonal else 0,
        )
    if options.damping is not None:
        built = _build_damped(source, diagonal, options, allowed, phases, ranks, saved)
    else:
        built = Builds(source, diagonal, options, allowed, phases, ranks, saved).first()
    stored, error = built.matrix.compression_rate, built.matrix.estimated_error
    phases.describe(f"compressed to {stored:.2%} of N², estimated error {error:.1e}")
    return built


def _build_damped(
    source: EntrySource,
    diagonal: Tensor,
    options: Options,
    allowed: int | None,
    phases: Phases,
    ranks: OneRank,
    saved: Checkpoint,
) -> Construction:
    """Build until (A + λI)⁻¹ is as accurate as is asked for, and A + λI positive definite."""
    damping, wanted = options.damping, options.tolerance
    assert damping is not None
    assert wanted is not None
    finest, tolerance = FINEST * torch.finfo(source.dtype).eps, 0.0
    if wanted:
        phases.describe("planning: effective dimension")
        with phases.timed("planning"):
            tolerance = frobenius_tolerance(source, diagonal, damping, wanted, options.seed)
            tolerance = max(tolerance, finest)
    elif allowed is not None:
        tolerance = finest
    builds: Builds | None = None
    best: Construction | None = None
    for _ in range(_MAX_DAMPED_BUILDS):
        if builds is None or not builds.start.tree.has_clusters:
            # A global part with a diagonal has to be planned anew to become more accurate.
            own = replace(options, tolerance=tolerance, damped_tolerance=wanted or None)
            builds = Builds(source, diagonal, own, allowed, phases, ranks, saved)
            built = builds.first()
        else:
            built = builds.build(tolerance)
        built = built.measured()
        record = built.matrix.record
        if best is None or badness(record.damped_error) < badness(best.matrix.record.damped_error):
            best = built
        is_final = allowed is not None or record.num_capped > 0 or tolerance <= finest
        if is_final or is_met(record.damped_error, wanted):
            break
        tolerance = max(finest, tolerance * damped_step(record.damped_error, wanted))
    assert best is not None
    is_safe = is_met(best.matrix.record.damped_error, math.inf)
    return best if is_safe else best.repaired()


def _require_memory(source: EntrySource, num_kept: int, options: Options, ranks: OneRank) -> None:
    """Check that there is memory for the least that is needed: leaf blocks, the first samples."""
    assert options.tolerance is not None
    leaf_size = options.leaf_size or default_leaf_size(options.tolerance)
    depth = depth_for(num_kept, leaf_size)
    width = -(-num_kept // 2**depth)
    floats = 2**depth * width**2
    if options.method == "sketch" and depth:
        rank = min(FIRST_RANK, width if options.max_rank is None else options.max_rank)
        floats += 2 * num_kept * num_columns_for(rank)
    require_bytes(
        floats // ranks.size * source.dtype.itemsize,
        source.device,
        f"compressing a matrix of N = {source.shape[0]} with leaves of {leaf_size}",
        ("choose a smaller leaf_size or max_rank", "use float32"),
    )
