"""hcurv.laplace: from a trained network to the posterior of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hcurv.applications.laplace.curvature import Curvature, Structure, check_structure
from hcurv.applications.laplace.likelihood import (
    DataFit,
    Likelihood,
    check_noise,
    likelihood_of,
)
from hcurv.applications.laplace.posterior import LaplacePosterior
from hcurv.applications.laplace.subset import select_parameters
from hcurv.arguments import check_number
from hcurv.damping import DampingLike
from hcurv.indexing import check_seed
from hcurv.losses import Loss
from hcurv.network.batches import Batches, Data
from hcurv.network.model.snapshot import ForwardFunction, ModelSnapshot, check_parameters
from hcurv.network.model_inputs import map_inputs
from hcurv.precision import full_precision

__all__ = ["laplace"]


@full_precision
def laplace(
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    prior_precision: DampingLike = 1.0,
    *,
    noise: float | None = None,
    parameters: str | Sequence[str] = "all",
    structure: Structure = "exact",
    tolerance: float = 1e-2,
    forward_fn: ForwardFunction | None = None,
    workspace: int = 2**28,
    seed: int = 0,
    progress: bool = False,
) -> LaplacePosterior:
    """Approximate the posterior of a trained network's weights by a normal distribution.

    It is N(θ, (H/σ² + D)⁻¹): θ are the weights as they are, H is the Gauss-Newton Hessian of the
    negative log-likelihood of all points, D the precision of the prior N(0, D⁻¹) and σ the noise of
    a regression. The network is linearised at θ for predictions. The model is not changed.

    Args:
        model: the trained network, as for `GaussNewton`. Its outputs are (points, outputs).
        loss: what it was trained with: `CrossEntropyLoss`, `BCEWithLogitsLoss`, `MSELoss`,
            `PoissonNLLLoss`, or `hcurv.losses.HalfSquaredError` or `GaussianNLL`. Whether it takes
            means or sums makes no difference here.
        data: the training data with targets, as for `GaussNewton`.
        prior_precision: D: a number, numbers by the names of parameters or layers, or a tensor
            (N,). Training with weight decay w on the mean of n losses means D = n·w.
        noise: σ, the standard deviation of the noise of a regression; None for the root mean square
            of the residuals. `tune` finds a better one. With `GaussianNLL`, a factor of the given
            standard deviations, 1 for None.
        parameters: "all", "last" for the last layer, or a list of names of parameters or layers or
            of patterns such as "*.bias". All others stay as they are, without uncertainty.
        structure: "exact", or an approximation of H to compare with: "kfac", "ekfac", "diagonal".
        tolerance: relative error of solves where no exact factorization is affordable.
        forward_fn: as for `GaussNewton`.
        workspace: bytes of temporary memory, as for `GaussNewton`.
        seed: the seed of sketches and draws of `GaussNewton.factorize`.
        progress: whether to show progress bars.

    Raises:
        TypeError: the loss has no likelihood that is known here.
        ValueError: the data has no targets, outputs have more than two axes, or an option does not
            fit.

    Examples:
        >>> post = hcurv.laplace(model, loss, (inputs, targets)).tune()
        >>> prediction = post.predict(inputs[:5])
        >>> prediction.probabilities.shape, prediction.variances.shape
        (torch.Size([5, 3]), torch.Size([5, 3]))
    """
    check_structure(structure)
    likelihood = likelihood_of(loss)
    check_noise(noise, likelihood)
    module = select_parameters(model, parameters, data, forward_fn)
    snapshot = ModelSnapshot(module, forward_fn)
    _check_outputs(snapshot, data)
    tolerance = check_number(tolerance, "tolerance", above=0, below=1)
    curvature = Curvature(
        module,
        likelihood.loss,
        data,
        structure,
        tolerance=tolerance,
        forward_fn=forward_fn,
        workspace=workspace,
        seed=check_seed(seed),
        progress=progress,
    )
    fit = _measure_fit(snapshot, likelihood, data)
    if noise is None:
        noise = _default_noise(likelihood, fit)
    return LaplacePosterior(snapshot, likelihood, curvature, fit, prior_precision, float(noise))


def _check_outputs(snapshot: ModelSnapshot, data: Data) -> None:
    """Refuse data without targets, and outputs that are not one vector for each point."""
    dtype, device = check_parameters(snapshot.module)
    inputs, targets = next(iter(Batches(data, dtype, device)), (None, None))
    if inputs is None:
        raise ValueError("data is empty: at least one point is needed")
    if targets is None:
        raise ValueError(
            "the posterior needs targets: pass data=(inputs, targets) or a loader of both"
        )
    few = map_inputs(lambda tensor: tensor[:1], inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            shape = tuple(snapshot.outputs(few).shape)
        except Exception:
            return  # `GaussNewton` explains what is wrong.
    if len(shape) != 2:
        raise ValueError(
            f"outputs must have the shape (points, outputs); one point has {shape}: pass"
            " forward_fn=lambda model, x: model(x).flatten(1), or what makes sense of them"
        )


def _measure_fit(snapshot: ModelSnapshot, likelihood: Likelihood, data: Data) -> DataFit:
    """The log-likelihood of the data at the weights."""
    parameter = next(iter(snapshot.trainable.values()))
    total = DataFit(0.0)
    with torch.no_grad():
        for inputs, targets in Batches(data, parameter.dtype, parameter.device):
            assert targets is not None
            total = total + likelihood.fit(snapshot.outputs(inputs), targets)
    return total


def _default_noise(likelihood: Likelihood, fit: DataFit) -> float:
    """The root mean square of the residuals, for squared errors; else 1."""
    if not likelihood.is_noisy or likelihood.has_given_noise:
        return 1.0
    if not fit.errors > 0:
        raise ValueError(
            "the network fits all targets exactly, so that the noise cannot be estimated: give it"
            " with noise="
        )
    return math.sqrt(fit.errors / fit.num_values)
