"""hcurv: the Gauss-Newton Hessian of a PyTorch network as a matrix that can be used."""

from hcurv import losses
from hcurv.gauss_newton import GaussNewton
from hcurv.hierarchical import CompressionWarning, FileFormatError, HMatrix, compress, load
from hcurv.memory import InsufficientMemoryError
from hcurv.operators import EntrySource, SymmetricOperator
from hcurv.sampling import SampledEntries, SamplingError, num_samples_for, sampling_error
from hcurv.tracing import UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
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
    "num_samples_for",
    "sampling_error",
]
