"""hcurv: the Gauss-Newton Hessian of a PyTorch network as a matrix that can be used.

Names are imported when they are first asked for (PEP 562): torch takes a second to import, and
neither ``hcurv --help`` nor ``hcurv.__version__`` needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

__all__ = [
    "Accuracy",
    "AccuracyWarning",
    "CGResult",
    "ClusterTree",
    "ComparedMethod",
    "Comparison",
    "CompressionWarning",
    "ConvergenceWarning",
    "Diagonal",
    "EigenResult",
    "EntrySource",
    "Estimate",
    "Factorization",
    "Factorized",
    "FileFormatError",
    "GaussNewton",
    "GaussNewtonStep",
    "HMatrix",
    "Influence",
    "InfluenceWarning",
    "InfluentialPoints",
    "InsufficientMemoryError",
    "InverseError",
    "JacobianRows",
    "LaplacePosterior",
    "NearFieldWarning",
    "NotFactorizableError",
    "NotPositiveDefiniteError",
    "ParameterLayout",
    "Plan",
    "Prediction",
    "Pruning",
    "PruningStep",
    "RanksError",
    "SampledEntries",
    "SamplingError",
    "Score",
    "SymmetricOperator",
    "TangentKernel",
    "Tuning",
    "UnsupportedModelError",
    "baselines",
    "certify",
    "cg",
    "compare",
    "compress",
    "eigsh",
    "gauss_newton_step",
    "influence",
    "laplace",
    "load",
    "losses",
    "nearest_neighbors",
    "num_samples_for",
    "optim",
    "prune",
    "sampling_error",
]

if TYPE_CHECKING:
    from hcurv import baselines, losses, optim
    from hcurv.applications.influence import influence
    from hcurv.applications.influence_scores import (
        Influence,
        InfluenceWarning,
        InfluentialPoints,
    )
    from hcurv.applications.laplace import LaplacePosterior, Prediction, Score, Tuning, laplace
    from hcurv.applications.newton_step import GaussNewtonStep, gauss_newton_step
    from hcurv.applications.pruning import Pruning, PruningStep, prune
    from hcurv.diagonal import Diagonal
    from hcurv.factorized import AccuracyWarning, Factorized, NotFactorizableError
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
    from hcurv.hierarchical.tree.cluster_tree import ClusterTree
    from hcurv.hierarchical.tree.neighbors import nearest_neighbors
    from hcurv.inversion.accuracy import Accuracy, Estimate, certify
    from hcurv.layout import ParameterLayout
    from hcurv.linalg import CGResult, ConvergenceWarning, EigenResult, cg, eigsh
    from hcurv.memory import InsufficientMemoryError
    from hcurv.network.gauss_newton import GaussNewton
    from hcurv.network.jacobian_rows import JacobianRows
    from hcurv.network.kernel import TangentKernel
    from hcurv.network.sampling import SampledEntries
    from hcurv.network.sampling_accuracy import SamplingError, num_samples_for, sampling_error
    from hcurv.network.tracing import UnsupportedModelError
    from hcurv.operators import EntrySource, SymmetricOperator
    from hcurv.ranks import RanksError
    from hcurv.report.compare_methods import compare
    from hcurv.report.comparison import ComparedMethod, Comparison
    from hcurv.report.inverse_errors import InverseError
else:  # hidden from type checkers, which would otherwise accept any name
    _NAMES = {  # the public names of each module; none if the module itself is the public name
        "baselines": (),
        "losses": (),
        "optim": (),
        "diagonal": ("Diagonal",),
        "applications.influence": ("influence",),
        "applications.influence_scores": ("Influence", "InfluenceWarning", "InfluentialPoints"),
        "applications.laplace": ("LaplacePosterior", "Prediction", "Score", "Tuning", "laplace"),
        "applications.newton_step": ("GaussNewtonStep", "gauss_newton_step"),
        "applications.pruning": ("Pruning", "PruningStep", "prune"),
        "factorized": ("AccuracyWarning", "Factorized", "NotFactorizableError"),
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
        "hierarchical.tree.cluster_tree": ("ClusterTree",),
        "hierarchical.tree.neighbors": ("nearest_neighbors",),
        "inversion.accuracy": ("Accuracy", "Estimate", "certify"),
        "layout": ("ParameterLayout",),
        "linalg": ("CGResult", "ConvergenceWarning", "EigenResult", "cg", "eigsh"),
        "memory": ("InsufficientMemoryError",),
        "network.gauss_newton": ("GaussNewton",),
        "network.jacobian_rows": ("JacobianRows",),
        "network.kernel": ("TangentKernel",),
        "network.sampling": ("SampledEntries",),
        "network.sampling_accuracy": ("SamplingError", "num_samples_for", "sampling_error"),
        "network.tracing": ("UnsupportedModelError",),
        "operators": ("EntrySource", "SymmetricOperator"),
        "ranks": ("RanksError",),
        "report.compare_methods": ("compare",),
        "report.comparison": ("ComparedMethod", "Comparison"),
        "report.inverse_errors": ("InverseError",),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name in __all__ and name in _NAMES:
            return import_module(f"hcurv.{name}")  # the import sets the attribute
        if name not in _MODULES:
            raise AttributeError(f"module 'hcurv' has no attribute {name!r}")
        value = getattr(import_module(f"hcurv.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
