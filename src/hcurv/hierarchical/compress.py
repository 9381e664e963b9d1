"""hcurv.compress: any symmetric positive semi-definite matrix into an HMatrix."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hcurv.cluster_tree import Distance, cluster, depth_for
from hcurv.hierarchical.build import FIRST_RANK, Builder, Sampler, num_columns_for
from hcurv.hierarchical.definite import make_definite
from hcurv.hierarchical.global_part import GlobalPart, Remainder
from hcurv.hierarchical.interactions import near_leaves
from hcurv.hierarchical.matrix import BuildRecord, HMatrix
from hcurv.hierarchical.neighbor_columns import NeighborSampler
from hcurv.hierarchical.ordering import choose_tree, default_leaf_size
from hcurv.hierarchical.plan import tolerance_step
from hcurv.hierarchical.planner import Prepared, prepare
from hcurv.hierarchical.sketch import RandomProducts, SketchSampler
from hcurv.indexing import check_count
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import as_source, has_product

__all__ = ["CompressionWarning", "compress"]


class CompressionWarning(UserWarning):
    """The compressed matrix is less accurate than asked for."""


@dataclass(frozen=True)
class _Settings:
    leaf_size: int | None  # None to choose
    max_rank: int | None
    tolerance: float


_PRESETS = {
    "low": _Settings(leaf_size=128, max_rank=128, tolerance=5e-2),
    "high": _Settings(leaf_size=1024, max_rank=1024, tolerance=5e-4),
}
_FINEST = 10  # times machine epsilon: tolerance where storage alone is asked for
_FITS, _MOST_FITS = 2, 12  # builds to make better use of max_storage, or to fit into it at all
_AIM, _WELL_USED = 0.94, 0.85  # shares of max_storage to aim at, and to be content with
_NEAR = 1.1  # times the smallest tolerance: no other build for the rest
_WARN_BEYOND = 1.5  # times the tolerance, where a cap is to blame ...
_WARN_UNCAPPED = 4.0  # ... or where it is not


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
        accuracy: preset: "low" (leaves of 128, ranks to 128, tolerance 5e-2) or "high" (1024, 1024,
            5e-4), the paper's settings; the next three arguments override it.
        tolerance: relative error ‖H − A‖_F/‖H‖_F to aim at.
        leaf_size: largest number of rows of a leaf; chosen if neither it nor a preset is given.
        max_rank: rank cap. Without a preset there is none: the tolerance alone decides.
        global_rank: columns of a global part V Vᵀ that is taken off before the rest is compressed
            in a tree: 0 for none, "auto" for as many as make the whole smallest (``A.plan`` shows
            what was weighed). It needs products; without them it is 0.
        max_storage: most floats to store, as a share of N² (as `compression_rate`); the error is
            then the smallest that this allows, but not below ``tolerance`` if that is given.
        near_budget: share of the leaves that every leaf may have near to it: blocks between near
            leaves, those with most nearest neighbours of each other's rows, are stored as they are.
            For products: to be factorized it is compressed once more, to HSS form, which is what 0
            gives.
        ordering: "angle" or "gram" (the paper's distances), "natural", a name that the source
            offers, a permutation of the rows, or "auto" for the best by a quick score.
        method: "sketch" needs products with the source, "neighbors" needs entries only (the
            paper's way); "auto" takes the sketch where there are products.
        distance: of nearest neighbours, for ``method="neighbors"`` and the near field.
        positive_definite: make sure that A + damping·I is positive definite, for this damping and
            any larger one, by small changes of A where compression errors are in the way.
        damping: for ``positive_definite``, positive.
        seed: of everything random; the result is a function of source, arguments and seed.
        progress: show a progress bar over the levels.

    Returns:
        The compressed matrix; ``estimated_error`` is its relative error, estimated on random
        vectors that were not used to build it.

    Raises:
        TypeError, ValueError: the source is no such matrix, or the options are unfit.
        InsufficientMemoryError: it would not fit into free memory.

    Warns:
        CompressionWarning: the estimated error is well above the tolerance, with a remedy.

    Examples:
        >>> A = hcurv.compress(H, tolerance=1e-2)
        >>> A @ v, A.compression_rate, A.estimated_error
    """
    settings = _settle(accuracy, tolerance, leaf_size, max_rank)
    if method not in ("auto", "sketch", "neighbors"):
        raise ValueError(f'method must be "auto", "sketch" or "neighbors"; got {method!r}')
    if distance not in ("angle", "gram"):
        raise ValueError(f'distance must be "angle" or "gram"; got {distance!r}')
    if positive_definite and (damping is None or not 0 < damping < math.inf):
        raise ValueError(
            "positive_definite=True needs a positive damping, as in positive_definite=True,"
            f" damping=1e-3; got {damping!r}"
        )
    if damping is not None and not positive_definite:
        raise ValueError(
            "damping is for positive_definite=True only; to factorize with a damping use"
            " A.factorize(damping)"
        )
    if not (isinstance(near_budget, int | float) and 0 <= near_budget < 1):
        raise ValueError(f"near_budget is a share of the leaves, 0 ≤ share < 1; got {near_budget}")
    if max_storage is not None and not 0 < max_storage < math.inf:
        raise ValueError(f"max_storage is a share of N², positive; got {max_storage}")
    if near_budget and positive_definite:
        raise ValueError(
            "positive_definite=True is for matrices to factorize, without a near field: use"
            " near_budget=0"
        )
    with torch.no_grad():
        matrix = as_source(source)
        if max_storage is not None and accuracy is None and tolerance is None:
            settings = replace(settings, tolerance=_FINEST * torch.finfo(matrix.dtype).eps)
        if method == "auto":
            method = "sketch" if has_product(matrix) else "neighbors"
        if method == "sketch" and not has_product(matrix):
            raise ValueError(
                f'method="sketch" needs products, but {type(matrix).__name__} has no "@"; use'
                ' method="neighbors"'
            )
        if method == "neighbors" and max_storage is not None:
            raise ValueError('max_storage needs products: use method="sketch", or a tolerance')
        rank = _check_global_rank(global_rank, method, matrix.shape[0])
        if rank is None and settings.tolerance == 0 and max_storage is None:
            rank = 0  # a rank cap alone is asked for
        max_floats = None if max_storage is None else int(max_storage * matrix.shape[0] ** 2)
        options = _Options(
            settings,
            rank,
            near_budget,
            max_floats,
            ordering,
            method,
            distance,
            damping,
            seed,
            progress,
        )
        return _compress(matrix, options)


def _check_global_rank(global_rank: int | str, method: str, size: int) -> int | None:
    """A number, or None to choose."""
    if global_rank == "auto":
        return 0 if method == "neighbors" else None
    if isinstance(global_rank, str):
        raise ValueError(f'global_rank must be a number or "auto"; got {global_rank!r}')
    rank = check_count(global_rank, "global_rank", least=0, most=size)
    if rank and method == "neighbors":
        raise ValueError('global_rank needs products: use method="sketch", or global_rank=0')
    return rank


def _settle(
    accuracy: str | None, tolerance: float | None, leaf_size: int | None, max_rank: int | None
) -> _Settings:
    if accuracy is not None and accuracy not in _PRESETS:
        known = " or ".join(f'"{name}"' for name in _PRESETS)
        raise ValueError(f"accuracy must be {known}; got {accuracy!r}")
    if tolerance is not None:
        try:
            fit = math.isfinite(tolerance) and tolerance >= 0
        except TypeError:
            fit = False
        if not fit:
            raise ValueError(f"tolerance must be a number of at least 0; got {tolerance!r}")
    if leaf_size is not None:
        leaf_size = check_count(leaf_size, "leaf_size")
    if max_rank is not None:
        max_rank = check_count(max_rank, "max_rank", least=0)
    if accuracy is not None:
        preset = _PRESETS[accuracy]
        return _Settings(
            preset.leaf_size if leaf_size is None else leaf_size,
            preset.max_rank if max_rank is None else max_rank,
            preset.tolerance if tolerance is None else float(tolerance),
        )
    # A cap alone is an accuracy by itself.
    wanted = 0.0 if tolerance is None and max_rank is not None else tolerance
    wanted = _PRESETS["low"].tolerance if wanted is None else float(wanted)
    return _Settings(leaf_size, max_rank, wanted)


@dataclass(frozen=True)
class _Options:
    settings: _Settings
    global_rank: int | None  # None to choose
    near_budget: float
    max_floats: int | None
    ordering: str | Tensor
    method: str
    distance: Distance
    damping: float | None
    seed: int
    progress: bool


def _compress(source: EntrySource, options: _Options) -> HMatrix:
    diagonal = source.diagonal()
    _require_memory(source, int((diagonal > 0).sum()), options.settings, options.method)
    start = time.perf_counter()
    prepared = _prepare(source, diagonal, options)
    seconds = {"planning": time.perf_counter() - start, **prepared.seconds}
    seconds["planning"] -= sum(prepared.seconds.values())
    part = prepared.global_part
    rest = source if part is None else Remainder(source, part, diagonal)
    tolerance = options.settings.tolerance if prepared.plan is None else prepared.plan.tolerance
    products = None
    if options.method == "sketch":
        start, fit = time.perf_counter(), options.max_floats is not None
        order, known = prepared.tree.permutation, prepared.sketch
        products = RandomProducts(rest, order, options.seed + 1, known, keep=fit)
        seconds["samples"] = seconds.get("samples", 0.0) + time.perf_counter() - start
    build = partial(_build, rest, products, prepared, options, seconds)
    result = build(tolerance)
    if options.max_floats is not None and prepared.tree.num_kept:
        result = _fit(result, options.max_floats, options.settings.tolerance, build)
    _warn(result)
    return result


def _fit(first: HMatrix, most: int, least: float, build: Callable[[float], HMatrix]) -> HMatrix:
    """Build again until it fits into what is allowed, and makes use of it: plans are estimates."""
    result, fitting, tolerance = first, None, first.record.tolerance
    for attempt in range(_MOST_FITS):
        fits = result.num_stored <= most
        if fits and (fitting is None or result.num_stored > fitting.num_stored):
            fitting = result
        enough = attempt >= _FITS or result.num_stored >= _WELL_USED * most
        if fits and (enough or tolerance <= _NEAR * least):
            break
        if fitting is not None and attempt >= _FITS:
            break
        step = tolerance_step(result.num_stored, int(_AIM * most))
        tolerance = max(tolerance * step, least)
        if tolerance >= 1:
            break
        result = build(tolerance)
    return result if fitting is None else fitting


def _build(
    rest: EntrySource,
    products: RandomProducts | None,
    prepared: Prepared,
    options: _Options,
    seconds: dict[str, float],
    tolerance: float,
) -> HMatrix:
    """The matrix of a plan; ``rest`` is what its global part leaves, ``products`` are with it."""
    tree, part, seed = prepared.tree, prepared.global_part, options.seed
    settings, diagonal = options.settings, rest.diagonal()
    interactions = near_leaves(rest, tree, diagonal, options.near_budget, options.distance, seed)
    cap = settings.max_rank if settings.max_rank is not None else tree.num_kept
    own = tolerance / max(prepared.share, torch.finfo(rest.dtype).eps)  # relative to the rest
    builder = Builder(rest, tree, interactions, own, cap, options.progress)
    builder.seconds.update(seconds)
    sampler: Sampler
    with builder.timed("samples"):
        if products is not None:
            sampler = SketchSampler(products)
        else:
            sampler = NeighborSampler(rest, tree, diagonal, options.distance, interactions, seed)
    leaves, near, levels = builder.build(sampler)
    record = BuildRecord(
        method=options.method,
        tolerance=tolerance,
        leaf_size=prepared.leaf_size,
        max_rank=settings.max_rank,
        seed=seed,
        num_columns=sampler.num_columns,
        num_capped=builder.num_capped,
        estimated_error=0.0,
        damping=options.damping,
        plan=prepared.plan,
        seconds=builder.seconds,
    )
    result = HMatrix(tree, leaves, levels, record, rest.dtype, None, near)
    if options.damping is not None:
        with builder.timed("definiteness"):
            result = make_definite(result, options.damping)
    with builder.timed("error estimate"):
        has_tree = tree.num_kept > 0 or part is None
        error = _estimate_error(result, sampler, part) if has_tree else prepared.share
    record = replace(record, estimated_error=error)
    return HMatrix(tree, result.leaves, result.levels, record, rest.dtype, part, near)


def _prepare(source: EntrySource, diagonal: Tensor, options: _Options) -> Prepared:
    settings, ordering = options.settings, options.ordering
    if options.method == "sketch":
        return prepare(
            source,
            diagonal,
            settings.tolerance,
            leaf_size=settings.leaf_size,
            ordering=ordering,
            global_rank=options.global_rank,
            max_floats=options.max_floats,
            seed=options.seed,
        )
    leaf_size = settings.leaf_size or default_leaf_size(settings.tolerance)
    if isinstance(ordering, str) and ordering == "auto":
        tree = choose_tree(source, leaf_size, settings.tolerance, diagonal, options.seed)
    else:
        tree = cluster(
            source, leaf_size=leaf_size, ordering=ordering, seed=options.seed, diagonal=diagonal
        )
    return Prepared(None, tree, leaf_size, None, None, 1.0)


def _require_memory(source: EntrySource, num_kept: int, settings: _Settings, method: str) -> None:
    """The least that is sure to be needed: leaf blocks and the first samples."""
    leaf_size = settings.leaf_size or default_leaf_size(settings.tolerance)
    depth = depth_for(num_kept, leaf_size)
    width = -(-num_kept // 2**depth)
    floats = 2**depth * width**2
    if method == "sketch" and depth:
        rank = min(FIRST_RANK, width if settings.max_rank is None else settings.max_rank)
        floats += 2 * num_kept * num_columns_for(rank)
    require_bytes(
        floats * source.dtype.itemsize,
        source.device,
        f"compressing a matrix of N = {source.shape[0]} with leaves of {leaf_size}",
        ("choose a smaller leaf_size or max_rank", "use float32"),
    )


def _estimate_error(matrix: HMatrix, sampler: Sampler, part: GlobalPart | None) -> float:
    """Of the matrix and a global part together, relative; products are those of the rest."""
    inputs, products = sampler.held_out()
    error = torch.linalg.vector_norm(products - matrix @ inputs, dtype=torch.float64)
    if part is not None:
        part.add_product(inputs, products)
    norm = torch.linalg.vector_norm(products, dtype=torch.float64)
    return float(error / norm) if float(norm) > 0 else float(error)


def _warn(matrix: HMatrix) -> None:
    record = matrix.record
    factor = _WARN_BEYOND if record.num_capped else _WARN_UNCAPPED
    if record.tolerance == 0 or record.estimated_error <= factor * record.tolerance:
        return
    if record.num_capped:
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
        if record.damping is not None:
            reason += f", or a larger damping than {record.damping:.1e} to be definite with"
    warnings.warn(
        f"estimated relative error {record.estimated_error:.1e}, asked for"
        f" {record.tolerance:.1e}: {reason}.",
        CompressionWarning,
        stacklevel=4,
    )
