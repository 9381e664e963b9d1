"""hcurv: the Gauss-Newton Hessian of a PyTorch network as a matrix that can be used.

Names are imported when they are first asked for (PEP 562): torch takes a second to import, and
neither ``hcurv --help`` nor ``hcurv.__version__`` needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
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
else:  # type checkers would take any name for granted if they saw this
    _NAMES = {  # what each module is asked for
        "baselines": (),
        "losses": (),
        "cluster_tree": ("ClusterTree",),
        "comparison": ("ComparedMethod", "Comparison", "compare"),
        "gauss_newton": ("GaussNewton",),
        "hierarchical": (
            "CompressionWarning",
            "Factorization",
            "FileFormatError",
            "HMatrix",
            "NearFieldWarning",
            "NotPositiveDefiniteError",
            "Plan",
            "compress",
            "load",
        ),
        "krylov": ("CGResult", "EigenResult", "cg", "eigsh"),
        "memory": ("InsufficientMemoryError",),
        "neighbors": ("nearest_neighbors",),
        "newton_step": ("GaussNewtonStep", "gauss_newton_step"),
        "operators": ("EntrySource", "SymmetricOperator"),
        "sampling": ("SampledEntries", "SamplingError", "num_samples_for", "sampling_error"),
        "tracing": ("UnsupportedModelError",),
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name in __all__ and name in _NAMES:
            return import_module(f"hcurv.{name}")  # which makes it an attribute
        if name not in _HOMES:
            raise AttributeError(f"module 'hcurv' has no attribute {name!r}")
        value = getattr(import_module(f"hcurv.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
