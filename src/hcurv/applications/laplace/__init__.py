"""The Laplace approximation of the posterior of a network's weights."""

from hcurv.applications.laplace.approximate import laplace
from hcurv.applications.laplace.posterior import LaplacePosterior
from hcurv.applications.laplace.predictive import Prediction
from hcurv.applications.laplace.scores import Score
from hcurv.applications.laplace.tuning import Tuning

__all__ = ["LaplacePosterior", "Prediction", "Score", "Tuning", "laplace"]
