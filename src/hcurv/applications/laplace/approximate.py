"""hcurv.laplace: from a trained network to the posterior of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from hcurv.network.model.snapshot import (
    ForwardFunction,
    ModelSnapshot,
    check_parameters,
    plain_model,
)
from hcurv.network.model_inputs import map_inputs
from hcurv.precision import full_precision
from hcurv.ranks import OneRank, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    process_group: ProcessGroup | None = None,
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
        process_group: a group of `torch.distributed`, if several processes work together. Each of
            them passes its own training points, of any number, and everything else alike. All of
            them make the same calls of the posterior, with the same inputs to predict at, and all
            receive the same results. Not with "kfac" and "ekfac".
        workspace: bytes of temporary memory, as for `GaussNewton`.
        seed: the seed of sketches and draws of `GaussNewton.factorize`.
        progress: whether to show progress bars.

    Raises:
        TypeError: the loss has no likelihood that is known here.
        ValueError: the data has no targets, outputs have more than two axes, or an option does not
            fit.
        RanksError: processes of a group passed different models, losses or options.

    Examples:
        >>> post = hcurv.laplace(model, loss, (inputs, targets)).tune()
        >>> prediction = post.predict(inputs[:5])
        >>> prediction.probabilities.shape, prediction.variances.shape
        (torch.Size([5, 3]), torch.Size([5, 3]))
    """
    ranks = ranks_of(process_group)
    model = plain_model(model)
    with ranks.agreed():
        check_structure(structure)
        likelihood = likelihood_of(loss)
        check_noise(noise, likelihood)
        tolerance = check_number(tolerance, "tolerance", above=0, below=1)
        seed = check_seed(seed)
        if ranks.size > 1 and structure in ("kfac", "ekfac"):
            raise ValueError(
                f'structure="{structure}" is made in one process: with a process_group, take'
                ' structure="exact" or "diagonal"'
            )
    ranks.same(
        prior_precision=prior_precision,
        noise=noise,
        parameters=parameters,
        structure=structure,
        tolerance=tolerance,
        seed=seed,
    )
    module = select_parameters(model, parameters, data, forward_fn, ranks)
    snapshot = ModelSnapshot(module, forward_fn)
    with ranks.agreed():
        _check_outputs(snapshot, data, ranks)
    curvature = Curvature(
        module,
        likelihood.loss,
        data,
        structure,
        tolerance=tolerance,
        forward_fn=forward_fn,
        workspace=workspace,
        seed=seed,
        progress=progress,
        process_group=process_group,
    )
    fit = _measure_fit(snapshot, likelihood, data, ranks)
    if noise is None:
        noise = _default_noise(likelihood, fit)
    return LaplacePosterior(snapshot, likelihood, curvature, fit, prior_precision, float(noise))


def _check_outputs(snapshot: ModelSnapshot, data: Data, ranks: OneRank) -> None:
    """Refuse data without targets, and outputs that are not one vector for each point."""
    dtype, device = check_parameters(snapshot.module)
    inputs, targets = next(iter(Batches(data, dtype, device)), (None, None))
    if inputs is None:
        if ranks.size > 1:
            return  # Other ranks have points, or `GaussNewton` refuses that none has any.
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


def _measure_fit(
    snapshot: ModelSnapshot, likelihood: Likelihood, data: Data, ranks: OneRank
) -> DataFit:
    """The log-likelihood of the data of all ranks at the weights."""
    parameter = next(iter(snapshot.trainable.values()))
    total = DataFit(0.0)
    with ranks.agreed(), torch.no_grad():
        for inputs, targets in Batches(data, parameter.dtype, parameter.device):
            assert targets is not None
            total = total + likelihood.fit(snapshot.outputs(inputs), targets)
    parts = [total.constant, total.errors, total.num_values]
    constant, errors, num_values = ranks.sum(torch.tensor(parts, dtype=torch.float64)).tolist()
    return DataFit(constant, errors, int(num_values))


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
