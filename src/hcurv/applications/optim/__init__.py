"""The Gauss-Newton optimizer; its public place is `hcurv.optim`."""

from hcurv.applications.optim.optimizer import GaussNewton
from hcurv.applications.optim.records import StepRecord

__all__ = ["GaussNewton", "StepRecord"]
