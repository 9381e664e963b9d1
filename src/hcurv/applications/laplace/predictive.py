"""From normally distributed outputs to predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hcurv.network.model.snapshot import ModelSnapshot
from hcurv.network.model_inputs import Inputs

__all__ = ["METHODS", "Method", "Prediction", "outputs_with", "probabilities"]

Method: TypeAlias = Literal["probit", "samples", "bridge"]
METHODS = ("probit", "samples", "bridge")
# Samples of outputs hold no more floats than this at a time.
_SAMPLE_FLOATS = 2**24


@dataclass(frozen=True)
class Prediction:
    """What a `LaplacePosterior` predicts at n points with d outputs.

    Attributes:
        outputs: the outputs of the network, which are the means of the linearised outputs, (n, d).
        variances: their variances, the uncertainty that more data would take away, (n, d).
        covariances: the covariances of the outputs of each point, (n, d, d), if asked for.
        mean: the mean of the targets: the outputs of a regression, the probabilities of a
            classifier, the rates of counts, (n, d).
        target_variances: variances of the targets, noise included, (n, d); None for classifiers.

    Examples:
        >>> found = hcurv.laplace(model, loss, (inputs, targets)).predict(inputs)
        >>> found.probabilities.shape, found.variances.shape
        (torch.Size([20, 3]), torch.Size([20, 3]))
    """

    outputs: Tensor
    variances: Tensor
    covariances: Tensor | None
    mean: Tensor
    target_variances: Tensor | None

    @classmethod
    def join(cls, parts: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one.

        Examples:
            >>> found = hcurv.laplace(model, loss, (inputs, targets)).predict(inputs)
            >>> hcurv.Prediction.join([found, found]).outputs.shape
            torch.Size([40, 3])
        """
        columns: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            columns[field.name] = None if values[0] is None else torch.cat(values)
        return cls(**columns)

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of a classifier, (n, d); the same as ``mean``."""
        if self.target_variances is not None:
            raise AttributeError("only classifiers have probabilities; use mean")
        return self.mean

    @property
    def standard_deviations(self) -> Tensor:
        """√target_variances: how far targets scatter, noise included, (n, d)."""
        if self.target_variances is None:
            raise AttributeError("classifiers have probabilities, not standard deviations")
        return self.target_variances.sqrt()


def probabilities(
    outputs: Tensor,
    covariances: Tensor,
    *,
    method: Method,
    several: bool,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Mean probabilities of normally distributed logits, (b, d).

    Args:
        outputs: the means, (b, d).
        covariances: (b, d, d).
        method: "probit", "samples" or "bridge".
        several: whether the outputs are the logits of one class out of several (softmax), or each
            its own label (sigmoid).
        num_samples: how many samples "samples" averages.
        generator: the source of its random numbers.
    """
    if method == "probit":
        variances = covariances.diagonal(dim1=1, dim2=2)
        moderated = outputs / (1 + math.pi / 8 * variances).sqrt()
        return torch.softmax(moderated, 1) if several else torch.sigmoid(moderated)
    if method == "bridge":
        return _bridge(outputs, covariances)
    return _sampled(outputs, covariances, several, num_samples, generator)


def _bridge(outputs: Tensor, covariances: Tensor) -> Tensor:
    """The mean of the Dirichlet distribution that the Laplace bridge makes of the normal one.

    Logits have a direction, that of all ones, which a softmax does not see. The normal distribution
    is first restricted to logits that add up to zero. Then (Hobbhahn, Kristiadi, Hennig 2022)

        α_k = (1 − 2/K + exp(μ_k)/K² Σ_l exp(−μ_l)) / Σ_kk.
    """
    num_classes = outputs.shape[1]
    sums = covariances.sum(2)
    total = sums.sum(1)
    tiny = torch.finfo(outputs.dtype).tiny
    share = sums / total.clamp(min=tiny)[:, None]
    centred = outputs - share * outputs.sum(1, keepdim=True)
    variances = covariances.diagonal(dim1=1, dim2=2) - share * sums
    variances = variances.clamp(min=tiny)
    products = centred + torch.logsumexp(-centred, 1, keepdim=True) - 2 * math.log(num_classes)
    rest = outputs.new_tensor(max(0.0, 1 - 2 / num_classes)).log()
    return torch.softmax(torch.logaddexp(products, rest) - variances.log(), 1)


def _sampled(
    outputs: Tensor,
    covariances: Tensor,
    several: bool,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """The mean over samples of the logits of each point."""
    roots = square_roots(covariances)
    result = torch.zeros_like(outputs)
    step = max(1, _SAMPLE_FLOATS // max(1, outputs.numel()))
    for first in range(0, num_samples, step):
        count = min(step, num_samples - first)
        noise = torch.randn(
            (count, *outputs.shape),
            dtype=outputs.dtype,
            device=generator.device,
            generator=generator,
        ).to(outputs.device)
        logits = outputs + torch.einsum("bij,kbj->kbi", roots, noise)
        chances = torch.softmax(logits, 2) if several else torch.sigmoid(logits)
        result += chances.sum(0)
    return result / num_samples


def square_roots(covariances: Tensor) -> Tensor:
    """B_i with B_i B_iᵀ = Σ_i, (b, d, d), by eigenvectors: covariances may be singular."""
    values, vectors = torch.linalg.eigh(covariances)
    roots: Tensor = vectors * values.clamp(min=0).sqrt()[:, None, :]
    return roots


def outputs_with(
    snapshot: ModelSnapshot, weights: Mapping[str, Tensor], batches: Sequence[Inputs]
) -> Tensor:
    """The outputs of the network itself with other weights, (n, d)."""
    module = snapshot.module

    def moved(*args: Any, **kwargs: Any) -> Tensor:
        return torch.func.functional_call(module, dict(weights), args, kwargs)  # type: ignore[no-any-return]

    return torch.cat([snapshot.outputs(some, moved) for some in batches])
