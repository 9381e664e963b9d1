"""Krylov methods on symmetric operators: conjugate gradients and eigenpairs.

An operator is anything with ``shape``, ``dtype`` and ``@``: a `SymmetricOperator` or a tensor.
"""

from hcurv.krylov.conjugate_gradients import CGResult, cg
from hcurv.krylov.eigenpairs import EigenResult, eigsh, lanczos

__all__ = ["CGResult", "EigenResult", "cg", "eigsh", "lanczos"]
