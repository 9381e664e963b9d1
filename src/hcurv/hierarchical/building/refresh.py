"""A matrix that has changed a little, in the form of one that was compressed before.

Tree, ranks and skeletons stay. The entries of leaf blocks and couplings are read anew, and
interpolations are fitted anew to a few random products, which are carried up the tree as in a build
(`sketch.py`). A global part V Vᵀ takes one product for each of its columns: alone, it becomes
Nyström's approximation from the old V; beside a tree it keeps the range of V (Q QᵀHQ Qᵀ with
orthonormal Q), because the tree interpolates what that range left. How good it all is, is measured
as after a build.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hcurv.hierarchical.building.assembly import leaf_blocks, make_couplings, skeleton_places
from hcurv.hierarchical.building.damped_error import estimate_damped_error, is_met
from hcurv.hierarchical.building.sampler import num_columns_for
from hcurv.hierarchical.building.shortfall import CompressionWarning
from hcurv.hierarchical.building.sketch import SketchPanel, carry, random_products
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.parts.global_part import GlobalPart, Remainder
from hcurv.hierarchical.parts.levels import Basis, Coupling, LeafBlocks, Level, take_rows
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.solving.definite import make_definite
from hcurv.layout import layout_of
from hcurv.linalg.growing_nystrom import GrowingNystrom
from hcurv.linalg.nystrom import double_gram, orthonormal
from hcurv.operators import EntrySource
from hcurv.sources import as_source, has_product, product
from hcurv.user_warnings import warn_user

__all__ = ["refresh"]

# The error is estimated with so many random vectors.
_NUM_PROBES = 16
# Interpolations are fitted to at most so many columns, and away from the old ones only where a
# direction has more than this share of the mean square.
_MAX_COLUMNS, _RIDGE = 1024, 1e-9
# Columns of V below this share of the largest may have lost their orthogonality to rounding.
_SURE = 1e-4
# T is computed in panels of this many rows, so that little more than half of it is enough.
_PANEL = 256
# Columns of V that keep this share of their norm beside those before are independent enough.
_INDEPENDENT = 0.3
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
    generator = torch.Generator(source.device).manual_seed(seed)
    leaves, near, levels = _blocks(old, rest, generator)
    parts = {"leaves": leaves, "levels": levels, "global_part": part}
    fresh = old.with_parts(**parts, near=near) if near else old.with_parts(**parts)
    # The interpolations were fitted to other random vectors of the same generator.
    probes = torch.randn(
        source.shape[0],
        _NUM_PROBES,
        dtype=source.dtype,
        device=source.device,
        generator=generator,
    )
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
    rows = old.rows
    has_all = torch.equal(rows, torch.arange(source.shape[0], device=rows.device))

    def multiply(directions: Tensor) -> Tensor:
        if has_all:
            return product(source, directions)
        whole = directions.new_zeros(source.shape[0], directions.shape[1])
        whole.index_copy_(0, rows, directions)
        return product(source, whole).index_select(0, rows)

    if keeps_range:
        basis = orthonormal(old.factor)
        core = double_gram(basis, multiply(basis))
        values, rotation = torch.linalg.eigh((core + core.T) / 2)
        found = basis @ (rotation * values.clamp(min=0.0).sqrt()).to(basis.dtype)
    else:
        found = _nystrom(old.factor, multiply)
    if found.shape[1] == old.rank:
        return GlobalPart(rows, found)
    factor = old.factor.new_zeros(old.factor.shape)  # rounding may have left fewer columns
    factor[:, : found.shape[1]] = found
    return GlobalPart(rows, factor)


def _nystrom(old: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Nyström's approximation V Vᵀ from the range of an old V.

    If the matrix has changed a little, Q, the old columns with norm 1, are about eigenvectors, so
    that T = QᵀHQ is about diagonal. With T = LLᵀ, V = HQ L⁻ᵀ then has nearly orthogonal columns
    without an eigendecomposition. Rounding is relative to each column, as long as an entry of T is
    taken from the smaller of the two products that it could come from. Where T is far from
    diagonal, because the matrix has changed much, V is made anew.
    """
    norms = torch.linalg.vector_norm(old, dim=0)
    sure = norms > _SURE * norms.max()  # all others may have lost their orthogonality to rounding
    basis = old[:, sure] / norms[sure]
    if bool(sure.all()):
        images = multiply(basis)
        core = torch.zeros(2 * (old.shape[1],), dtype=torch.float64, device=old.device)
        for start in range(0, old.shape[1], _PANEL):
            part = slice(start, start + _PANEL)
            core[part, start:] = (basis[:, part].T @ images[:, start:]).double()
        core = core.triu().add_(core.triu(1).T)
        sizes = core.diagonal()
        roots = sizes.clamp(min=torch.finfo(old.dtype).tiny).sqrt()
        triangle, failed = torch.linalg.cholesky_ex(core / roots / roots[:, None])
        if not bool(failed) and bool(triangle.diagonal().min() > _INDEPENDENT):
            lower = (roots[:, None] * triangle).to(old.dtype)
            found: Tensor = torch.linalg.solve_triangular(lower.T, images, upper=True, left=False)
            return found
        del images
    sketch = GrowingNystrom(multiply)
    sketch.extend(basis)
    if not bool(sure.all()):
        sketch.extend(old[:, ~sure].clone())
    if not sketch.width:
        return old[:, :0]
    return sketch.factor(min(old.shape[1], sketch.values.numel()))


def _blocks(
    old: HMatrix, rest: EntrySource, generator: torch.Generator
) -> tuple[LeafBlocks, tuple[Coupling, ...], tuple[Level, ...]]:
    """The same blocks of another matrix."""
    rows = old.tree.permutation
    bounds = old.tree.bounds(old.tree.depth)
    if rows.numel() == 0:
        return old.leaves, (), old.levels
    leaves = leaf_blocks(rest, rows, bounds)
    near = make_couplings(rest, rows, bounds.diff(), _pairs(old.near, rows))
    largest = max((int(level.ranks.max()) for level in old.levels), default=0)
    if largest == 0:
        return leaves, near, old.levels
    num_columns = min(num_columns_for(largest), _MAX_COLUMNS)
    panel = SketchPanel(*random_products(rest, RowShare(rows), num_columns, generator))
    dense: tuple[LeafBlocks | Coupling, ...] = (leaves, *near)
    for blocks in dense:
        blocks.add_product(panel.inputs, panel.outputs, -1.0)
    levels = []
    for level in old.levels:
        bases = tuple(_fitted(basis, panel.outputs) for basis in level.bases)
        rows = rows[skeleton_places(bases, level.ranks)]
        couplings = make_couplings(rest, rows, level.ranks, _pairs(level.couplings, rows))
        levels.append(replace(level, bases=bases, couplings=couplings))
        panel = carry(panel, levels[-1])
    return leaves, near, tuple(levels)


def _fitted(basis: Basis, samples: Tensor) -> Basis:
    """The same skeletons with weights that fit samples of the rows, near the old weights.

    With the skeleton rows Y of a node, and what the old weights leave of its other rows, R, the
    change of the weights is R Yᵀ (Y Yᵀ + δI)⁻¹. Where nothing has changed, it is rounding.
    """
    if basis.weights.numel() == 0:
        return basis
    skeleton = take_rows(samples, basis.skeleton).double()
    weights = basis.weights.double()
    left = take_rows(samples, basis.rest).double() - weights @ skeleton
    gram = skeleton @ skeleton.mT
    diagonal = gram.diagonal(dim1=1, dim2=2)
    shift = _RIDGE * diagonal.mean(1) + torch.finfo(gram.dtype).tiny
    diagonal += shift[:, None]
    factor = torch.linalg.cholesky(gram)
    change = torch.cholesky_solve(skeleton @ left.mT, factor).mT
    return replace(basis, weights=(weights + change).to(basis.weights.dtype))


def _pairs(couplings: tuple[Coupling, ...], like: Tensor) -> Tensor:
    """All pairs of nodes that are coupled, (P, 2)."""
    if not couplings:
        return like.new_zeros(0, 2)
    return torch.cat([coupling.pairs for coupling in couplings])


def _warn(old: HMatrix, new: HMatrix) -> None:
    before, after = old.record, new.record
    allowed = max(before.estimated_error, before.tolerance)
    if after.estimated_error > _WORSE * allowed:
        warn_user(
            f"the matrix has changed too much for its old form: the estimated error is"
            f" {after.estimated_error:.1e}, and was {before.estimated_error:.1e}; compress it anew",
            CompressionWarning,
        )
    elif after.damping is not None:
        wanted = after.damped_tolerance or float("inf")
        if not is_met(after.damped_error, wanted, _WORSE):
            warn_user(
                "the matrix has changed too much for solves with its old form at damping="
                f"{after.damping:.1e}; compress it anew",
                CompressionWarning,
            )
