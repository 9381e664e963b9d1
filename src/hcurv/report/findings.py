"""Measure what a report shows beyond the table: curves, spectra, the curvature of each layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hcurv.baselines import LowRank
from hcurv.hierarchical import CompressionWarning, HMatrix, compress
from hcurv.linalg import lanczos
from hcurv.network.gauss_newton import GaussNewton
from hcurv.operators import SymmetricOperator

if TYPE_CHECKING:
    from hcurv.report.comparison import Comparison, ComparisonDetails

__all__ = ["Findings", "LayerCurvature", "Spectrum", "find"]

# Curves show the error at these shares of the budget, and at all of it.
_SHARES = (0.25, 0.5)
# All eigenvalues are computed of matrices with at most this many rows, which takes a few seconds.
_DENSE = 2000
# Larger matrices get this many steps of the Lanczos method, or as many as these floats allow.
_STEPS = 256
_BASIS_FLOATS = 2**28
# At most this many eigenvalues of a larger matrix are shown: later ones have rarely converged.
_MOST_VALUES = 128
# An eigenvalue has converged when its residual is at most this part of it. A figure shows no more.
_CONVERGED = 1e-2
_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
# The tolerance of a tree that is built only to be looked at. It is rough, so that it is built fast.
_TREE_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a matrix that are larger than rounding errors.

    Attributes:
        values: The eigenvalues, largest first.
        complete: Whether these are all of them, or only the leading ones.
    """

    values: tuple[float, ...]
    complete: bool


@dataclass(frozen=True)
class LayerCurvature:
    """The diagonal of H over the parameters of one layer.

    Attributes:
        name: The name of the layer.
        shape: The number of inputs and of units.
        num_parameters: How many of its parameters belong to the matrix.
        num_zeros: How many entries are exactly zero.
        share: The share of the layer in the trace of H.
        quantiles: The 1, 25, 50, 75 and 99 % quantiles of the entries that are not zero. None if
            all are zero.
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
        curves: Storage and error at shares of the budget, by the name of the method.
        exact: The spectrum of H.
        compressed: The spectrum of the hierarchical matrix.
        layers: The curvature of each layer.
        tree: A matrix whose blocks can be drawn. It is the hierarchical matrix itself, or, if that
            has no tree, a matrix that was compressed as a tree alone. None if H is zero.
    """

    curves: dict[str, list[tuple[float, float]]]
    exact: Spectrum
    compressed: Spectrum
    layers: list[LayerCurvature]
    tree: HMatrix | None


def find(comparison: Comparison, details: ComparisonDetails, curves: bool) -> Findings:
    """Measure everything that the report shows; the curves only if ``curves`` asks for them."""
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
    """Build the hierarchical matrix again with a share of its storage, by making its ranks smaller.

    It keeps leaf size and ordering, because planning anew for each budget would take far longer.
    """
    matrix = details.compressed
    rank = int(share * matrix.global_rank)
    # A tolerance of 1 asks the tree for nothing, so that the global part is all there is.
    options: dict[str, Any] = {"tolerance": 1.0}
    if matrix.tree.has_clusters:
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
        seed=details.seed,
        **options,
    )


def _tree(details: ComparisonDetails) -> HMatrix | None:
    if details.compressed.tree.has_clusters:
        return details.compressed
    tolerance = max(_TREE_TOLERANCE, details.compressed.estimated_error)
    result = compress(details.matrix, tolerance=tolerance, global_rank=0, seed=details.seed)
    return result if result.tree.has_clusters else None


def _spectrum(operator: SymmetricOperator) -> Spectrum:
    """Return all eigenvalues of a small matrix, or those that Lanczos finds of a large one."""
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
    layout = matrix.layout
    return [
        _curvature(
            name,
            layout.layer_shape(name),
            diagonal[layout.select(*names).to(matrix.device)],
            trace,
        )
        for name, names in layout.layers.items()
    ]


def _curvature(name: str, shape: tuple[int, int], values: Tensor, trace: float) -> LayerCurvature:
    positive = values[values > 0].cpu().numpy()
    quantiles = None
    if positive.size:
        quantiles = tuple(float(q) for q in np.quantile(positive, _QUANTILES))
    share = float(values.sum()) / trace if trace > 0 else 0.0
    count = values.numel()
    return LayerCurvature(name, shape, count, count - positive.size, share, quantiles)
