"""Training with curvature: an optimizer for torch that takes damped Gauss-Newton steps.

`GaussNewton` here is a `torch.optim.Optimizer`; `hcurv.GaussNewton` is the matrix that it uses.
"""

from hcurv.applications.optim import GaussNewton, StepRecord

__all__ = ["GaussNewton", "StepRecord"]
