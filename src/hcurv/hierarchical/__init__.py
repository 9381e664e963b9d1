"""Hierarchical matrices: compression, product, entries, files."""

from hcurv.hierarchical.compress import CompressionWarning, compress
from hcurv.hierarchical.matrix import HMatrix
from hcurv.hierarchical.storage import FileFormatError, load

__all__ = ["CompressionWarning", "FileFormatError", "HMatrix", "compress", "load"]
