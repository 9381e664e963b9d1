"""Convex losses as the matrix sees them: a square root R_i of each point's Hessian, R_iᵀR_i = Q_i.

The Gauss-Newton Hessian H = JᵀQJ (paper, Definition 1.1) needs Q_i = ∂²f(x_i, y_i), the gradient
needs ∂f(x_i, y_i), and both need the divisor of the loss's ``reduction``. A `Loss` provides these
three. `as_loss` translates the loss modules of torch; any other convex loss is a subclass.
"""

from hcurv.losses.binary_cross_entropies import BinaryCrossEntropy
from hcurv.losses.cross_entropies import CrossEntropy
from hcurv.losses.loss import Loss
from hcurv.losses.squared_errors import HalfSquaredError, MeanSquaredError
from hcurv.losses.torch_modules import as_loss

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "HalfSquaredError",
    "Loss",
    "MeanSquaredError",
    "as_loss",
]
