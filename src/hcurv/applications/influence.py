"""Prepare influence scores of a trained network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hcurv.applications.damping_choice import choose_damping
from hcurv.applications.fingerprints import Ingredients, digest_of_model
from hcurv.applications.influence_scores import Influence
from hcurv.applications.training_gradients import TrainingGradients
from hcurv.damping import DampingLike
from hcurv.factorized import Factorized
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.model.snapshot import ForwardFunction, plain_model
from hcurv.precision import full_precision
from hcurv.ranks import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["influence"]


@full_precision
def influence(
    model: nn.Module,
    loss: nn.Module | Loss,
    train_data: Data,
    damping: DampingLike | None = None,
    *,
    tolerance: float = 3e-3,
    curvature: Any = None,
    check_damping: bool = True,
    forward_fn: ForwardFunction | None = None,
    process_group: ProcessGroup | None = None,
    seed: int = 0,
    workspace: int = 2**28,
    progress: bool = False,
) -> Influence:
    """Prepare influence scores: what leaving out training points would change, without retraining.

    A positive score means that the point helps: without it, the loss of the query would be higher
    by about the score. A negative one means that it harms. Scores of several points add up. The
    matrix is the exact Gauss-Newton Hessian over all training points, and it is inverted to the
    tolerance (`GaussNewton.factorize`); no approximation by blocks or Kronecker factors is made.

    H, and with it the damping, belongs to the loss as it is passed. The scores do not depend on its
    reduction: reduction="mean" with the damping λ and reduction="sum" with the damping n·λ give the
    same scores, and the default damping is the same in both cases.

    Args:
        model: the trained network, as for `GaussNewton`.
        loss: the loss that it was trained with.
        train_data: the training points with targets, as for `GaussNewton`.
        damping: D, positive: a number, a tensor (N,), or numbers by the names of parameters or
            layers. The right value is the weight decay of the training, if there was any: λ where
            λ/2‖θ‖² was added to this loss. If training with a mean loss stopped before it
            converged, add 1/(learning rate · steps), with the learning rate divided by 1 - m for
            momentum m: that is what stopping early amounts to. None takes ten times the mean
            diagonal entry of H (a tenth of it with ``curvature``), at which scores predicted best
            what training again without some points gives (`hcurv reproduce influence-damping`).
        tolerance: relative error of solves. With 1e-2, rank correlations with exact scores were
            0.998 (`hcurv reproduce influence`), so that the default is smaller.
        curvature: a matrix to take in place of the exact H, such as a `baselines.KFAC` of the same
            model: anything with ``factorize(damping)``.
        check_damping: measure, on the first queries, whether scores depend on the damping.
        forward_fn: as for `GaussNewton`.
        process_group: a group of `torch.distributed`, if several processes work together. Each of
            them passes its own training points, of any number, and everything else alike. All of
            them make the same calls, with the same queries, and all receive the same scores, which
            are those of the points of all ranks: first those of rank 0, then those of rank 1, and
            so on, on each in the order of its data.
        seed: the seed of sketches and draws.
        workspace: as for `GaussNewton`.
        progress: whether to show a progress bar of the preparation.

    Raises:
        ValueError: the data has no targets, or the damping is not positive; see `GaussNewton` for
            other reasons.
        RanksError: processes of a group passed different models, losses, options or curvatures.

    Examples:
        >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
        >>> infl.scores((inputs[:5], targets[:5])).shape
        torch.Size([5, 20])
        >>> infl.self_scores().shape
        torch.Size([20])
    """
    ranks = ranks_of(process_group)
    model = plain_model(model)
    ranks.same(damping=damping, tolerance=tolerance, check_damping=check_damping, seed=seed)
    if curvature is not None and not callable(getattr(curvature, "factorize", None)):
        raise TypeError(
            "curvature must be a matrix with a method factorize(damping), such as"
            f" hcurv.baselines.KFAC(…); got {type(curvature).__name__}"
        )
    matrix = GaussNewton(
        model,
        loss,
        train_data,
        forward_fn=forward_fn,
        seed=seed,
        process_group=process_group,
        workspace=workspace,
        progress=progress,
    )
    gradients = TrainingGradients(matrix, train_data)
    if damping is None:
        damping = choose_damping(matrix, curvature is None)
    factorized: Factorized
    if curvature is None:
        factorized = matrix.factorize(damping, tolerance, seed=seed)
    else:
        if curvature.shape != matrix.shape:
            raise ValueError(
                f"curvature is of shape {tuple(curvature.shape)}, but the model has"
                f" {matrix.shape[0]} trainable parameters"
            )
        factorized = curvature.factorize(damping)
        if ranks.size > 1:
            # A matrix that was made of one rank's own points would be another one on each rank.
            ones = torch.ones(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
            ranks.agree(curvature=factorized.solve(ones))
    made_of = Ingredients(digest_of_model(model, loss), train_data, tolerance)
    used = matrix if curvature is None else curvature
    return Influence(matrix, used, factorized, gradients, made_of, check_damping)
