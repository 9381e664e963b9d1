"""hcurv.compress: any symmetric positive semi-definite matrix into an HMatrix."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hcurv.cluster_tree import Distance, cluster, depth_for
from hcurv.hierarchical.build import FIRST_RANK, Builder, Sampler, num_columns_for
from hcurv.hierarchical.definite import make_definite
from hcurv.hierarchical.matrix import BuildRecord, HMatrix
from hcurv.hierarchical.neighbor_columns import NeighborSampler
from hcurv.hierarchical.ordering import choose_tree
from hcurv.hierarchical.sketch import SketchSampler
from hcurv.indexing import check_count
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import as_source, has_product

__all__ = ["CompressionWarning", "compress"]


class CompressionWarning(UserWarning):
    """The compressed matrix is less accurate than asked for."""


@dataclass(frozen=True)
class _Settings:
    leaf_size: int
    max_rank: int | None
    tolerance: float


_PRESETS = {
    "low": _Settings(leaf_size=128, max_rank=128, tolerance=5e-2),
    "high": _Settings(leaf_size=1024, max_rank=1024, tolerance=5e-4),
}
_WARN_BEYOND = 1.5  # times the tolerance, where a cap is to blame ...
_WARN_UNCAPPED = 4.0  # ... or where it is not


def compress(
    source: EntrySource | Tensor,
    *,
    accuracy: Literal["low", "high"] | None = None,
    tolerance: float | None = None,
    leaf_size: int | None = None,
    max_rank: int | None = None,
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
        leaf_size: largest number of rows of a leaf.
        max_rank: rank cap. Without a preset there is none: the tolerance alone decides.
        ordering: "angle" or "gram" (the paper's distances), "natural", a name that the source
            offers, a permutation of the rows, or "auto" for the best by a quick score.
        method: "sketch" needs products with the source, "neighbors" needs entries only (the
            paper's way); "auto" takes the sketch where there are products.
        distance: of nearest neighbours, for ``method="neighbors"``.
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

    Example:
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
    with torch.no_grad():
        matrix = as_source(source)
        if method == "auto":
            method = "sketch" if has_product(matrix) else "neighbors"
        if method == "sketch" and not has_product(matrix):
            raise ValueError(
                f'method="sketch" needs products, but {type(matrix).__name__} has no "@"; use'
                ' method="neighbors"'
            )
        return _compress(matrix, settings, ordering, method, distance, damping, seed, progress)


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
    if accuracy is None and tolerance is None:
        accuracy = "low" if max_rank is None and leaf_size is None else None
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
    return _Settings(
        leaf_size if leaf_size is not None else 128 if wanted >= 1e-2 else 512, max_rank, wanted
    )


def _compress(
    source: EntrySource,
    settings: _Settings,
    ordering: str | Tensor,
    method: str,
    distance: Distance,
    damping: float | None,
    seed: int,
    progress: bool,
) -> HMatrix:
    diagonal = source.diagonal()
    _require_memory(source, int((diagonal > 0).sum()), settings, method)
    start = time.perf_counter()
    if isinstance(ordering, str) and ordering == "auto":
        tree, sketch = choose_tree(source, settings.leaf_size, settings.tolerance, diagonal, seed)
    else:
        tree = cluster(
            source,
            leaf_size=settings.leaf_size,
            ordering=ordering,
            seed=seed,
            diagonal=diagonal,
        )
        sketch = None
    cap = settings.max_rank if settings.max_rank is not None else tree.num_kept
    builder = Builder(source, tree, settings.tolerance, cap, progress)
    builder.seconds["ordering"] = time.perf_counter() - start
    sampler: Sampler
    with builder.timed("samples"):
        if method == "sketch":
            sampler = SketchSampler(source, tree.permutation, seed + 1, sketch)
        else:
            sampler = NeighborSampler(source, tree, diagonal, distance, seed)
    leaves, levels = builder.build(sampler)
    record = BuildRecord(
        method=method,
        tolerance=settings.tolerance,
        leaf_size=settings.leaf_size,
        max_rank=settings.max_rank,
        seed=seed,
        num_columns=sampler.num_columns,
        num_capped=builder.num_capped,
        estimated_error=0.0,
        damping=damping,
        seconds=builder.seconds,
    )
    result = HMatrix(tree, leaves, levels, record, source.dtype)
    if damping is not None:
        with builder.timed("definiteness"):
            result = make_definite(result, damping)
    with builder.timed("error estimate"):
        record = replace(record, estimated_error=_estimate_error(result, sampler))
    result = HMatrix(tree, result.leaves, result.levels, record, source.dtype)
    _warn(result)
    return result


def _require_memory(source: EntrySource, num_kept: int, settings: _Settings, method: str) -> None:
    """The least that is sure to be needed: leaf blocks and the first samples."""
    depth = depth_for(num_kept, settings.leaf_size)
    width = -(-num_kept // 2**depth)
    floats = 2**depth * width**2
    if method == "sketch" and depth:
        rank = min(FIRST_RANK, width if settings.max_rank is None else settings.max_rank)
        floats += 2 * num_kept * num_columns_for(rank)
    require_bytes(
        floats * source.dtype.itemsize,
        source.device,
        f"compressing a matrix of N = {source.shape[0]} with leaves of {settings.leaf_size}",
        ("choose a smaller leaf_size or max_rank", "use float32"),
    )


def _estimate_error(matrix: HMatrix, sampler: Sampler) -> float:
    inputs, products = sampler.held_out()
    norm = torch.linalg.vector_norm(products, dtype=torch.float64)
    error = torch.linalg.vector_norm(products - matrix @ inputs, dtype=torch.float64)
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
