"""hcurv: the Gauss-Newton Hessian of a PyTorch network as a matrix that can be used."""

from hcurv import losses
from hcurv.cluster_tree import ClusterTree
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import CompressionWarning, FileFormatError, HMatrix, compress, load
from hcurv.memory import InsufficientMemoryError
from hcurv.neighbors import nearest_neighbors
from hcurv.operators import EntrySource, SymmetricOperator
from hcurv.sampling import SampledEntries, SamplingError, num_samples_for, sampling_error
from hcurv.tracing import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "ClusterTree",
    "CompressionWarning",
    "EntrySource",
    "FileFormatError",
    "GaussNewton",
    "HMatrix",
    "InsufficientMemoryError",
    "SampledEntries",
    "SamplingError",
    "SymmetricOperator",
    "UnsupportedModelError",
    "compress",
    "load",
    "losses",
    "nearest_neighbors",
    "num_samples_for",
    "sampling_error",
]
