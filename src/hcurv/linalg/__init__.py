"""Building blocks of linear algebra: conjugate gradients, eigenpairs, Nyström, interpolation.

They work with any `SymmetricOperator` or dense tensor, and know neither networks nor trees.
"""

from hcurv.linalg.conjugate_gradients import CGResult, ConvergenceWarning, cg
from hcurv.linalg.eigenpairs import EigenResult, eigsh
from hcurv.linalg.lanczos import lanczos, spectral_sample

__all__ = [
    "CGResult",
    "ConvergenceWarning",
    "EigenResult",
    "cg",
    "eigsh",
    "lanczos",
    "spectral_sample",
]
