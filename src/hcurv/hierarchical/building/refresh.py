"""A matrix that has changed a little, in the form of one that was compressed before.

Tree, ranks, skeletons and interpolations stay. The entries of leaf blocks and couplings are read
anew. A global part V Vᵀ takes one product for each of its columns: alone, it becomes Nyström's
approximation from the old V; beside a tree it keeps the range of V (Q QᵀHQ Qᵀ with orthonormal Q),
because the tree interpolates what that range left. How good it all is, is measured as after a
build.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import leaf_blocks, make_couplings, skeleton_places
from hcurv.hierarchical.building.damped_error import estimate_damped_error, is_met
from hcurv.hierarchical.building.shortfall import CompressionWarning
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.parts.global_part import GlobalPart, Remainder
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.solving.definite import make_definite
from hcurv.layout import layout_of
from hcurv.linalg.growing_nystrom import GrowingNystrom
from hcurv.linalg.nystrom import double_gram, orthonormal
from hcurv.operators import EntrySource
from hcurv.sources import as_source, has_product, product

__all__ = ["refresh"]

# The error is estimated with so many random vectors.
_NUM_PROBES = 16
# An error above this multiple of the one before is worth a warning.
_WORSE = 2.0


def refresh(old: HMatrix, matrix: EntrySource | Tensor, seed: int) -> HMatrix:
    """Return ``matrix`` in the form of ``old``."""
    began = time.perf_counter()
    source = as_source(matrix)
    if source.shape != old.shape or source.dtype != old.dtype:
        raise ValueError(
            f"refresh needs a matrix like the old one, {old.shape} of {old.dtype}; got"
            f" {tuple(source.shape)} of {source.dtype}"
        )
    if not has_product(source):
        raise TypeError(
            f'refresh needs products, but {type(source).__name__} has no "@"; compress it anew'
        )
    diagonal = source.diagonal()
    part = old.global_part
    if part is not None:
        part = _global_part(part, source, old.tree.has_clusters)
    rest = source if part is None else Remainder(source, part, diagonal)
    leaves, near, levels = _blocks(old, rest)
    parts = {"leaves": leaves, "levels": levels, "global_part": part}
    fresh = old.with_parts(**parts, near=near) if near else old.with_parts(**parts)
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(source.shape[0], _NUM_PROBES, dtype=source.dtype, generator=generator)
    probes = probes.to(source.device)
    exact = product(source, probes)
    record = replace(old.record, seed=seed, damped_error=None)

    def measured(found: HMatrix) -> HMatrix:
        wrong = torch.linalg.vector_norm(exact - found @ probes, dtype=torch.float64)
        norm = torch.linalg.vector_norm(exact, dtype=torch.float64)
        error = float(wrong / norm) if float(norm) > 0 else float(wrong)
        damped = None
        if record.damping is not None:
            damped = estimate_damped_error(found, rest, None, record.damping, seed)
        own = replace(
            record,
            estimated_error=error,
            norm=float(norm) / _NUM_PROBES**0.5,
            damped_error=damped,
            seconds={"refresh": time.perf_counter() - began},
        )
        return found.with_parts(record=own)

    result = measured(fresh)
    if record.damping is not None and not is_met(result.record.damped_error, float("inf")):
        definite = make_definite(result.hierarchical_part, record.damping)
        result = measured(fresh.with_parts(leaves=definite.leaves))
    _warn(old, result)
    return result.with_layout(layout_of(source) or old.layout)


def _global_part(old: GlobalPart, source: EntrySource, keeps_range: bool) -> GlobalPart:
    """V of the same rank for another matrix."""

    def multiply(directions: Tensor) -> Tensor:
        whole = directions.new_zeros(source.shape[0], directions.shape[1])
        whole.index_copy_(0, old.rows, directions)
        return product(source, whole).index_select(0, old.rows)

    if keeps_range:
        basis = orthonormal(old.factor)
        core = double_gram(basis, multiply(basis))
        values, rotation = torch.linalg.eigh((core + core.T) / 2)
        found = basis @ (rotation * values.clamp(min=0.0).sqrt()).to(basis.dtype)
    else:
        sketch = GrowingNystrom(multiply)
        sketch.extend(old.factor.clone())
        found = old.factor[:, :0]
        if sketch.width:
            found = sketch.factor(min(old.rank, sketch.values.numel()))
    factor = old.factor.new_zeros(old.factor.shape)  # rounding may have left fewer columns
    factor[:, : found.shape[1]] = found
    return GlobalPart(old.rows, factor)


def _blocks(
    old: HMatrix, rest: EntrySource
) -> tuple[LeafBlocks, tuple[Coupling, ...], tuple[Level, ...]]:
    """The same blocks of another matrix."""
    rows = old.tree.permutation
    bounds = old.tree.bounds(old.tree.depth)
    if rows.numel() == 0:
        return old.leaves, (), old.levels
    leaves = leaf_blocks(rest, rows, bounds)
    near = make_couplings(rest, rows, bounds.diff(), _pairs(old.near, rows))
    levels = []
    for level in old.levels:
        rows = rows[skeleton_places(level.bases, level.ranks)]
        couplings = make_couplings(rest, rows, level.ranks, _pairs(level.couplings, rows))
        levels.append(replace(level, couplings=couplings))
    return leaves, near, tuple(levels)


def _pairs(couplings: tuple[Coupling, ...], like: Tensor) -> Tensor:
    """All pairs of nodes that are coupled, (P, 2)."""
    if not couplings:
        return like.new_zeros(0, 2)
    return torch.cat([coupling.pairs for coupling in couplings])


def _warn(old: HMatrix, new: HMatrix) -> None:
    before, after = old.record, new.record
    allowed = max(before.estimated_error, before.tolerance)
    if after.estimated_error > _WORSE * allowed:
        warnings.warn(
            f"the matrix has changed too much for its old form: the estimated error is"
            f" {after.estimated_error:.1e}, and was {before.estimated_error:.1e}; compress it anew",
            CompressionWarning,
            stacklevel=4,
        )
    elif after.damping is not None:
        wanted = after.damped_tolerance or float("inf")
        if not is_met(after.damped_error, wanted, _WORSE):
            warnings.warn(
                "the matrix has changed too much for solves with its old form at damping="
                f"{after.damping:.1e}; compress it anew",
                CompressionWarning,
                stacklevel=4,
            )
