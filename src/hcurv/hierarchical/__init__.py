"""Hierarchical matrices: compression, product, entries, factorization, files."""

from hcurv.hierarchical.compress import CompressionWarning, compress
from hcurv.hierarchical.load import load
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.matrix.storage import FileFormatError
from hcurv.hierarchical.near_field.matrix import NearFieldWarning
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.solving.definite import NotPositiveDefiniteError
from hcurv.hierarchical.solving.factorization import Factorization

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
