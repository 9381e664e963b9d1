"""hcurv: the Gauss-Newton Hessian of a PyTorch network as a matrix that can be used."""

from hcurv import baselines, losses
from hcurv.cluster_tree import ClusterTree
from hcurv.comparison import ComparedMethod, Comparison, compare
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import (
    CompressionWarning,
    Factorization,
    FileFormatError,
    HMatrix,
    NearFieldWarning,
    NotPositiveDefiniteError,
    Plan,
    compress,
    load,
)
from hcurv.krylov import CGResult, EigenResult, cg, eigsh
from hcurv.memory import InsufficientMemoryError
from hcurv.neighbors import nearest_neighbors
from hcurv.newton_step import GaussNewtonStep, gauss_newton_step
from hcurv.operators import EntrySource, SymmetricOperator
from hcurv.sampling import SampledEntries, SamplingError, num_samples_for, sampling_error
from hcurv.tracing import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "CGResult",
    "ClusterTree",
    "ComparedMethod",
    "Comparison",
    "CompressionWarning",
    "EigenResult",
    "EntrySource",
    "Factorization",
    "FileFormatError",
    "GaussNewton",
    "GaussNewtonStep",
    "HMatrix",
    "InsufficientMemoryError",
    "NearFieldWarning",
    "NotPositiveDefiniteError",
    "Plan",
    "SampledEntries",
    "SamplingError",
    "SymmetricOperator",
    "UnsupportedModelError",
    "baselines",
    "cg",
    "compare",
    "compress",
    "eigsh",
    "gauss_newton_step",
    "load",
    "losses",
    "nearest_neighbors",
    "num_samples_for",
    "sampling_error",
]
