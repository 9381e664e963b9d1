"""hcurv.compress: any symmetric positive semi-definite matrix into an HMatrix."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Literal

import torch
from torch import Tensor

from hcurv.hierarchical.building.construct import (
    BuildSettings,
    BuildStart,
    Construction,
    HSSStructure,
    MatrixStructure,
    construct,
)
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sampler import FIRST_RANK, num_columns_for
from hcurv.hierarchical.building.sketch import RandomProducts
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.near_field.matrix import NearFieldStructure
from hcurv.hierarchical.options import Options, check_options
from hcurv.hierarchical.parts.global_part import Remainder
from hcurv.hierarchical.parts.plan import tolerance_step
from hcurv.hierarchical.planning.ordering import choose_tree, default_leaf_size
from hcurv.hierarchical.planning.planner import prepare
from hcurv.hierarchical.tree.cluster_tree import Distance, cluster, depth_for
from hcurv.layout import layout_of
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import as_source, structural_orders

__all__ = ["CompressionWarning", "compress"]

# With max_storage, at most so many builds try to make better use of the storage, ...
_MAX_IMPROVEMENTS = 2
# ... and at most so many builds are made until one fits.
_MAX_BUILDS = 12
# Another build aims at this share of max_storage, because its size is known to a few per cent only.
_AIM = 0.94
# A build that uses this share of max_storage is good enough.
_WELL_USED = 0.85
# A tolerance within this factor of the smallest one is not worth another build.
_CLOSE = 1.1
# If several builds may be needed, so many floats of random products are kept for the next one:
# 1 GB in single precision.
_KEPT_FLOATS = 2**28
# The estimated error is warned of beyond these multiples of the tolerance. It is known to about
# 20 %, because it is measured on 16 random vectors. Without a rank cap the multiple is larger,
# since the user could do nothing but accept the error or use another precision.
_WARN_CAPPED = 1.5
_WARN_UNCAPPED = 4.0
# Errors before and after a repair of definiteness are measured on the same vectors, so that a
# smaller increase counts.
_WARN_REPAIRED = 1.2


class CompressionWarning(UserWarning):
    """The compressed matrix is less accurate than asked for.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", hcurv.CompressionWarning)
        ...     rough = hcurv.compress(H, tolerance=1e-4, max_rank=1, leaf_size=8, global_rank=0)
        >>> rough.estimated_error > 1e-4
        True
    """


def compress(
    source: EntrySource | Tensor,
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
    positive_definite: bool = False,
    damping: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> HMatrix:
    """Compress a symmetric positive semi-definite matrix into a hierarchical one.

    Args:
        source: a `GaussNewton`, sampled entries, a dense tensor, or any object with the
            `EntrySource` protocol. It may further offer ``@`` (products), ``blocks(rows, cols)``
            (many blocks at once) and ``orders()`` (orders of its rows by name).
        accuracy: a preset with the paper's settings: "low" (leaves of 128, ranks up to 128,
            tolerance 5e-2) or "high" (1024, 1024, 5e-4). The next three arguments override it.
        tolerance: relative error ‖H − A‖_F/‖H‖_F to aim at; 0 for as accurate as rounding allows.
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
            The error is then the smallest that this allows, but not below ``tolerance`` if that is
            given.
        ordering: "angle" or "gram" (the paper's distances), "natural", a name that the source
            offers, a permutation of the rows, or "auto" to choose the one that needs least storage.
        method: "sketch" needs products with the source, "neighbors" needs entries only (the
            paper's way); "auto" takes the sketch if the source offers products.
        distance: distance of nearest neighbours, for ``method="neighbors"`` and the near field.
        positive_definite: make sure that A + damping·I is positive definite, for this damping and
            any larger one, by small changes of A where compression errors are in the way.
        damping: the positive damping that ``positive_definite`` needs.
        seed: seed of everything random. The result is a function of source, arguments and seed.
        progress: show on stderr what is being done, in planning and building, and for how long.

    Returns:
        The compressed matrix; ``estimated_error`` is its relative error, estimated on random
        vectors that were not used to build it.

    Raises:
        TypeError, ValueError: the source is not such a matrix, an option has no valid value, or
            nothing fits into ``max_storage`` (the message names the smallest value that works).
        InsufficientMemoryError: the result would not fit into free memory.

    Warns:
        CompressionWarning: the estimated error is well above the tolerance. The message says why,
            and what to do.

    Examples:
        >>> A = hcurv.compress(H, tolerance=1e-2)
        >>> bool((A @ b - H @ b).norm() < 0.05 * (H @ b).norm())
        True
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
        positive_definite=positive_definite,
        damping=damping,
        seed=seed,
        progress=progress,
    )
    with torch.no_grad(), closing(Phases(progress)) as phases:
        matrix = as_source(source)
        built = _compress(matrix, options.for_source(matrix), phases)
    _warn(built)
    return built.matrix.with_layout(layout_of(matrix))


def _compress(source: EntrySource, options: Options, phases: Phases) -> Construction:
    """Plan, and build until the result fits into the storage that is allowed."""
    assert options.tolerance is not None
    diagonal = source.diagonal()
    _require_memory(source, int((diagonal > 0).sum()), options)
    max_floats = _max_floats(source, diagonal, options)
    with phases.timed("planning"):
        start = _plan(source, diagonal, options, max_floats, phases)
    part = start.global_part
    rest = source if part is None else Remainder(source, part, diagonal)
    products = None
    if options.method == "sketch":
        kept = 0 if max_floats is None else _KEPT_FLOATS
        with phases.timed("samples"):
            order = start.tree.permutation
            products = RandomProducts(rest, order, options.seed + 1, start.sketch, kept)
    structure: MatrixStructure = HSSStructure()
    if options.near_budget:
        structure = NearFieldStructure(options.near_budget, options.distance, options.seed)
    settings = BuildSettings(
        structure, options.max_rank, options.distance, options.damping, options.seed
    )

    def build(tolerance: float) -> Construction:
        return construct(rest, start, products, tolerance, settings, phases)

    built = build(options.tolerance if start.plan is None else start.plan.tolerance)
    if max_floats is not None and start.tree.num_kept:
        built = _fit(built, max_floats, options.tolerance, build)
    stored, error = built.matrix.compression_rate, built.matrix.estimated_error
    phases.describe(f"compressed to {stored:.2%} of N², estimated error {error:.1e}")
    return built


def _max_floats(source: EntrySource, diagonal: Tensor, options: Options) -> int | None:
    """The number of floats that may be stored; refused if nothing can be that small."""
    if options.max_storage is None:
        return None
    size, num_rows = source.shape[0], int((diagonal > 0).sum())
    max_floats = int(options.max_storage * size**2)
    rank = options.global_rank or 1
    if rank * num_rows <= max_floats:
        return max_floats
    smallest = _share_for(rank * num_rows, size)
    if options.global_rank:
        raise ValueError(
            f"global_rank={rank} takes {rank * num_rows} floats, more than the {max_floats} of N²"
            f" = {size**2} that max_storage={options.max_storage:g} allows. Use global_rank="
            f"{max_floats // num_rows} or less, or max_storage={smallest:g} or more"
        )
    raise ValueError(
        f"max_storage={options.max_storage:g} allows {max_floats} of N² = {size**2} floats, but"
        f" the smallest compressed matrix has one float for each of {num_rows} nonzero rows. Use"
        f" max_storage={smallest:g} or more"
    )


def _share_for(num_floats: int, size: int) -> float:
    """The smallest ``max_storage`` with three digits that allows so many floats."""
    share = num_floats / size**2
    unit = 10.0 ** (math.floor(math.log10(share)) - 2)
    steps = math.floor(share / unit)
    while int((rounded := float(f"{steps * unit:.3g}")) * size**2) < num_floats:
        steps += 1
    return rounded


def _fit(
    first: Construction, max_floats: int, least: float, build: Callable[[float], Construction]
) -> Construction:
    """Build again until the result fits into what is allowed, and makes use of it.

    Plans are estimates, so that a first build may be too large or needlessly inaccurate.

    Args:
        first: the first build.
        max_floats: number of floats that are allowed.
        least: smallest tolerance that is worth a build.
        build: builds with another tolerance.

    Raises:
        ValueError: no build was small enough.
    """
    result, best, tolerance = first, None, first.matrix.record.tolerance
    smallest = first.matrix.num_stored
    for attempt in range(_MAX_BUILDS):
        stored = result.matrix.num_stored
        smallest = min(smallest, stored)
        if stored <= max_floats and (best is None or stored > best.matrix.num_stored):
            best = result
        is_good = attempt >= _MAX_IMPROVEMENTS or stored >= _WELL_USED * max_floats
        if stored <= max_floats and (is_good or tolerance <= _CLOSE * least):
            break
        if (best is not None and attempt >= _MAX_IMPROVEMENTS) or tolerance >= 1:
            break
        step = tolerance_step(stored, int(_AIM * max_floats))
        if best is None:
            step = max(step, 1 + attempt / 4)  # small steps may never get there
        tolerance = min(max(tolerance * step, least), 1.0)
        result = build(tolerance)
    if best is None:
        size = first.matrix.shape[0]
        raise ValueError(
            f"max_storage={max_floats / size**2:.3g} is too small for these options: the smallest"
            f" matrix that was built stores {smallest} floats. Use max_storage="
            f"{_share_for(smallest, size):g} or more, a smaller leaf_size or global_rank, or"
            ' leave them to be chosen (leaf_size=None, global_rank="auto")'
        )
    return best


def _plan(
    source: EntrySource,
    diagonal: Tensor,
    options: Options,
    max_floats: int | None,
    phases: Phases,
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
            max_floats=max_floats,
            seed=options.seed,
            orders=orders,
            phases=phases,
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


def _require_memory(source: EntrySource, num_kept: int, options: Options) -> None:
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
        floats * source.dtype.itemsize,
        source.device,
        f"compressing a matrix of N = {source.shape[0]} with leaves of {leaf_size}",
        ("choose a smaller leaf_size or max_rank", "use float32"),
    )


def _warn(built: Construction) -> None:
    """Warn of an error that is larger than asked for."""
    matrix, record = built.matrix, built.matrix.record
    error, wanted, before = record.estimated_error, record.tolerance, built.error_before_repair
    if wanted == 0:
        return
    is_repair = before is not None and error > _WARN_REPAIRED * max(wanted, before)
    factor = _WARN_CAPPED if record.num_capped else _WARN_UNCAPPED
    if error <= factor * wanted and not is_repair:
        return
    if is_repair:
        reason = (
            f"making A + {record.damping:.1e}·I positive definite raised it from {before:.1e}. Use"
            " a larger damping, or a smaller tolerance, which leaves less to repair"
        )
    elif record.num_capped:
        reason = (
            f"the rank cap {record.max_rank} held back {record.num_capped} of"
            f" {2 ** (matrix.tree.depth + 1) - 2} nodes. Raise max_rank or leaf_size, try another"
            " ordering, or accept a larger tolerance"
        )
    else:
        reason = (
            f"{matrix.dtype} rounding or noise in the entries is in the way. Use float64 or accept"
            " a larger tolerance"
        )
    warnings.warn(
        f"the estimated relative error is {error:.1e}, asked for was {wanted:.1e}: {reason}.",
        CompressionWarning,
        stacklevel=3,
    )
