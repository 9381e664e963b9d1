"""Losses as the matrix sees them: a square root R_i of each point's Hessian, R_iᵀR_i = Q_i.

The Gauss-Newton Hessian H = JᵀQJ (paper, Definition 1.1) needs Q_i = ∂²f(x_i, y_i), the gradient
needs ∂f(x_i, y_i), and both need the divisor of the loss's ``reduction``. A `Loss` provides these
three. `as_loss` translates the loss modules of torch; any other convex loss is a subclass.

Two losses take the output of a softmax or a sigmoid instead of logits: `NegativeLogLikelihood` and
`BinaryCrossEntropyOfProbabilities`. Their Q_i is the Fisher information of the outputs, so that H
is the same as with the loss on logits.
"""

from hcurv.losses.binary_cross_entropies import (
    BinaryCrossEntropy,
    BinaryCrossEntropyOfProbabilities,
)
from hcurv.losses.cross_entropies import CrossEntropy, NegativeLogLikelihood
from hcurv.losses.loss import Loss
from hcurv.losses.poisson import PoissonNLL
from hcurv.losses.robust_errors import Huber, SmoothL1
from hcurv.losses.squared_errors import GaussianNLL, HalfSquaredError, MeanSquaredError
from hcurv.losses.torch_modules import as_loss

__all__ = [
    "BinaryCrossEntropy",
    "BinaryCrossEntropyOfProbabilities",
    "CrossEntropy",
    "GaussianNLL",
    "HalfSquaredError",
    "Huber",
    "Loss",
    "MeanSquaredError",
    "NegativeLogLikelihood",
    "PoissonNLL",
    "SmoothL1",
    "as_loss",
]
