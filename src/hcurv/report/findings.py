"""What a report shows beyond the table of a comparison: curves, spectra, curvature per layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hcurv.baselines import LowRank
from hcurv.baselines.diagonal import parameter_blocks
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import CompressionWarning, HMatrix, compress
from hcurv.krylov import lanczos
from hcurv.operators import SymmetricOperator

if TYPE_CHECKING:
    from hcurv.comparison import Comparison, ComparisonDetails

__all__ = ["Findings", "LayerCurvature", "Spectrum", "find"]

_SHARES = (0.25, 0.5)  # of the budget, for curves
_DENSE = 2000  # rows up to which all eigenvalues are computed
_STEPS = 256  # of Lanczos beyond that ...
_BASIS_FLOATS = 2**28  # ... as far as they fit into this
_MOST_VALUES = 128  # eigenvalues that are shown then
_CONVERGED = 1e-2  # residual over eigenvalue
_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_TREE_TOLERANCE = 5e-2  # of a tree that is built to be looked at


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues above rounding.

    Attributes:
        values: descending.
        complete: whether these are all of them.
    """

    values: tuple[float, ...]
    complete: bool


@dataclass(frozen=True)
class LayerCurvature:
    """The diagonal of H over the parameters of one layer.

    Attributes:
        name: of the layer.
        shape: inputs and units.
        num_parameters: that belong to the matrix.
        num_zeros: entries that are exactly zero.
        share: of the trace of H.
        quantiles: 1, 25, 50, 75 and 99 % of the other entries; None if there are none.
    """

    name: str
    shape: tuple[int, int]
    num_parameters: int
    num_zeros: int
    share: float
    quantiles: tuple[float, ...] | None


@dataclass(frozen=True)
class Findings:
    """Everything that is measured for a report.

    Attributes:
        curves: storage and error of methods at shares of the budget, by their names.
        exact: spectrum of H.
        compressed: spectrum of the hierarchical matrix.
        layers: curvature of each layer.
        tree: a matrix whose blocks can be drawn: the hierarchical matrix, or where that has no
            tree, one that is a tree alone; None if H is zero.
    """

    curves: dict[str, list[tuple[float, float]]]
    exact: Spectrum
    compressed: Spectrum
    layers: list[LayerCurvature]
    tree: HMatrix | None


def find(comparison: Comparison, details: ComparisonDetails, curves: bool) -> Findings:
    """Measure; ``curves`` at shares of the budget only if wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressionWarning)
        return Findings(
            _curves(comparison, details) if curves else {},
            _spectrum(details.matrix),
            _spectrum(details.compressed),
            _layers(details.matrix),
            _tree(details),
        )


def _curves(
    comparison: Comparison, details: ComparisonDetails
) -> dict[str, list[tuple[float, float]]]:
    size = comparison.size
    result: dict[str, list[tuple[float, float]]] = {"hierarchical": [], "low rank": []}
    for share in _SHARES:
        smaller = _smaller(comparison, details, share)
        rank = min(size, int(share * comparison.storage * size**2 / (size + 1)))
        low_rank = LowRank(details.matrix, rank, seed=details.seed) if rank else None
        for name, operator in (("hierarchical", smaller), ("low rank", low_rank)):
            if operator is not None:
                error = operator.relative_error(details.matrix, details.num_probes, details.seed)
                result[name].append((operator.compression_rate, error))
    return result


def _smaller(comparison: Comparison, details: ComparisonDetails, share: float) -> HMatrix | None:
    """The hierarchical matrix with a share of its storage: as it is, but of smaller ranks.

    To plan for each budget anew would take far longer.
    """
    matrix = details.compressed
    rank = int(share * matrix.global_rank)
    options: dict[str, Any] = {"tolerance": 1.0}  # a global part alone
    if matrix.tree.num_kept:
        options = {
            "max_storage": share * comparison.storage,
            "leaf_size": matrix.record.leaf_size,
            "ordering": matrix.tree.ordering,
        }
    elif not rank:
        return None
    return compress(
        details.matrix,
        global_rank=rank,
        positive_definite=True,
        damping=comparison.damping,
        seed=details.seed,
        **options,
    )


def _tree(details: ComparisonDetails) -> HMatrix | None:
    if details.compressed.tree.num_kept:
        return details.compressed
    tolerance = max(_TREE_TOLERANCE, details.compressed.estimated_error)
    result = compress(details.matrix, tolerance=tolerance, global_rank=0, seed=details.seed)
    return result if result.tree.num_kept else None


def _spectrum(operator: SymmetricOperator) -> Spectrum:
    """All eigenvalues of a small matrix, those that Lanczos finds of a large one."""
    size = operator.shape[0]
    complete = size <= _DENSE
    if complete:
        dense = operator.to_dense().double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2).flip(0)
    else:
        steps = min(_STEPS, max(1, _BASIS_FLOATS // size))
        values, _, residuals = lanczos(
            operator.__matmul__, size, steps, operator.dtype, operator.device
        )
        values, residuals = values.flip(0), residuals.flip(0)
        converged = (residuals <= _CONVERGED * values).long().cumprod(0).bool()
        values = values[converged][:_MOST_VALUES]
    floor = torch.finfo(operator.dtype).eps * float(values[:1].sum())
    return Spectrum(tuple(values[values > floor].tolist()), complete)


def _layers(matrix: GaussNewton) -> list[LayerCurvature]:
    diagonal = matrix.diagonal().double()
    trace = float(diagonal.sum())
    rows = parameter_blocks(matrix, "layer")
    return [
        _curvature(slot.layer.name, tuple(slot.layer.weight.shape[::-1]), diagonal[part], trace)
        for slot, part in zip(matrix.factors.slots, rows, strict=True)
    ]


def _curvature(name: str, shape: tuple[int, ...], values: Tensor, trace: float) -> LayerCurvature:
    positive = values[values > 0].cpu().numpy()
    quantiles = None
    if positive.size:
        quantiles = tuple(float(q) for q in np.quantile(positive, _QUANTILES))
    share = float(values.sum()) / trace if trace > 0 else 0.0
    inputs, units = shape
    count = values.numel()
    return LayerCurvature(name, (inputs, units), count, count - positive.size, share, quantiles)
