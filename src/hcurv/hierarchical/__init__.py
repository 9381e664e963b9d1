"""Hierarchical matrices: compression, product, entries, factorization, files."""

from hcurv.hierarchical.compress import CompressionWarning, compress
from hcurv.hierarchical.factorization import Factorization, NotPositiveDefiniteError
from hcurv.hierarchical.matrix import HMatrix, NearFieldWarning
from hcurv.hierarchical.plan import Plan
from hcurv.hierarchical.storage import FileFormatError, load

__all__ = [
    "CompressionWarning",
    "Factorization",
    "FileFormatError",
    "HMatrix",
    "NearFieldWarning",
    "NotPositiveDefiniteError",
    "Plan",
    "compress",
    "load",
]
