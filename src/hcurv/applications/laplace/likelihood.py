"""The likelihoods that a Laplace approximation knows: what a loss says about the targets.

A likelihood turns the user's loss, whatever its reduction is, into the sum over all points, has
the exact log-likelihood with all of its constants, and turns means and covariances of the outputs
into predictions of targets.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hcurv.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GaussianNLL,
    HalfSquaredError,
    Loss,
    MeanSquaredError,
    PoissonNLL,
    as_loss,
)

__all__ = ["DataFit", "Likelihood", "check_noise", "likelihood_of"]


@dataclass(frozen=True)
class DataFit:
    """How well the outputs fit the targets, as far as it does not depend on the noise.

    The log-likelihood is ``constant − errors/(2σ²) − num_values·log σ``, with noise σ; without
    noise, it is the constant.

    Attributes:
        constant: what does not depend on σ.
        errors: the sum of squared errors, over their variances at σ = 1.
        num_values: the number of values that were measured with the noise.
    """

    constant: float
    errors: float = 0.0
    num_values: int = 0

    def __add__(self, other: DataFit) -> DataFit:
        """The fit of two sets of points."""
        return DataFit(
            self.constant + other.constant,
            self.errors + other.errors,
            self.num_values + other.num_values,
        )

    def log_likelihood(self, noise: Tensor) -> Tensor:
        """log p(targets | outputs), for a standard deviation of the noise."""
        if not self.num_values:
            return torch.as_tensor(self.constant, dtype=torch.float64)
        return self.constant - self.errors / (2 * noise**2) - self.num_values * noise.log()


class Likelihood(ABC):
    """A distribution of targets, given outputs.

    Attributes:
        loss: the negative log-likelihood of all points (with noise 1), whose Gauss-Newton Hessian
            is the curvature.
        name: for messages and files.
        is_noisy: whether targets are values with normal noise, whose σ can be tuned.
        has_given_noise: whether the loss itself says how large the noise is.
        is_classifier: whether predictions are probabilities.
    """

    name: str
    is_noisy = False
    is_classifier = False

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.has_given_noise = isinstance(loss, GaussianNLL)

    @abstractmethod
    def fit(self, outputs: Tensor, targets: Tensor) -> DataFit:
        """The log-likelihood of some points, outputs (b, d)."""

    def target_mean(self, outputs: Tensor, variances: Tensor) -> Tensor:
        """The mean of the targets of normally distributed outputs, (b, d)."""
        return outputs

    def target_variances(self, outputs: Tensor, variances: Tensor, noise: float) -> Tensor | None:
        """Their variances, if they are numbers, (b, d)."""
        return None


class Gaussian(Likelihood):
    """y = f(x) + σ√v·ε, with v = 1 for squared errors; v is given by `GaussianNLL`."""

    name = "gaussian"
    is_noisy = True

    @property
    def _variance(self) -> float | Tensor:
        return self.loss.variance if isinstance(self.loss, GaussianNLL) else 1.0

    def fit(self, outputs: Tensor, targets: Tensor) -> DataFit:
        """Errors over v, and the constants of the density."""
        values = outputs.double()
        variance = torch.as_tensor(self._variance, dtype=torch.float64, device=outputs.device)
        variance = variance.expand_as(values)
        errors = ((values - targets.double()).square() / variance).sum()
        constant = -0.5 * (variance.log().sum() + values.numel() * math.log(2 * math.pi))
        return DataFit(float(constant), float(errors), values.numel())

    def target_variances(self, outputs: Tensor, variances: Tensor, noise: float) -> Tensor:
        """Those of the outputs, and the noise."""
        given = torch.as_tensor(self._variance, dtype=outputs.dtype, device=outputs.device)
        return variances + noise**2 * given


class Classes(Likelihood):
    """One class out of several: softmax of the outputs."""

    name = "classes"
    is_classifier = True

    def fit(self, outputs: Tensor, targets: Tensor) -> DataFit:
        """Minus the cross-entropy, summed."""
        loss = self.loss
        assert isinstance(loss, CrossEntropy)
        weight = None if loss.weight is None else loss.weight.to(outputs.device, torch.float64)
        value = functional.cross_entropy(
            outputs.double(),
            targets.double() if targets.is_floating_point() else targets.long(),
            weight=weight,
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            reduction="sum",
        )
        return DataFit(-float(value))


class Labels(Likelihood):
    """Independent labels that are 0 or 1: sigmoid of each output."""

    name = "labels"
    is_classifier = True

    def fit(self, outputs: Tensor, targets: Tensor) -> DataFit:
        """Minus the binary cross-entropy, summed."""
        loss = self.loss
        assert isinstance(loss, BinaryCrossEntropy)
        value = functional.binary_cross_entropy_with_logits(
            outputs.double(),
            targets.double(),
            weight=None if loss.weight is None else loss.weight.double(),
            pos_weight=None if loss.pos_weight is None else loss.pos_weight.double(),
            reduction="sum",
        )
        return DataFit(-float(value))


class Counts(Likelihood):
    """Poisson counts; outputs are logarithms of rates."""

    name = "counts"

    def fit(self, outputs: Tensor, targets: Tensor) -> DataFit:
        """Σ y·f − exp(f) − log y!."""
        values, counts = outputs.double(), targets.double()
        found = counts * values - values.exp() - torch.lgamma(counts + 1)
        return DataFit(float(found.sum()))

    def target_mean(self, outputs: Tensor, variances: Tensor) -> Tensor:
        """E exp(f) = exp(f + v/2): the mean rate."""
        return (outputs + variances / 2).exp()

    def target_variances(self, outputs: Tensor, variances: Tensor, noise: float) -> Tensor:
        """The mean rate, and the variance of the rate."""
        rate = self.target_mean(outputs, variances)
        return rate + rate.square() * torch.expm1(variances)


def likelihood_of(loss: nn.Module | Loss) -> Likelihood:
    """The likelihood that a loss belongs to.

    Raises:
        TypeError: it is not that of a distribution that is known here; the message says which are.
    """
    known = as_loss(loss)
    if isinstance(known, MeanSquaredError | HalfSquaredError):
        return Gaussian(HalfSquaredError(reduction="sum"))
    summed = copy.copy(known)
    summed.reduction = "sum"
    if isinstance(known, GaussianNLL):
        return Gaussian(summed)
    if isinstance(known, CrossEntropy):
        return Classes(summed)
    if isinstance(known, BinaryCrossEntropy):
        return Labels(summed)
    if isinstance(known, PoissonNLL) and known.log_input:
        return Counts(summed)
    raise TypeError(
        f"the Laplace approximation knows no likelihood for {type(loss).__name__}. Use"
        " CrossEntropyLoss or BCEWithLogitsLoss on logits (without a softmax or sigmoid at the end"
        " of the network), MSELoss, hcurv.losses.HalfSquaredError or GaussianNLL, or"
        " PoissonNLLLoss(log_input=True)"
    )


def check_noise(noise: float | None, likelihood: Likelihood) -> None:
    """Raise unless this noise is one that the likelihood can have."""
    if noise is None:
        return
    if not likelihood.is_noisy:
        raise ValueError("noise is the standard deviation of a regression; classes have none")
    if not (isinstance(noise, int | float) and math.isfinite(noise) and noise > 0):
        raise ValueError(f"noise must be a positive number; got {noise!r}")
